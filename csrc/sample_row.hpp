// One row of logits: its faults, the order of its tokens, and which of them the transforms of a request keep. Shared by
// sampling and verification; the readable definition is src/forerun/sample/transforms.py.
#pragma once

#include "sample.hpp"
#include "sample_math.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <type_traits>
#include <vector>

namespace forerun::sampling {

constexpr int kBlock = 64;  // tokens whose largest logit and strongest noise are bounded together
constexpr float kInf = std::numeric_limits<float>::infinity();

// Non-decreasing as the logit falls. Tokens of the last bin (z < -31.9) have no mass.
FORERUN_INLINE std::int32_t bin_of(float z) {
  const float position = -z * 32.0f;
  constexpr float last = SampleScratch::kBins - 1;
  return static_cast<std::int32_t>(position < last ? position : last);
}

// Whether tokens of this z have no mass for sure: round(e^z * 2^40) is 0 below -28.4.
FORERUN_INLINE bool massless(float z) { return z < -28.6f; }

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
  const float* const* block;  // where each block's logits are: in the caller's row, or masked in the scratch
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

FORERUN_INLINE float logit_of(const Row& row, std::int32_t id) { return row.block[id / kBlock][id % kBlock]; }

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

alignas(64) inline constexpr auto kNothing = [] {
  std::array<float, kBlock> nothing{};
  nothing.fill(-kInf);
  return nothing;
}();

// Where block `b` of the masked row is. Blocks of which all or nothing is allowed aren't copied, nor read here.
FORERUN_INLINE const float* masked_block(const float* x, int b, int count, const std::uint32_t* mask, float* copy) {
  const std::uint32_t* words = mask + b * (kBlock / 32);
  if (count == kBlock) {
    if ((words[0] | words[1]) == 0) return kNothing.data();
    if ((words[0] & words[1]) == 0xFFFFFFFFu) return x;
  }
  for (int first = 0; first < count; first += 32) {
    const std::uint32_t word = words[first / 32];
    const int n = std::min(count - first, 32);
    for (int j = 0; j < n; ++j) copy[first + j] = select(word >> j & 1u, x[first + j], -kInf);
  }
  return copy;
}

// Block maxima, the row's maximum and its faults. Floats are compared as integers in the same order (negative
// ones with their other bits flipped), a reduction that the compiler may reorder; NaNs lie beyond the infinities.
FORERUN_INLINE Row scan_row(const float* logits, int V, const std::uint32_t* mask, float temperature,
                            SampleScratch& s) {
  const int blocks = (V + kBlock - 1) / kBlock;
  s.block.resize(static_cast<std::size_t>(blocks));
  s.block_max.resize(static_cast<std::size_t>(blocks));
  if (mask != nullptr) s.masked.resize(static_cast<std::size_t>(blocks) * kBlock);
  Row row{s.block.data(), V, blocks, -kInf, temperature, 0};
  constexpr std::int32_t plus_inf = 0x7F800000;
  constexpr std::int32_t minus_inf = -plus_inf - 1;
  std::int32_t highest = minus_inf;
  std::int32_t lowest = plus_inf;
  for (int b = 0; b < row.blocks; ++b) {
    const float* x = logits + b * kBlock;
    if (mask != nullptr) x = masked_block(x, b, block_size(row, b), mask, s.masked.data() + b * kBlock);
    s.block[static_cast<std::size_t>(b)] = x;
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
  int j = 0;
  while (row.block[b][j] != row.max) ++j;
  return b * kBlock + j;
}

// The k-th largest block maximum, which bounds the k-th largest logit from below: few blocks reach it.
FORERUN_INLINE float bound_of_first(const std::vector<float>& block_max, int k, std::vector<float>& order) {
  if (static_cast<std::size_t>(k) > block_max.size()) return -kInf;
  order = block_max;
  std::nth_element(order.begin(), order.begin() + (k - 1), order.end(), std::greater<>());
  return order[static_cast<std::size_t>(k - 1)];
}

// Leaves the keys of tokens whose logit is at least `least` in s.keys, the k first of them in front and the k-th in its
// place if there are that many.
FORERUN_INLINE void select_above(const Row& row, int k, float least, SampleScratch& s) {
  s.keys.clear();
  for (int b = 0; b < row.blocks; ++b) {
    if (s.block_max[static_cast<std::size_t>(b)] < least) continue;
    const float* x = row.block[b];
    const int count = block_size(row, b);
    for (int j = 0; j < count; ++j) {
      if (x[j] >= least) s.keys.push_back(key_of(x[j], b * kBlock + j));
    }
  }
  if (s.keys.size() >= static_cast<std::size_t>(k)) {
    std::nth_element(s.keys.begin(), s.keys.begin() + (k - 1), s.keys.end());
  }
}

// The same for the k first tokens of the row, -inf included; needs k <= V.
FORERUN_INLINE void select_first(const Row& row, int k, SampleScratch& s) {
  select_above(row, k, bound_of_first(s.block_max, k, s.order), s);
}

// -- the shortest prefix of an order that holds a share of the mass, found without sorting: s.mass has the mass of each
//    bin, and bins follow one another in the order

FORERUN_INLINE std::uint64_t limit_of(std::uint64_t total, float share) {
  const double limit = std::ceil(static_cast<double>(share) * static_cast<double>(total));
  return std::max<std::uint64_t>(1, static_cast<std::uint64_t>(limit));
}

// The bin in which the mass reaches the limit, or `end` if it isn't before that one; `before` becomes the mass of the
// bins before it.
FORERUN_INLINE std::int32_t crossing_bin(const SampleScratch& s, std::uint64_t limit, std::int32_t end,
                                         std::uint64_t& before) {
  std::int32_t bin = 0;
  before = 0;
  while (bin < end && before + s.mass[static_cast<std::size_t>(bin)] < limit) {
    before += s.mass[static_cast<std::size_t>(bin++)];
  }
  return bin;
}

// The key at which the mass, by ascending key, reaches the limit.
FORERUN_INLINE std::uint64_t crossing_key(std::vector<Ranked>& ranked, std::uint64_t before, std::uint64_t limit) {
  const auto by_key = [](const Ranked& a, const Ranked& b) { return a.key < b.key; };
  // Halve the candidates around their median until few are left, then walk them in order.
  auto low = ranked.begin();
  auto high = ranked.end();
  while (high - low > 32) {
    const auto middle = low + (high - low) / 2;
    std::nth_element(low, middle, high, by_key);
    std::uint64_t left = 0;
    for (auto k = low; k != middle; ++k) left += k->mass;
    if (before + left >= limit) {
      high = middle;
    } else {
      before += left;
      low = middle;
    }
  }
  std::sort(low, high, by_key);
  while ((before += low->mass) < limit) ++low;
  return low->key;
}

// The token at which the mass of the sorted tokens reaches p of the whole mass, among those that `cut` keeps. Most of
// it usually lies in few blocks: the others are summed, and put into bins only if it has to be looked for there.
FORERUN_INLINE Cut top_p_cut(const Row& row, const Cut& cut, float p, SampleScratch& s) {
  constexpr std::int32_t head = 12 * 32;  // bins up to z = -12
  s.mass.fill(0);
  alignas(64) std::uint64_t mass[kBlock];
  alignas(64) std::int32_t bin[kBlock];
  std::uint64_t total = 0;
  const auto weigh = [&](int b, float z, float logit, int j) __attribute__((always_inline)) {
    return mass_of(select(keeps(cut, logit, b * kBlock + j), exp32(z), 0.0f));
  };
  const auto put_in_bins = [&](int b) __attribute__((always_inline)) {
    const float* x = row.block[b];
    std::uint64_t sum = 0;
    over_block(block_size(row, b), [&](auto count) __attribute__((always_inline)) {
      for (int j = 0; j < count; ++j) {
        const float z = scaled(row, x[j]);
        bin[j] = bin_of(z);
        mass[j] = weigh(b, z, x[j], j);
      }
      for (int j = 0; j < count; ++j) {
        s.mass[static_cast<std::size_t>(bin[j])] += mass[j];
        sum += mass[j];
      }
    });
    return sum;
  };
  s.later.clear();
  for (int b = 0; b < row.blocks; ++b) {
    const float top = s.block_max[static_cast<std::size_t>(b)];
    if (top < cut.logit || massless(scaled(row, top))) continue;
    if (bin_of(scaled(row, top)) < head) {
      total += put_in_bins(b);
      continue;
    }
    s.later.push_back(b);
    const float* x = row.block[b];
    over_block(block_size(row, b), [&](auto count) __attribute__((always_inline)) {
      for (int j = 0; j < count; ++j) total += weigh(b, scaled(row, x[j]), x[j], j);
    });
  }
  std::uint64_t before = 0;
  const std::uint64_t limit = limit_of(total, p);
  std::int32_t crossing = crossing_bin(s, limit, head, before);
  if (crossing == head) {
    for (const int b : s.later) put_in_bins(b);
    crossing = crossing_bin(s, limit, SampleScratch::kBins, before);
  }
  s.ranked.clear();
  for (int b = 0; b < row.blocks; ++b) {
    const float top = s.block_max[static_cast<std::size_t>(b)];
    if (top < cut.logit || bin_of(scaled(row, top)) > crossing) continue;
    const int first = b * kBlock;
    const float* x = row.block[b];
    const int count = block_size(row, b);
    for (int j = 0; j < count; ++j) bin[j] = bin_of(scaled(row, x[j]));
    for (int j = 0; j < count; ++j) {
      if (bin[j] == crossing && keeps(cut, x[j], first + j)) {
        s.ranked.push_back({key_of(x[j], first + j), mass_of(exp32(scaled(row, x[j])))});
      }
    }
  }
  return token_of(crossing_key(s.ranked, before, limit));
}

// The last of the k first tokens, and their keys in the front of s.keys; none: there is nothing to cut off but tokens of
// -inf. k = 0 keeps all.
FORERUN_INLINE Cut top_k_cut(const Row& row, std::int32_t k, SampleScratch& s) {
  if (k == 0 || k >= row.V) return {};
  constexpr float lowest = std::numeric_limits<float>::lowest();
  select_above(row, k, std::max(bound_of_first(s.block_max, k, s.order), lowest), s);
  if (s.keys.size() < static_cast<std::size_t>(k)) return {};
  return token_of(s.keys[static_cast<std::size_t>(k - 1)]);
}

// What top-k and top-p keep of a row without faults at a temperature above 0.
FORERUN_INLINE Cut cut_of(const Row& row, const SampleSpec& spec, SampleScratch& s) {
  const Cut cut = top_k_cut(row, spec.top_k, s);
  return spec.top_p < 1.0f ? top_p_cut(row, cut, spec.top_p, s) : cut;
}

}  // namespace forerun::sampling
