#include "sample.hpp"
#include "sample_arrays.hpp"
#include "sample_row.hpp"
#include "sample_stages.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

namespace forerun {
namespace {

using namespace sampling;

// The token of the highest score (scaled logit + noise), lowest id first, among those that the cut and min-p
// keep. Blocks are bounded by their largest logit and strongest noise; only those that can win are evaluated.
FORERUN_INLINE int draw(const Row& row, const Cut& cut, float min_p, NoiseKey key, SampleScratch& s) {
  const std::size_t blocks = static_cast<std::size_t>(row.blocks);
  s.block_noise.resize(blocks);
  s.block_bound.resize(blocks);
  for (int b = 0; b < row.blocks; ++b) {
    std::int32_t least = std::numeric_limits<std::int32_t>::max();
    const float top = s.block_max[static_cast<std::size_t>(b)];
    if (!(top < cut.logit) && exp32(scaled(row, top)) * 1.001f >= min_p && top > -kInf) {
      const std::uint32_t first = static_cast<std::uint32_t>(b) * kBlock;
      for (std::uint32_t j = 0; j < kBlock; ++j) {  // past V: a looser bound, nothing else
        const std::int32_t bits = noise_bits(key, first + j);
        least = bits < least ? bits : least;
      }
    }
    s.block_noise[static_cast<std::size_t>(b)] = least;
  }
  // gumbel_of falls with its argument up to rounding, which is far below the slack.
  constexpr float slack = 1e-4f;
  for (std::size_t b = 0; b < blocks; ++b) {
    const float bound = scaled(row, s.block_max[b]) + (gumbel_of(s.block_noise[b]) + slack);
    s.block_bound[b] = s.block_max[b] < cut.logit ? -kInf : bound;
  }

  float best = -kInf;
  int chosen = row.V;
  alignas(64) float score[kBlock];
  const auto evaluate = [&](int b) __attribute__((always_inline)) {
    const int first = b * kBlock;
    const float* x = row.block[b];
    over_block(block_size(row, b), [&](auto count) __attribute__((always_inline)) {
      for (int j = 0; j < count; ++j) {
        const float z = scaled(row, x[j]);
        const float noisy = z + gumbel_of(noise_bits(key, static_cast<std::uint32_t>(first + j)));
        const bool kept = keeps(cut, x[j], first + j) & (exp32(z) >= min_p);
        score[j] = select(kept, noisy, -kInf);
      }
      for (int j = 0; j < count; ++j) {
        if (score[j] > best || (score[j] == best && best > -kInf && first + j < chosen)) {
          best = score[j];
          chosen = first + j;
        }
      }
    });
  };
  const int strongest = static_cast<int>(
      std::max_element(s.block_bound.begin(), s.block_bound.end()) - s.block_bound.begin());
  evaluate(strongest);
  for (int b = 0; b < row.blocks; ++b) {
    if (b != strongest && s.block_bound[static_cast<std::size_t>(b)] >= best) evaluate(b);
  }
  return best > -kInf ? chosen : kSampleNothingAllowed;
}

// The same among listed tokens.
FORERUN_INLINE int draw_listed(const Entries& e, NoiseKey key) {
  float best = -kInf;
  int chosen = kSampleNothingAllowed;
  alignas(64) float score[kBlock];
  for (std::size_t first = 0; first < e.id.size(); first += kBlock) {
    const int count = static_cast<int>(std::min<std::size_t>(kBlock, e.id.size() - first));
    for (int j = 0; j < count; ++j) {
      const std::size_t i = first + static_cast<std::size_t>(j);
      score[j] = e.z[i] + gumbel_of(noise_bits(key, static_cast<std::uint32_t>(e.id[i])));
    }
    for (int j = 0; j < count; ++j) {
      if (score[j] > best) {
        best = score[j];
        chosen = e.id[first + static_cast<std::size_t>(j)];
      }
    }
  }
  return chosen;
}

FORERUN_INLINE int sample_impl(const float* logits, int V, const std::uint32_t* mask, const SampleSpec& spec,
                               std::uint64_t position, SampleScratch& s) {
  const Row row = scan_row(logits, V, mask, spec.temperature, s);
  if (row.status != 0) return row.status;
  if (spec.temperature == 0.0f) return first_max(row, s);
  if (needs_stages(spec) || lists_first(spec, V)) {
    run_stages(row, spec, s);
    return draw_listed(s.entries, noise_key(spec.seed, position));
  }
  return draw(row, cut_of(row, spec, s), spec.min_p, noise_key(spec.seed, position), s);
}

// ln(mass / 2^40) in float64, written out because math libraries differ in the last bit.
FORERUN_INLINE double log_mass(std::uint64_t mass) {
  int exponent = 0;
  double m = std::frexp(static_cast<double>(mass), &exponent);
  if (m < 0.70710678118654752) {
    m = m * 2.0;
    exponent -= 1;
  }
  const double s = (m - 1.0) / (m + 1.0);
  const double s2 = s * s;
  double sum = 0.0;
  for (int n = 23; n >= 1; n -= 2) sum = sum * s2 + 1.0 / n;
  return static_cast<double>(exponent - 40) * 0.69314718055994531 + 2.0 * s * sum;
}

FORERUN_INLINE int logprobs_impl(const float* logits, int V, int token, int top, std::int32_t* ids,
                                 float* logprobs, float* chosen, SampleScratch& s) {
  const Row row = scan_row(logits, V, nullptr, 1.0f, s);
  if (row.status != 0) {
    std::fill_n(ids, top, -1);
    std::fill_n(logprobs, top, std::numeric_limits<float>::quiet_NaN());
    *chosen = std::numeric_limits<float>::quiet_NaN();
    return row.status;
  }
  std::uint64_t total = 0;
  for (int b = 0; b < row.blocks; ++b) {
    const float* x = logits + b * kBlock;
    over_block(block_size(row, b), [&](auto count) __attribute__((always_inline)) {
      std::uint64_t sum = 0;
      for (int j = 0; j < count; ++j) sum += mass_of(exp32(scaled(row, x[j])));
      total += sum;
    });
  }
  const double log_total = log_mass(total);
  const auto logprob = [&](float logit) {
    return static_cast<float>(static_cast<double>(logit) - static_cast<double>(row.max) - log_total);
  };
  *chosen = logprob(logits[token]);
  if (top > 0) {
    select_first(row, top, s);
    std::sort(s.keys.begin(), s.keys.begin() + top);
    for (int i = 0; i < top; ++i) {
      const Cut entry = token_of(s.keys[static_cast<std::size_t>(i)]);
      ids[i] = entry.id;
      logprobs[i] = logprob(entry.logit);
    }
  }
  return 0;
}

FORERUN_INLINE void gumbel_impl(NoiseKey key, const std::int32_t* ids, int n, float* out) {
  for (int i = 0; i < n; ++i) out[i] = gumbel_of(noise_bits(key, static_cast<std::uint32_t>(ids[i])));
}

// -- the instruction sets

struct SampleKernels {
  int (*sample)(const float*, int, const std::uint32_t*, const SampleSpec&, std::uint64_t, SampleScratch&);
  int (*logprobs)(const float*, int, int, int, std::int32_t*, float*, float*, SampleScratch&);
  void (*gumbel)(NoiseKey, const std::int32_t*, int, float*);
};

#define FORERUN_SAMPLE_SET(NAME, TARGET)                                                                    \
  TARGET int sample_##NAME(const float* x, int V, const std::uint32_t* mask, const SampleSpec& spec,        \
                           std::uint64_t position, SampleScratch& s) {                                      \
    return sample_impl(x, V, mask, spec, position, s);                                                      \
  }                                                                                                         \
  TARGET int logprobs_##NAME(const float* x, int V, int token, int top, std::int32_t* ids, float* logprobs, \
                             float* chosen, SampleScratch& s) {                                             \
    return logprobs_impl(x, V, token, top, ids, logprobs, chosen, s);                                       \
  }                                                                                                         \
  TARGET void gumbel_##NAME(NoiseKey key, const std::int32_t* ids, int n, float* out) {                     \
    gumbel_impl(key, ids, n, out);                                                                          \
  }                                                                                                         \
  constexpr SampleKernels kernels_##NAME{sample_##NAME, logprobs_##NAME, gumbel_##NAME};

FORERUN_SAMPLE_SET(baseline, )
#if defined(__x86_64__)
FORERUN_SAMPLE_SET(avx2, __attribute__((target("avx2"))))
FORERUN_SAMPLE_SET(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))))
#endif

const SampleKernels& kernels(SampleIsa isa) {
#if defined(__x86_64__)
  if (isa == SampleIsa::automatic) {
    isa = sample_isa_available(SampleIsa::avx512) ? SampleIsa::avx512
          : sample_isa_available(SampleIsa::avx2) ? SampleIsa::avx2
                                                  : SampleIsa::baseline;
  }
  if (isa == SampleIsa::avx512) return kernels_avx512;
  if (isa == SampleIsa::avx2) return kernels_avx2;
#endif
  return kernels_baseline;
}

}  // namespace

bool sample_isa_available(SampleIsa isa) {
#if defined(__x86_64__)
  if (isa == SampleIsa::avx2) return __builtin_cpu_supports("avx2");
  if (isa == SampleIsa::avx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
#else
  if (isa == SampleIsa::avx2 || isa == SampleIsa::avx512) return false;
#endif
  return true;
}

int sample_row(const float* logits, int V, const std::uint32_t* mask, const SampleSpec& spec, std::uint64_t position,
               SampleScratch& scratch, SampleIsa isa) {
  return kernels(isa).sample(logits, V, mask, spec, position, scratch);
}

int logprobs_row(const float* logits, int V, int token, int top, std::int32_t* ids, float* logprobs,
                 float* chosen, SampleScratch& scratch, SampleIsa isa) {
  return kernels(isa).logprobs(logits, V, token, top, ids, logprobs, chosen, scratch);
}

void gumbel_row(std::uint64_t seed, std::uint64_t position, const std::int32_t* ids, int n, float* out,
                SampleIsa isa) {
  kernels(isa).gumbel(noise_key(seed, position), ids, n, out);
}

// -- Python

namespace {

Output<std::int32_t> sample(Logits logits, Vector<std::int32_t> rows, Vector<float> temperature,
                            Vector<std::int32_t> top_k, Vector<float> top_p, Vector<float> min_p,
                            Vector<float> typical_p, Vector<std::uint32_t> order, Vector<std::uint64_t> seed,
                            Vector<std::int64_t> position, Vector<std::int32_t> edit_start,
                            Vector<std::int32_t> edit_ids, Vector<float> edit_bias, Vector<float> edit_factor,
                            Vector<float> edit_count, Vector<float> edit_presence, MaskWords masks,
                            Vector<std::int32_t> mask_rows, const std::string& isa_name) {
  const std::size_t R = rows.shape(0);
  const int V = vocabulary(logits);
  expect_rows_within(rows, logits);
  const Specs specs{temperature, top_k, top_p, min_p, typical_p, order, seed, position,
                    {edit_start, edit_ids, edit_bias, edit_factor, edit_count, edit_presence}};
  specs.check(R, V);
  const Masks allowed{masks, mask_rows};
  allowed.check(R, V);
  const SampleIsa isa = isa_named(isa_name);
  auto tokens = std::make_unique<std::int32_t[]>(R);
  {
    nb::gil_scoped_release release;
    static thread_local SampleScratch scratch;  // a few megabytes, whose pages would be asked for anew in every call
    for (std::size_t r = 0; r < R; ++r) {
      tokens[r] = sample_row(row_of(logits, rows.data()[r]), V, allowed.at(r), specs.at(r), specs.position_at(r),
                             scratch, isa);
    }
  }
  return output(std::move(tokens), {R});
}

Output<float> gumbel(std::uint64_t seed, std::uint64_t position, Vector<std::int32_t> ids,
                     const std::string& isa_name) {
  const SampleIsa isa = isa_named(isa_name);
  auto noise = std::make_unique<float[]>(ids.shape(0));
  gumbel_row(seed, position, ids.data(), static_cast<int>(ids.shape(0)), noise.get(), isa);
  return output(std::move(noise), {ids.shape(0)});
}

std::tuple<Output<std::int32_t>, Output<float>, Output<float>> top_logprobs(Logits logits,
                                                                           Vector<std::int32_t> rows, int top,
                                                                           Vector<std::int32_t> chosen,
                                                                           const std::string& isa_name) {
  const std::size_t R = rows.shape(0);
  const int V = vocabulary(logits);
  expect_rows_within(rows, logits);
  expect_rows("chosen", chosen, R);
  if (top < 0 || top > V) throw std::invalid_argument("top must be between 0 and the vocabulary size");
  for (std::size_t r = 0; r < R; ++r) {
    if (chosen.data()[r] < 0 || chosen.data()[r] >= V) {
      throw std::invalid_argument("chosen[" + std::to_string(r) + "] is " +
                                  std::to_string(chosen.data()[r]) + ", outside the vocabulary of " +
                                  std::to_string(V) + " tokens");
    }
  }
  const SampleIsa isa = isa_named(isa_name);
  const std::size_t width = static_cast<std::size_t>(top);
  auto ids = std::make_unique<std::int32_t[]>(R * width);
  auto logprobs = std::make_unique<float[]>(R * width);
  auto chosen_logprob = std::make_unique<float[]>(R);
  {
    nb::gil_scoped_release release;
    static thread_local SampleScratch scratch;
    for (std::size_t r = 0; r < R; ++r) {
      logprobs_row(row_of(logits, rows.data()[r]), V, chosen.data()[r], top, ids.get() + r * width,
                   logprobs.get() + r * width, chosen_logprob.get() + r, scratch, isa);
    }
  }
  return {output(std::move(ids), {R, width}), output(std::move(logprobs), {R, width}),
          output(std::move(chosen_logprob), {R})};
}

std::vector<std::string> sample_isas() {
  std::vector<std::string> names{"baseline"};
  if (sample_isa_available(SampleIsa::avx2)) names.emplace_back("avx2");
  if (sample_isa_available(SampleIsa::avx512)) names.emplace_back("avx512");
  return names;
}

}  // namespace

void register_sample(nb::module_& m) {
  // noconvert: an array of another type or layout is refused, not copied.
  const auto array = [](const char* name) { return nb::arg(name).noconvert(); };
  m.def("sample", &sample, array("logits"), array("rows"), array("temperature"), array("top_k"), array("top_p"),
        array("min_p"), array("typical_p"), array("order"), array("seed"), array("position"), array("edit_start"),
        array("edit_ids"), array("edit_bias"), array("edit_factor"), array("edit_count"), array("edit_presence"),
        array("masks"), array("mask_rows"), nb::arg("isa") = "auto",
        "Tokens int32[R] drawn from rows int32[R] of logits float32[N, V], of those tokens that row mask_rows of masks "
        "uint32[M, W] allows (-1: of all); -1: a logit is NaN or +inf, -2: nothing is allowed.");
  m.def("gumbel", &gumbel, nb::arg("seed"), nb::arg("position"), array("ids"), nb::arg("isa") = "auto",
        "Gumbel noise float32[n] of token ids int32[n] at one position.");
  m.def("top_logprobs", &top_logprobs, array("logits"), array("rows"), nb::arg("top"), array("chosen"),
        nb::arg("isa") = "auto",
        "(ids int32[R, top], logprobs float32[R, top], chosen_logprob float32[R]) of rows int32[R] of logits "
        "float32[N, V]; -1 and NaN in a row that has no distribution.");
  m.def("sample_isas", &sample_isas, "Names of the instruction sets that this processor can sample with.");
}

}  // namespace forerun
