// Block layouts of GGUF's tensor types, read one value at a time. Source of the layouts: the GGUF/ggml format as
// published with llama.cpp (ggml-common.h); written from the format, checked against tests/reference/dequant.py.
#include "ggml_types.hpp"

#include <cstring>

namespace forerun {

BlockSize block_size(Type type) {
  switch (type) {
    case Type::F32: return {1, 4};
    case Type::F16: return {1, 2};
    case Type::BF16: return {1, 2};
    case Type::Q4_0: return {32, 18};
    case Type::Q4_1: return {32, 20};
    case Type::Q5_0: return {32, 22};
    case Type::Q5_1: return {32, 24};
    case Type::Q8_0: return {32, 34};
    case Type::Q4_K: return {256, 144};
    case Type::Q5_K: return {256, 176};
    case Type::Q6_K: return {256, 210};
  }
  return {0, 0};
}

float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16;
  uint32_t exponent = (h >> 10) & 0x1f, mantissa = h & 0x3ff, bits;
  if (exponent == 0x1f) {
    bits = sign | 0x7f800000 | (mantissa ? (mantissa << 13) | 0x400000 : 0);
  } else if (exponent != 0) {
    bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  } else if (mantissa == 0) {
    bits = sign;
  } else {
    exponent = 113;
    while (!(mantissa & 0x400)) { mantissa <<= 1; exponent--; }
    bits = sign | (exponent << 23) | ((mantissa & 0x3ff) << 13);
  }
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

uint16_t float_to_half(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint16_t sign = uint16_t((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;       // NaN stays NaN
  if (magnitude >= 0x477fe000) return sign | 0x7bff;      // saturate, infinity included
  if (magnitude < 0x33000001) return sign;                // below half of the smallest subnormal (ties to even)
  if (magnitude < 0x38800000) {                           // subnormal half
    const int shift = 126 - int(magnitude >> 23);         // 14..24
    const uint32_t m = (magnitude & 0x7fffff) | 0x800000;
    const uint32_t half = 1u << (shift - 1), rest = m & ((1u << shift) - 1);
    uint32_t q = m >> shift;
    if (rest > half || (rest == half && (q & 1))) q++;
    return uint16_t(sign | q);
  }
  const uint32_t rest = magnitude & 0x1fff;
  uint32_t q = (magnitude - 0x38000000) >> 13;
  if (rest > 0x1000 || (rest == 0x1000 && (q & 1))) q++;
  return uint16_t(sign | (q > 0x7bff ? 0x7bff : q));
}

float bf16_to_float(uint16_t h) {
  const uint32_t bits = uint32_t(h) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

static uint16_t u16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}

void k_scale_min(const uint8_t* s, int g, uint8_t& scale, uint8_t& minimum) {
  if (g < 4) {
    scale = s[g] & 63;
    minimum = s[g + 4] & 63;
  } else {
    scale = uint8_t((s[g + 4] & 0xf) | ((s[g - 4] >> 6) << 4));
    minimum = uint8_t((s[g + 4] >> 4) | ((s[g] >> 6) << 4));
  }
}

void dequantize_row(Type type, const uint8_t* src, int64_t K, float* dst) {
  const BlockSize bs = block_size(type);
  for (int64_t b = 0; b < K / bs.values; b++, src += bs.bytes, dst += bs.values) {
    switch (type) {
      case Type::F32: std::memcpy(dst, src, 4); break;
      case Type::F16: dst[0] = half_to_float(u16(src)); break;
      case Type::BF16: dst[0] = bf16_to_float(u16(src)); break;
      case Type::Q4_0: {
        const float d = half_to_float(u16(src));
        for (int i = 0; i < 16; i++) {
          dst[i] = d * float((src[2 + i] & 15) - 8);
          dst[i + 16] = d * float((src[2 + i] >> 4) - 8);
        }
        break;
      }
      case Type::Q4_1: {
        const float d = half_to_float(u16(src)), m = half_to_float(u16(src + 2));
        for (int i = 0; i < 16; i++) {
          dst[i] = d * float(src[4 + i] & 15) + m;
          dst[i + 16] = d * float(src[4 + i] >> 4) + m;
        }
        break;
      }
      case Type::Q5_0:
      case Type::Q5_1: {
        const bool has_min = type == Type::Q5_1;
        const float d = half_to_float(u16(src)), m = has_min ? half_to_float(u16(src + 2)) : 0.f;
        const uint8_t* p = src + (has_min ? 4 : 2);
        uint32_t high;
        std::memcpy(&high, p, 4);
        for (int i = 0; i < 16; i++) {
          const int lo = (p[4 + i] & 15) | int((high >> i) & 1) << 4;
          const int hi = (p[4 + i] >> 4) | int((high >> (i + 16)) & 1) << 4;
          dst[i] = has_min ? d * float(lo) + m : d * float(lo - 16);
          dst[i + 16] = has_min ? d * float(hi) + m : d * float(hi - 16);
        }
        break;
      }
      case Type::Q8_0: {
        const float d = half_to_float(u16(src));
        for (int i = 0; i < 32; i++) dst[i] = d * float(int8_t(src[2 + i]));
        break;
      }
      case Type::Q4_K:
      case Type::Q5_K: {
        const bool five = type == Type::Q5_K;
        const float d = half_to_float(u16(src)), dmin = half_to_float(u16(src + 2));
        const uint8_t* high = src + 16;
        const uint8_t* q = src + (five ? 48 : 16);
        for (int g = 0; g < 8; g++) {
          uint8_t sc, mn;
          k_scale_min(src + 4, g, sc, mn);
          const float scale = d * float(sc), minimum = dmin * float(mn);
          for (int i = 0; i < 32; i++) {
            const uint8_t byte = q[(g / 2) * 32 + i];
            int v = g % 2 ? byte >> 4 : byte & 15;
            if (five) v |= ((high[i] >> g) & 1) << 4;
            dst[g * 32 + i] = scale * float(v) - minimum;
          }
        }
        break;
      }
      case Type::Q6_K: {
        const float d = half_to_float(u16(src + 208));
        const auto* scales = reinterpret_cast<const int8_t*>(src + 192);
        for (int i = 0; i < 256; i++) {
          const int half = i / 128, r = i % 128, quarter = r / 32, l = r % 32;
          const uint8_t low = src[half * 64 + (quarter & 1) * 32 + l];
          const uint8_t high = src[128 + half * 32 + l];
          const int v = ((quarter & 2) ? low >> 4 : low & 15) | ((high >> (2 * quarter)) & 3) << 4;
          dst[i] = d * float(scales[i / 16]) * float(v - 32);
        }
        break;
      }
    }
  }
}

}  // namespace forerun
