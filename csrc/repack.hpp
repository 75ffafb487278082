// From GGUF's row-major blocks to tiles of 16 output columns, read once per step from start to end.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels.hpp"

namespace forerun {

size_t packed_tile_bytes(Type type, int K);  // a multiple of 64
inline int packed_tiles(int N) { return (N + kTile - 1) / kTile; }

// Packs tile `tile` of an N x K matrix; columns past N are zero weights.
void pack_tile(Type type, const uint8_t* src, int N, int K, int tile, uint8_t* dst);

// Offsets inside a tile or superblock, shared with the kernels.
namespace layout {
constexpr int kNibbles = 256;  // 32 k x 16 columns x 4 bits
constexpr int kHigh1 = 64;     // one more bit for each of them
constexpr int kSixes = 192;    // 16 k x 16 columns x 6 bits
constexpr size_t pad64(size_t n) { return (n + 63) & ~size_t(63); }

// Types with one scale per 32: all scales, then all minimums (where the type has them), then the groups.
constexpr bool has_min(Type t) { return t == Type::Q4_1 || t == Type::Q5_1; }
constexpr int group32_bytes(Type t) {
  return t == Type::Q8_0 ? 512 : (t == Type::Q5_0 || t == Type::Q5_1) ? kNibbles + kHigh1 : kNibbles;
}
constexpr size_t min32_offset(int K) { return size_t(K) / 32 * 32; }
constexpr size_t group32_offset(Type t, int K) { return pad64(size_t(K) / 32 * (has_min(t) ? 64 : 32)); }

// Q4_K, Q5_K: f16 d[16], f16 dmin[16], u8 scale pairs [4][16][2], u8 minimum pairs [4][16][2], 8 groups.
// Q6_K: f16 d[16], 32 bytes of padding, i8 scale pairs [8][16][2], 8 groups.
constexpr int kKScales = 64, kKMins = 192, kKGroups = 320;
constexpr int group_k_bytes(Type t) {
  return t == Type::Q6_K ? 2 * kSixes : t == Type::Q5_K ? kNibbles + kHigh1 : kNibbles;
}
constexpr int super_bytes(Type t) { return kKGroups + 8 * group_k_bytes(t); }
}  // namespace layout

}  // namespace forerun
