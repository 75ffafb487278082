// Rejection sampling at one node of a draft tree (recursive over siblings, without replacement).
//
// The readable definition is src/forerun/verify/node.py; this code decides the same on every instruction set. Mass is
// summed in integers; float operations are float64 ones in a written-out order.
#pragma once

#include "sample.hpp"

#include <cstdint>
#include <vector>

namespace nanobind {
class module_;
}

namespace forerun {

struct DraftChild {
  std::int32_t token;  // in [0, V)
  const float* q;      // [V]: the distribution that it was drawn from, its earlier siblings not yet taken out;
                       // null: it was chosen, not drawn
};

// choice: index of the accepted child, or -1. token: that child's, or the target's own, or a negative result of
// sample_row.
struct NodeChoice {
  std::int32_t choice, token;
};

// Working memory that one thread reuses from node to node.
struct VerifyScratch {
  SampleScratch sample;
  std::vector<std::uint64_t> weights, next_weights;
  std::vector<std::uint64_t> block_mass, next_block_mass;
};

// What becomes of the children of a node whose target scores are logits[0, V), masked as by sample_row; `position` is
// that of the token that is decided. Without children: sample_row's token. At temperature 0: the highest logit, and the first child that is it.
//
// Cost beyond sample_row's scan and cuts: one pass over the logits that top-k and top-p leave. A child with q adds a
// pass over its row, and another if it is rejected.
NodeChoice reject_node(const float* logits, int V, const std::uint32_t* mask, const SampleSpec& spec,
                       std::uint64_t position, const std::vector<DraftChild>& children, VerifyScratch& scratch,
                       SampleIsa isa = SampleIsa::automatic);

// Adds reject to the Python module.
void register_verify(nanobind::module_& m);

}  // namespace forerun
