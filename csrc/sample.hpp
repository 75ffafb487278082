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

// The transforms of a request, numbered as the 4-bit digits of SampleSpec::order.
enum class Stage : std::uint32_t { penalties = 1, temperature, top_k, top_p, min_p, typical_p };

// Changes of single logits at the place of Stage::penalties: x + bias, then * factor below 0 and / factor else, then
// - by_count - by_presence. Ids are distinct and in [0, V), factors above 0.
struct LateEdits {
  std::size_t n = 0;
  const std::int32_t* ids = nullptr;
  const float *bias = nullptr, *factor = nullptr, *by_count = nullptr, *by_presence = nullptr;
};

struct SampleSpec {
  float temperature = 0.0f;  // at least 0 and finite; 0 is greedy
  std::int32_t top_k = 0;    // at least 0; 0 is off
  float top_p = 1.0f;        // from 0 to 1; 1 is off
  float min_p = 0.0f;        // from 0 to 1; 0 is off
  float typical_p = 1.0f;    // from 0 to 1; 1 is off
  std::uint32_t order = 0;   // the stages that run, the first in the lowest digit; 0: all but penalties, as numbered
  std::uint64_t seed = 0;
  LateEdits edits;           // applied if `order` has Stage::penalties and the temperature is above 0
};

// Results of sample_row that are not token ids.
inline constexpr int kSampleNotFinite = -1;       // a logit is NaN or +inf
inline constexpr int kSampleNothingAllowed = -2;  // every logit is -inf or masked, or the row is empty

enum class SampleIsa { automatic, baseline, avx2, avx512 };

bool sample_isa_available(SampleIsa isa);

// Tokens that are left, by ascending id.
struct Entries {
  std::vector<float> rank;  // what orders them: the logit, or what late edits made of it
  std::vector<float> z;     // shifted to a maximum of 0 and scaled as far as the stages got
  std::vector<std::int32_t> id;
};

struct Ranked {
  std::uint64_t key, mass;
};

// Working memory that one thread reuses from row to row.
struct SampleScratch {
  static constexpr int kBins = 1024;
  std::vector<const float*> block;
  std::vector<float> masked;
  std::vector<float> block_max;
  std::vector<float> block_bound;
  std::vector<std::int32_t> block_noise;
  std::vector<float> order;
  std::vector<std::uint64_t> keys;
  std::vector<Ranked> ranked;
  Entries entries;
  std::vector<std::uint64_t> masses;
  std::vector<std::int32_t> bins, ids, later;
  std::vector<float> part_max;
  std::vector<double> wide;
  std::array<std::uint64_t, kBins> mass;
};

// The token drawn from logits[0, V) after the transforms of `spec` with the noise of
// (spec.seed, position); the lowest id of the highest logit when the temperature is 0. Negative: see above.
// mask: one bit a token, bit t % 32 of word t / 32; a token without it has the logit -inf, whatever is stored. Null:
// every token is allowed. `isa` must be available; `automatic` always is.
int sample_row(const float* logits, int V, const std::uint32_t* mask, const SampleSpec& spec, std::uint64_t position,
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
