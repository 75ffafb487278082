// Stands in for the compiler's <immintrin.h> (by its place in the include path), so that csrc/isa_*.cpp can be
// compiled and run where the processor lacks their instructions: each intrinsic that csrc/simd.hpp uses, written out
// lane by lane after its operation in the Intel Intrinsics Guide. One that is missing here is a compile error.
// 256-bit and 512-bit forms share each definition; where AVX2 is real, check_sets.cpp holds both against it.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define _MM_FROUND_TO_NEAREST_INT 0
#define _MM_FROUND_NO_EXC 8
#define _CMP_NLE_UQ 0x16

using __mmask16 = uint16_t;

namespace {

template <int Bytes, class Kind>
union Register {
  int8_t i8[Bytes];
  uint8_t u8[Bytes];
  int16_t i16[Bytes / 2];
  uint16_t u16[Bytes / 2];
  int32_t i32[Bytes / 4];
  uint32_t u32[Bytes / 4];
  uint64_t u64[Bytes / 8];
  float f32[Bytes / 4];
};
using __m128i = Register<16, int>;
using __m256i = Register<32, int>;
using __m512i = Register<64, int>;
using __m128 = Register<16, float>;
using __m256 = Register<32, float>;
using __m512 = Register<64, float>;

// -- arithmetic of one lane

inline float bits_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline uint32_t float_as_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float half_as_float(uint16_t h) {
  const int exponent = h >> 10 & 31, mantissa = h & 1023;
  const uint32_t sign = uint32_t(h >> 15) << 31;
  if (exponent == 31) return bits_as_float(sign | 0x7f800000u | uint32_t(mantissa) << 13 | (mantissa ? 1u << 22 : 0u));
  const float size = exponent ? std::ldexp(float(mantissa + 1024), exponent - 25) : std::ldexp(float(mantissa), -24);
  return sign ? -size : size;
}

inline uint16_t float_as_half(float x) {  // to nearest, ties to even; past the largest, infinity
  const uint32_t bits = float_as_bits(x);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  if (x != x) return uint16_t(sign | 0x7e00 | (bits >> 13 & 0x3ff));
  const float size = std::fabs(x);
  if (size >= 65520.f) return uint16_t(sign | 0x7c00);
  const int exponent = std::max(size > 0.f ? std::ilogb(size) : -14, -14);
  const int units = int(std::nearbyint(std::ldexp(size, 10 - exponent)));
  return uint16_t(sign | (((exponent + 14) << 10) + units));
}

inline int32_t float_as_int(float x) {
  const float r = std::nearbyint(x);
  return r >= -2147483648.f && r < 2147483648.f ? int32_t(r) : INT32_MIN;
}

inline int32_t madd_pair(const int16_t* a, const int16_t* b) {
  return int32_t(uint32_t(a[0] * b[0]) + uint32_t(a[1] * b[1]));
}

inline int16_t maddubs_pair(const uint8_t* a, const int8_t* b) {
  return int16_t(std::clamp(a[0] * b[0] + a[1] * b[1], -32768, 32767));
}

inline uint32_t dpbusd_quad(uint32_t sum, const uint8_t* a, const int8_t* b) {
  return sum + uint32_t(a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3]);
}

inline uint8_t saturate_u8(int16_t x) { return uint8_t(std::clamp<int>(x, 0, 255)); }
inline uint16_t saturate_u16(int32_t x) { return uint16_t(std::clamp(x, 0, 65535)); }

// The kernels name one rounding only, the one that is written out above, and one comparison.
inline void expect_nearest(int mode) {
  if (mode != (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)) std::abort();
}

inline bool compare(float a, float b, int predicate) {
  if (predicate != _CMP_NLE_UQ) std::abort();
  return !(a <= b);
}

template <class To, class From>
inline To reinterpret(const From& from) {
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <class To>
inline To load_bytes(const void* p) {
  To to;
  std::memcpy(&to, p, sizeof(to));
  return to;
}

// -- the intrinsics: `expr` gives lane i of the result

#define EACH(result, name, params, lane, expr) \
  inline result name params { result r; for (size_t i = 0; i < sizeof(r) / sizeof(r.lane[0]); i++) r.lane[i] = expr; return r; }
#define FLOAT2(name, expr) \
  EACH(__m256, _mm256_##name, (__m256 a, __m256 b), f32, expr) \
  EACH(__m512, _mm512_##name, (__m512 a, __m512 b), f32, expr)
#define FLOAT3(name, expr) \
  EACH(__m256, _mm256_##name, (__m256 a, __m256 b, __m256 c), f32, expr) \
  EACH(__m512, _mm512_##name, (__m512 a, __m512 b, __m512 c), f32, expr)
#define INT2(name, lane, expr) \
  EACH(__m256i, _mm256_##name, (__m256i a, __m256i b), lane, expr) \
  EACH(__m512i, _mm512_##name, (__m512i a, __m512i b), lane, expr)
#define SHIFT(name, lane, expr) \
  EACH(__m256i, _mm256_##name, (__m256i a, unsigned n), lane, expr) \
  EACH(__m512i, _mm512_##name, (__m512i a, unsigned n), lane, expr)
#define FILL(name, type, lane) \
  EACH(__m256i, _mm256_##name, (type x), lane, x) \
  EACH(__m512i, _mm512_##name, (type x), lane, x)
// From a vector half as wide.
#define WIDEN(name, lane, expr) \
  EACH(__m256i, _mm256_##name, (__m128i a), lane, expr) \
  EACH(__m512i, _mm512_##name, (__m256i a), lane, expr)

FLOAT2(add_ps, a.f32[i] + b.f32[i])
FLOAT2(sub_ps, a.f32[i] - b.f32[i])
FLOAT2(mul_ps, a.f32[i] * b.f32[i])
FLOAT2(div_ps, a.f32[i] / b.f32[i])
FLOAT2(max_ps, a.f32[i] > b.f32[i] ? a.f32[i] : b.f32[i])
FLOAT2(min_ps, a.f32[i] < b.f32[i] ? a.f32[i] : b.f32[i])
FLOAT3(fmadd_ps, std::fma(a.f32[i], b.f32[i], c.f32[i]))
FLOAT3(fnmadd_ps, std::fma(-a.f32[i], b.f32[i], c.f32[i]))
EACH(__m256, _mm256_set1_ps, (float x), f32, x)
EACH(__m512, _mm512_set1_ps, (float x), f32, x)
EACH(__m256, _mm256_cvtepi32_ps, (__m256i a), f32, float(a.i32[i]))
EACH(__m512, _mm512_cvtepi32_ps, (__m512i a), f32, float(a.i32[i]))
EACH(__m256i, _mm256_cvtps_epi32, (__m256 a), i32, float_as_int(a.f32[i]))
EACH(__m512i, _mm512_cvtps_epi32, (__m512 a), i32, float_as_int(a.f32[i]))
EACH(__m256, _mm256_cvtph_ps, (__m128i a), f32, half_as_float(a.u16[i]))
EACH(__m512, _mm512_cvtph_ps, (__m256i a), f32, half_as_float(a.u16[i]))
EACH(__m128i, _mm256_cvtps_ph, (__m256 a, int mode), u16, (expect_nearest(mode), float_as_half(a.f32[i])))
EACH(__m256i, _mm512_cvtps_ph, (__m512 a, int mode), u16, (expect_nearest(mode), float_as_half(a.f32[i])))
EACH(__m256, _mm256_round_ps, (__m256 a, int mode), f32, (expect_nearest(mode), std::nearbyint(a.f32[i])))
EACH(__m512, _mm512_roundscale_ps, (__m512 a, int mode), f32, (expect_nearest(mode), std::nearbyint(a.f32[i])))
EACH(__m256, _mm256_and_ps, (__m256 a, __m256 b), u32, a.u32[i] & b.u32[i])
EACH(__m256, _mm256_or_ps, (__m256 a, __m256 b), u32, a.u32[i] | b.u32[i])
EACH(__m256, _mm256_cmp_ps, (__m256 a, __m256 b, int predicate), u32, compare(a.f32[i], b.f32[i], predicate) ? ~0u : 0u)
EACH(__m512, _mm512_abs_ps, (__m512 a), u32, a.u32[i] & 0x7fffffffu)

INT2(add_epi16, u16, uint16_t(a.u16[i] + b.u16[i]))
INT2(add_epi32, u32, a.u32[i] + b.u32[i])
INT2(sub_epi32, u32, a.u32[i] - b.u32[i])
INT2(mullo_epi32, u32, a.u32[i] * b.u32[i])
INT2(madd_epi16, i32, madd_pair(a.i16 + 2 * i, b.i16 + 2 * i))
INT2(maddubs_epi16, i16, maddubs_pair(a.u8 + 2 * i, b.i8 + 2 * i))
SHIFT(slli_epi16, u16, n > 15 ? uint16_t(0) : uint16_t(a.u16[i] << n))
SHIFT(srli_epi16, u16, n > 15 ? uint16_t(0) : uint16_t(a.u16[i] >> n))
SHIFT(slli_epi32, u32, n > 31 ? 0u : a.u32[i] << n)
SHIFT(srli_epi32, u32, n > 31 ? 0u : a.u32[i] >> n)
SHIFT(srai_epi32, i32, a.i32[i] >> (n > 31 ? 31u : n))
FILL(set1_epi8, char, i8)
FILL(set1_epi16, short, i16)
FILL(set1_epi32, int, i32)
WIDEN(cvtepu8_epi16, u16, a.u8[i])
WIDEN(cvtepi8_epi16, i16, a.i8[i])
WIDEN(cvtepu16_epi32, u32, a.u16[i])
EACH(__m256i, _mm256_abs_epi8, (__m256i a), u8, uint8_t(a.i8[i] < 0 ? -a.i8[i] : a.i8[i]))
EACH(__m256i, _mm256_sign_epi8, (__m256i a, __m256i b), u8, uint8_t(b.i8[i] < 0 ? -a.i8[i] : b.i8[i] > 0 ? a.i8[i] : 0))
EACH(__m256i, _mm256_packus_epi32, (__m256i a, __m256i b), u16,  // within each 128 bits, a's lanes before b's
     saturate_u16((i % 8 < 4 ? a : b).i32[i / 8 * 4 + i % 4]))
EACH(__m128i, _mm_packus_epi16, (__m128i a, __m128i b), u8, saturate_u8((i < 8 ? a : b).i16[i % 8]))
EACH(__m256i, _mm256_permute4x64_epi64, (__m256i a, unsigned order), u64, a.u64[order >> (2 * i) & 3])
EACH(__m128i, _mm256_extracti128_si256, (__m256i a, int half), u64, a.u64[2 * half + i])
EACH(__m128i, _mm512_cvtepi32_epi8, (__m512i a), u8, uint8_t(a.u32[i]))
EACH(__m256i, _mm256_dpbusd_avx_epi32, (__m256i sum, __m256i a, __m256i b), u32,
     dpbusd_quad(sum.u32[i], a.u8 + 4 * i, b.i8 + 4 * i))
EACH(__m512i, _mm512_dpbusd_epi32, (__m512i sum, __m512i a, __m512i b), u32,
     dpbusd_quad(sum.u32[i], a.u8 + 4 * i, b.i8 + 4 * i))

#define WHOLE(W) \
  EACH(__m##W##i, _mm##W##_and_si##W, (__m##W##i a, __m##W##i b), u64, a.u64[i] & b.u64[i]) \
  EACH(__m##W##i, _mm##W##_or_si##W, (__m##W##i a, __m##W##i b), u64, a.u64[i] | b.u64[i]) \
  EACH(__m##W##i, _mm##W##_xor_si##W, (__m##W##i a, __m##W##i b), u64, a.u64[i] ^ b.u64[i]) \
  inline __m##W _mm##W##_setzero_ps() { return _mm##W##_set1_ps(0.f); } \
  inline __m##W##i _mm##W##_setzero_si##W() { return _mm##W##_set1_epi32(0); } \
  inline __m##W _mm##W##_castsi##W##_ps(__m##W##i a) { return reinterpret<__m##W>(a); } \
  inline __m##W _mm##W##_loadu_ps(const void* p) { return load_bytes<__m##W>(p); } \
  inline __m##W##i _mm##W##_loadu_si##W(const void* p) { return load_bytes<__m##W##i>(p); } \
  inline void _mm##W##_storeu_ps(void* p, __m##W a) { std::memcpy(p, &a, sizeof(a)); } \
  inline void _mm##W##_storeu_si##W(void* p, __m##W##i a) { std::memcpy(p, &a, sizeof(a)); }
WHOLE(256)
WHOLE(512)
EACH(__m128, _mm_add_ps, (__m128 a, __m128 b), f32, a.f32[i] + b.f32[i])
EACH(__m128, _mm_max_ps, (__m128 a, __m128 b), f32, a.f32[i] > b.f32[i] ? a.f32[i] : b.f32[i])
EACH(__m128, _mm_add_ss, (__m128 a, __m128 b), f32, i == 0 ? a.f32[i] + b.f32[i] : a.f32[i])
EACH(__m128, _mm_max_ss, (__m128 a, __m128 b), f32, i == 0 && !(a.f32[i] > b.f32[i]) ? b.f32[i] : a.f32[i])
EACH(__m128, _mm_movehl_ps, (__m128 a, __m128 b), f32, (i < 2 ? b : a).f32[i < 2 ? i + 2 : i])
EACH(__m128, _mm_movehdup_ps, (__m128 a), f32, a.f32[i | 1])
EACH(__m128, _mm256_castps256_ps128, (__m256 a), f32, a.f32[i])
EACH(__m128, _mm256_extractf128_ps, (__m256 a, int half), f32, a.f32[4 * half + int(i)])
EACH(__m256, _mm512_castps512_ps256, (__m512 a), f32, a.f32[i])
EACH(__m256, _mm512_extractf32x8_ps, (__m512 a, int half), f32, a.f32[8 * half + int(i)])
inline float _mm_cvtss_f32(__m128 a) { return a.f32[0]; }
inline __m128i _mm256_castsi256_si128(__m256i a) { return reinterpret<__m128i>(a); }
inline int _mm256_movemask_ps(__m256 a) {
  int mask = 0;
  for (int i = 0; i < 8; i++) mask |= int(a.u32[i] >> 31) << i;
  return mask;
}
inline __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int predicate) {
  int mask = 0;
  for (int i = 0; i < 16; i++) mask |= int(compare(a.f32[i], b.f32[i], predicate)) << i;
  return __mmask16(mask);
}
inline __m128i _mm_loadu_si128(const void* p) { return load_bytes<__m128i>(p); }
inline void _mm_storeu_si128(void* p, __m128i a) { std::memcpy(p, &a, sizeof(a)); }

#undef EACH
#undef FLOAT2
#undef FLOAT3
#undef INT2
#undef SHIFT
#undef FILL
#undef WIDEN
#undef WHOLE

}  // namespace
