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

// The parameters of rows. The kernels rely on what `check` demands: outside these ranges nothing may be left to draw.
struct Specs {
  Vector<float> temperature;
  Vector<std::int32_t> top_k;
  Vector<float> top_p, min_p;
  Vector<std::uint64_t> seed;
  Vector<std::int64_t> position;

  void check(std::size_t rows) const {
    const auto share = [](float p) { return p >= 0.0f && p <= 1.0f; };
    const auto scale = [](float t) { return t >= 0.0f && std::isfinite(t); };
    expect("temperature", temperature, rows, "0 or above and finite", scale);
    expect("top_k", top_k, rows, "0 or above", [](std::int32_t k) { return k >= 0; });
    expect("top_p", top_p, rows, "from 0 to 1", share);
    expect("min_p", min_p, rows, "from 0 to 1", share);
    expect_rows("seed", seed, rows);
    expect_rows("position", position, rows);
  }
  SampleSpec at(std::size_t r) const {
    return {temperature.data()[r], top_k.data()[r], top_p.data()[r], min_p.data()[r], seed.data()[r]};
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

inline int vocabulary(const Logits& logits) {
  constexpr std::size_t most = 1u << 22;  // keeps the sum of masses below 2^63
  if (logits.shape(1) > most) throw std::invalid_argument("logits have more than 4194304 columns");
  return static_cast<int>(logits.shape(1));
}

inline const float* row_of(const Logits& logits, std::int32_t row) {
  return logits.data() + static_cast<std::size_t>(row) * logits.shape(1);
}

}  // namespace forerun
