// How sampling and verification take and give NumPy arrays.
#pragma once

#include "sample.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

namespace forerun {

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

inline SampleIsa isa_named(const std::string& name) {
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
                                " entries for " + std::to_string(rows) + " rows");
  }
}

inline void expect_rows_within(const Vector<std::int32_t>& rows, const Logits& logits) {
  for (std::size_t r = 0; r < rows.shape(0); ++r) {
    if (rows.data()[r] < 0 || static_cast<std::size_t>(rows.data()[r]) >= logits.shape(0)) {
      throw std::invalid_argument("rows[" + std::to_string(r) + "] is " + std::to_string(rows.data()[r]) +
                                  ", outside the " + std::to_string(logits.shape(0)) + " rows of logits");
    }
  }
}

// Row r's late edits are entries start[r] to start[r + 1] of the other arrays.
struct EditArrays {
  Vector<std::int32_t> start, ids;
  Vector<float> bias, factor, by_count, by_presence;

  void check(std::size_t rows, int V) const {
    const std::size_t n = ids.shape(0);
    bool ascending = start.shape(0) == rows + 1 && start.data()[0] == 0 &&
                     static_cast<std::size_t>(start.data()[rows]) == n;
    for (std::size_t r = 0; ascending && r < rows; ++r) ascending = start.data()[r] <= start.data()[r + 1];
    if (!ascending) {
      throw std::invalid_argument("edit_start must rise from 0 to the number of edits, " + std::to_string(n) + ", in " +
                                  std::to_string(rows + 1) + " entries");
    }
    for (const auto& [name, values] : {std::pair{"edit_bias", &bias}, {"edit_factor", &factor},
                                       {"edit_count", &by_count}, {"edit_presence", &by_presence}}) {
      if (values->shape(0) != n) {
        throw std::invalid_argument(std::string(name) + " has " + std::to_string(values->shape(0)) + " entries for " +
                                    std::to_string(n) + " edits");
      }
      for (std::size_t i = 0; i < n; ++i) {
        if (!std::isfinite(values->data()[i]) || (values == &factor && values->data()[i] <= 0.0f)) {
          throw std::invalid_argument(std::string(name) + "[" + std::to_string(i) + "] is " +
                                      std::to_string(values->data()[i]) + "; it must be finite, and a factor above 0");
        }
      }
    }
    for (std::size_t i = 0; i < n; ++i) {
      if (ids.data()[i] < 0 || ids.data()[i] >= V) {
        throw std::invalid_argument("edit_ids[" + std::to_string(i) + "] is " + std::to_string(ids.data()[i]) +
                                    ", outside the vocabulary of " + std::to_string(V) + " tokens");
      }
    }
  }
  LateEdits at(std::size_t r) const {
    const std::size_t first = static_cast<std::size_t>(start.data()[r]);
    return {static_cast<std::size_t>(start.data()[r + 1]) - first, ids.data() + first, bias.data() + first,
            factor.data() + first, by_count.data() + first, by_presence.data() + first};
  }
};

// The parameters of rows. The kernels rely on what `check` demands: outside these ranges nothing may be left to draw.
struct Specs {
  Vector<float> temperature;
  Vector<std::int32_t> top_k;
  Vector<float> top_p, min_p, typical_p;
  Vector<std::uint32_t> order;
  Vector<std::uint64_t> seed;
  Vector<std::int64_t> position;
  EditArrays edits;

  void check(std::size_t rows, int V) const {
    // Digits 1 to 6, none twice, without a gap.
    const auto stages = [](std::uint32_t digits) {
      std::uint32_t seen = 1;
      for (; digits != 0; digits >>= 4) {
        const std::uint32_t stage = 1u << (digits & 15u);
        if (stage > 1u << 6 || (seen & stage) != 0) return false;
        seen |= stage;
      }
      return true;
    };
    const auto share = [](float p) { return p >= 0.0f && p <= 1.0f; };
    const auto scale = [](float t) { return t >= 0.0f && std::isfinite(t); };
    expect("temperature", temperature, rows, "0 or above and finite", scale);
    expect("top_k", top_k, rows, "0 or above", [](std::int32_t k) { return k >= 0; });
    expect("top_p", top_p, rows, "from 0 to 1", share);
    expect("min_p", min_p, rows, "from 0 to 1", share);
    expect("typical_p", typical_p, rows, "from 0 to 1", share);
    expect("order", order, rows, "hexadecimal digits from 1 to 6, each once", stages);
    edits.check(rows, V);
    expect_rows("seed", seed, rows);
    expect_rows("position", position, rows);
  }
  SampleSpec at(std::size_t r) const {
    return {temperature.data()[r], top_k.data()[r], top_p.data()[r], min_p.data()[r], typical_p.data()[r],
            order.data()[r], seed.data()[r], edits.at(r)};
  }
  std::uint64_t position_at(std::size_t r) const { return static_cast<std::uint64_t>(position.data()[r]); }

 private:
  template <class T, class Test>
  static void expect(const char* name, const Vector<T>& values, std::size_t rows, const char* range, Test allowed) {
    expect_rows(name, values, rows);
    for (std::size_t r = 0; r < rows; ++r) {
      if (!allowed(values.data()[r])) {
        throw std::invalid_argument(std::string(name) + "[" + std::to_string(r) + "] is " +
                                    std::to_string(values.data()[r]) + "; it must be " + range);
      }
    }
  }
};

using MaskWords = nb::ndarray<const std::uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Which tokens rows may choose: bit t % 32 of word t / 32 in row rows[r] of `words`; -1: all.
struct Masks {
  MaskWords words;
  Vector<std::int32_t> rows;

  void check(std::size_t R, int V) const {
    expect_rows("mask_rows", rows, R);
    const std::size_t width = (static_cast<std::size_t>(V) + 31) / 32;
    if (words.shape(0) > 0 && words.shape(1) != width) {
      throw std::invalid_argument("masks have " + std::to_string(words.shape(1)) + " words a row; a vocabulary of " +
                                  std::to_string(V) + " tokens takes " + std::to_string(width));
    }
    for (std::size_t r = 0; r < R; ++r) {
      if (rows.data()[r] < -1 || rows.data()[r] >= static_cast<std::int64_t>(words.shape(0))) {
        throw std::invalid_argument("mask_rows[" + std::to_string(r) + "] is " + std::to_string(rows.data()[r]) +
                                    "; expected -1 or one of the " + std::to_string(words.shape(0)) + " masks");
      }
    }
  }
  const std::uint32_t* at(std::size_t r) const {
    const std::int32_t row = rows.data()[r];
    return row < 0 ? nullptr : words.data() + static_cast<std::size_t>(row) * words.shape(1);
  }
};

inline int vocabulary(const Logits& logits) {
  constexpr std::size_t most = 1u << 22;  // keeps the sum of masses below 2^63
  if (logits.shape(1) > most) throw std::invalid_argument("logits have more than 4194304 columns");
  return static_cast<int>(logits.shape(1));
}

inline const float* row_of(const Logits& logits, std::int32_t row) {
  return logits.data() + static_cast<std::size_t>(row) * logits.shape(1);
}

}  // namespace forerun
