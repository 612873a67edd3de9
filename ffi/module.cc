// The Python module of one platform (_cpu, _cuda, ...): its handlers and its capability table, nothing else.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "ffi/counted.h"
#include "ffi/handlers.h"
#include "kernels/capability.h"

namespace nb = nanobind;

namespace {

struct Target {
  const char* name;
  XLA_FFI_Handler* handler;
  const std::atomic<int64_t>& calls;
};

template <XLA_FFI_Handler* handler>
Target target(const char* name) {
  return {name, &mla::counted<handler>, mla::calls_of<handler>};
}

// Every custom-call target of the module.
std::vector<Target> targets() {
  return {
      target<jax_mla_plan_decode>("jax_mla_plan_decode"),
      target<jax_mla_decode>("jax_mla_decode"),
      target<jax_mla_update_cache>("jax_mla_update_cache"),
      target<jax_mla_merge_states>("jax_mla_merge_states"),
      target<jax_mla_pack_kv>("jax_mla_pack_kv"),
      target<jax_mla_pack_kv_fp8>("jax_mla_pack_kv_fp8"),
      target<jax_mla_prefill>("jax_mla_prefill"),
      target<jax_mla_gather_context>("jax_mla_gather_context"),
      target<jax_mla_sparse_decode>("jax_mla_sparse_decode"),
  };
}

nb::dict handlers() {
  nb::dict all;
  for (const Target& t : targets()) all[t.name] = nb::capsule(reinterpret_cast<void*>(t.handler));
  return all;
}

nb::dict handler_calls() {
  nb::dict all;
  for (const Target& t : targets()) all[t.name] = t.calls.load(std::memory_order_relaxed);
  return all;
}

nb::list counts(const std::vector<mla::Range>& ranges) {
  nb::list all;
  for (const auto& range : ranges) all.append(nb::make_tuple(range.first, range.last, range.step));
  return all;
}

// One dict a row, with the fields of jax_mla.dispatch.Capability.
nb::list capabilities() {
  nb::list rows;
  for (const auto& capability : mla::capabilities()) {
    nb::dict row;
    row["operation"] = capability.operation;
    row["variant"] = capability.variant;
    row["architecture"] = capability.architecture;
    row["q_dtype"] = capability.q_dtype;
    row["cache_dtype"] = capability.cache_dtype;
    row["planner_heads"] = counts(capability.planner_heads);
    row["reducer_heads"] = counts(capability.reducer_heads);
    row["tile_rows"] = capability.tile_rows;
    row["max_q_len"] = capability.max_q_len;
    row["page_sizes"] = counts(capability.page_sizes);
    row["positive_scale"] = capability.positive_scale;
    row["key_parts"] = capability.key_parts;
    row["largest_if_several"] = capability.largest_if_several;
    row["by_name"] = capability.by_name;
    rows.append(row);
  }
  return rows;
}

nb::list variants() {
  nb::list names;
  for (const char* name : mla::variants()) names.append(name);
  return names;
}

// Of the headers that the handlers were compiled with; a jaxlib with older ones refuses them.
nb::tuple api_version() { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); }

}  // namespace

NB_MODULE(JAX_MLA_MODULE, m) {
  m.def("handlers", &handlers, "Custom-call targets and their handlers, as capsules.");
  m.def("handler_calls", &handler_calls, "Custom-call targets and how often each handler ran in this process.");
  m.def("capabilities", &capabilities, "The compiled-in table, one dict a row, the best variant first.");
  m.def("variants", &variants, "Every variant compiled in; the attribute `variant` counts them from 1, 0 is the best.");
  m.def("api_version", &api_version, "XLA FFI API version (major, minor) that the handlers were built for.");
  m.def("parts_per_unit", &mla::parts_per_unit, "Parts of a plan for each multiprocessor or thread.");
}
