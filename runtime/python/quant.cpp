// Quantised weights and GGUF files.
#include "core/quant.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>

#include "ggml/gguf_file.h"
#include "python/bindings.h"

namespace keepdim {

DType quantised_type(const std::string& name) {
  DType dtype;
  if (!find_dtype(name, &dtype) || !is_quantised(dtype))
    fail(Code::invalid_argument, "[quantise] dtype '" + name + "': is not a quantised dtype.");
  return dtype;
}

namespace {

template <class T>
nb::ndarray<nb::numpy, T> new_array(size_t rows, size_t columns) {
  auto* data = new T[std::max<size_t>(rows * columns, 1)];
  const nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::ndarray<nb::numpy, T>(data, {rows, columns}, owner);
}

template <class T>
using Matrix = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

nb::ndarray<nb::numpy, uint8_t> quantise_rows(const Matrix<float>& x, const std::string& name) {
  const DType dtype = quantised_type(name);
  const size_t rows = x.shape(0), k = x.shape(1), block = dtype_block(dtype);
  if (k % block)
    fail(Code::invalid_argument, "[quantise] rows of " + std::to_string(k) + ": not a multiple of " + std::to_string(block) +
                                     " elements, as " + name + " needs.");
  auto y = new_array<uint8_t>(rows, k / block * dtype_bytes(dtype));
  nb::gil_scoped_release release;
  quantise(dtype, x.data(), static_cast<int64_t>(rows), static_cast<int64_t>(k), y.data());
  return y;
}

nb::ndarray<nb::numpy, float> dequantise_rows(const Matrix<uint8_t>& x, const std::string& name) {
  const DType dtype = quantised_type(name);
  const size_t rows = x.shape(0), bytes = dtype_bytes(dtype), k = x.shape(1) / bytes * dtype_block(dtype);
  if (x.shape(1) % bytes)
    fail(Code::invalid_argument, "[quantise] rows of " + std::to_string(x.shape(1)) + " bytes: not a multiple of " +
                                     std::to_string(bytes) + ", the bytes of a block of " + name + ".");
  auto y = new_array<float>(rows, k);
  nb::gil_scoped_release release;
  dequantise(dtype, x.data(), static_cast<int64_t>(rows), static_cast<int64_t>(k), y.data());
  return y;
}

}  // namespace

void add_quant(nb::module_& m) {
  m.def("quantise", quantise_rows, "rows"_a, "dtype"_a, "f32 [rows, k] to u8 [rows, bytes of a row].");
  m.def("dequantise", dequantise_rows, "rows"_a, "dtype"_a, "u8 [rows, bytes of a row] to f32 [rows, k].");
  m.def(
      "check_gguf", [](const nb::bytes& path) { check_gguf({path.c_str(), path.size()}); }, "path"_a,
      "Raises which count, length or offset of a GGUF file does not fit into it.");
}

}  // namespace keepdim
