#include "sample.hpp"
#include "sample_math.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

namespace forerun {
namespace {

constexpr int kBlock = 64;  // tokens whose largest logit and strongest noise are bounded together
constexpr float kInf = std::numeric_limits<float>::infinity();

// Non-decreasing as the logit falls. Tokens of the last bin (z < -31.9) have no mass.
FORERUN_INLINE std::int32_t bin_of(float z) {
  const float position = -z * 32.0f;
  constexpr float last = SampleScratch::kBins - 1;
  return static_cast<std::int32_t>(position < last ? position : last);
}

// -- order of tokens: logit descending, id ascending, as the ascending order of 64-bit keys

struct Cut {  // the last token that is kept
  float logit = -kInf;
  std::int32_t id = std::numeric_limits<std::int32_t>::max();
};

FORERUN_INLINE bool keeps(const Cut& cut, float logit, std::int32_t id) {
  return (logit > cut.logit) | ((logit == cut.logit) & (id <= cut.id));
}

FORERUN_INLINE std::uint64_t key_of(float logit, std::int32_t id) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(logit + 0.0f);  // -0 and 0 are one value
  const std::uint32_t ascending = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<std::uint64_t>(~ascending) << 32 | static_cast<std::uint32_t>(id);
}

FORERUN_INLINE Cut token_of(std::uint64_t key) {
  const std::uint32_t ascending = ~static_cast<std::uint32_t>(key >> 32);
  const std::uint32_t bits = ascending & 0x80000000u ? ascending & 0x7FFFFFFFu : ~ascending;
  return {std::bit_cast<float>(bits), static_cast<std::int32_t>(static_cast<std::uint32_t>(key))};
}

// -- one row

struct Row {
  const float* logits;
  int V;
  int blocks;
  float max;
  float temperature;
  int status;
};

FORERUN_INLINE int block_size(const Row& row, int block) {
  const int left = row.V - block * kBlock;
  return left < kBlock ? left : kBlock;
}

FORERUN_INLINE float scaled(const Row& row, float logit) {
  return (logit - row.max) / row.temperature;
}

// Calls body(constant or variable count): whole blocks get a count that the compiler can unroll.
template <class Body>
FORERUN_INLINE void over_block(int count, Body&& body) {
  if (count == kBlock) {
    body(std::integral_constant<int, kBlock>{});
  } else {
    body(count);
  }
}

// Block maxima, the row's maximum and its faults. Floats are compared as integers in the same order (negative
// ones with their other bits flipped), a reduction that the compiler may reorder; NaNs lie beyond the infinities.
FORERUN_INLINE Row scan_row(const float* logits, int V, float temperature, SampleScratch& s) {
  Row row{logits, V, (V + kBlock - 1) / kBlock, -kInf, temperature, 0};
  s.block_max.resize(static_cast<std::size_t>(row.blocks));
  constexpr std::int32_t plus_inf = 0x7F800000;
  constexpr std::int32_t minus_inf = -plus_inf - 1;
  std::int32_t highest = minus_inf;
  std::int32_t lowest = plus_inf;
  for (int b = 0; b < row.blocks; ++b) {
    const float* x = logits + b * kBlock;
    std::int32_t high = std::numeric_limits<std::int32_t>::min();
    over_block(block_size(row, b), [&](auto count) __attribute__((always_inline)) {
      for (int j = 0; j < count; ++j) {
        const std::int32_t bits = std::bit_cast<std::int32_t>(x[j]);
        const std::int32_t key = bits ^ ((bits >> 31) & 0x7FFFFFFF);
        high = key > high ? key : high;
        lowest = key < lowest ? key : lowest;
      }
    });
    s.block_max[static_cast<std::size_t>(b)] = std::bit_cast<float>(high ^ ((high >> 31) & 0x7FFFFFFF));
    highest = high > highest ? high : highest;
  }
  row.max = std::bit_cast<float>(highest ^ ((highest >> 31) & 0x7FFFFFFF));
  if (highest >= plus_inf || lowest < minus_inf) {
    row.status = kSampleNotFinite;
  } else if (highest == minus_inf) {
    row.status = kSampleNothingAllowed;
  }
  return row;
}

FORERUN_INLINE int first_max(const Row& row, const SampleScratch& s) {
  int b = 0;
  while (s.block_max[static_cast<std::size_t>(b)] != row.max) ++b;
  int i = b * kBlock;
  while (row.logits[i] != row.max) ++i;
  return i;
}

// Leaves the keys of at least the k first tokens in s.keys, the k first of them in front and the k-th in its
// place. The k-th largest block maximum bounds the k-th largest logit from below, so few blocks are read.
FORERUN_INLINE void select_first(const Row& row, int k, SampleScratch& s) {
  float least = -kInf;
  if (k <= row.blocks) {
    s.order = s.block_max;
    std::nth_element(s.order.begin(), s.order.begin() + (k - 1), s.order.end(), std::greater<>());
    least = s.order[static_cast<std::size_t>(k - 1)];
  }
  s.keys.clear();
  for (int b = 0; b < row.blocks; ++b) {
    if (s.block_max[static_cast<std::size_t>(b)] < least) continue;
    const int first = b * kBlock;
    const int end = first + block_size(row, b);
    for (int i = first; i < end; ++i) {
      if (row.logits[i] >= least) s.keys.push_back(key_of(row.logits[i], i));
    }
  }
  std::nth_element(s.keys.begin(), s.keys.begin() + (k - 1), s.keys.end());
}

FORERUN_INLINE std::uint64_t mass_of_key(const Row& row, std::uint64_t key) {
  return mass_of(exp32(scaled(row, token_of(key).logit)));
}

// The token at which the mass of the sorted tokens reaches p of the whole mass, among those that `cut` keeps.
FORERUN_INLINE Cut top_p_cut(const Row& row, const Cut& cut, float p, SampleScratch& s) {
  s.mass.fill(0);
  alignas(64) std::uint64_t mass[kBlock];
  alignas(64) std::int32_t bin[kBlock];
  for (int b = 0; b < row.blocks; ++b) {
    const float top = s.block_max[static_cast<std::size_t>(b)];
    if (top < cut.logit || bin_of(scaled(row, top)) == SampleScratch::kBins - 1) continue;
    const int first = b * kBlock;
    const float* x = row.logits + first;
    over_block(block_size(row, b), [&](auto count) __attribute__((always_inline)) {
      for (int j = 0; j < count; ++j) {
        const float z = scaled(row, x[j]);
        bin[j] = bin_of(z);
        mass[j] = mass_of(select(keeps(cut, x[j], first + j), exp32(z), 0.0f));
      }
      for (int j = 0; j < count; ++j) s.mass[static_cast<std::size_t>(bin[j])] += mass[j];
    });
  }
  std::uint64_t total = 0;
  for (const std::uint64_t m : s.mass) total += m;
  const double share = std::ceil(static_cast<double>(p) * static_cast<double>(total));
  const std::uint64_t limit = std::max<std::uint64_t>(1, static_cast<std::uint64_t>(share));

  std::uint64_t before = 0;
  std::int32_t crossing = 0;
  while (before + s.mass[static_cast<std::size_t>(crossing)] < limit) {
    before += s.mass[static_cast<std::size_t>(crossing++)];
  }
  s.keys.clear();
  for (int b = 0; b < row.blocks; ++b) {
    const float top = s.block_max[static_cast<std::size_t>(b)];
    if (top < cut.logit || bin_of(scaled(row, top)) > crossing) continue;
    const int first = b * kBlock;
    const float* x = row.logits + first;
    const int count = block_size(row, b);
    for (int j = 0; j < count; ++j) bin[j] = bin_of(scaled(row, x[j]));
    for (int j = 0; j < count; ++j) {
      if (bin[j] == crossing && keeps(cut, x[j], first + j)) s.keys.push_back(key_of(x[j], first + j));
    }
  }
  // Halve the candidates around their median until few are left, then walk them in order.
  auto low = s.keys.begin();
  auto high = s.keys.end();
  while (high - low > 32) {
    const auto middle = low + (high - low) / 2;
    std::nth_element(low, middle, high);
    std::uint64_t left = 0;
    for (auto k = low; k != middle; ++k) left += mass_of_key(row, *k);
    if (before + left >= limit) {
      high = middle;
    } else {
      before += left;
      low = middle;
    }
  }
  std::sort(low, high);
  while ((before += mass_of_key(row, *low)) < limit) ++low;
  return token_of(*low);
}

// The token of the highest score (scaled logit + noise), lowest id first, among those that the cut and min-p
// keep. Blocks are bounded by their largest logit and strongest noise; only those that can win are evaluated.
FORERUN_INLINE int draw(const Row& row, const Cut& cut, float min_p, NoiseKey key, SampleScratch& s) {
  const std::size_t blocks = static_cast<std::size_t>(row.blocks);
  s.block_noise.resize(blocks);
  s.block_bound.resize(blocks);
  for (int b = 0; b < row.blocks; ++b) {
    std::int32_t least = std::numeric_limits<std::int32_t>::max();
    if (!(s.block_max[static_cast<std::size_t>(b)] < cut.logit)) {
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
    const float* x = row.logits + first;
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
  return chosen;
}

FORERUN_INLINE int sample_impl(const float* logits, int V, const SampleSpec& spec, std::uint64_t position,
                               SampleScratch& s) {
  const Row row = scan_row(logits, V, spec.temperature, s);
  if (row.status != 0) return row.status;
  if (spec.temperature == 0.0f) return first_max(row, s);
  Cut cut;
  if (spec.top_k > 0 && spec.top_k < V) {
    select_first(row, spec.top_k, s);
    cut = token_of(s.keys[static_cast<std::size_t>(spec.top_k - 1)]);
  }
  if (spec.top_p < 1.0f) cut = top_p_cut(row, cut, spec.top_p, s);
  return draw(row, cut, spec.min_p, noise_key(spec.seed, position), s);
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
  const Row row = scan_row(logits, V, 1.0f, s);
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
  int (*sample)(const float*, int, const SampleSpec&, std::uint64_t, SampleScratch&);
  int (*logprobs)(const float*, int, int, int, std::int32_t*, float*, float*, SampleScratch&);
  void (*gumbel)(NoiseKey, const std::int32_t*, int, float*);
};

#define FORERUN_SAMPLE_SET(NAME, TARGET)                                                                    \
  TARGET int sample_##NAME(const float* x, int V, const SampleSpec& spec, std::uint64_t position,           \
                           SampleScratch& s) {                                                              \
    return sample_impl(x, V, spec, position, s);                                                            \
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

int sample_row(const float* logits, int V, const SampleSpec& spec, std::uint64_t position,
               SampleScratch& scratch, SampleIsa isa) {
  return kernels(isa).sample(logits, V, spec, position, scratch);
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

namespace nb = nanobind;

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Output = nb::ndarray<nb::numpy, T>;

template <class T>
Output<T> output(std::unique_ptr<T[]> data, std::initializer_list<std::size_t> shape) {
  nb::capsule owner(data.get(), [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return Output<T>(data.release(), shape, owner);
}

SampleIsa isa_named(const std::string& name) {
  const SampleIsa isa = name == "auto"       ? SampleIsa::automatic
                        : name == "baseline" ? SampleIsa::baseline
                        : name == "avx2"     ? SampleIsa::avx2
                        : name == "avx512"   ? SampleIsa::avx512
                                             : throw std::invalid_argument("unknown instruction set: " + name);
  if (!sample_isa_available(isa)) throw std::invalid_argument("this processor lacks " + name);
  return isa;
}

template <class T>
void expect_rows(const char* name, const Vector<T>& values, std::size_t rows) {
  if (values.shape(0) != rows) {
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(values.shape(0)) +
                                " entries for " + std::to_string(rows) + " rows of logits");
  }
}

int vocabulary(const Logits& logits) {
  constexpr std::size_t most = 1u << 22;  // keeps the sum of masses below 2^63
  if (logits.shape(1) > most) throw std::invalid_argument("logits have more than 4194304 columns");
  return static_cast<int>(logits.shape(1));
}

Output<std::int32_t> sample(Logits logits, Vector<float> temperature, Vector<std::int32_t> top_k,
                            Vector<float> top_p, Vector<float> min_p, Vector<std::uint64_t> seed,
                            Vector<std::int64_t> position, const std::string& isa_name) {
  const std::size_t rows = logits.shape(0);
  const int V = vocabulary(logits);
  expect_rows("temperature", temperature, rows);
  expect_rows("top_k", top_k, rows);
  expect_rows("top_p", top_p, rows);
  expect_rows("min_p", min_p, rows);
  expect_rows("seed", seed, rows);
  expect_rows("position", position, rows);
  const SampleIsa isa = isa_named(isa_name);
  auto tokens = std::make_unique<std::int32_t[]>(rows);
  {
    nb::gil_scoped_release release;
    SampleScratch scratch;
    for (std::size_t r = 0; r < rows; ++r) {
      const SampleSpec spec{temperature.data()[r], top_k.data()[r], top_p.data()[r], min_p.data()[r],
                            seed.data()[r]};
      tokens[r] = sample_row(logits.data() + r * logits.shape(1), V, spec,
                             static_cast<std::uint64_t>(position.data()[r]), scratch, isa);
    }
  }
  return output(std::move(tokens), {rows});
}

Output<float> gumbel(std::uint64_t seed, std::uint64_t position, Vector<std::int32_t> ids,
                     const std::string& isa_name) {
  const SampleIsa isa = isa_named(isa_name);
  auto noise = std::make_unique<float[]>(ids.shape(0));
  gumbel_row(seed, position, ids.data(), static_cast<int>(ids.shape(0)), noise.get(), isa);
  return output(std::move(noise), {ids.shape(0)});
}

std::tuple<Output<std::int32_t>, Output<float>, Output<float>> top_logprobs(Logits logits, int top,
                                                                           Vector<std::int32_t> chosen,
                                                                           const std::string& isa_name) {
  const std::size_t rows = logits.shape(0);
  const int V = vocabulary(logits);
  expect_rows("chosen", chosen, rows);
  if (top < 0 || top > V) throw std::invalid_argument("top must be between 0 and the vocabulary size");
  for (std::size_t r = 0; r < rows; ++r) {
    if (chosen.data()[r] < 0 || chosen.data()[r] >= V) {
      throw std::invalid_argument("chosen[" + std::to_string(r) + "] is " +
                                  std::to_string(chosen.data()[r]) + ", outside the vocabulary of " +
                                  std::to_string(V) + " tokens");
    }
  }
  const SampleIsa isa = isa_named(isa_name);
  const std::size_t width = static_cast<std::size_t>(top);
  auto ids = std::make_unique<std::int32_t[]>(rows * width);
  auto logprobs = std::make_unique<float[]>(rows * width);
  auto chosen_logprob = std::make_unique<float[]>(rows);
  {
    nb::gil_scoped_release release;
    SampleScratch scratch;
    for (std::size_t r = 0; r < rows; ++r) {
      logprobs_row(logits.data() + r * logits.shape(1), V, chosen.data()[r], top, ids.get() + r * width,
                   logprobs.get() + r * width, chosen_logprob.get() + r, scratch, isa);
    }
  }
  return {output(std::move(ids), {rows, width}), output(std::move(logprobs), {rows, width}),
          output(std::move(chosen_logprob), {rows})};
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
  m.def("sample", &sample, array("logits"), array("temperature"), array("top_k"), array("top_p"),
        array("min_p"), array("seed"), array("position"), nb::arg("isa") = "auto",
        "Tokens int32[R] drawn from logits float32[R, V]; -1: a logit is NaN or +inf, -2: nothing is allowed.");
  m.def("gumbel", &gumbel, nb::arg("seed"), nb::arg("position"), array("ids"), nb::arg("isa") = "auto",
        "Gumbel noise float32[n] of token ids int32[n] at one position.");
  m.def("top_logprobs", &top_logprobs, array("logits"), nb::arg("top"), array("chosen"),
        nb::arg("isa") = "auto",
        "(ids int32[R, top], logprobs float32[R, top], chosen_logprob float32[R]) of logits float32[R, V]; "
        "-1 and NaN in a row that has no distribution.");
  m.def("sample_isas", &sample_isas, "Names of the instruction sets that this processor can sample with.");
}

}  // namespace forerun
