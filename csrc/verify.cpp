#include "verify.hpp"
#include "sample_arrays.hpp"
#include "sample_row.hpp"
#include "sample_stages.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace forerun {
namespace {

using namespace sampling;

constexpr double kResidualScale = 0x1p51;  // sums of residual masses stay exact, and each below 2^52

// Which stream's numbers a node uses; `position` is that of the token that it decides.
FORERUN_INLINE double acceptance_uniform(std::uint64_t seed, std::uint64_t position, std::int32_t token) {
  const NoiseKey key = noise_key(stream_seed(seed, Stream::accept), position);
  return (static_cast<double>(noise_bits(key, static_cast<std::uint32_t>(token))) + 0.5) * 0x1p-31;
}

FORERUN_INLINE double residual_uniform(std::uint64_t seed, std::uint64_t position) {
  const NoiseKey key = noise_key(stream_seed(seed, Stream::residual), position);
  return static_cast<double>(noise_bits(key, 0)) * 0x1p-31 +
         static_cast<double>(noise_bits(key, 1) >> 9) * 0x1p-53;
}

// What isn't a probability counts as 0 (negative, NaN) or 1 (above).
FORERUN_INLINE std::uint64_t mass_of_q(float q) {
  return mass_of(select(q > 0.0f, select(q < 1.0f, q, 1.0f), 0.0f));
}

FORERUN_INLINE std::uint64_t rounded(double mass) {  // half to even, for 0 <= mass < 2^52
  return std::bit_cast<std::uint64_t>(mass + 0x1p52) - 0x4330000000000000u;
}

// The target's masses at a node, less what the rejected children took.
struct Target {
  Row row;
  Cut cut;
  float min_p;
  bool stored;  // every mass is in scratch.weights; else it is computed when needed
  std::uint64_t total = 0;
};

FORERUN_INLINE std::uint64_t original_mass(const Target& t, std::int32_t id) {
  const float logit = logit_of(t.row, id);
  const float weight = exp32(scaled(t.row, logit));
  return mass_of(select(keeps(t.cut, logit, id) & (weight >= t.min_p), weight, 0.0f));
}

// Fills block sums and the total, and the weights of all tokens if they are to be stored.
FORERUN_INLINE void weigh(Target& t, VerifyScratch& s) {
  const Row& row = t.row;
  s.block_mass.resize(static_cast<std::size_t>(row.blocks));
  if (t.stored) s.weights.resize(static_cast<std::size_t>(row.V));
  alignas(64) std::uint64_t mass[kBlock];
  for (int b = 0; b < row.blocks; ++b) {
    const float top = s.sample.block_max[static_cast<std::size_t>(b)];
    const int first = b * kBlock;
    const int count = block_size(row, b);
    std::uint64_t sum = 0;
    const bool without = top < t.cut.logit || massless(scaled(row, top));
    if (!without) {
      const float* x = row.block[b];
      over_block(count, [&](auto n) __attribute__((always_inline)) {
        for (int j = 0; j < n; ++j) {
          const float weight = exp32(scaled(row, x[j]));
          mass[j] = mass_of(select(keeps(t.cut, x[j], first + j) & (weight >= t.min_p), weight, 0.0f));
        }
        for (int j = 0; j < n; ++j) sum += mass[j];
      });
    }
    if (t.stored) {
      std::uint64_t* out = s.weights.data() + first;
      without ? static_cast<void>(std::fill_n(out, count, 0)) : static_cast<void>(std::copy_n(mass, count, out));
    }
    s.block_mass[static_cast<std::size_t>(b)] = sum;
    t.total += sum;
  }
}

// The target of a row whose transforms leave a list of tokens.
FORERUN_INLINE Target listed_target(const Row& row, const SampleSpec& spec, VerifyScratch& s) {
  run_stages(row, spec, s.sample);
  Target t{row, {}, 0.0f, true};
  s.weights.assign(static_cast<std::size_t>(row.V), 0);
  s.block_mass.assign(static_cast<std::size_t>(row.blocks), 0);
  const Entries& e = s.sample.entries;
  for (std::size_t i = 0; i < e.id.size(); ++i) {
    const std::uint64_t mass = mass_of(exp32(e.z[i]));
    s.weights[static_cast<std::size_t>(e.id[i])] = mass;
    s.block_mass[static_cast<std::size_t>(e.id[i] / kBlock)] += mass;
    t.total += mass;
  }
  return t;
}

FORERUN_INLINE std::uint64_t sum_of_q(const float* q, int V) {
  std::uint64_t total = 0;
  for (int i = 0; i < V; ++i) total += mass_of_q(q[i]);
  return total;
}

FORERUN_INLINE bool among(const DraftChild* children, int n, std::int32_t token) {
  for (int i = 0; i < n; ++i) {
    if (children[i].token == token) return true;
  }
  return false;
}

// Child k, drawn from q of mass `q_total` (its earlier siblings taken out), is rejected: what remains is the positive
// part of p - q. If rounding leaves nothing of it, p stays.
FORERUN_INLINE void subtract(Target& t, const DraftChild* children, int k, std::uint64_t q_total, VerifyScratch& s) {
  const int V = t.row.V;
  const float* q = children[k].q;
  const double p_scale = kResidualScale / static_cast<double>(t.total);
  const double q_scale = kResidualScale / static_cast<double>(q_total);
  s.next_weights.resize(static_cast<std::size_t>(V));
  s.next_block_mass.resize(static_cast<std::size_t>(t.row.blocks));
  const auto residual = [&](std::uint64_t p_mass, std::uint64_t q_mass) __attribute__((always_inline)) {
    const double p_share = float_of(p_mass) * p_scale;
    const double q_share = float_of(q_mass) * q_scale;
    return rounded(p_share > q_share ? p_share - q_share : 0.0);
  };
  std::uint64_t total = 0;
  for (int b = 0; b < t.row.blocks; ++b) {
    const int first = b * kBlock;
    const std::uint64_t* p = s.weights.data() + first;
    std::uint64_t* out = s.next_weights.data() + first;
    std::uint64_t sum = 0;
    over_block(block_size(t.row, b), [&](auto n) __attribute__((always_inline)) {
      for (int j = 0; j < n; ++j) out[j] = residual(p[j], mass_of_q(q[first + j]));
      for (int j = 0; j < n; ++j) sum += out[j];
    });
    s.next_block_mass[static_cast<std::size_t>(b)] = sum;
    total += sum;
  }
  const auto correct = [&](std::int32_t id, std::uint64_t mass) {
    const std::uint64_t change = mass - s.next_weights[static_cast<std::size_t>(id)];  // modulo 2^64
    s.next_weights[static_cast<std::size_t>(id)] = mass;
    s.next_block_mass[static_cast<std::size_t>(id / kBlock)] += change;
    total += change;
  };
  for (int i = 0; i < k; ++i) {
    const std::int32_t id = children[i].token;
    correct(id, residual(s.weights[static_cast<std::size_t>(id)], 0));
  }
  correct(children[k].token, 0);
  if (total == 0) return;
  t.total = total;
  std::swap(s.weights, s.next_weights);
  std::swap(s.block_mass, s.next_block_mass);
}

// The token at which the masses, summed by ascending id, pass a uniform share of the total; kSampleNothingAllowed
// where there is none, which takes a spec outside its ranges.
FORERUN_INLINE std::int32_t draw_residual(const Target& t, const DraftChild* children, int n, double uniform,
                                          const VerifyScratch& s) {
  if (t.total == 0) return kSampleNothingAllowed;
  std::uint64_t left = static_cast<std::uint64_t>(uniform * static_cast<double>(t.total));
  left = std::min(left, t.total - 1);
  std::size_t b = 0;
  while (s.block_mass[b] <= left) left -= s.block_mass[b++];
  for (std::int32_t id = static_cast<std::int32_t>(b) * kBlock;; ++id) {
    const std::uint64_t mass = t.stored                    ? s.weights[static_cast<std::size_t>(id)]
                               : among(children, n, id) ? 0
                                                           : original_mass(t, id);
    if (mass > left) return id;
    left -= mass;
  }
}

FORERUN_INLINE NodeChoice reject_impl(const float* logits, int V, const std::uint32_t* mask, const SampleSpec& spec,
                                      std::uint64_t position, const DraftChild* children, int n, VerifyScratch& s) {
  const Row row = scan_row(logits, V, mask, spec.temperature, s.sample);
  if (row.status != 0) return {-1, row.status};
  if (spec.temperature == 0.0f) {
    const std::int32_t token = first_max(row, s.sample);
    for (int k = 0; k < n; ++k) {
      if (children[k].token == token) return {k, token};
    }
    return {-1, token};
  }
  const bool drawn = std::any_of(children, children + n, [](const DraftChild& child) { return child.q != nullptr; });
  Target t = needs_stages(spec) ? listed_target(row, spec, s)
                                : Target{row, cut_of(row, spec, s.sample), spec.min_p, drawn};
  if (!needs_stages(spec)) weigh(t, s);
  for (int k = 0; k < n; ++k) {
    const std::int32_t token = children[k].token;
    const float* q = children[k].q;
    const bool tried = among(children, k, token);
    std::uint64_t mass = 0;
    if (t.stored) {
      mass = s.weights[static_cast<std::size_t>(token)];
    } else if (!tried) {
      mass = original_mass(t, token);
    }
    std::uint64_t q_mass = 1;
    std::uint64_t q_total = 1;
    if (q != nullptr) {
      q_mass = tried ? 0 : mass_of_q(q[token]);
      if (q_mass == 0) continue;  // not drawn from q: refused, and nothing is learnt from it
      q_total = sum_of_q(q, V);
      for (int i = 0; i < k; ++i) {
        if (!among(children, i, children[i].token)) q_total -= mass_of_q(q[children[i].token]);
      }
    }
    const double uniform = acceptance_uniform(spec.seed, position, token);
    if (uniform * (static_cast<double>(t.total) * static_cast<double>(q_mass)) <
        static_cast<double>(mass) * static_cast<double>(q_total)) {
      return {k, token};
    }
    if (q != nullptr) {
      subtract(t, children, k, q_total, s);
    } else {
      if (t.stored) s.weights[static_cast<std::size_t>(token)] = 0;
      s.block_mass[static_cast<std::size_t>(token / kBlock)] -= mass;
      t.total -= mass;
    }
  }
  return {-1, draw_residual(t, children, n, residual_uniform(spec.seed, position), s)};
}

// -- the instruction sets

using Kernel = NodeChoice (*)(const float*, int, const std::uint32_t*, const SampleSpec&, std::uint64_t,
                              const DraftChild*, int, VerifyScratch&);

#define FORERUN_VERIFY_SET(NAME, TARGET)                                                                       \
  TARGET NodeChoice reject_##NAME(const float* x, int V, const std::uint32_t* mask, const SampleSpec& spec,    \
                                  std::uint64_t position, const DraftChild* children, int n, VerifyScratch& s) { \
    return reject_impl(x, V, mask, spec, position, children, n, s);                                            \
  }

FORERUN_VERIFY_SET(baseline, )
#if defined(__x86_64__)
FORERUN_VERIFY_SET(avx2, __attribute__((target("avx2"))))
FORERUN_VERIFY_SET(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))))
#endif

Kernel kernel(SampleIsa isa) {
#if defined(__x86_64__)
  const bool automatic = isa == SampleIsa::automatic;
  if (isa == SampleIsa::avx512 || (automatic && sample_isa_available(SampleIsa::avx512))) return reject_avx512;
  if (isa == SampleIsa::avx2 || (automatic && sample_isa_available(SampleIsa::avx2))) return reject_avx2;
#endif
  return reject_baseline;
}

}  // namespace

NodeChoice reject_node(const float* logits, int V, const std::uint32_t* mask, const SampleSpec& spec,
                       std::uint64_t position, const std::vector<DraftChild>& children, VerifyScratch& scratch,
                       SampleIsa isa) {
  if (children.empty()) return {-1, sample_row(logits, V, mask, spec, position, scratch.sample, isa)};
  return kernel(isa)(logits, V, mask, spec, position, children.data(), static_cast<int>(children.size()), scratch);
}

// -- Python

namespace {

using Q = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void expect_children(const Vector<std::int32_t>& start, const Vector<std::int32_t>& tokens, const Q& q,
                     const Vector<std::int32_t>& q_rows, std::size_t R, int V) {
  const std::size_t C = tokens.shape(0);
  bool ascending = start.shape(0) == R + 1 && start.data()[0] == 0 &&
                   static_cast<std::size_t>(start.data()[R]) == C;
  for (std::size_t r = 0; ascending && r < R; ++r) ascending = start.data()[r] <= start.data()[r + 1];
  if (!ascending) {
    throw std::invalid_argument("child_start must rise from 0 to the number of children, " + std::to_string(C) +
                                ", in " + std::to_string(R + 1) + " entries");
  }
  if (q_rows.shape(0) != C) {
    throw std::invalid_argument("child_q has " + std::to_string(q_rows.shape(0)) + " entries for " +
                                std::to_string(C) + " children");
  }
  if (q.shape(0) > 0 && q.shape(1) != static_cast<std::size_t>(V)) {
    throw std::invalid_argument("q has " + std::to_string(q.shape(1)) + " columns for a vocabulary of " +
                                std::to_string(V) + " tokens");
  }
  for (std::size_t c = 0; c < C; ++c) {
    if (tokens.data()[c] < 0 || tokens.data()[c] >= V) {
      throw std::invalid_argument("child_tokens[" + std::to_string(c) + "] is " + std::to_string(tokens.data()[c]) +
                                  ", outside the vocabulary of " + std::to_string(V) + " tokens");
    }
    if (q_rows.data()[c] < -1 || q_rows.data()[c] >= static_cast<std::int64_t>(q.shape(0))) {
      throw std::invalid_argument("child_q[" + std::to_string(c) + "] is " + std::to_string(q_rows.data()[c]) +
                                  "; expected -1 or one of the " + std::to_string(q.shape(0)) + " rows of q");
    }
  }
}

std::tuple<Output<std::int32_t>, Output<std::int32_t>> reject(
    Logits logits, Vector<std::int32_t> rows, Vector<float> temperature, Vector<std::int32_t> top_k,
    Vector<float> top_p, Vector<float> min_p, Vector<float> typical_p, Vector<std::uint32_t> order,
    Vector<std::uint64_t> seed, Vector<std::int64_t> position, Vector<std::int32_t> edit_start,
    Vector<std::int32_t> edit_ids, Vector<float> edit_bias, Vector<float> edit_factor, Vector<float> edit_count,
    Vector<float> edit_presence, Vector<std::int32_t> child_start, Vector<std::int32_t> child_tokens, Q q, Vector<std::int32_t> child_q,
    MaskWords masks, Vector<std::int32_t> mask_rows, const std::string& isa_name) {
  const std::size_t R = rows.shape(0);
  const int V = vocabulary(logits);
  expect_rows_within(rows, logits);
  const Specs specs{temperature, top_k, top_p, min_p, typical_p, order, seed, position,
                    {edit_start, edit_ids, edit_bias, edit_factor, edit_count, edit_presence}};
  specs.check(R, V);
  expect_children(child_start, child_tokens, q, child_q, R, V);
  const Masks allowed{masks, mask_rows};
  allowed.check(R, V);
  const SampleIsa isa = isa_named(isa_name);
  auto choice = std::make_unique<std::int32_t[]>(R);
  auto tokens = std::make_unique<std::int32_t[]>(R);
  {
    nb::gil_scoped_release release;
    static thread_local VerifyScratch scratch;
    std::vector<DraftChild> children;
    for (std::size_t r = 0; r < R; ++r) {
      children.clear();
      for (std::int32_t c = child_start.data()[r]; c < child_start.data()[r + 1]; ++c) {
        const std::int32_t q_row = child_q.data()[c];
        children.push_back({child_tokens.data()[c],
                            q_row < 0 ? nullptr : q.data() + static_cast<std::size_t>(q_row) * q.shape(1)});
      }
      const NodeChoice made = reject_node(row_of(logits, rows.data()[r]), V, allowed.at(r), specs.at(r),
                                          specs.position_at(r), children, scratch, isa);
      choice[r] = made.choice;
      tokens[r] = made.token;
    }
  }
  return {output(std::move(choice), {R}), output(std::move(tokens), {R})};
}

}  // namespace

void register_verify(nb::module_& m) {
  // noconvert: an array of another type or layout is refused, not copied.
  const auto array = [](const char* name) { return nb::arg(name).noconvert(); };
  m.def("reject", &reject, array("logits"), array("rows"), array("temperature"), array("top_k"), array("top_p"),
        array("min_p"), array("typical_p"), array("order"), array("seed"), array("position"), array("edit_start"),
        array("edit_ids"), array("edit_bias"), array("edit_factor"), array("edit_count"), array("edit_presence"),
        array("child_start"), array("child_tokens"), array("q"), array("child_q"), array("masks"), array("mask_rows"), nb::arg("isa") = "auto",
        "(choice int32[R], token int32[R]): rejection sampling of the children of one node a row. Row r's children are "
        "child_tokens[child_start[r]:child_start[r + 1]], each drawn from row child_q of q float32[Q, V], or chosen "
        "(-1). choice: the accepted one's index among them, or -1; token: its token or the target's own, as in "
        "sample. Masks as in sample.");
}

}  // namespace forerun
