// What the tape asks of an instruction set: a table of kernels, one table per set, all with the same results.
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "ggml_types.hpp"

namespace forerun {

constexpr int kTile = 16;   // weight columns (outputs) packed together, and the width of a virtual vector
constexpr int kBlock = 16;  // tokens of a KV block
constexpr int kRows = 8;    // rows of activations that one kernel call multiplies
constexpr int kQueries = 16;  // queries for which one kernel call reads keys and values

// Inputs that share an int8 scale before K-quants (whose own blocks have 256): the finer scale cuts
// the divergence from float32 several times (figures in docs/design.md); what it costs was not measured apart.
constexpr int kActBlock = 64;

// How activations are quantised for a weight type: int8 with one scale per row and block of 32 or kActBlock, or not at
// all.
enum class Act : int { Float = 0, Q32 = 1, QK = 2 };
Act act_of(Type type);

// Quantised rows. All arrays are row-major over the step's tokens.
struct QuantRows {
  int K;
  int8_t* q;        // [T][K]
  float* scale;     // QK: [T][K/kActBlock]; Q32: [T][K/32]
  float* sum;       // Q32 only: [T][K/32], scale * sum of the block's q
  int16_t* start16; // QK only: [T][K/16][2], -32 * the sums of the q with k mod 4 < 2 and of the others
  int16_t* sum32;   // [T][K/32]
};

// A weight matrix of N outputs x K inputs in tiles of 16 columns (layout: repack.cpp).
struct Packed {
  Type type;
  int N, K;
  const uint8_t* data;
  size_t tile_bytes;
};

struct KvView {           // one layer's cache: K as [block][kv head][dim][16 tokens], V as [block][kv head][dim/16][16 tokens][16]
  uint16_t* k;
  uint16_t* v;
  int n_kv, head_dim;
  size_t block_stride() const { return size_t(n_kv) * size_t(head_dim) * kBlock; }
};

// The queries of one request in a step.
struct AttnRow {
  int cached;                // committed keys before this step's tokens
  int count;                 // this step's query tokens of the request
  const uint64_t* ancestors; // [count] bits over this step's tokens, or nullptr: each sees all tokens up to itself
  const int32_t* blocks;     // block table
};

struct AttnSpec {
  int n_heads, n_kv, head_dim, window;  // window 0: unlimited
  float scale;
};

struct RopeSpec {
  int n_heads, n_kv, head_dim, rotary_dims;
  bool interleaved;
  const float* cos;    // [positions][rotary_dims/2]
  const float* sin;
  const float* q_norm; // [head_dim] or nullptr
  const float* k_norm;
  float eps;
};

struct KernelTable {
  const char* name;
  // y[m*16 + c] = sum over k of x[m, k] * w[tile*16 + c, k] for m < rows <= kRows; x rows begin at row0.
  void (*linear_q)(const Packed& w, int tile, const QuantRows& x, int row0, int rows, float* y);
  void (*linear_f)(const Packed& w, int tile, const float* x, int row0, int rows, float* y);
  void (*quantize_q32)(const float* x, const QuantRows& out, int row, int from, int to);   // columns from..to
  void (*quantize_qk)(const float* x, const QuantRows& out, int row, int from, int to);
  void (*rms_norm)(const float* x, const float* weight, int K, float eps, float* y);
  void (*glu)(const float* gate, const float* up, int n, bool gelu, float* y);
  // One head of one token: kind 0 query (in place), 1 key (into the cache), 2 value (into the cache).
  void (*rope_store)(const RopeSpec& s, int kind, int head, int position, float* x, const KvView& kv, int block, int slot);
  // Queries first..first+n (n <= kQueries) of a kv head's group in a row, numbered token * group + head within the
  // group. q, out: [tokens][n_heads*head_dim]; scratch: n * (keys + 80) floats.
  void (*attention)(const AttnSpec& s, const AttnRow& row, const KvView& kv, int kv_head, int first, int n,
                    const float* q, float* out, float* scratch);
  void (*add)(float* x, const float* y, int n);
  // Whether one of 16 scores is larger than the best so far, or no number.
  bool (*beats)(const float* y, float best);
};

const KernelTable* kernels_portable();
const KernelTable* kernels_avx2();     // nullptr where not compiled in
const KernelTable* kernels_avxvnni();
const KernelTable* kernels_avx512();

// The best set that this CPU supports, or the one that is named ("portable", "avx2", "avxvnni", "avx512");
// nullptr and a reason if it isn't available.
const KernelTable* select_kernels(const char* name, const char** why);

}  // namespace forerun
