#include "core/cpu.h"

namespace keepdim {

BuildInfo build_info() { return {KEEPDIM_CPU, KEEPDIM_GGML_VERSION}; }

// __builtin_cpu_supports needs a literal; the build defines KEEPDIM_NEEDS_… for the features that its objects use.
#define KEEPDIM_NEED(name) \
  if (!__builtin_cpu_supports(name)) missing += missing.empty() ? name : ", " name

std::string cpu_error() {
  std::string missing;
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
#ifdef KEEPDIM_NEEDS_AVX
  KEEPDIM_NEED("avx");
#endif
#ifdef KEEPDIM_NEEDS_AVX2
  KEEPDIM_NEED("avx2");
#endif
#ifdef KEEPDIM_NEEDS_FMA
  KEEPDIM_NEED("fma");
#endif
#ifdef KEEPDIM_NEEDS_F16C
  KEEPDIM_NEED("f16c");
#endif
#ifdef KEEPDIM_NEEDS_BMI2
  KEEPDIM_NEED("bmi2");
#endif
#ifdef KEEPDIM_NEEDS_AVX512F
  KEEPDIM_NEED("avx512f");
#endif
#ifdef KEEPDIM_NEEDS_AVX512BW
  KEEPDIM_NEED("avx512bw");
#endif
#ifdef KEEPDIM_NEEDS_AVX512DQ
  KEEPDIM_NEED("avx512dq");
#endif
#ifdef KEEPDIM_NEEDS_AVX512VL
  KEEPDIM_NEED("avx512vl");
#endif
#ifdef KEEPDIM_NEEDS_AVX512VBMI
  KEEPDIM_NEED("avx512vbmi");
#endif
#ifdef KEEPDIM_NEEDS_AVX512VNNI
  KEEPDIM_NEED("avx512vnni");
#endif
#ifdef KEEPDIM_NEEDS_AVX512BF16
  KEEPDIM_NEED("avx512bf16");
#endif
  if (missing.empty()) return missing;
  return "[load] cpu: this build (" KEEPDIM_CPU ") needs " + missing +
         ", which this CPU lacks. Build keepdim on this machine from source.";
}

}  // namespace keepdim
