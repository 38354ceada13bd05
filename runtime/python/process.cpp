// Process-wide functions: engines, options, counters of all delegates.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "core/cpu.h"
#include "core/options.h"
#include "core/registry.h"
#include "executorch/backend.h"
#include "executorch/kernels.h"
#include "python/bindings.h"
#include "python/counters.h"

namespace keepdim {

namespace {

nb::list live() {
  nb::list out;
  for (const Counters& c : live_counters()) out.append(counters_dict(c));
  return out;
}

nb::dict options_dict() {
  const Options o = options();
  nb::dict out;
  out["threads"] = o.threads;
  out["memory_limit"] = o.memory_limit;
  out["plan_limit"] = o.plan_limit;
  return out;
}

void change_options(std::optional<int> threads, std::optional<int64_t> memory_limit, std::optional<int64_t> plan_limit) {
  const Options o = options();
  set_options({threads.value_or(o.threads), memory_limit.value_or(o.memory_limit), plan_limit.value_or(o.plan_limit)});
}

nb::dict engines() {
  nb::dict out;
  for (const std::string& name : engine_names()) out[name.c_str()] = find_engine(name).ops();
  return out;
}

nb::dict thresholds(const std::string& engine) {
  nb::dict out;
  for (const auto& [name, value] : find_engine(engine).thresholds()) out[name.c_str()] = value;
  return out;
}

void set_thresholds(const std::string& engine, const nb::dict& changed) {
  std::map<std::string, int64_t> all;
  for (const auto& [name, value] : changed) all[nb::cast<std::string>(name)] = nb::cast<int64_t>(value);
  find_engine(engine).set_thresholds(all);
}

bool widens(const std::string& engine, const std::string& dtype) {
  const EngineInfo& info = find_engine(engine);
  return info.widens && info.widens(quantised_type(dtype));
}

std::pair<int, int64_t> activation_format(const std::string& engine, const std::string& dtype, int64_t rows) {
  const EngineInfo& info = find_engine(engine);
  const DType weight = quantised_type(dtype);
  const ActivationFormat format = info.activation_format ? info.activation_format(weight, rows) : ActivationFormat{32, 1};
  return {format.bits, format.block};
}

nb::dict backends() {
  nb::dict out;
  for (const auto& [id, answer] : backend_status()) out[id.c_str()] = answer;
  return out;
}

nb::dict build_info_dict() {
  nb::dict out;
  out["cpu"] = build_info().cpu;
  out["ggml"] = build_info().ggml;
  out["format"] = kFormatVersion;
  return out;
}

}  // namespace

void add_process(nb::module_& m) {
  m.def("live", live, "Counters of every living delegate.");
  m.def("last_error", [] { return last_error(); }, "The sentence of this thread's last failure.");
  m.def("clear_last_error", [] { clear_last_error(); });
  m.def("options", options_dict);
  m.def("set_options", change_options, nb::kw_only(), "threads"_a = nb::none(), "memory_limit"_a = nb::none(),
        "plan_limit"_a = nb::none());
  m.def("kernels", kernel_names, "Names of ExecuTorch's own kernels in this process.");
  m.def("load_engine", [](const std::string& engine) { find_engine(engine); }, "engine"_a, "Raises why there is no such engine.");
  m.def("engines", engines, "Names of the engines that are loaded, and their ops.");
  m.def("thresholds", thresholds, "engine"_a, "Sizes at which an engine switches from one kernel to another, by name.");
  m.def("set_thresholds", set_thresholds, "engine"_a, "changed"_a, "Change thresholds, for plans that are built later.");
  m.def("widens", widens, "engine"_a, "dtype"_a, "Whether an engine makes f32 of weights in such blocks when it loads them.");
  m.def("activation_format", activation_format, "engine"_a, "dtype"_a, "rows"_a,
        "Bits and elements per scale of the activations that an engine multiplies with weights of a dtype; 32: floats.");
  m.def("backends", backends, "ExecuTorch backend ids and the status of their registration; 0 is ok.");
  m.def("cpu_supported", [] { return cpu_error().empty(); });
  m.def("build_info", build_info_dict);
}

}  // namespace keepdim
