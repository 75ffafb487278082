#include "tape.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#include "repack.hpp"

namespace forerun {

namespace {

[[noreturn]] void bad(const std::string& what) { throw std::invalid_argument(what); }

// The piece of 0..n that is member's share.
struct Share {
  int from, to;
  Share(int n, int member, int team) : from(int(int64_t(n) * member / team)), to(int(int64_t(n) * (member + 1) / team)) {}
};

}  // namespace

template <class T>
Aligned<T>::Aligned(size_t n) : size_(n) {
  const size_t bytes = std::max<size_t>(n * sizeof(T), 1);
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  data_ = std::unique_ptr<T, Unmap>(static_cast<T*>(p), Unmap{bytes});
}

template <class T>
void Aligned<T>::Unmap::operator()(T* p) const { munmap(p, bytes); }

KvCache::KvCache(int layers, int blocks, int n_kv, int head_dim)
    : layers_(layers), blocks_(blocks), n_kv_(n_kv), head_dim_(head_dim),
      memory_(2 * size_t(layers) * size_t(blocks) * size_t(n_kv) * size_t(head_dim) * kBlock) {}

KvView KvCache::layer(int i) const {
  KvView view{nullptr, nullptr, n_kv_, head_dim_};
  const size_t side = size_t(blocks_) * view.block_stride();
  view.k = memory_.data() + size_t(2 * i) * side;
  view.v = view.k + side;
  return view;
}

void KvCache::copy_block(int from, int to) {
  if (from < 0 || to < 0 || from >= blocks_ || to >= blocks_) bad("copy_block: block out of range");
  for (int i = 0; i < layers_; i++) {
    const KvView view = layer(i);
    const size_t n = view.block_stride();
    std::memcpy(view.k + size_t(to) * n, view.k + size_t(from) * n, n * sizeof(uint16_t));
    std::memcpy(view.v + size_t(to) * n, view.v + size_t(from) * n, n * sizeof(uint16_t));
  }
}

void KvCache::move_slot(int from_block, int from_slot, int to_block, int to_slot) {
  if (from_block < 0 || to_block < 0 || from_block >= blocks_ || to_block >= blocks_ || from_slot < 0 ||
      to_slot < 0 || from_slot >= kBlock || to_slot >= kBlock)
    bad("move_slot: block or slot out of range");
  for (int i = 0; i < layers_; i++) {
    const KvView view = layer(i);
    const size_t n = view.block_stride();
    const uint16_t* ks = view.k + size_t(from_block) * n + from_slot;
    uint16_t* kd = view.k + size_t(to_block) * n + to_slot;
    for (int d = 0; d < n_kv_ * head_dim_; d++) kd[d * kBlock] = ks[d * kBlock];
    const uint16_t* vs = view.v + size_t(from_block) * n + from_slot * 16;
    uint16_t* vd = view.v + size_t(to_block) * n + to_slot * 16;
    for (int c = 0; c < n_kv_ * head_dim_ / 16; c++)
      std::memmove(vd + c * kBlock * 16, vs + c * kBlock * 16, 16 * sizeof(uint16_t));
  }
}

Tape::Tape(int max_tokens, int max_outputs, int threads, const KernelTable* kernels)
    : max_tokens_(max_tokens), max_outputs_(max_outputs), threads_(threads), k_(kernels),
      scratch_(size_t(threads)), best_(size_t(threads)) {
  if (max_tokens < 1 || max_outputs < 1 || threads < 1 || threads > 1024) bad("tape: sizes must be at least 1");
}

Tape::Buffer& Tape::at(int id) {
  if (id < 0 || size_t(id) >= buffers_.size()) bad("tape: unknown buffer");
  return buffers_[size_t(id)];
}

int Tape::buffer(int width, Domain domain) {
  if (width < 16 || width % 16) bad("tape: a buffer's width must be a multiple of 16, got " + std::to_string(width));
  Buffer b{};
  b.width = width;
  b.domain = domain;
  b.data = Aligned<float>(size_t(domain == Domain::Tokens ? max_tokens_ : max_outputs_) * size_t(width));
  buffers_.push_back(std::move(b));
  return int(buffers_.size()) - 1;
}

int Tape::max_rows(int id) const {
  return buffers_.at(size_t(id)).domain == Domain::Tokens ? max_tokens_ : max_outputs_;
}

int Tape::weight(Type type, int N, int K, const uint8_t* packed) {
  weights_.push_back({type, N, K, packed, packed_tile_bytes(type, K)});
  return int(weights_.size()) - 1;
}

int Tape::vector(const float* values, int n) {
  vectors_.emplace_back(values, values + n);
  return int(vectors_.size()) - 1;
}

Tape::Op& Tape::push(Kind kind) {
  ops_.emplace_back();
  ops_.back().kind = kind;
  return ops_.back();
}

// Makes the quantised form of a buffer available to the operation that is about to be recorded.
void Tape::want(int id, Act act) {
  Buffer& b = at(id);
  if (act == Act::Float) return;
  const int form = int(act);
  if (!b.wants[form]) {
    const size_t T = size_t(b.domain == Domain::Tokens ? max_tokens_ : max_outputs_), K = size_t(b.width);
    const size_t block = act == Act::QK ? kActBlock : 32;
    if (K % block) bad("tape: width " + std::to_string(K) + " is no multiple of the quantisation block");
    const auto take = [&](size_t bytes) {
      b.storage.emplace_back(bytes);
      return b.storage.back().data();
    };
    QuantRows& q = b.quant[form];
    q.K = int(K);
    q.q = reinterpret_cast<int8_t*>(take(T * K));
    q.scale = reinterpret_cast<float*>(take(T * K / block * 4));
    q.sum32 = reinterpret_cast<int16_t*>(take(T * K / 32 * 2));
    q.sum = act == Act::Q32 ? reinterpret_cast<float*>(take(T * K / 32 * 4)) : nullptr;
    q.start16 = act == Act::QK ? reinterpret_cast<int16_t*>(take(T * K / 16 * 4)) : nullptr;
    b.wants[form] = true;
  }
  if (b.producer >= 0) {
    ops_[size_t(b.producer)].quantize |= 1 << form;
  } else {
    Op& op = push(Kind::Quantize);
    op.in = id;
    op.quantize = 1 << form;
    b.producer = int(ops_.size()) - 1;  // another form is added to the same operation
  }
}

void Tape::embed(Type type, int N, int K, const uint8_t* raw, float scale, int out) {
  if (at(out).width != K) bad("embed: width differs from the table's");
  Op& op = push(Kind::Embed);
  op.type = type, op.N = N, op.K = K, op.raw = raw, op.scale = scale, op.out = out;
  at(out).producer = -1;
}

void Tape::rms_norm(int in, int weight, float eps, int out) {
  if (at(in).width != at(out).width || int(vectors_.at(size_t(weight)).size()) != at(in).width ||
      at(in).domain != at(out).domain)
    bad("rms_norm: shapes differ");
  Op& op = push(Kind::Norm);
  op.in = in, op.weight = weight, op.eps = eps, op.out = out;
  at(out).producer = int(ops_.size()) - 1;
}

void Tape::linear(int in, const std::vector<Segment>& segments) {
  if (segments.empty()) bad("linear: no weights");
  int tiles = 0;
  for (const Segment& s : segments) {
    const Packed& w = weights_.at(size_t(s.weight));
    if (w.K != at(in).width || w.N != at(s.out).width || at(s.out).domain != at(in).domain || s.out == in)
      bad("linear: shapes differ");
    if (s.bias >= 0 && int(vectors_.at(size_t(s.bias)).size()) != w.N) bad("linear: bias length differs");
    tiles += packed_tiles(w.N);
  }
  for (const Segment& s : segments) want(in, act_of(weights_[size_t(s.weight)].type));
  for (const Segment& s : segments) at(s.out).producer = -1;
  Op& op = push(Kind::Linear);
  op.in = in, op.segments = segments, op.tiles = tiles;
}

void Tape::rope_store(int q, int k, int v, int layer, const RopeSpec& spec, int positions) {
  if (at(q).width != spec.n_heads * spec.head_dim || at(k).width != spec.n_kv * spec.head_dim ||
      at(v).width != at(k).width || spec.head_dim % 16 || spec.rotary_dims % 2 || spec.rotary_dims > spec.head_dim)
    bad("rope_store: shapes differ");
  Op& op = push(Kind::Rope);
  op.in = q, op.in2 = k, op.in3 = v, op.layer = layer, op.rope = spec, op.positions = positions;
  at(q).producer = at(k).producer = -1;
}

void Tape::attention(int q, int out, int layer, const AttnSpec& spec) {
  if (at(q).width != spec.n_heads * spec.head_dim || at(out).width != at(q).width || spec.n_kv < 1 ||
      spec.n_heads % spec.n_kv || spec.head_dim % 16)
    bad("attention: shapes differ");
  const int group = spec.n_heads / spec.n_kv;
  if (attn_kv_ != 0 && (attn_kv_ != spec.n_kv || attn_group_ != group)) bad("attention: layers differ in their heads");
  attn_kv_ = spec.n_kv;
  attn_group_ = group;
  Op& op = push(Kind::Attention);
  op.in = q, op.out = out, op.layer = layer, op.attn = spec;
  at(out).producer = -1;
}

void Tape::gated(int in, int gate, int up, bool gelu, int out) {
  const Packed &g = weights_.at(size_t(gate)), &u = weights_.at(size_t(up));
  if (g.K != at(in).width || u.K != g.K || g.N != at(out).width || u.N != g.N || at(out).domain != at(in).domain ||
      out == in)
    bad("gated: shapes differ");
  for (const Packed* w : {&g, &u}) want(in, act_of(w->type));
  Op& op = push(Kind::Gated);
  op.in = in, op.weight = gate, op.weight2 = up, op.gelu = gelu, op.out = out, op.tiles = packed_tiles(g.N);
  at(out).producer = int(ops_.size()) - 1;
}

void Tape::add(int x, int y) {
  if (at(x).width != at(y).width || at(x).domain != at(y).domain) bad("add: shapes differ");
  Op& op = push(Kind::Add);
  op.in = y, op.out = x;
  at(x).producer = -1;
}

void Tape::gather(int in, int out) {
  if (at(in).width != at(out).width || at(in).domain != Domain::Tokens || at(out).domain != Domain::Outputs)
    bad("gather: shapes differ");
  Op& op = push(Kind::Gather);
  op.in = in, op.out = out;
  at(out).producer = -1;
}

void Tape::head(int in, int weight) {
  const Packed& w = weights_.at(size_t(weight));
  if (w.K != at(in).width || at(in).domain != Domain::Outputs) bad("head: shapes differ");
  want(in, act_of(w.type));
  Op& op = push(Kind::Head);
  op.in = in, op.weight = weight, op.tiles = packed_tiles(w.N);
  vocabulary_ = w.N;
}

float* Tape::rows(int id, int n) {
  if (n > max_rows(id)) bad("tape: more rows than the buffer has");
  return at(id).data.data();
}

size_t Tape::bytes() const {
  size_t n = 0;
  for (const Buffer& b : buffers_) {
    n += b.data.size() * sizeof(float);
    for (const auto& s : b.storage) n += s.size();
  }
  return n;
}

void Tape::check(const Step& s, const KvCache* kv) const {
  if (s.tokens < 1 || s.tokens > max_tokens_) bad("step: between 1 and " + std::to_string(max_tokens_) + " tokens");
  if (s.outputs < 0 || s.outputs > max_outputs_) bad("step: at most " + std::to_string(max_outputs_) + " outputs");
  if (s.logits < 0 || s.logits > s.outputs) bad("step: more logits than outputs");
  if (s.rows < 1 || s.row_start[0] != 0 || s.row_start[s.rows] != s.tokens) bad("step: rows don't cover the tokens");
  for (int i = 0; i < s.outputs; i++)
    if (s.output[i] < 0 || s.output[i] >= s.tokens) bad("step: output token out of range");
  for (int r = 0; r < s.rows; r++) {
    const int count = s.row_start[r + 1] - s.row_start[r];
    if (count < 1 || s.cached[r] < 0) bad("step: an empty row or negative length");
    if (s.is_tree[r]) {
      if (count > 64) bad("step: a tree row has at most 64 tokens");
      for (int t = 0; t < count; t++) {
        const uint64_t a = s.ancestors[s.row_start[r] + t];
        if (!((a >> t) & 1) || (t < 63 && (a >> (t + 1)) != 0)) bad("step: an ancestor mask names a later token or not itself");
      }
    }
    const int used = (s.cached[r] + count + kBlock - 1) / kBlock;
    if (kv != nullptr) {
      if (s.table_row[r] < 0 || s.table_row[r] >= s.table_rows) bad("step: no such block table");
      if (used > s.table_width) bad("step: block table too short");
      for (int b = 0; b < used; b++) {
        const int32_t id = s.table(r)[b];
        if (id < 0 || id >= kv->blocks()) bad("step: block out of range");
      }
    }
  }
  for (const Op& op : ops_) {
    if (op.kind == Kind::Embed)
      for (int t = 0; t < s.tokens; t++)
        if (s.token[t] < 0 || s.token[t] >= op.N) bad("step: token outside the vocabulary");
    if (op.kind == Kind::Rope) {
      for (int t = 0; t < s.tokens; t++)
        if (s.position[t] < 0 || s.position[t] >= op.positions) bad("step: position outside the rotary table");
      if (kv == nullptr || op.layer >= kv->layers() || kv->n_kv() != op.rope.n_kv || kv->head_dim() != op.rope.head_dim)
        bad("step: the KV cache doesn't match the model");
      break;  // all layers share one position table size and one cache
    }
  }
}

void Tape::plan_attention(const Step& s) {
  attn_tasks_.clear();
  if (attn_kv_ == 0) return;
  int keys = 0;
  for (int r = 0; r < s.rows; r++) keys = std::max(keys, s.cached[r] + s.row_start[r + 1] - s.row_start[r]);
  for (auto& scratch : scratch_)
    if (scratch.size() < kQueries * size_t(keys + 80)) scratch.resize(kQueries * size_t(keys + keys / 4 + 80));
  const auto queries = [&](int r) { return (s.row_start[r + 1] - s.row_start[r]) * attn_group_; };
  // Queries that share each key that is read: many, but not so many that threads wait for the one with a task more.
  // Reading keys and values costs about as much as one and a half queries' arithmetic.
  int best = kQueries;
  double least = __builtin_inf();
  for (int width = kQueries; width >= 1; width /= 2) {
    int tasks = 0;
    for (int r = 0; r < s.rows; r++) tasks += (queries(r) + width - 1) / width * attn_kv_;
    const int turns = (tasks + threads_ - 1) / threads_;
    const double cost = turns * (1.5 + double(s.tokens) * attn_group_ * attn_kv_ / tasks);
    if (cost < least) best = width, least = cost;
  }
  for (int r = 0; r < s.rows; r++)
    for (int first = 0; first < queries(r); first += best)
      for (int h = 0; h < attn_kv_; h++) attn_tasks_.push_back({r, h, first, std::min(best, queries(r) - first)});
}

void Tape::quantize(Buffer& b, int forms, int row, int from, int to) {
  const float* x = b.data.data() + size_t(row) * size_t(b.width);
  if (forms & (1 << int(Act::Q32))) k_->quantize_q32(x, b.quant[int(Act::Q32)], row, from, to);
  if (forms & (1 << int(Act::QK))) k_->quantize_qk(x, b.quant[int(Act::QK)], row, from, to);
}

namespace {
constexpr size_t kAhead = 12288;      // bytes of the next product's weights that a member asks for before it waits,
constexpr size_t kAheadAtOnce = 256;  // between two looks at the others,
constexpr size_t kMostAhead = 131072;  // and altogether: they lie in the second cache
constexpr int kGatedTiles = kActBlock / kTile;
constexpr int kPanel = 64;  // rows whose activations stay in cache while several tiles pass over them
}  // namespace

// emit(row, y) receives the 16 results of each row from..from+rows of one tile.
template <class Emit>
void Tape::multiply(const Packed& w, const Buffer& x, int tile, int from, int rows, Emit emit) {
  alignas(64) float y[kRows * kTile];
  const Act act = act_of(w.type);
  const int calls = (rows + kRows - 1) / kRows;
  for (int c = 0; c < calls; c++) {
    const int begin = from + int(int64_t(rows) * c / calls), end = from + int(int64_t(rows) * (c + 1) / calls);
    if (act == Act::Float) k_->linear_f(w, tile, x.data.data(), begin, end - begin, y);
    else k_->linear_q(w, tile, x.quant[int(act)], begin, end - begin, y);
    for (int m = begin; m < end; m++) emit(m, y + (m - begin) * kTile);
  }
}

// Tiles that a thread takes at a time: few enough that threads end together, which takes finer pieces where many rows
// make a tile long; many enough that the counter costs nothing; and whole blocks of quantisation where the results are
// quantised on the way.
int Tape::piece(const Op& op, const Step& s) const {
  const bool gated = op.kind == Kind::Gated;
  const int rows = count(buffers_[size_t(op.in)].domain, s), pieces = threads_ * (rows > kRows ? 32 : 8);
  const int tiles = std::clamp(op.tiles / pieces, 1, gated ? 8 : 16);
  return gated ? std::max(tiles / kGatedTiles * kGatedTiles, kGatedTiles) : tiles;
}

// The first piece of every member is fixed and half of its share, so that it can be asked for early.
int Tape::first_piece(const Op& op, const Step& s) const {
  const int step = piece(op, s);
  return std::max(op.tiles / (2 * threads_) / step * step, step);
}

// work(first tile, last tile + 1, first row, rows) for this member's share of a product: its first piece, then what the
// counter deals out.
template <class Work>
void Tape::each_panel(const Op& op, std::atomic<int>& next, int member, const Step& s, Work work) {
  const int step = piece(op, s), first = first_piece(op, s), rows = count(at(op.in).domain, s);
  for (int begin = member * first, size = first; begin < op.tiles;
       begin = next.fetch_add(step, std::memory_order_relaxed), size = step)
    for (int panel = 0; panel < rows; panel += kPanel)
      work(begin, std::min(begin + size, op.tiles), panel, std::min(kPanel, rows - panel));
}

void Tape::run_linear(const Op& op, std::atomic<int>& next, int member, const Step& s) {
  const Buffer& x = at(op.in);
  each_panel(op, next, member, s, [&](int begin, int end, int row, int rows) {
    int base = 0;
    for (const Segment& seg : op.segments) {
      const Packed& w = weights_[size_t(seg.weight)];
      const int tiles = packed_tiles(w.N);
      float* out = at(seg.out).data.data();
      const float* bias = seg.bias >= 0 ? vectors_[size_t(seg.bias)].data() : nullptr;
      for (int i = std::max(begin, base); i < std::min(end, base + tiles); i++) {
        const int tile = i - base, n = std::min(kTile, w.N - tile * kTile);
        multiply(w, x, tile, row, rows, [&](int m, const float* y) {
          float* o = out + size_t(m) * size_t(w.N) + size_t(tile) * kTile;
          for (int c = 0; c < n; c++) {
            float value = y[c];
            if (bias != nullptr) value += bias[tile * kTile + c];
            o[c] = seg.add ? o[c] + value : value;
          }
        });
      }
      base += tiles;
    }
  });
}

// Both products, gate and quantisation while the numbers are in this thread's nearest cache. Few rows take several tiles
// of one weight before the other's, so that weights are read in long runs; many rows would lose their place there.
void Tape::run_gated(const Op& op, std::atomic<int>& next, int member, const Step& s) {
  const Buffer& x = at(op.in);
  Buffer& out = at(op.out);
  const Packed &gate = weights_[size_t(op.weight)], &up = weights_[size_t(op.weight2)];
  each_panel(op, next, member, s, [&](int begin, int end, int row, int rows) {
    alignas(64) float g[kPanel * kTile], u[kPanel * kTile];
    const int step = rows <= kPanel / kGatedTiles ? kGatedTiles : 1;
    for (int first = begin; first < end; first += step) {
      const int last = std::min(first + step, end), n = (last - first) * kTile;
      const auto product = [&](const Packed& w, float* y) {
        for (int tile = first; tile < last; tile++)
          multiply(w, x, tile, row, rows, [&](int m, const float* results) {
            std::memcpy(y + (m - row) * n + (tile - first) * kTile, results, kTile * sizeof(float));
          });
      };
      product(gate, g);
      product(up, u);
      k_->glu(g, u, rows * n, op.gelu, g);
      for (int m = 0; m < rows; m++)
        std::memcpy(out.data.data() + size_t(row + m) * size_t(out.width) + size_t(first) * kTile, g + m * n,
                    size_t(n) * sizeof(float));
    }
    for (int m = row; m < row + rows; m++) quantize(out, op.quantize, m, begin * kTile, end * kTile);
  });
}

void Tape::run_head(const Op& op, std::atomic<int>& next, int member, const Step& s, Team& team) {
  const Packed& w = weights_[size_t(op.weight)];
  const Buffer& x = at(op.in);
  auto& best = best_[size_t(member)];
  best.assign(size_t(s.outputs), {-__builtin_inff(), -1, false});
  each_panel(op, next, member, s, [&](int begin, int end, int row, int rows) {
    for (int tile = begin; tile < end; tile++) {
      const int n = std::min(kTile, w.N - tile * kTile);
      multiply(w, x, tile, row, rows, [&](int m, const float* y) {
        if (m < s.logits) {
          std::memcpy(s.logits_out + size_t(m) * size_t(w.N) + size_t(tile) * kTile, y, size_t(n) * 4);
          return;
        }
        Best& b = best[size_t(m)];
        if (n == kTile && !k_->beats(y, b.value)) return;  // a thread's tiles ascend, so a tie keeps the lower id
        for (int c = 0; c < n; c++) {
          if (!(y[c] < __builtin_inff())) b.broken = true;
          else if (y[c] > b.value) b = {y[c], tile * kTile + c, b.broken};
        }
      });
    }
  });
  team.barrier();
  if (member != 0) return;
  for (int m = s.logits; m < s.outputs; m++) {
    Best winner{-__builtin_inff(), -1, false};
    bool broken = false;
    for (int t = 0; t < team.size(); t++) {
      const Best& b = best_[size_t(t)][size_t(m)];
      broken = broken || b.broken;
      if (b.id >= 0 && (b.value > winner.value || (b.value == winner.value && (winner.id < 0 || b.id < winner.id)))) winner = b;
    }
    s.argmax_out[m] = broken ? -1 : winner.id;
  }
}

// The weights that this member reads first in the next product after operation i. They are asked for while it does the
// small operations between two products, and while it waits in them for others, so that memory never rests.
Tape::Ahead Tape::ahead_of(size_t i, int member, const Step& s) const {
  Ahead ahead;
  for (i++; i < ops_.size() && !is_product(ops_[i].kind); i++) {}
  if (i >= ops_.size()) return ahead;
  const Op& op = ops_[i];
  const int first = first_piece(op, s);
  const int begin = member * first;
  int base = 0;
  const auto add = [&](int weight, size_t most) {
    const Packed& w = weights_[size_t(weight)];
    const int tiles = packed_tiles(w.N), from = std::max(begin - base, 0), to = std::min(begin + first - base, tiles);
    if (from < to) ahead.add(w.data + size_t(from) * w.tile_bytes, std::min(size_t(to - from) * w.tile_bytes, most));
    return tiles;
  };
  switch (op.kind) {
    case Kind::Linear:
      for (const Segment& seg : op.segments) base += add(seg.weight, kMostAhead);
      break;
    case Kind::Gated:
      for (int weight : {op.weight, op.weight2}) add(weight, kMostAhead / 2);
      break;
    default: add(op.weight, kMostAhead);
  }
  return ahead;
}

void Tape::run_attention(const Op& op, std::atomic<int>& next, int member, const Step& s, KvCache* kv) {
  const KvView view = kv->layer(op.layer);
  const size_t width = size_t(at(op.in).width);
  for (size_t i; (i = size_t(next.fetch_add(1, std::memory_order_relaxed))) < attn_tasks_.size();) {
    const AttnTask& task = attn_tasks_[i];
    const int begin = s.row_start[task.row];
    const AttnRow row{s.cached[task.row], s.row_start[task.row + 1] - begin,
                      s.is_tree[task.row] ? s.ancestors + begin : nullptr,
                      s.table(task.row)};
    k_->attention(op.attn, row, view, task.kv_head, task.first, task.n, at(op.in).data.data() + size_t(begin) * width,
                  at(op.out).data.data() + size_t(begin) * width, scratch_[size_t(member)].data());
  }
}

void Tape::execute(const Op& op, std::atomic<int>& next, int member, const Step& s, KvCache* kv, Team& team) {
  switch (op.kind) {
    case Kind::Embed: {
      const Share share(s.tokens, member, team.size());
      for (int t = share.from; t < share.to; t++) {
        float* out = at(op.out).data.data() + size_t(t) * size_t(op.K);
        dequantize_row(op.type, op.raw + size_t(s.token[t]) * row_bytes(op.type, op.K), op.K, out);
        if (op.scale != 1.f)
          for (int k = 0; k < op.K; k++) out[k] *= op.scale;
      }
      return;
    }
    case Kind::Norm: {
      Buffer &x = at(op.in), &y = at(op.out);
      const Share share(count(x.domain, s), member, team.size());
      for (int t = share.from; t < share.to; t++) {
        k_->rms_norm(x.data.data() + size_t(t) * size_t(x.width), vectors_[size_t(op.weight)].data(), x.width, op.eps,
                     y.data.data() + size_t(t) * size_t(x.width));
        quantize(y, op.quantize, t, 0, y.width);
      }
      return;
    }
    case Kind::Quantize: {
      Buffer& x = at(op.in);
      const int pieces = (x.width + 255) / 256;
      const Share share(count(x.domain, s) * pieces, member, team.size());
      for (int i = share.from; i < share.to; i++)
        quantize(x, op.quantize, i / pieces, i % pieces * 256, std::min(i % pieces * 256 + 256, x.width));
      return;
    }
    case Kind::Rope: {
      const KvView view = kv->layer(op.layer);
      const int heads = op.rope.n_heads, n_kv = op.rope.n_kv, per_token = heads + 2 * n_kv, D = op.rope.head_dim;
      const Share share(s.tokens * per_token, member, team.size());
      int row = 0;
      for (int i = share.from; i < share.to; i++) {
        const int t = i / per_token, h = i % per_token;
        while (t >= s.row_start[row + 1]) row++;
        const int slot = s.cached[row] + t - s.row_start[row];
        const int block = s.table(row)[slot / kBlock];
        const int kind = h < heads ? 0 : h < heads + n_kv ? 1 : 2;
        const int head = kind == 0 ? h : (h - heads) % n_kv;
        Buffer& b = at(kind == 0 ? op.in : kind == 1 ? op.in2 : op.in3);
        k_->rope_store(op.rope, kind, head, s.position[t],
                       b.data.data() + size_t(t) * size_t(b.width) + size_t(head) * size_t(D), view, block, slot % kBlock);
      }
      return;
    }
    case Kind::Add: {
      Buffer &x = at(op.out), &y = at(op.in);
      const Share share(count(x.domain, s), member, team.size());
      for (int t = share.from; t < share.to; t++)
        k_->add(x.data.data() + size_t(t) * size_t(x.width), y.data.data() + size_t(t) * size_t(x.width), x.width);
      return;
    }
    case Kind::Gather: {
      Buffer &x = at(op.in), &y = at(op.out);
      const Share share(s.outputs, member, team.size());
      for (int i = share.from; i < share.to; i++)
        std::memcpy(y.data.data() + size_t(i) * size_t(x.width), x.data.data() + size_t(s.output[i]) * size_t(x.width),
                    size_t(x.width) * 4);
      return;
    }
    case Kind::Linear: run_linear(op, next, member, s); return;
    case Kind::Gated: run_gated(op, next, member, s); return;
    case Kind::Attention: run_attention(op, next, member, s, kv); return;
    case Kind::Head: run_head(op, next, member, s, team); return;
  }
}

void Tape::run(const Step& s, KvCache* kv) {
  check(s, kv);
  plan_attention(s);
  std::vector<std::atomic<int>> next(ops_.size());
  for (size_t i = 0; i < ops_.size(); i++)
    next[i].store(is_product(ops_[i].kind) ? threads_ * first_piece(ops_[i], s) : 0, std::memory_order_relaxed);
  run_team(threads_, [&](int member, Team& team) {
    Ahead ahead;
    for (size_t i = 0; i < ops_.size(); i++) {
      const bool timed = member == 0 && !profile.empty();
      const auto start = timed ? std::chrono::steady_clock::now() : std::chrono::steady_clock::time_point();
      execute(ops_[i], next[i], member, s, kv, team);
      if (is_product(ops_[i].kind)) {
        ahead = ahead_of(i, member, s);
        ahead.ask(kAhead);
      }
      team.barrier([&] {
        if (!ahead.ask(kAheadAtOnce)) cpu_relax();
      });
      if (timed)
        profile[size_t(ops_[i].kind)] += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
  });
}

template class Aligned<float>;
template class Aligned<uint8_t>;
template class Aligned<uint16_t>;

}  // namespace forerun
