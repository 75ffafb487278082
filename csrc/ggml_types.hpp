// Tensor types of GGUF files: block geometry, and one row back to float32.
#pragma once
#include <cstddef>
#include <cstdint>

namespace forerun {

enum class Type : int {
  F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, BF16 = 30,
};

// Values per block and bytes per block; {0, 0} for a type that Forerun does not implement.
struct BlockSize { int values; int bytes; };
BlockSize block_size(Type type);

inline size_t row_bytes(Type type, int64_t K) {
  const BlockSize b = block_size(type);
  return size_t(K / b.values) * size_t(b.bytes);
}

// Software conversions, exact and independent of the CPU (round to nearest even where rounding is needed).
float half_to_float(uint16_t h);
uint16_t float_to_half(float f);  // saturates at +-65504: a KV entry must stay finite
float bf16_to_float(uint16_t h);

// K values of one row in GGUF's layout -> float32.
void dequantize_row(Type type, const uint8_t* src, int64_t K, float* dst);

// The 6-bit scale and minimum of group g (0..7) of a Q4_K or Q5_K block.
void k_scale_min(const uint8_t* scales12, int g, uint8_t& scale, uint8_t& minimum);

}  // namespace forerun
