// Quants are laid out so that one vector load gives, for each of 16 columns, 4 consecutive k-values: the operand of
// an 8-bit dot product. In a group of 32 k (8 quads), byte vector j holds quad 2j in its low nibbles and quad 2j+1 in
// its high nibbles; the 5th bits follow as one vector (bit q of a byte belongs to quad q). Of 6-bit quants, every 4 quads
// are three vectors: the first three quads in their low 6 bits, the fourth two bits at a time in their high 2 bits.
#include "repack.hpp"

#include <cstring>

namespace forerun {

Act act_of(Type type) {
  switch (type) {
    case Type::F32: case Type::F16: case Type::BF16: return Act::Float;
    case Type::Q4_K: case Type::Q5_K: case Type::Q6_K: return Act::QK;
    default: return Act::Q32;
  }
}

size_t packed_tile_bytes(Type type, int K) {
  switch (act_of(type)) {
    case Act::Float: return layout::pad64(size_t(K) * kTile * size_t(block_size(type).bytes));
    case Act::QK: return size_t(K / 256) * size_t(layout::super_bytes(type));
    default: return layout::group32_offset(type, K) + size_t(K / 32) * size_t(layout::group32_bytes(type));
  }
}

namespace {

// Puts the unsigned quant of (column c, k within the group) into the group's bytes.
void put(uint8_t* group, int c, int k, unsigned value, int bits) {
  const int quad = k / 4, lane = 4 * c + k % 4;
  if (bits == 8) {
    group[64 * quad + lane] = uint8_t(value);
    return;
  }
  if (bits == 6) {
    uint8_t* three = group + layout::kSixes * (quad / 4) + lane;
    if (quad % 4 < 3) {
      three[64 * (quad % 4)] = uint8_t(three[64 * (quad % 4)] | value);
      return;
    }
    for (int i = 0; i < 3; i++) three[64 * i] = uint8_t(three[64 * i] | ((value >> (2 * i)) & 3) << 6);
    return;
  }
  group[64 * (quad / 2) + lane] = uint8_t(group[64 * (quad / 2) + lane] | ((value & 15) << (quad % 2 ? 4 : 0)));
  if (bits == 5) group[layout::kNibbles + lane] = uint8_t(group[layout::kNibbles + lane] | ((value >> 4) << quad));
}

void pack32(Type type, const uint8_t* row, int K, int c, uint8_t* tile) {
  const int bytes = block_size(type).bytes;
  for (int g = 0; g < K / 32; g++, row += bytes) {
    std::memcpy(tile + (size_t(g) * kTile + size_t(c)) * 2, row, 2);
    const uint8_t* p = row + 2;
    if (layout::has_min(type)) {
      std::memcpy(tile + layout::min32_offset(K) + (size_t(g) * kTile + size_t(c)) * 2, p, 2);
      p += 2;
    }
    uint8_t* group = tile + layout::group32_offset(type, K) + size_t(g) * size_t(layout::group32_bytes(type));
    if (type == Type::Q8_0) {
      for (int k = 0; k < 32; k++) put(group, c, k, p[k], 8);
      continue;
    }
    const bool five = type == Type::Q5_0 || type == Type::Q5_1;
    uint32_t high = 0;
    if (five) {
      std::memcpy(&high, p, 4);
      p += 4;
    }
    for (int k = 0; k < 32; k++) {
      unsigned v = k < 16 ? p[k] & 15u : unsigned(p[k - 16]) >> 4;
      if (five) v |= ((high >> k) & 1u) << 4;
      put(group, c, k, v, five ? 5 : 4);
    }
  }
}

void pack256(Type type, const uint8_t* row, int K, int c, uint8_t* tile) {
  const int bytes = block_size(type).bytes;
  for (int b = 0; b < K / 256; b++, row += bytes, tile += layout::super_bytes(type)) {
    uint8_t* groups = tile + layout::kKGroups;
    const int group_bytes = layout::group_k_bytes(type);
    if (type == Type::Q6_K) {
      std::memcpy(tile + 2 * c, row + 208, 2);
      for (int s = 0; s < 16; s++) tile[layout::kKScales + (s / 2) * 32 + 2 * c + s % 2] = row[192 + s];
      for (int i = 0; i < 256; i++) {
        const int half = i / 128, quarter = (i % 128) / 32, l = i % 32;
        const unsigned low = row[half * 64 + (quarter & 1) * 32 + l], high = row[128 + half * 32 + l];
        const unsigned v = ((quarter & 2) ? low >> 4 : low & 15) | ((high >> (2 * quarter)) & 3) << 4;
        put(groups + (i / 32) * group_bytes, c, l, v, 6);
      }
      continue;
    }
    const bool five = type == Type::Q5_K;
    std::memcpy(tile + 2 * c, row, 2);
    std::memcpy(tile + 32 + 2 * c, row + 2, 2);
    for (int g = 0; g < 8; g++) {
      uint8_t scale, minimum;
      k_scale_min(row + 4, g, scale, minimum);
      tile[layout::kKScales + (g / 2) * 32 + 2 * c + g % 2] = scale;
      tile[layout::kKMins + (g / 2) * 32 + 2 * c + g % 2] = minimum;
      const uint8_t* q = row + (five ? 48 : 16) + (g / 2) * 32;
      for (int k = 0; k < 32; k++) {
        unsigned v = g % 2 ? unsigned(q[k]) >> 4 : q[k] & 15u;
        if (five) v |= ((unsigned(row[16 + k]) >> g) & 1u) << 4;
        put(groups + g * group_bytes, c, k, v, five ? 5 : 4);
      }
    }
  }
}

}  // namespace

void pack_tile(Type type, const uint8_t* src, int N, int K, int tile, uint8_t* dst) {
  std::memset(dst, 0, packed_tile_bytes(type, K));
  const size_t stride = row_bytes(type, K);
  for (int c = 0; c < kTile && tile * kTile + c < N; c++) {
    const uint8_t* row = src + size_t(tile * kTile + c) * stride;
    switch (act_of(type)) {
      case Act::Float: {
        const size_t size = size_t(block_size(type).bytes);
        for (int k = 0; k < K; k++)
          std::memcpy(dst + (size_t(k) * kTile + size_t(c)) * size, row + size_t(k) * size, size);
        break;
      }
      case Act::QK: pack256(type, row, K, c, dst); break;
      default: pack32(type, row, K, c, dst);
    }
  }
}

}  // namespace forerun
