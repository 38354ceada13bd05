// Shared by the parts of keepdim._native: conversion of Python objects, and one function per part that adds it to the module.
#pragma once
#include <nanobind/nanobind.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/program.h"

namespace keepdim {

namespace nb = nanobind;
using namespace nb::literals;

void add_contract(nb::module_& m);  // contract.cpp: Contract, dims
void add_method(nb::module_& m);    // method.cpp: File, Method
void add_delegate(nb::module_& m);  // delegate.cpp: Delegate, programs
void add_quant(nb::module_& m);     // quant.cpp: quantised weights
void add_process(nb::module_& m);   // process.cpp: engines, options, counters

inline std::string_view as_string_view(const nb::bytes& json) { return {json.c_str(), json.size()}; }

// Error reporting for one argument, and conversion of an integer argument.
[[noreturn]] void refuse(size_t i, const Spec& spec, const std::string& fact);
[[noreturn]] void wrong_argument_type(size_t i, const Spec& spec, PyObject* got);
int64_t read_int(size_t i, const Spec& spec, PyObject* arg);

// Interned attribute names of torch tensors; torch's headers are not used.
struct Names {
  PyObject* shape = PyUnicode_InternFromString("shape");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* is_cpu = PyUnicode_InternFromString("is_cpu");
  PyObject* is_contiguous = PyUnicode_InternFromString("is_contiguous");
  PyObject* contiguous = PyUnicode_InternFromString("contiguous");
  PyObject* is_neg = PyUnicode_InternFromString("is_neg");
  PyObject* resolve_neg = PyUnicode_InternFromString("resolve_neg");
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
};
const Names& names();

// torch's dtype objects, compared by identity; linear search, since there are few.
std::vector<std::pair<PyObject*, DType>>& dtypes();

DType quantised_type(const std::string& name);  // throws if unknown

}  // namespace keepdim
