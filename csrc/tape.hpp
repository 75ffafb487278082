// A forward pass as a list of operations over preallocated buffers, recorded once and run for every step.
//
// All threads walk the list together and meet at a barrier after each operation, so a step costs one call from
// Python and one wake-up of the threads. Work inside an operation is handed out in pieces by a counter; since each
// output value is computed by exactly one fixed chain of operations, who computes it has no influence on its bits.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.hpp"
#include "threads.hpp"

namespace forerun {

template <class T>
class Aligned {  // zeroed memory on a 64-byte boundary
 public:
  Aligned() = default;
  explicit Aligned(size_t n);
  T* data() const { return data_.get(); }
  size_t size() const { return size_; }

 private:
  struct Unmap { size_t bytes = 0; void operator()(T* p) const; };
  std::unique_ptr<T, Unmap> data_;
  size_t size_ = 0;
};

// The paged cache of all layers. Memory is touched only where blocks are used.
class KvCache {
 public:
  KvCache(int layers, int blocks, int n_kv, int head_dim);
  KvCache(const KvCache&) = delete;
  KvView layer(int i) const;
  int layers() const { return layers_; }
  int blocks() const { return blocks_; }
  int n_kv() const { return n_kv_; }
  int head_dim() const { return head_dim_; }
  size_t bytes() const { return memory_.size() * sizeof(uint16_t); }
  void copy_block(int from, int to);                                        // every layer
  void move_slot(int from_block, int from_slot, int to_block, int to_slot); // one token, every layer

 private:
  int layers_, blocks_, n_kv_, head_dim_;
  Aligned<uint16_t> memory_;
};

// One step's input; arrays are the caller's and only read.
struct Step {
  int tokens, rows, outputs, logits, table_rows, table_width;
  const int32_t* table(int row) const { return tables + size_t(table_row[row]) * size_t(table_width); }
  const int32_t* token;      // [tokens]
  const int32_t* position;   // [tokens] for the rotary embedding
  const int32_t* row_start;  // [rows + 1] first query token of each row
  const int32_t* cached;     // [rows] committed keys
  const uint8_t* is_tree;    // [rows] the row's tokens see each other by `ancestors`
  const uint64_t* ancestors; // [tokens] bit i: token i of the row is seen (itself included); tree rows only
  const int32_t* tables;     // [table_rows][table_width]
  const int32_t* table_row;  // [rows] each row's block table
  const int32_t* output;     // [outputs] tokens whose next-token distribution is wanted
  float* logits_out;         // [logits][vocabulary] for the first `logits` outputs
  int32_t* argmax_out;       // [outputs], filled for the others; -1: a score is NaN or infinite
};

enum class Domain : int { Tokens = 0, Outputs = 1 };

class Tape {
 public:
  Tape(int max_tokens, int max_outputs, int threads, const KernelTable* kernels);
  Tape(const Tape&) = delete;

  int buffer(int width, Domain domain);
  int weight(Type type, int N, int K, const uint8_t* packed);
  int vector(const float* values, int n);  // copied

  struct Segment { int weight, out, bias; bool add; };
  void embed(Type type, int N, int K, const uint8_t* rows, float scale, int out);
  void rms_norm(int in, int weight, float eps, int out);
  void linear(int in, const std::vector<Segment>& segments);
  void rope_store(int q, int k, int v, int layer, const RopeSpec& spec, int positions);
  void attention(int q, int out, int layer, const AttnSpec& spec);
  void gated(int in, int gate, int up, bool gelu, int out);
  void add(int x, int y);
  void gather(int in, int out);
  void head(int in, int weight);

  void run(const Step& step, KvCache* kv);  // throws std::invalid_argument on an inconsistent step
  float* rows(int buffer, int n);           // for tests: the first n rows
  int width(int buffer) const { return buffers_.at(size_t(buffer)).width; }
  int max_rows(int buffer) const;
  int threads() const { return threads_; }
  size_t bytes() const;
  const float* vector_data(int id) const { return vectors_.at(size_t(id)).data(); }
  std::vector<double> profile;  // seconds by kind of operation; filled while non-empty

 private:
  enum class Kind : int { Embed, Norm, Linear, Rope, Attention, Gated, Add, Gather, Head, Quantize };
  static bool is_product(Kind kind) { return kind == Kind::Linear || kind == Kind::Gated || kind == Kind::Head; }
  struct Buffer {
    int width;
    Domain domain;
    Aligned<float> data;
    bool wants[3] = {false, false, false};  // by Act
    QuantRows quant[3];
    std::vector<Aligned<uint8_t>> storage;
    int producer = -1;  // the operation that wrote it last and can quantise on the way, or -1
  };
  struct Op {
    Kind kind;
    int in = -1, in2 = -1, in3 = -1, out = -1, weight = -1, weight2 = -1, layer = -1, positions = 0;
    float eps = 0, scale = 0;
    bool gelu = false;
    int quantize = 0;  // bits by Act: forms of `out` (Quantize: of `in`) to make
    Type type = Type::F32;
    int N = 0, K = 0;
    const uint8_t* raw = nullptr;
    std::vector<Segment> segments;
    int tiles = 0;
    RopeSpec rope{};
    AttnSpec attn{};
  };
  // Memory that a member will read soon, asked for bit by bit.
  class Ahead {
   public:
    void add(const uint8_t* data, size_t bytes) {
      if (count_ < 3) runs_[count_++] = {data, data + bytes};
    }
    // Asks for more; false if there is nothing left. All sizes are multiples of 64.
    bool ask(size_t bytes) {
      for (; bytes > 0 && first_ < count_; bytes -= 64) {
        Run& run = runs_[first_];
        __builtin_prefetch(run.at, 0, 2);
        if ((run.at += 64) == run.end) first_++;
      }
      return first_ < count_;
    }

   private:
    struct Run { const uint8_t *at, *end; };
    Run runs_[3];
    int first_ = 0, count_ = 0;
  };
  struct AttnTask { int row, kv_head, first, n; };
  struct Best { float value; int32_t id; bool broken; };  // broken: a score was NaN or +inf

  Buffer& at(int id);
  int count(Domain d, const Step& s) const { return d == Domain::Tokens ? s.tokens : s.outputs; }
  Op& push(Kind kind);
  void want(int buffer, Act act);
  void check(const Step& s, const KvCache* kv) const;
  void plan_attention(const Step& s);
  void execute(const Op& op, std::atomic<int>& next, int member, const Step& s, KvCache* kv, Team& team);
  void quantize(Buffer& b, int forms, int row, int from, int to);
  int piece(const Op& op, const Step& s) const;
  template <class Emit>
  void multiply(const Packed& w, const Buffer& x, int tile, int from, int rows, Emit emit);
  template <class Work>
  void each_panel(const Op& op, std::atomic<int>& next, int member, const Step& s, Work work);
  void run_linear(const Op& op, std::atomic<int>& next, int member, const Step& s);
  void run_gated(const Op& op, std::atomic<int>& next, int member, const Step& s);
  int first_piece(const Op& op, const Step& s) const;
  Ahead ahead_of(size_t i, int member, const Step& s) const;
  void run_head(const Op& op, std::atomic<int>& next, int member, const Step& s, Team& team);
  void run_attention(const Op& op, std::atomic<int>& next, int member, const Step& s, KvCache* kv);

  const int max_tokens_, max_outputs_, threads_;
  const KernelTable* k_;
  std::vector<Buffer> buffers_;
  std::vector<Packed> weights_;
  std::vector<std::vector<float>> vectors_;
  std::vector<Op> ops_;
  std::vector<AttnTask> attn_tasks_;
  std::vector<std::vector<float>> scratch_;
  std::vector<std::vector<Best>> best_;
  int vocabulary_ = 0, attn_group_ = 0, attn_kv_ = 0;
};

}  // namespace forerun
