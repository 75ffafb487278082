// Choosing a token from a row of logits.
//
// The readable definition of everything here is src/forerun/sample/noise.py and transforms.py; this code
// returns the same bits on every instruction set. Float operations are float32, in a written-out order and
// without fused multiply-add (compile with -ffp-contract=off); probability mass is summed in integers, which
// is exact in any order.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace nanobind {
class module_;
}

namespace forerun {

struct SampleSpec {
  float temperature = 0.0f;  // at least 0 and finite; 0 is greedy
  std::int32_t top_k = 0;    // at least 0; 0 is off
  float top_p = 1.0f;        // from 0 to 1; 1 is off
  float min_p = 0.0f;        // from 0 to 1; 0 is off
  std::uint64_t seed = 0;
};

// Results of sample_row that are not token ids.
inline constexpr int kSampleNotFinite = -1;       // a logit is NaN or +inf
inline constexpr int kSampleNothingAllowed = -2;  // every logit is -inf, or the row is empty

enum class SampleIsa { automatic, baseline, avx2, avx512 };

bool sample_isa_available(SampleIsa isa);

// Working memory that one thread reuses from row to row.
struct SampleScratch {
  static constexpr int kBins = 1024;
  std::vector<float> block_max;
  std::vector<float> block_bound;
  std::vector<std::int32_t> block_noise;
  std::vector<float> order;
  std::vector<std::uint64_t> keys;
  std::array<std::uint64_t, kBins> mass;
};

// The token drawn from logits[0, V) after temperature, top-k, top-p and min-p with the noise of
// (spec.seed, position); the lowest id of the highest logit when the temperature is 0. Negative: see above.
// `isa` must be available; `automatic` always is.
int sample_row(const float* logits, int V, const SampleSpec& spec, std::uint64_t position,
               SampleScratch& scratch, SampleIsa isa = SampleIsa::automatic);

// Natural log-probabilities under the raw logits (before any transform): of `token` into *chosen, of the `top`
// most probable tokens (logit descending, id ascending) into ids[top] and logprobs[top].
// Needs 0 <= token < V and 0 <= top <= V. Returns 0, or a negative result of sample_row with the outputs
// set to -1 and NaN.
int logprobs_row(const float* logits, int V, int token, int top, std::int32_t* ids, float* logprobs,
                 float* chosen, SampleScratch& scratch, SampleIsa isa = SampleIsa::automatic);

// Gumbel noise of n token ids at one position.
void gumbel_row(std::uint64_t seed, std::uint64_t position, const std::int32_t* ids, int n, float* out,
                SampleIsa isa = SampleIsa::automatic);

// Adds sample, gumbel, top_logprobs and sample_isas to the Python module.
void register_sample(nanobind::module_& m);

}  // namespace forerun
