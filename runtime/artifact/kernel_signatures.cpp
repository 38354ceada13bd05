#include "artifact/kernel_signatures.h"

#include <unordered_map>
#include <utility>

namespace keepdim {

namespace {

struct KernelSignature {
  const char* name;
  const char* arguments;
};
constexpr KernelSignature kKernels[] = {
#include "kernel_arguments.inc"
};

constexpr KernelSignature kScalarKernels[] = {
    {"aten::sym_numel", "ti"},
    {"aten::_local_scalar_dense", "te"},
    {"executorch_prim::add.Scalar", "xx="},
    {"executorch_prim::sub.Scalar", "xx="},
    {"executorch_prim::mul.Scalar", "xx="},
    {"executorch_prim::floordiv.Scalar", "xx="},
    {"executorch_prim::floordiv.int", "iii"},
    {"executorch_prim::mod.Scalar", "iii"},
    {"executorch_prim::mod.int", "iii"},
    {"executorch_prim::truediv.Scalar", "xxd"},
    {"executorch_prim::eq.Scalar", "xxb"},
    {"executorch_prim::ge.Scalar", "xxb"},
    {"executorch_prim::gt.Scalar", "xxb"},
    {"executorch_prim::le.Scalar", "xxb"},
    {"executorch_prim::lt.Scalar", "xxb"},
    {"executorch_prim::neg.Scalar", "x="},
    {"executorch_prim::ceil.Scalar", "di"},
    {"executorch_prim::round.Scalar", "di"},
    {"executorch_prim::trunc.Scalar", "di"},
    {"executorch_prim::sym_float.Scalar", "nd"},
    {"executorch_prim::sym_int.Scalar", "ni"},
    {"executorch_prim::sym_ite.Scalar", "b.::"},
    {"executorch_prim::sym_max.Scalar", "iii"},
    {"executorch_prim::sym_min.Scalar", "iii"},
    {"executorch_prim::sym_not.Scalar", "bb"},
};

}  // namespace

const char* kernel_signature(const std::string& kernel, bool* over_sizes) {
  static const auto* const all = [] {
    auto* map = new std::unordered_map<std::string, std::pair<const char*, bool>>;
    for (const KernelSignature& kernel_info : kKernels) (*map)[kernel_info.name] = {kernel_info.arguments, false};
    for (const KernelSignature& kernel_info : kScalarKernels) (*map)[kernel_info.name] = {kernel_info.arguments, true};
    return map;
  }();
  const auto it = all->find(kernel);
  if (it == all->end()) return nullptr;
  *over_sizes = it->second.second;
  return it->second.first;
}

}  // namespace keepdim
