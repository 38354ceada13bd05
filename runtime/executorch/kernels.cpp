#include "executorch/kernels.h"

#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/kernel/kernel_runtime_context.h>
#include <executorch/runtime/kernel/operator_registry.h>
#include <executorch/runtime/platform/log.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <utility>

#include "executorch/types.h"

namespace keepdim {

namespace {

using Stack = et::Span<et::EValue*>;

// ---- replacements of ExecuTorch's size divisions, which crash on division by zero

// Python's // for floats.
double floor_quotient(double a, double b) {
  const double remainder = std::fmod(a, b), quotient = (a - remainder) / b;
  return std::round(remainder != 0 && (b < 0) != (remainder < 0) ? quotient - 1 : quotient);
}

int64_t floor_quotient(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

template <typename Divide>
void divide_sizes(et::KernelRuntimeContext& context, Stack stack, const Divide& divide) {
  if (stack.size() != 3 || !stack[0]->isInt() || !stack[1]->isInt()) return context.fail(et::Error::NotSupported);
  const int64_t a = stack[0]->toInt(), b = stack[1]->toInt();
  if (b == 0 || (b == -1 && a == INT64_MIN)) {
    ET_LOG(Error, "a size is divided by %lld", static_cast<long long>(b));
    return context.fail(et::Error::InvalidArgument);
  }
  *stack[2] = et::EValue(divide(a, b));
}

void floordiv(et::KernelRuntimeContext& context, Stack stack) {
  const auto number = [&](size_t i) { return stack[i]->isInt() ? static_cast<double>(stack[i]->toInt()) : stack[i]->toDouble(); };
  if (stack.size() == 3 && (stack[0]->isDouble() || stack[1]->isDouble())) {
    *stack[2] = et::EValue(floor_quotient(number(0), number(1)));
  } else {
    divide_sizes(context, stack, [](int64_t a, int64_t b) { return floor_quotient(a, b); });
  }
}

void mod(et::KernelRuntimeContext& context, Stack stack) {
  divide_sizes(context, stack, [](int64_t a, int64_t b) { return a - floor_quotient(a, b) * b; });
}

// ---- checks for operands on which an ExecuTorch kernel aborts: returns the reason, or nullptr

bool is_real(ScalarType type) {
  return type == ScalarType::Float || type == ScalarType::Double || type == ScalarType::Half || type == ScalarType::BFloat16;
}

const char* check_div(Stack stack) {  // self, other, out
  return is_real(stack[2]->toTensor().scalar_type()) ? nullptr : "a quotient is a float";
}

const char* check_view(Stack stack) {  // self, size, out
  const auto sizes = stack[1]->toIntList();
  const bool inferred = std::find(sizes.begin(), sizes.end(), -1) != sizes.end();
  return inferred && std::find(sizes.begin(), sizes.end(), 0) != sizes.end() ? "a size of -1 cannot be inferred if another is 0"
                                                                             : nullptr;
}

const char* check_fft(Stack stack) {  // self, dim, ...
  const int64_t rank = stack[0]->toTensor().dim();
  for (int64_t dim : stack[1]->toIntList()) {
    if (dim < -rank || dim >= rank) return "a dim is out of range";
  }
  return nullptr;
}

// For an empty operand, resizes the result and returns true.
bool skip_empty(Stack stack, size_t out) {
  const Tensor& self = stack[0]->toTensor();
  if (self.numel() > 0) return false;
  Tensor& result = stack[out]->toTensor();
  return executorch::runtime::resize_tensor(result, self.sizes()) == et::Error::Ok;
}

struct Check {
  const char* kernel;
  const char* (*refuse)(Stack);  // nullptr: no check
  size_t out;                    // > 0: index of the result, for kernels that abort on empty operands
};

constexpr std::array kChecks = {
    Check{"aten::div.out", check_div, 0},        Check{"aten::view_copy.out", check_view, 0},
    Check{"aten::_fft_c2r.out", check_fft, 0},   Check{"aten::_fft_r2c.out", check_fft, 0},
    Check{"aten::_log_softmax.out", nullptr, 3}, Check{"aten::_softmax.out", nullptr, 3},
};

std::array<std::atomic<et::OpFunction>, kChecks.size()> originals;  // rewritten with the same values by every load

// ExecuTorch needs a plain function pointer, hence one instantiation per check. Argument types match the kernel's schema.
template <size_t I>
void checked(et::KernelRuntimeContext& context, Stack stack) {
  constexpr Check check = kChecks[I];
  if (check.refuse != nullptr) {
    if (const char* why = check.refuse(stack)) {
      ET_LOG(Error, "%s: %s", check.kernel, why);
      return context.fail(et::Error::InvalidArgument);
    }
  }
  if (check.out > 0 && skip_empty(stack, check.out)) return;
  originals[I].load(std::memory_order_relaxed)(context, stack);
}

template <size_t... I>
constexpr std::array<et::OpFunction, sizeof...(I)> checked_functions(std::index_sequence<I...>) {
  return {checked<I>...};
}

constexpr auto kChecked = checked_functions(std::make_index_sequence<kChecks.size()>());

bool same_name(const char* a, const char* b) { return std::strcmp(a, b) == 0; }

std::vector<et::Kernel> make_kernels() {
  std::vector<et::Kernel> all = {et::Kernel("executorch_prim::floordiv.int", floordiv),
                                 et::Kernel("executorch_prim::floordiv.Scalar", floordiv),
                                 et::Kernel("executorch_prim::mod.int", mod), et::Kernel("executorch_prim::mod.Scalar", mod)};
  const size_t replacement_count = all.size();
  for (const et::Kernel& kernel : et::get_registered_kernels()) {
    const auto replaced = [&](const et::Kernel& other) { return same_name(other.name_, kernel.name_); };
    if (std::any_of(all.begin(), all.begin() + static_cast<ptrdiff_t>(replacement_count), replaced)) continue;
    const auto check =
        std::find_if(kChecks.begin(), kChecks.end(), [&](const Check& c) { return same_name(c.kernel, kernel.name_); });
    if (check == kChecks.end()) {
      all.push_back(kernel);
    } else if (kernel.kernel_key_.is_fallback()) {
      const size_t i = static_cast<size_t>(check - kChecks.begin());
      originals[i].store(kernel.op_, std::memory_order_relaxed);
      all.emplace_back(kernel.name_, kChecked[i]);
    }
  }
  return all;
}

}  // namespace

std::vector<std::string> kernel_names() {
  std::vector<std::string> out;
  for (const et::Kernel& kernel : et::get_registered_kernels()) out.emplace_back(kernel.name_);
  return out;
}

std::vector<et::Kernel> checked_kernels() { return make_kernels(); }

}  // namespace keepdim
