// Counters of a delegate as a dict.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "core/delegate.h"

namespace keepdim {

inline nanobind::dict counters_dict(const Counters& c) {
  nanobind::dict out;
  out["id"] = c.id;
  out["engine"] = c.engine;
  out["calls"] = c.calls;
  out["built"] = c.built;
  out["reused"] = c.reused;
  out["evicted"] = c.evicted;
  out["plans"] = c.plans;
  out["plan_bytes"] = c.plan_bytes;
  out["arena_bytes"] = c.arena_bytes;
  out["packed_bytes"] = c.packed_bytes;
  out["state_bytes"] = c.state_bytes;
  out["weight_bytes"] = c.weight_bytes;
  return out;
}

}  // namespace keepdim
