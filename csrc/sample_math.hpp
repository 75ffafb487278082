// The noise and the float functions of csrc/sample.cpp, operation by operation those of
// src/forerun/sample/noise.py and transforms.py, where the algorithms and their sources are named.
#pragma once

#include <bit>
#include <cstdint>

// Everything marked so is compiled once for each instruction set, inside that set's functions.
#define FORERUN_INLINE static inline __attribute__((always_inline))

namespace forerun {

// condition ? a : b without a branch, which would keep the compiler from using vectors.
FORERUN_INLINE float select(bool condition, float a, float b) {
  const std::uint32_t mask = 0u - static_cast<std::uint32_t>(condition);
  return std::bit_cast<float>((std::bit_cast<std::uint32_t>(a) & mask) |
                              (std::bit_cast<std::uint32_t>(b) & ~mask));
}

struct NoiseKey {
  std::uint32_t first, second;
};

FORERUN_INLINE std::uint64_t mix64(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

enum class Stream : std::uint64_t { token = 0, accept = 1, residual = 2, draft = 3 };

FORERUN_INLINE std::uint64_t stream_seed(std::uint64_t seed, Stream stream) {
  constexpr std::uint64_t step = 0xD1B54A32D192ED03u;
  return stream == Stream::token ? seed : mix64(seed + static_cast<std::uint64_t>(stream) * step);
}

FORERUN_INLINE NoiseKey noise_key(std::uint64_t seed, std::uint64_t position) {
  constexpr std::uint64_t golden = 0x9E3779B97F4A7C15u;
  const std::uint64_t key = mix64(mix64(seed + golden) + position * golden);
  return {static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32)};
}

FORERUN_INLINE std::uint32_t mix32(std::uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// 31 uniform bits; the lower, the stronger the noise.
FORERUN_INLINE std::int32_t noise_bits(NoiseKey key, std::uint32_t id) {
  return static_cast<std::int32_t>(mix32(mix32(id ^ key.first) ^ key.second) >> 1);
}

FORERUN_INLINE float log_sum(float f, float exponent) {
  const float z = f * f;
  float p = 7.0376836292e-2f;
  p = p * f + -1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f + -1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f + -1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f + -2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  p = p * f * z;
  p = p + exponent * -2.12194440e-4f;
  p = p - 0.5f * z;
  return (f + p) + exponent * 0.693359375f;
}

constexpr std::int32_t kSqrtHalf = 0x3F3504F3;  // the bits of sqrt(1/2)

FORERUN_INLINE float log32(float x) {
  const std::int32_t i = std::bit_cast<std::int32_t>(x) - kSqrtHalf;
  const float m = std::bit_cast<float>((i & 0x7FFFFF) + kSqrtHalf);
  return log_sum(m - 1.0f, static_cast<float>(i >> 23));
}

FORERUN_INLINE float log1m32(float v) {
  const std::int32_t i = std::bit_cast<std::int32_t>(1.0f - v) - kSqrtHalf;
  const std::int32_t exponent = i >> 23;
  const float m = std::bit_cast<float>((i & 0x7FFFFF) + kSqrtHalf);
  return log_sum(select(exponent == 0, -v, m - 1.0f), static_cast<float>(exponent));
}

FORERUN_INLINE float gumbel_of(std::int32_t bits) {
  float v = (static_cast<float>(bits) + 0.5f) * 0x1p-31f;
  v = v < 0x1.fffffep-1f ? v : 0x1.fffffep-1f;
  return -log32(-log1m32(v));
}

FORERUN_INLINE float exp32(float z) {
  const float x = z > -86.0f ? z : -86.0f;
  const float n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
  float r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * (r * r) + r) + 1.0f;
  const std::int32_t scale = (static_cast<std::int32_t>(n) + 127) << 23;
  p = p * std::bit_cast<float>(scale);
  return select(z >= -86.0f, p, 0.0f);
}

// round(weight * 2^40), half to even: adding 2^52 leaves the integer in the low bits of the double.
FORERUN_INLINE std::uint64_t mass_of(float weight) {
  const double shifted = static_cast<double>(weight) * 0x1p40 + 0x1p52;
  return std::bit_cast<std::uint64_t>(shifted) - 0x4330000000000000u;
}

// The float of an integer below 2^52.
FORERUN_INLINE double float_of(std::uint64_t mass) {
  return std::bit_cast<double>(mass | 0x4330000000000000u) - 0x1p52;
}

}  // namespace forerun
