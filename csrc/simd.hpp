// Vector types of one instruction set. Included once by each isa_*.cpp, inside that file's own namespace.
//
// Two families:
//   F   - 16 floats. Every kernel works on 16 virtual lanes whatever the register width, so that reductions have
//         one shape and all instruction sets round at the same places.
//   I   - the integer side of the matrix products: L weight columns x 4 consecutive k per vector, unsigned weights
//         times signed activations. Integer sums are exact, so their order is free and each set picks its fastest.
// FR_ISA selects: 0 portable, 1 AVX2, 2 AVX2 with AVX-VNNI, 3 AVX-512 with VNNI.

// Before a loop of at most 8 rounds that index vectors: registers have no index. Portable vectors are memory anyway.
#if FR_ISA == 0
#define FR_UNROLL
#else
#define FR_UNROLL _Pragma("GCC unroll 8")
#endif

#if FR_ISA == 3

struct F {
  __m512 v;
  static F zero() { return {_mm512_setzero_ps()}; }
  static F set1(float x) { return {_mm512_set1_ps(x)}; }
  static F load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static F load_half(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
  static F load_bf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store_half(uint16_t* p) const {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  // Round to nearest even, then the low byte of each lane.
  void store_int8(int8_t* p) const { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v))); }
};
static inline F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline F fnma(F a, F b, F c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
static inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }  // a > b ? a : b
static inline F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }  // a < b ? a : b
static inline F abs(F a) { return {_mm512_abs_ps(a.v)}; }
static inline F round(F a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
static inline bool any_not_le(F a, F b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_NLE_UQ) != 0; }  // a > b, or NaN
// 2^n for integral n in [-126, 127].
static inline F pow2(F n) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}

struct I {
  static constexpr int L = 16;
  static constexpr int kQuads = 8;            // of a group's 8 quads, those whose weights are unpacked together
  static constexpr bool kSplitChain = false;  // 32-bit accumulators never overflow within a group
  using B = __m512i;
  static B load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static B zero() { return _mm512_setzero_si512(); }
  static B set1(uint8_t x) { return _mm512_set1_epi8((char)x); }
  static B and_(B a, B b) { return _mm512_and_si512(a, b); }
  static B or_(B a, B b) { return _mm512_or_si512(a, b); }
  template <int n> static B srl(B a) { return _mm512_srli_epi16(a, n); }
  template <int n> static B sll(B a) { return _mm512_slli_epi16(a, n); }
  static B bcast(const void* p) { int32_t x; std::memcpy(&x, p, 4); return _mm512_set1_epi32(x); }
  static B add32(B a, B b) { return _mm512_add_epi32(a, b); }
  static B sub32(B a, B b) { return _mm512_sub_epi32(a, b); }
  // Products of one quad of k, summed into a group's running sum.
  static B dot(B acc, B w, B x) { return _mm512_dpbusd_epi32(acc, w, x); }
  static B dot_first(B w, B x) { return _mm512_dpbusd_epi32(_mm512_setzero_si512(), w, x); }
  // The sum with which dots begin, from its two 16-bit halves (QuantRows::start16).
  static B start(B pairs) { return _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)); }
  // A group's sum times its per-column scale.
  static B finish(B acc, B scale) { return _mm512_mullo_epi32(acc, scale); }
  static B finish1(B acc) { return acc; }
  // L pairs of bytes -> lanes of two 16-bit values, and one of the two as the operand of finish().
  static B pairs_u8(const uint8_t* p) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
  static B pairs_i8(const uint8_t* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
  static B even(B pairs) { return _mm512_srai_epi32(_mm512_slli_epi32(pairs, 16), 16); }
  static B odd(B pairs) { return _mm512_srai_epi32(pairs, 16); }
  static B madd(B a, B b) { return _mm512_madd_epi16(a, b); }
  // Signed 8-bit weights: stored with the sign bit flipped by the caller, corrected by 128 * sum(x).
  static constexpr bool kSigned8ByOffset = true;
  static B dot_s8(B acc, B w, B x) { return _mm512_dpbusd_epi32(acc, _mm512_xor_si512(w, set1(0x80)), x); }
};
struct FL {  // L floats
  __m512 v;
  static FL zero() { return {_mm512_setzero_ps()}; }
  static FL set1(float x) { return {_mm512_set1_ps(x)}; }
  static FL load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static FL load_half(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
  static FL load_bf16(const uint16_t* p) { return {F::load_bf16(p).v}; }
  static FL from(I::B a) { return {_mm512_cvtepi32_ps(a)}; }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
};
static inline FL mul(FL a, FL b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline FL add(FL a, FL b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline FL fma(FL a, FL b, FL c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline FL fnma(FL a, FL b, FL c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }

#elif FR_ISA == 1 || FR_ISA == 2

struct FL {
  __m256 v;
  static FL zero() { return {_mm256_setzero_ps()}; }
  static FL set1(float x) { return {_mm256_set1_ps(x)}; }
  static FL load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static FL load_half(const uint16_t* p) { return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p))}; }
  static FL load_bf16(const uint16_t* p) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16))};
  }
  static FL from(__m256i a) { return {_mm256_cvtepi32_ps(a)}; }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
};
static inline FL mul(FL a, FL b) { return {_mm256_mul_ps(a.v, b.v)}; }
static inline FL add(FL a, FL b) { return {_mm256_add_ps(a.v, b.v)}; }
static inline FL fma(FL a, FL b, FL c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
static inline FL fnma(FL a, FL b, FL c) { return {_mm256_fnmadd_ps(a.v, b.v, c.v)}; }

struct F {
  __m256 a, b;
  static F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static F set1(float x) { const __m256 v = _mm256_set1_ps(x); return {v, v}; }
  static F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static F load_half(const uint16_t* p) { return {FL::load_half(p).v, FL::load_half(p + 8).v}; }
  static F load_bf16(const uint16_t* p) { return {FL::load_bf16(p).v, FL::load_bf16(p + 8).v}; }
  void store(float* p) const { _mm256_storeu_ps(p, a); _mm256_storeu_ps(p + 8, b); }
  void store_half(uint16_t* p) const {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  void store_int8(int8_t* p) const {
    const __m256i low_bytes = _mm256_set1_epi32(0xff);
    const __m256i x = _mm256_and_si256(_mm256_cvtps_epi32(a), low_bytes);
    const __m256i y = _mm256_and_si256(_mm256_cvtps_epi32(b), low_bytes);
    const __m256i w = _mm256_permute4x64_epi64(_mm256_packus_epi32(x, y), 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
  }
};
#define FR_BOTH(name, op) \
  static inline F name(F x, F y) { return {op(x.a, y.a), op(x.b, y.b)}; }
FR_BOTH(add, _mm256_add_ps)
FR_BOTH(sub, _mm256_sub_ps)
FR_BOTH(mul, _mm256_mul_ps)
FR_BOTH(div, _mm256_div_ps)
FR_BOTH(max, _mm256_max_ps)
FR_BOTH(min, _mm256_min_ps)
#undef FR_BOTH
static inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline F fnma(F x, F y, F z) { return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)}; }
static inline F abs(F x) {
  const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}
static inline F round(F x) {
  return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
static inline bool any_not_le(F x, F y) {
  return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(x.a, y.a, _CMP_NLE_UQ), _mm256_cmp_ps(x.b, y.b, _CMP_NLE_UQ))) != 0;
}
static inline F pow2(F n) {
  const __m256i bias = _mm256_set1_epi32(127);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.a), bias), 23)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.b), bias), 23))};
}

struct I {
  static constexpr int L = 8;
  static constexpr int kQuads = 2;  // more would take the registers of the rows' sums
  using B = __m256i;
  static B load(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
  static B zero() { return _mm256_setzero_si256(); }
  static B set1(uint8_t x) { return _mm256_set1_epi8((char)x); }
  static B and_(B a, B b) { return _mm256_and_si256(a, b); }
  static B or_(B a, B b) { return _mm256_or_si256(a, b); }
  template <int n> static B srl(B a) { return _mm256_srli_epi16(a, n); }
  template <int n> static B sll(B a) { return _mm256_slli_epi16(a, n); }
  static B bcast(const void* p) { int32_t x; std::memcpy(&x, p, 4); return _mm256_set1_epi32(x); }
  static B add32(B a, B b) { return _mm256_add_epi32(a, b); }
  static B sub32(B a, B b) { return _mm256_sub_epi32(a, b); }
  static B pairs_u8(const uint8_t* p) { return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)); }
  static B pairs_i8(const uint8_t* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)); }
  static B madd(B a, B b) { return _mm256_madd_epi16(a, b); }
#if FR_ISA == 2
  static constexpr bool kSplitChain = false;
  static B dot(B acc, B w, B x) { return _mm256_dpbusd_avx_epi32(acc, w, x); }
  static B dot_first(B w, B x) { return _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), w, x); }
  static B start(B pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
  static B finish(B acc, B scale) { return _mm256_mullo_epi32(acc, scale); }
  static B finish1(B acc) { return acc; }
  static B even(B pairs) { return _mm256_srai_epi32(_mm256_slli_epi32(pairs, 16), 16); }
  static B odd(B pairs) { return _mm256_srai_epi32(pairs, 16); }
  static constexpr bool kSigned8ByOffset = true;
  static B dot_s8(B acc, B w, B x) { return _mm256_dpbusd_avx_epi32(acc, _mm256_xor_si256(w, set1(0x80)), x); }
#else
  // Sums stay in 16 bits for as many quads as cannot overflow; the multiplication by the scale widens them for free.
  static constexpr bool kSplitChain = true;
  static B dot(B acc, B w, B x) { return keep(_mm256_add_epi16(acc, _mm256_maddubs_epi16(w, x))); }
  static B dot_first(B w, B x) { return keep(_mm256_maddubs_epi16(w, x)); }
  static B start(B pairs) { return pairs; }
  // Stops the optimiser from moving all additions of a chain to its end: the products that wait would be spilled.
  static B keep(B sums) {
#if defined(__OPTIMIZE__)
    asm("" : "+x"(sums));
#endif
    return sums;
  }
  static B finish(B acc, B scale) { return _mm256_madd_epi16(acc, scale); }
  static B finish1(B acc) { return _mm256_madd_epi16(acc, _mm256_set1_epi16(1)); }
  static B even(B pairs) { return _mm256_or_si256(_mm256_slli_epi32(pairs, 16), _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff))); }
  static B odd(B pairs) { return _mm256_or_si256(_mm256_srli_epi32(pairs, 16), _mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000)))); }
  static constexpr bool kSigned8ByOffset = false;
  static B dot_s8(B acc, B w, B x) {
    const B products = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(products, _mm256_set1_epi16(1)));
  }
#endif
};

#else  // portable

struct F {
  float v[16];
  static F zero() { return set1(0.f); }
  static F set1(float x) { F r; for (float& e : r.v) e = x; return r; }
  static F load(const float* p) { F r; std::memcpy(r.v, p, 64); return r; }
  static F load_half(const uint16_t* p) { F r; for (int i = 0; i < 16; i++) r.v[i] = half_to_float(p[i]); return r; }
  static F load_bf16(const uint16_t* p) { F r; for (int i = 0; i < 16; i++) r.v[i] = bf16_to_float(p[i]); return r; }
  void store(float* p) const { std::memcpy(p, v, 64); }
  void store_half(uint16_t* p) const { for (int i = 0; i < 16; i++) p[i] = float_to_half(v[i]); }
  void store_int8(int8_t* p) const {
    for (int i = 0; i < 16; i++) {
      const float r = __builtin_nearbyintf(v[i]);
      // What cvtps2dq gives for NaN and out-of-range values is 0x80000000, whose low byte is 0.
      p[i] = r >= -2147483648.f && r < 2147483648.f ? int8_t(uint32_t(int32_t(r))) : int8_t(0);
    }
  }
};
#define FR_LANES(name, args, expr) \
  static inline F name args { F r; for (int i = 0; i < 16; i++) r.v[i] = expr; return r; }
FR_LANES(add, (F a, F b), a.v[i] + b.v[i])
FR_LANES(sub, (F a, F b), a.v[i] - b.v[i])
FR_LANES(mul, (F a, F b), a.v[i] * b.v[i])
FR_LANES(div, (F a, F b), a.v[i] / b.v[i])
FR_LANES(fma, (F a, F b, F c), __builtin_fmaf(a.v[i], b.v[i], c.v[i]))
FR_LANES(fnma, (F a, F b, F c), __builtin_fmaf(-a.v[i], b.v[i], c.v[i]))
FR_LANES(max, (F a, F b), a.v[i] > b.v[i] ? a.v[i] : b.v[i])
FR_LANES(min, (F a, F b), a.v[i] < b.v[i] ? a.v[i] : b.v[i])
FR_LANES(abs, (F a), __builtin_fabsf(a.v[i]))
FR_LANES(round, (F a), __builtin_nearbyintf(a.v[i]))
#undef FR_LANES
static inline bool any_not_le(F a, F b) {
  for (int i = 0; i < 16; i++)
    if (!(a.v[i] <= b.v[i])) return true;
  return false;
}
static inline F pow2(F n) {
  F r;
  for (int i = 0; i < 16; i++) {
    // A NaN exponent never reaches a result: the polynomial that multiplies it is NaN as well.
    const int32_t e = n.v[i] >= -200.f && n.v[i] <= 200.f ? int32_t(n.v[i]) : 0;
    const uint32_t bits = uint32_t(e + 127) << 23;
    std::memcpy(&r.v[i], &bits, 4);
  }
  return r;
}

using FL = F;

struct I {
  static constexpr int L = 16;
  static constexpr int kQuads = 8;
  static constexpr bool kSplitChain = false;
  union B {
    uint8_t u8[64]; int8_t i8[64]; int16_t i16[32]; uint16_t u16[32]; int32_t i32[16]; uint32_t u32[16];
  };
  static B load(const uint8_t* p) { B r; std::memcpy(&r, p, 64); return r; }
  static B zero() { return set1(0); }
  static B set1(uint8_t x) { B r; std::memset(&r, x, 64); return r; }
  static B and_(B a, B b) { for (int i = 0; i < 16; i++) a.u32[i] &= b.u32[i]; return a; }
  static B or_(B a, B b) { for (int i = 0; i < 16; i++) a.u32[i] |= b.u32[i]; return a; }
  template <int n> static B srl(B a) { for (int i = 0; i < 32; i++) a.u16[i] = uint16_t(a.u16[i] >> n); return a; }
  template <int n> static B sll(B a) { for (int i = 0; i < 32; i++) a.u16[i] = uint16_t(a.u16[i] << n); return a; }
  static B bcast(const void* p) { B r; uint32_t x; std::memcpy(&x, p, 4); for (uint32_t& e : r.u32) e = x; return r; }
  static B add32(B a, B b) { for (int i = 0; i < 16; i++) a.u32[i] += b.u32[i]; return a; }
  static B sub32(B a, B b) { for (int i = 0; i < 16; i++) a.u32[i] -= b.u32[i]; return a; }
  static B dot(B acc, B w, B x) {
    for (int i = 0; i < 16; i++)
      for (int j = 0; j < 4; j++) acc.i32[i] += int32_t(w.u8[4 * i + j]) * int32_t(x.i8[4 * i + j]);
    return acc;
  }
  static B dot_first(B w, B x) { return dot(zero(), w, x); }
  static B start(B pairs) { for (int i = 0; i < 16; i++) pairs.i32[i] = pairs.i16[2 * i] + pairs.i16[2 * i + 1]; return pairs; }
  static B finish(B acc, B scale) { for (int i = 0; i < 16; i++) acc.i32[i] *= scale.i32[i]; return acc; }
  static B finish1(B acc) { return acc; }
  static B pairs_u8(const uint8_t* p) { B r; for (int i = 0; i < 32; i++) r.i16[i] = p[i]; return r; }
  static B pairs_i8(const uint8_t* p) { B r; for (int i = 0; i < 32; i++) r.i16[i] = int8_t(p[i]); return r; }
  static B even(B pairs) { B r; for (int i = 0; i < 16; i++) r.i32[i] = pairs.i16[2 * i]; return r; }
  static B odd(B pairs) { B r; for (int i = 0; i < 16; i++) r.i32[i] = pairs.i16[2 * i + 1]; return r; }
  static B madd(B a, B b) {
    B r;
    for (int i = 0; i < 16; i++)
      r.i32[i] = int32_t(a.i16[2 * i]) * b.i16[2 * i] + int32_t(a.i16[2 * i + 1]) * b.i16[2 * i + 1];
    return r;
  }
  static constexpr bool kSigned8ByOffset = false;
  static B dot_s8(B acc, B w, B x) {
    for (int i = 0; i < 16; i++)
      for (int j = 0; j < 4; j++) acc.i32[i] += int32_t(w.i8[4 * i + j]) * int32_t(x.i8[4 * i + j]);
    return acc;
  }
};
static inline FL from_int(I::B a) { FL r; for (int i = 0; i < 16; i++) r.v[i] = float(a.i32[i]); return r; }

#endif

#if FR_ISA != 0
static inline FL from_int(I::B a) { return FL::from(a); }
#endif

// Fixed-shape reductions over the 16 lanes: (l, l+8), (l, l+4), (l, l+2), (l, l+1).
#if FR_ISA == 0
static inline float sum(F x) {
  for (int w = 8; w >= 1; w /= 2)
    for (int i = 0; i < w; i++) x.v[i] = x.v[i] + x.v[i + w];
  return x.v[0];
}
static inline float maximum(F x) {
  for (int w = 8; w >= 1; w /= 2)
    for (int i = 0; i < w; i++) x.v[i] = x.v[i] > x.v[i + w] ? x.v[i] : x.v[i + w];
  return x.v[0];
}
#else
#if FR_ISA == 3
static inline __m256 lower(F x) { return _mm512_castps512_ps256(x.v); }
static inline __m256 upper(F x) { return _mm512_extractf32x8_ps(x.v, 1); }
#else
static inline __m256 lower(F x) { return x.a; }
static inline __m256 upper(F x) { return x.b; }
#endif
static inline float sum(F x) {
  const __m256 eight = _mm256_add_ps(lower(x), upper(x));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
static inline float maximum(F x) {
  const __m256 eight = _mm256_max_ps(lower(x), upper(x));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#endif

// exp(x) for x <= 88; 0 below -87.3. Cody-Waite reduction by ln 2 and a degree-6 polynomial (coefficients of the
// Cephes library's expf), relative error under 2e-7.
static inline F exp(F x) {
  x = max(x, F::set1(-87.f));
  x = min(x, F::set1(88.f));
  const F n = round(mul(x, F::set1(1.44269504088896341f)));
  F r = fnma(n, F::set1(0.693359375f), x);
  r = fnma(n, F::set1(-2.12194440e-4f), r);
  F p = F::set1(1.9875691500e-4f);
  p = fma(p, r, F::set1(1.3981999507e-3f));
  p = fma(p, r, F::set1(8.3334519073e-3f));
  p = fma(p, r, F::set1(4.1665795894e-2f));
  p = fma(p, r, F::set1(1.6666665459e-1f));
  p = fma(p, r, F::set1(5.0000001201e-1f));
  p = fma(p, mul(r, r), r);
  p = add(p, F::set1(1.f));
  return mul(p, pow2(n));
}
