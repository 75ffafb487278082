// The transforms of a row in any order, on a list of the tokens that are left. The readable definition is
// src/forerun/sample/transforms.py. Needed where the order isn't the default one, and for typical-p: what it keeps
// isn't the beginning of the tokens by logit. Where top-k leaves few tokens it is the short way, too.
#pragma once

#include "sample_row.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace forerun::sampling {

FORERUN_INLINE bool needs_stages(const SampleSpec& spec) { return spec.order != 0 || spec.typical_p < 1.0f; }

// Whether top-k leaves a short list.
FORERUN_INLINE bool lists_first(const SampleSpec& spec, int V) {
  return spec.top_k > 0 && spec.top_k < V && spec.top_k <= 4096;
}

// Writes entry n, which must have room.
FORERUN_INLINE void put(Entries& e, std::size_t n, float rank, float z, std::int32_t id) {
  e.rank[n] = rank;
  e.z[n] = z;
  e.id[n] = id;
}

FORERUN_INLINE void resize(Entries& e, std::size_t n) {
  e.rank.resize(n);
  e.z.resize(n);
  e.id.resize(n);
}

// Lists the tokens that aren't -inf, by ascending id, with z = (logit - max) / row.temperature. by_mass: some of those
// without mass may be left out.
FORERUN_INLINE void list_tokens(const Row& row, bool by_mass, SampleScratch& s) {
  Entries& e = s.entries;
  resize(e, static_cast<std::size_t>(row.V) + 1);
  std::size_t n = 0;
  alignas(64) float z[kBlock];
  alignas(64) std::int32_t kept[kBlock];
  for (int b = 0; b < row.blocks; ++b) {
    const float top = s.block_max[static_cast<std::size_t>(b)];
    if (top == -kInf || (by_mass && massless(scaled(row, top)))) continue;
    const int first = b * kBlock;
    const float* x = row.block[b];
    const int count = block_size(row, b);
    over_block(count, [&](auto size) __attribute__((always_inline)) {
      for (int j = 0; j < size; ++j) {
        z[j] = scaled(row, x[j]);
        kept[j] = x[j] > -kInf;
      }
    });
    for (int j = 0; j < count; ++j) {
      put(e, n, x[j], z[j], first + j);
      n += static_cast<std::size_t>(kept[j]);
    }
  }
  resize(e, n);
}

// Lists what top-k leaves, by ascending id.
FORERUN_INLINE void list_first(const Row& row, std::int32_t k, SampleScratch& s) {
  static_cast<void>(top_k_cut(row, k, s));
  const std::size_t n = std::min(s.keys.size(), static_cast<std::size_t>(k));
  s.ids.resize(n);
  for (std::size_t i = 0; i < n; ++i) s.ids[i] = token_of(s.keys[i]).id;
  std::sort(s.ids.begin(), s.ids.end());
  resize(s.entries, n);
  for (std::size_t i = 0; i < n; ++i) {
    const float x = logit_of(row, s.ids[i]);
    put(s.entries, i, x, scaled(row, x), s.ids[i]);
  }
}

template <class Test>
FORERUN_INLINE void keep_if(Entries& e, Test&& test) {
  std::size_t n = 0;
  const std::size_t size = e.id.size();
  alignas(64) std::int32_t kept[kBlock];
  for (std::size_t first = 0; first < size; first += kBlock) {
    const int count = static_cast<int>(std::min<std::size_t>(kBlock, size - first));
    over_block(count, [&](auto width) __attribute__((always_inline)) {
      for (int j = 0; j < width; ++j) kept[j] = test(first + static_cast<std::size_t>(j));
    });
    for (int j = 0; j < count; ++j) {
      const std::size_t i = first + static_cast<std::size_t>(j);
      put(e, n, e.rank[i], e.z[i], e.id[i]);
      n += static_cast<std::size_t>(kept[j]);
    }
  }
  resize(e, n);
}

// Keeps the shortest prefix, by ascending key(i), that holds `share` of the mass; at least one entry. bin(i) is one of
// kBins and doesn't fall as the key rises.
template <class Key, class Bin>
FORERUN_INLINE void keep_share(SampleScratch& s, float share, Key&& key, Bin&& bin) {
  Entries& e = s.entries;
  const std::size_t n = e.id.size();
  s.masses.resize(n);
  s.bins.resize(n);
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < n; ++i) {
    s.masses[i] = mass_of(exp32(e.z[i]));
    s.bins[i] = bin(i);
    total += s.masses[i];
  }
  s.mass.fill(0);
  for (std::size_t i = 0; i < n; ++i) s.mass[static_cast<std::size_t>(s.bins[i])] += s.masses[i];
  std::uint64_t before = 0;
  const std::uint64_t limit = limit_of(total, share);
  const std::int32_t crossing = crossing_bin(s, limit, SampleScratch::kBins, before);
  s.ranked.clear();
  for (std::size_t i = 0; i < n; ++i) {
    if (s.bins[i] == crossing) s.ranked.push_back({key(i), s.masses[i]});
  }
  const std::uint64_t last = crossing_key(s.ranked, before, limit);
  keep_if(e, [&](std::size_t i) __attribute__((always_inline)) { return key(i) <= last; });
}

FORERUN_INLINE void keep_top_k(SampleScratch& s, std::int32_t k) {
  Entries& e = s.entries;
  const std::size_t n = e.id.size();
  if (k == 0 || static_cast<std::size_t>(k) >= n) return;
  s.part_max.assign((n + kBlock - 1) / kBlock, -kInf);
  for (std::size_t i = 0; i < n; ++i) s.part_max[i / kBlock] = std::max(s.part_max[i / kBlock], e.rank[i]);
  const float least = bound_of_first(s.part_max, k, s.order);
  s.keys.clear();
  for (std::size_t i = 0; i < n; ++i) {
    if (e.rank[i] >= least) s.keys.push_back(key_of(e.rank[i], e.id[i]));
  }
  std::nth_element(s.keys.begin(), s.keys.begin() + (k - 1), s.keys.end());
  const std::uint64_t last = s.keys[static_cast<std::size_t>(k - 1)];
  keep_if(e, [&](std::size_t i) __attribute__((always_inline)) { return key_of(e.rank[i], e.id[i]) <= last; });
}

FORERUN_INLINE void keep_top_p(SampleScratch& s, float p) {
  const Entries& e = s.entries;
  keep_share(
      s, p, [&](std::size_t i) __attribute__((always_inline)) { return key_of(e.rank[i], e.id[i]); },
      [&](std::size_t i) __attribute__((always_inline)) { return bin_of(e.z[i]); });
}

FORERUN_INLINE void keep_min_p(SampleScratch& s, float p) {
  Entries& e = s.entries;
  keep_if(e, [&](std::size_t i) __attribute__((always_inline)) { return exp32(e.z[i]) >= p; });
}

// Keeps the tokens whose surprise is nearest to the expected one, and shifts z to a maximum of 0. Returns the shift.
FORERUN_INLINE float keep_typical(SampleScratch& s, float p) {
  Entries& e = s.entries;
  keep_if(e, [&](std::size_t i) __attribute__((always_inline)) { return mass_of(exp32(e.z[i])) > 0; });
  std::uint64_t total = 0;
  std::uint64_t surprise = 0;
  for (const float z : e.z) {
    const float weight = exp32(z);
    total += mass_of(weight);
    surprise += mass_of(select(weight > 0.0f, weight * -z, 0.0f));
  }
  const float mean = static_cast<float>(static_cast<double>(surprise) / static_cast<double>(total));
  const auto distance = [&](std::size_t i) __attribute__((always_inline)) { return std::fabs(e.z[i] + mean); };
  keep_share(
      s, p, [&](std::size_t i) __attribute__((always_inline)) { return key_of(-distance(i), e.id[i]); },
      [&](std::size_t i) __attribute__((always_inline)) { return bin_of(-distance(i)); });
  const float top = *std::max_element(e.z.begin(), e.z.end());
  for (float& z : e.z) z -= top;
  return top;
}

// The edits of tokens that are still listed: of the logit as it stands, which is z + offset. Returns the shift that
// brings the maximum of z back to 0; tokens are ordered by z from now on.
FORERUN_INLINE double edit_late(const Row& row, const LateEdits& edits, double temperature, double offset,
                                SampleScratch& s) {
  Entries& e = s.entries;
  s.wide.assign(e.z.begin(), e.z.end());
  for (std::size_t k = 0; k < edits.n; ++k) {
    const auto found = std::lower_bound(e.id.begin(), e.id.end(), edits.ids[k]);
    if (found == e.id.end() || *found != edits.ids[k]) continue;
    double v = static_cast<double>(logit_of(row, *found)) / temperature;
    v += static_cast<double>(edits.bias[k]);
    const double factor = static_cast<double>(edits.factor[k]);
    v = v < 0.0 ? v * factor : v / factor;
    v -= static_cast<double>(edits.by_count[k]);
    v -= static_cast<double>(edits.by_presence[k]);
    s.wide[static_cast<std::size_t>(found - e.id.begin())] = v - offset;
  }
  const double top = *std::max_element(s.wide.begin(), s.wide.end());
  for (std::size_t i = 0; i < e.z.size(); ++i) e.z[i] = static_cast<float>(s.wide[i] - top);
  e.rank = e.z;
  return top;
}

FORERUN_INLINE bool off(const SampleSpec& spec, Stage stage) {
  return (stage == Stage::top_k && spec.top_k == 0) || (stage == Stage::top_p && spec.top_p >= 1.0f) ||
         (stage == Stage::min_p && spec.min_p <= 0.0f) || (stage == Stage::typical_p && spec.typical_p >= 1.0f) ||
         (stage == Stage::penalties && spec.edits.n == 0);
}

// Leaves in s.entries what all transforms keep of a row without faults at a temperature above 0, by ascending id, with
// a largest z of 0.
FORERUN_INLINE void run_stages(Row row, const SampleSpec& spec, SampleScratch& s) {
  std::uint32_t order = spec.order != 0 ? spec.order : 0x65432u;
  row.temperature = 1.0f;
  bool first = false;  // whether top-k is done
  // Temperature doesn't change which tokens come first, so both are done on the row.
  for (; order != 0; order >>= 4) {
    const Stage stage = static_cast<Stage>(order & 15u);
    if (stage == Stage::temperature) {
      row.temperature = spec.temperature;
    } else if (stage == Stage::top_k && lists_first(spec, row.V)) {
      first = true;
    } else if (!off(spec, stage)) {
      break;
    }
  }
  const Stage next = static_cast<Stage>(order & 15u);
  if (first) {
    list_first(row, spec.top_k, s);
  } else {
    list_tokens(row, next == Stage::top_p || next == Stage::typical_p, s);
  }
  double temperature = static_cast<double>(row.temperature);
  double offset = static_cast<double>(row.max) / temperature;
  for (; order != 0; order >>= 4) {
    switch (static_cast<Stage>(order & 15u)) {
      case Stage::penalties:
        if (spec.edits.n > 0) offset += edit_late(row, spec.edits, temperature, offset, s);
        break;
      case Stage::temperature:
        for (float& z : s.entries.z) z /= spec.temperature;
        temperature = static_cast<double>(spec.temperature);
        offset /= temperature;
        break;
      case Stage::top_k:
        keep_top_k(s, spec.top_k);
        break;
      case Stage::top_p:
        if (spec.top_p < 1.0f) keep_top_p(s, spec.top_p);
        break;
      case Stage::min_p:
        if (spec.min_p > 0.0f) keep_min_p(s, spec.min_p);
        break;
      case Stage::typical_p:
        if (spec.typical_p < 1.0f) offset += static_cast<double>(keep_typical(s, spec.typical_p));
        break;
    }
  }
}

}  // namespace forerun::sampling
