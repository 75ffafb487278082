// Compares every function of every instruction set's KernelTable with the portable one, bit for bit, on random and
// extreme inputs. test_emulated_sets.py builds it: the sets that this processor has as the package compiles them, and
// each set once more over emulated/immintrin.h. Prints one line per set and function; ends at the first difference
// with exit status 1 and what it was.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <new>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels.hpp"
#include "repack.hpp"

namespace forerun {
const KernelTable* emulated_avx2();
const KernelTable* emulated_avxvnni();
const KernelTable* emulated_avx512();
}  // namespace forerun

using namespace forerun;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Exactly as large as asked for, so that a sanitizer sees the first byte past the end.
template <class T>
class Array {
 public:
  explicit Array(size_t n) : n_(n), p_(static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(64)))) {
    std::memset(static_cast<void*>(p_), 0xA5, n * sizeof(T));  // what a kernel doesn't write stays the same everywhere
  }
  Array(const Array& o) : Array(o.n_) { std::copy(o.p_, o.p_ + n_, p_); }
  Array(Array&& o) noexcept : n_(std::exchange(o.n_, 0)), p_(std::exchange(o.p_, nullptr)) {}
  Array& operator=(Array o) { std::swap(n_, o.n_); std::swap(p_, o.p_); return *this; }
  ~Array() { ::operator delete(p_, std::align_val_t(64)); }
  T* data() { return p_; }
  const T* data() const { return p_; }
  size_t size() const { return n_; }
  T& operator[](size_t i) { return p_[i]; }
  const T& operator[](size_t i) const { return p_[i]; }
  T* begin() { return p_; }
  T* end() { return p_ + n_; }

 private:
  size_t n_;
  T* p_;
};

// -- inputs

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  uint32_t bits() { return engine_(); }
  int below(int n) { return int(engine_() % uint32_t(n)); }
  int within(int low, int high) { return low + below(high - low + 1); }
  bool one_in(int n) { return below(n) == 0; }
  float uniform() { return float(int32_t(bits())) * 0x1p-31f; }
  float bell() { return uniform() + uniform() + uniform(); }
  template <class T, size_t N>
  T among(const T (&choices)[N]) { return choices[below(int(N))]; }

 private:
  std::mt19937 engine_;
};

enum class Floats { plain, wide, extreme };  // about 1; any finite size; NaN, infinities, denormals and limits as well

float one_float(Random& r, Floats kind) {
  static constexpr float special[] = {
      0.f, -0.f, 1.f, -1.f, kInf, -kInf, kNan, 3.4028235e38f, -3.4028235e38f, 1.17549435e-38f, -1e-40f, 1e-45f, 1e-30f,
      65504.f, -65504.f, 65519.996f, 65520.f, -65536.f, 6.1035e-5f, 5.96e-8f, 2.98e-8f, -2.9803e-8f, 88.f, -88.f, 87.f,
      87.5f, -87.33f, 103.9f, 16777217.f, 2147483648.f, -2147483648.f, 0.5f, 1.5f, -2.5f};
  if (kind == Floats::extreme && r.one_in(3)) return r.among(special);
  if (kind == Floats::plain) return r.bell();
  return std::ldexp(r.bell(), r.within(-148, 127));
}

Array<float> floats(Random& r, size_t n, Floats kind) {
  Array<float> x(n);
  for (float& v : x) v = one_float(r, kind);
  return x;
}

// Most calls want ordinary values with a rare surprise: a block with a NaN tells little about the others.
Floats mostly_plain(Random& r) { return r.one_in(4) ? Floats::extreme : r.one_in(3) ? Floats::wide : Floats::plain; }

uint16_t one_half(Random& r, bool extreme) {
  static constexpr uint16_t special[] = {0, 0x8000, 1, 0x83ff, 0x0400, 0x7bff, 0xfbff, 0x3c00, 0xbc00, 0x03ff};
  if (extreme) return r.one_in(3) ? r.among(special) : uint16_t(r.bits() & 0xbfff);  // below 2 in size
  return float_to_half(r.bell() * 0.02f);
}

// -- comparison

struct Set {
  std::string name;
  const KernelTable* table;
};

// The same in all bits, save that any NaN is like any other: theirs are as compilers and processors please.
// 16 unsigned bits are a float16 of the KV cache.
bool is_nan(float x) { return x != x; }
bool is_nan(uint16_t half) { return (half & 0x7fff) > 0x7c00; }
bool is_nan(int) { return false; }
template <class T>
bool same(T a, T b) { return std::memcmp(&a, &b, sizeof(T)) == 0 || (is_nan(a) && is_nan(b)); }

class Check {
 public:
  Check(std::vector<Set> sets) : sets_(std::move(sets)) {}

  // Runs `call(table, outputs)` on copies of `before` with the portable table and with every set.
  template <class Call, class... T>
  void operator()(const std::string& function, const std::string& inputs, Call call, const Array<T>&... before) {
    auto expected = std::tuple<Array<T>...>(before...);
    std::apply([&](auto&... out) { call(*kernels_portable(), out...); }, expected);
    for (size_t s = 0; s < sets_.size(); s++) {
      auto actual = std::tuple<Array<T>...>(before...);
      std::apply([&](auto&... out) { call(*sets_[s].table, out...); }, actual);
      where_ = sets_[s].name + " " + function + " of " + inputs;
      [&]<size_t... i>(std::index_sequence<i...>) {
        (compare(int(i), std::get<i>(expected), std::get<i>(actual)), ...);
      }(std::index_sequence_for<T...>());
    }
    if (!counts_.contains(function)) order_.push_back(function);
    Count& count = counts_[function];
    count.cases++;
    std::apply([&](const auto&... out) { (..., (count.numbers += written(before, out))); }, expected);
  }

  void report() const {
    for (const Set& set : sets_)
      for (const std::string& f : order_)
        std::printf("%-16s %-17s %7lld cases %10lld numbers\n", set.name.c_str(), f.c_str(), counts_.at(f).cases,
                    counts_.at(f).numbers);
  }

 private:
  struct Count { long long cases = 0, numbers = 0; };

  // Only what was really put to the test: neither NaNs, whose bits are free, nor what the function let be.
  template <class T>
  static long long written(const Array<T>& before, const Array<T>& after) {
    long long n = 0;
    for (size_t i = 0; i < after.size(); i++) n += !is_nan(after[i]) && !same(before[i], after[i]);
    return n;
  }

  template <class T>
  void compare(int output, const Array<T>& expected, const Array<T>& actual) {
    for (size_t i = 0; i < expected.size(); i++) {
      if (same(expected[i], actual[i])) continue;
      std::printf("DIFFERENT: %s\n  output %d [%zu]: portable %.9g, here %.9g", where_.c_str(), output, i,
                  double(expected[i]), double(actual[i]));
      if constexpr (sizeof(T) == 4)
        std::printf(" (%08x, %08x)", std::bit_cast<uint32_t>(expected[i]), std::bit_cast<uint32_t>(actual[i]));
      std::printf("\n");
      std::exit(1);
    }
  }

  std::vector<Set> sets_;
  std::vector<std::string> order_;
  std::map<std::string, Count> counts_;
  std::string where_;
};

[[gnu::format(printf, 1, 2)]] std::string text(const char* format, ...) {
  char line[256];
  va_list args;
  va_start(args, format);
  std::vsnprintf(line, sizeof(line), format, args);
  va_end(args);
  return line;
}

// -- linear layers

const std::pair<Type, const char*> kTypes[] = {
    {Type::Q4_K, "Q4_K"}, {Type::Q5_K, "Q5_K"}, {Type::Q6_K, "Q6_K"}, {Type::Q4_0, "Q4_0"},
    {Type::Q4_1, "Q4_1"}, {Type::Q5_0, "Q5_0"}, {Type::Q5_1, "Q5_1"}, {Type::Q8_0, "Q8_0"},
    {Type::F32, "F32"},   {Type::F16, "F16"},   {Type::BF16, "BF16"}};

enum class Quants { any, low, high, signs };  // random; all bits 0; all bits 1; 0x80 and 0x7f (Q8_0's extremes)

// Rows of GGUF blocks, as a file holds them. `extreme`: scales of any size, and for float types any bits.
Array<uint8_t> gguf(Random& r, Type type, int N, int K, Quants quants, bool extreme) {
  const size_t block = size_t(block_size(type).bytes);
  Array<uint8_t> data(size_t(N) * row_bytes(type, K));
  for (uint8_t& b : data) {
    const auto any = uint8_t(r.bits());
    b = quants == Quants::any ? any : quants == Quants::low ? 0 : quants == Quants::high ? 0xff : any & 1 ? 0x80 : 0x7f;
  }
  if (act_of(type) == Act::Float) {
    if (type == Type::F32)
      for (size_t i = 0; i < data.size(); i += 4) {
        const float v = one_float(r, extreme ? Floats::extreme : Floats::plain);
        std::memcpy(data.data() + i, &v, 4);
      }
    else if (!extreme)
      for (size_t i = 0; i < data.size(); i += 2) {
        const float v = r.bell();
        const uint16_t h = type == Type::F16 ? float_to_half(v) : uint16_t(std::bit_cast<uint32_t>(v) >> 16);
        std::memcpy(data.data() + i, &h, 2);
      }
    return data;
  }
  const bool two = layout::has_min(type) || type == Type::Q4_K || type == Type::Q5_K;
  for (size_t at = type == Type::Q6_K ? 208 : 0; at < data.size(); at += block)
    for (size_t e = 0; e < (two ? 2 : 1); e++) {
      const uint16_t h = one_half(r, extreme);
      std::memcpy(data.data() + at + 2 * e, &h, 2);
    }
  return data;
}

// Quantised rows that own their arrays.
struct Rows {
  Array<int8_t> q;
  Array<float> scale, sum;
  Array<int16_t> start16, sum32;
  int K, block;
  Rows(int rows, int K, Act act)
      : q(size_t(rows * K)), scale(size_t(rows * K / block_of(act))), sum(size_t(rows * K / 32)),
        start16(size_t(rows * K / 8)), sum32(size_t(rows * K / 32)), K(K), block(block_of(act)) {}
  static int block_of(Act act) { return act == Act::QK ? kActBlock : 32; }
  QuantRows view() { return {K, q.data(), scale.data(), sum.data(), start16.data(), sum32.data()}; }
};

// Every q at a limit and scales of any size: the largest integer sums, and floats that overflow or vanish.
void saturate(Random& r, Rows& x) {
  const int mode = r.below(3);
  for (int8_t& q : x.q) q = int8_t(mode == 0 ? 127 : mode == 1 ? -127 : r.one_in(2) ? 127 : -127);
  for (float& s : x.scale) s = one_float(r, Floats::wide);
  for (size_t i = 0; i < x.start16.size(); i++) {
    int total = 0;
    for (size_t k = 0; k < 16; k++)
      if (k % 4 / 2 == i % 2) total += x.q[i / 2 * 16 + k];
    x.start16[i] = int16_t(-32 * total);
  }
  for (size_t g = 0; g < x.sum.size(); g++) {
    int total = 0;
    for (size_t k = 0; k < 32; k++) total += x.q[g * 32 + k];
    x.sum32[g] = int16_t(total);
    x.sum[g] = x.scale[g * 32 / size_t(x.block)] * float(x.sum32[g]);
  }
}

void quantize(const KernelTable& t, Act act, const float* x, const QuantRows& out, int row, int from, int to) {
  (act == Act::QK ? t.quantize_qk : t.quantize_q32)(x, out, row, from, to);
}

void linear(Check& check, Random& r, int effort) {
  for (const auto& [type, name] : kTypes) {
    const Act act = act_of(type);
    for (int i = 0; i < 40 * effort; i++) {
      const int rows = i % kRows + 1, row0 = r.below(3), spare = r.below(2), tile = r.below(3);
      const int K = act == Act::QK ? 256 * r.within(1, 3) : act == Act::Q32 ? 32 * r.within(1, 11) : 16 * r.within(1, 9);
      const int N = (tile + 1) * kTile - (r.one_in(2) ? r.below(kTile) : 0);  // a last tile that isn't full
      const bool extreme = r.one_in(2);
      const Quants quants = r.one_in(2) ? Quants::any : Quants(r.below(4));
      const Array<uint8_t> source = gguf(r, type, N, K, quants, extreme);
      const size_t bytes = packed_tile_bytes(type, K);
      Array<uint8_t> packed(bytes * size_t(packed_tiles(N)));
      for (int t = 0; t < packed_tiles(N); t++)
        pack_tile(type, source.data(), N, K, t, packed.data() + bytes * size_t(t));
      const Packed w{type, N, K, packed.data(), bytes};
      const Array<float> y(size_t(rows * kTile));
      const Floats kind = mostly_plain(r);
      const bool saturated = act != Act::Float && r.one_in(3);
      const std::string inputs = text("%s, N %d, K %d, tile %d, rows %d+%d, %s scales, quants %d, %s", name, N, K, tile, row0,
                                      rows, extreme ? "extreme" : "plain", int(quants),
                                      saturated ? "saturated rows" : text("float rows %d", int(kind)).c_str());
      if (act == Act::Float) {
        const Array<float> x = floats(r, size_t((row0 + rows + spare) * K), kind);
        check(std::string("linear_f ") + name, inputs, [&](const KernelTable& t, Array<float>& out) {
          t.linear_f(w, tile, x.data(), row0, rows, out.data());
        }, y);
        continue;
      }
      Rows x(row0 + rows + spare, K, act);
      if (saturated) saturate(r, x);
      else
        for (int m = 0; m < row0 + rows + spare; m++)
          quantize(*kernels_portable(), act, floats(r, size_t(K), kind).data(), x.view(), m, 0, K);
      check(std::string("linear_q ") + name, inputs, [&](const KernelTable& t, Array<float>& out) {
        t.linear_q(w, tile, x.view(), row0, rows, out.data());
      }, y);
    }
  }
}

// -- element by element

void pointwise(Check& check, Random& r, int effort) {
  for (int i = 0; i < 400 * effort; i++) {
    const Floats kind = Floats(i % 3);
    const Act act = r.one_in(2) ? Act::Q32 : Act::QK;
    const int block = Rows::block_of(act), blocks = r.within(1, 6), K = block * blocks, rows = r.within(1, 3);
    const int row = r.below(rows), from = block * r.below(blocks), to = from + block * r.within(1, blocks - from / block);
    Array<float> x = floats(r, size_t(K), kind);
    if (r.one_in(2)) {  // blocks of one size each, some of them zero or around the limit under which they count as zero
      static constexpr float sizes[] = {0.f, 1e-42f, 1e-32f, 1e-30f, 1.5e-30f, 1.f, 1e30f, 2e37f};
      for (int k = 0; k < K; k += block) {
        const float size = r.among(sizes);
        for (int e = 0; e < block; e++) x[size_t(k + e)] = size * r.uniform();
      }
    }
    const Rows out(rows, K, act);
    check(act == Act::QK ? "quantize_qk" : "quantize_q32",
          text("row %d, columns %d..%d of %d, floats %d", row, from, to, K, int(kind)),
          [&](const KernelTable& t, Array<int8_t>& q, Array<float>& scale, Array<float>& sum, Array<int16_t>& start16,
              Array<int16_t>& sum32) {
            quantize(t, act, x.data(), {K, q.data(), scale.data(), sum.data(), start16.data(), sum32.data()}, row, from, to);
          }, out.q, out.scale, out.sum, out.start16, out.sum32);

    const int n = 16 * r.within(1, 20);
    const Array<float> a = floats(r, size_t(n), kind), b = floats(r, size_t(n), kind), y{size_t(n)};
    const std::string inputs = text("%d values, floats %d", n, int(kind));
    const float eps = r.one_in(3) ? 0.f : 1e-6f;
    check("rms_norm", inputs,
          [&](const KernelTable& t, Array<float>& o) { t.rms_norm(a.data(), b.data(), n, eps, o.data()); }, y);
    check("rms_norm in place", inputs,
          [&](const KernelTable& t, Array<float>& o) { t.rms_norm(o.data(), b.data(), n, eps, o.data()); }, a);
    check("glu silu", inputs,
          [&](const KernelTable& t, Array<float>& o) { t.glu(a.data(), b.data(), n, false, o.data()); }, y);
    check("glu gelu", inputs,
          [&](const KernelTable& t, Array<float>& o) { t.glu(a.data(), b.data(), n, true, o.data()); }, y);
    check("add", inputs, [&](const KernelTable& t, Array<float>& o) { t.add(o.data(), b.data(), n); }, a);
  }
  for (int i = 0; i < 60 * effort; i++) {
    constexpr int vectors = 64;
    Array<float> y = floats(r, vectors * kTile, Floats::plain), best(vectors);
    for (int v = 0; v < vectors; v++) {
      float* scores = y.data() + v * kTile;
      if (r.one_in(3)) scores[r.below(kTile)] = one_float(r, Floats::extreme);
      const float top = *std::max_element(scores, scores + kTile);
      const float bests[] = {top, std::nextafter(top, -kInf), std::nextafter(top, kInf), -top, 0.f, -kInf, kInf};
      best[size_t(v)] = r.among(bests);
    }
    check("beats", "a best score around the largest of 16", [&](const KernelTable& t, Array<int8_t>& answers) {
      for (int v = 0; v < vectors; v++) answers[size_t(v)] = t.beats(y.data() + v * kTile, best[size_t(v)]);
    }, Array<int8_t>(vectors));
  }
  // exp() on a grid that is finer than its rounding steps, through the gate.
  Array<float> gate(1 << 14), up(1 << 14);
  for (size_t i = 0; i < gate.size(); i++) gate[i] = float(int(i) - (1 << 13)) * (100.f / (1 << 13));
  std::fill(up.begin(), up.end(), 1.f);
  for (const bool gelu : {false, true})
    check(gelu ? "glu gelu" : "glu silu", "a grid of -100..100", [&](const KernelTable& t, Array<float>& o) {
      t.glu(gate.data(), up.data(), int(gate.size()), gelu, o.data());
    }, up);
}

// -- the KV cache

void rope(Check& check, Random& r, int effort) {
  for (int i = 0; i < 300 * effort; i++) {
    const int kind = i % 3, D = 16 * r.within(1, 8), n_kv = r.within(1, 3), group = r.within(1, 3), blocks = 3, positions = 5;
    const int rotary = r.one_in(2) ? D : 2 * r.within(1, D / 2), head = r.below(kind == 0 ? n_kv * group : n_kv);
    const int position = r.below(positions), block = r.below(blocks), slot = r.below(kBlock);
    const Floats floats_kind = mostly_plain(r);
    const bool interleaved = r.one_in(2), norms = r.one_in(2);
    const Array<float> c = floats(r, size_t(positions * rotary / 2), Floats::plain), n = floats(r, c.size(), Floats::plain);
    const Array<float> q_norm = floats(r, size_t(D), floats_kind), k_norm = floats(r, size_t(D), floats_kind);
    const RopeSpec s{n_kv * group, n_kv, D, rotary, interleaved, c.data(), n.data(), norms ? q_norm.data() : nullptr,
                     norms ? k_norm.data() : nullptr, 1e-6f};
    Array<float> x = floats(r, size_t(D), floats_kind);
    if (r.one_in(4))
      for (float& v : x) v = r.bell() * 60000.f;  // around the largest half
    const Array<uint16_t> cache(size_t(blocks * n_kv * D * kBlock));
    check(text("rope_store %s", kind == 0 ? "query" : kind == 1 ? "key" : "value"),
          text("D %d, rotary %d, %s, norms %d, head %d, floats %d", D, rotary, interleaved ? "interleaved" : "halves", norms,
               head, int(floats_kind)),
          [&](const KernelTable& t, Array<float>& v, Array<uint16_t>& keys, Array<uint16_t>& values) {
            t.rope_store(s, kind, head, position, v.data(), {keys.data(), values.data(), n_kv, D}, block, slot);
          }, x, cache, cache);
  }
  // Every float16, and the floats halfway between neighbours and just beside: what a KV entry is rounded to.
  for (uint32_t h = 0; h < 0x7c00; h += 512) {
    Array<float> x(512 * 4);
    for (uint32_t i = 0; i < 512; i++) {
      const float low = half_to_float(uint16_t(h + i)), high = half_to_float(uint16_t(h + i + 1));
      const float middle = high < kInf ? low + (high - low) / 2 : 65520.f;
      const float around[] = {low, middle, std::nextafter(middle, 0.f), std::nextafter(middle, kInf)};
      for (uint32_t e = 0; e < 4; e++) x[4 * i + e] = i % 2 ? -around[e] : around[e];
    }
    const int D = int(x.size());
    const RopeSpec s{1, 1, D, 0, false, nullptr, nullptr, nullptr, nullptr, 0.f};
    const Array<uint16_t> cache(size_t(D * kBlock));
    check("rope_store value", text("halves from %04x", h), [&](const KernelTable& t, Array<uint16_t>& values) {
      t.rope_store(s, 2, 0, 0, x.data(), {nullptr, values.data(), 1, D}, 0, 3);
    }, cache);
  }
}

// The bits of each token's path through a random tree: its ancestors and itself.
std::vector<uint64_t> random_tree(Random& r, int count) {
  std::vector<uint64_t> paths;
  for (int t = 0; t < count; t++) {
    const int parent = r.within(-1, t - 1);
    paths.push_back((parent < 0 ? 0 : paths[size_t(parent)]) | uint64_t(1) << t);
  }
  return paths;
}

void attention(Check& check, Random& r, int effort) {
  for (int i = 0; i < 240 * effort; i++) {
    const int D = 16 * r.within(1, 6), n_kv = r.within(1, 2), group = r.within(1, 4), count = r.one_in(8) ? 64 : r.within(1, 10);
    const int cached = r.one_in(4) ? 0 : r.below(r.one_in(4) ? 300 : 80), keys = cached + count;
    const int n = std::min(i % kQueries + 1, count * group), first = r.below(count * group - n + 1), kv_head = r.below(n_kv);
    const int window = r.one_in(2) ? 0 : r.within(1, keys + 3);
    const bool tree = r.one_in(2);
    const Floats q_kind = r.one_in(6) ? Floats::extreme : Floats::plain;
    const std::vector<uint64_t> paths = random_tree(r, count);
    const int blocks = (keys + kBlock - 1) / kBlock;
    std::vector<int32_t> ids(static_cast<size_t>(blocks));
    for (int b = 0; b < blocks; b++) ids[size_t(b)] = b;
    for (int b = blocks - 1; b > 0; b--) std::swap(ids[size_t(b)], ids[size_t(r.below(b + 1))]);
    Array<uint16_t> k(size_t(blocks * n_kv * D * kBlock)), v(k.size());
    const bool extreme = r.one_in(5);
    for (Array<uint16_t>* cache : {&k, &v})
      for (uint16_t& h : *cache) h = extreme ? one_half(r, true) : float_to_half(r.bell());
    const Array<float> q = floats(r, size_t(count * n_kv * group * D), q_kind), out(q.size());
    const Array<float> scratch(size_t(n * (keys + 80)));
    const AttnSpec s{n_kv * group, n_kv, D, window, r.one_in(5) ? 4.f : 1.f / std::sqrt(float(D))};
    const AttnRow row{cached, count, tree ? paths.data() : nullptr, ids.data()};
    check(text("attention n=%d", n),
          text("D %d, heads %d/%d, cached %d, count %d, first %d, window %d, %s, floats %d/%d", D, n_kv * group, n_kv, cached,
               count, first, window, tree ? "tree" : "chain", int(q_kind), extreme),
          [&](const KernelTable& t, Array<float>& o) {
            Array<float> work(scratch);
            t.attention(s, row, {k.data(), v.data(), n_kv, D}, kv_head, first, n, q.data(), o.data(), work.data());
          }, out);
  }
}

std::vector<Set> sets_to_check() {
  std::vector<Set> sets;
  for (const char* name : {"avx2", "avxvnni", "avx512"}) {
    const char* why = nullptr;
    if (const KernelTable* table = select_kernels(name, &why)) sets.push_back({name, table});
    else std::printf("%s on this processor: %s\n", name, why);
  }
  sets.push_back({"avx2 emulated", emulated_avx2()});
  sets.push_back({"avxvnni emulated", emulated_avxvnni()});
  sets.push_back({"avx512 emulated", emulated_avx512()});
  return sets;
}

}  // namespace

// check_sets [seed [effort]]
int main(int argc, char** argv) {
  Random r(argc > 1 ? uint32_t(std::strtoul(argv[1], nullptr, 10)) : 1u);
  const int effort = argc > 2 ? std::atoi(argv[2]) : 1;
  Check check(sets_to_check());
  linear(check, r, effort);
  pointwise(check, r, effort);
  rope(check, r, effort);
  attention(check, r, effort);
  check.report();
}
