// The Python face of the kernels. Shapes and dtypes are checked in forerun/ops before they arrive here; what could
// corrupt memory is checked here again.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <nanobind/stl/tuple.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "repack.hpp"
#include "sample.hpp"
#include "suffix.hpp"
#include "tape.hpp"
#include "verify.hpp"

namespace nb = nanobind;
using namespace forerun;
using nb::literals::operator""_a;

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints2 = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Masks = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Flags = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using IntsOut = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Type type_of(int id) {
  if (block_size(Type(id)).values == 0) throw std::invalid_argument("unsupported tensor type " + std::to_string(id));
  return Type(id);
}

template <class T>
nb::ndarray<nb::numpy, T> own(Aligned<T>&& memory, std::vector<size_t> shape) {
  auto* kept = new Aligned<T>(std::move(memory));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<Aligned<T>*>(p); });
  return nb::ndarray<nb::numpy, T>(kept->data(), shape.size(), shape.data(), owner);
}

void need(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

// A tape and the arrays that its operations point into.
struct PyTape {
  Tape tape;
  std::vector<nb::object> kept;
  PyTape(int tokens, int outputs, int threads, const KernelTable* k) : tape(tokens, outputs, threads, k) {}
  PyTape(const PyTape&) = delete;
};

double read_bandwidth(Bytes data, int threads, int repeats) {
  // Bytes per second of the best pass: what a kernel that did nothing but read could reach.
  const auto* p = data.data();
  const size_t n = data.size() / 64 * 64;
  double best = 0;
  std::atomic<uint64_t> sink{0};
  nb::gil_scoped_release release;
  for (int r = 0; r < repeats; r++) {
    const auto start = std::chrono::steady_clock::now();
    run_team(threads, [&](int member, Team& team) {
      const size_t from = n / 64 * size_t(member) / size_t(team.size()) * 64;
      const size_t to = n / 64 * size_t(member + 1) / size_t(team.size()) * 64;
      uint64_t sums[8] = {};
      for (size_t i = from; i < to; i += 64) {
        uint64_t v[8];
        std::memcpy(v, p + i, 64);
        for (int j = 0; j < 8; j++) sums[j] += v[j];
      }
      for (uint64_t x : sums) sink += x;
    });
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    best = std::max(best, double(n) / seconds);
  }
  return best;
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Native kernels of Forerun; use forerun.ops.";

  register_sample(m);
  register_suffix(m);
  register_verify(m);
  m.def("physical_cores", &physical_cores);
  m.def("instruction_set", [](const std::string& name) {
    const char* why = "";
    const KernelTable* k = select_kernels(name.c_str(), &why);
    if (k == nullptr) throw std::invalid_argument(why);
    return std::string(k->name);
  }, "name"_a);
  m.def("read_bandwidth", &read_bandwidth, "data"_a, "threads"_a, "repeats"_a);
  m.def("packed_bytes", [](int type, int N, int K) {
    return packed_tile_bytes(type_of(type), K) * size_t(packed_tiles(N));
  }, "type"_a, "N"_a, "K"_a);
  m.def("pack", [](int id, Bytes src, int N, int K, nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> out,
                   int threads) {
    const Type type = type_of(id);
    need(N > 0 && K > 0 && K % block_size(type).values == 0 && K % 4 == 0, "pack: bad shape");
    need(src.size() == row_bytes(type, K) * size_t(N), "pack: source size");
    const size_t stride = packed_tile_bytes(type, K);
    need(out.size() == stride * size_t(packed_tiles(N)), "pack: output size");
    nb::gil_scoped_release release;
    std::atomic<int> next{0};
    run_team(threads, [&](int, Team&) {
      for (int t; (t = next.fetch_add(1)) < packed_tiles(N);)
        pack_tile(type, src.data(), N, K, t, out.data() + size_t(t) * stride);
    });
  }, "type"_a, "src"_a, "N"_a, "K"_a, "out"_a, "threads"_a);
  m.def("dequantize", [](int id, Bytes src, int N, int K) {
    const Type type = type_of(id);
    need(N > 0 && K > 0 && K % block_size(type).values == 0 && src.size() == row_bytes(type, K) * size_t(N), "dequantize: shape");
    Aligned<float> out(size_t(N) * size_t(K));
    for (int n = 0; n < N; n++)
      dequantize_row(type, src.data() + size_t(n) * row_bytes(type, K), K, out.data() + size_t(n) * size_t(K));
    return own(std::move(out), {size_t(N), size_t(K)});
  }, "type"_a, "src"_a, "N"_a, "K"_a);

  nb::class_<KvCache>(m, "KvCache")
      .def(nb::init<int, int, int, int>(), "layers"_a, "blocks"_a, "n_kv"_a, "head_dim"_a)
      .def_prop_ro("bytes", &KvCache::bytes)
      .def_prop_ro("blocks", &KvCache::blocks)
      .def("copy_block", &KvCache::copy_block, "source"_a, "target"_a)
      .def("move_slot", &KvCache::move_slot);

  nb::class_<PyTape>(m, "Tape")
      .def("__init__", [](PyTape* self, int tokens, int outputs, int threads, const std::string& isa) {
        const char* why = "";
        const KernelTable* k = select_kernels(isa.c_str(), &why);
        if (k == nullptr) throw std::invalid_argument(why);
        new (self) PyTape(tokens, outputs, threads, k);
      }, "max_tokens"_a, "max_outputs"_a, "threads"_a, "isa"_a)
      .def_prop_ro("bytes", [](PyTape& t) { return t.tape.bytes(); })
      .def("buffer", [](PyTape& t, int width, bool outputs) {
        return t.tape.buffer(width, outputs ? Domain::Outputs : Domain::Tokens);
      }, "width"_a, "outputs"_a = false)
      .def("weight", [](PyTape& t, int id, int N, int K, Bytes packed) {
        const Type type = type_of(id);
        need(N > 0 && K > 0 && packed.size() == packed_tile_bytes(type, K) * size_t(packed_tiles(N)), "weight: size");
        t.kept.push_back(nb::cast(packed));
        return t.tape.weight(type, N, K, packed.data());
      }, "type"_a, "N"_a, "K"_a, "packed"_a)
      .def("vector", [](PyTape& t, Floats v) { return t.tape.vector(v.data(), int(v.size())); }, "values"_a)
      .def("embed", [](PyTape& t, int id, int N, int K, Bytes rows, float scale, int out) {
        const Type type = type_of(id);
        need(N > 0 && K > 0 && rows.size() == row_bytes(type, K) * size_t(N), "embed: size");
        t.kept.push_back(nb::cast(rows));
        t.tape.embed(type, N, K, rows.data(), scale, out);
      }, "type"_a, "N"_a, "K"_a, "rows"_a, "scale"_a, "out"_a)
      .def("rms_norm", [](PyTape& t, int in, int weight, float eps, int out) { t.tape.rms_norm(in, weight, eps, out); })
      .def("linear", [](PyTape& t, int in, const std::vector<std::tuple<int, int, int, bool>>& segments) {
        std::vector<Tape::Segment> list;
        for (const auto& [w, out, bias, add] : segments) list.push_back({w, out, bias, add});
        t.tape.linear(in, list);
      })
      .def("rope_store", [](PyTape& t, int q, int k, int v, int layer, int n_heads, int n_kv, int head_dim, int rotary_dims,
                            bool interleaved, int cos, int sin, int positions, int q_norm, int k_norm, float eps) {
        const auto vector = [&](int id) { return id < 0 ? nullptr : t.tape.vector_data(id); };
        t.tape.rope_store(q, k, v, layer, {n_heads, n_kv, head_dim, rotary_dims, interleaved, vector(cos), vector(sin),
                                           vector(q_norm), vector(k_norm), eps}, positions);
      })
      .def("attention", [](PyTape& t, int q, int out, int layer, int n_heads, int n_kv, int head_dim, int window, float scale) {
        t.tape.attention(q, out, layer, {n_heads, n_kv, head_dim, window, scale});
      })
      .def("gated", [](PyTape& t, int in, int gate, int up, bool gelu, int out) { t.tape.gated(in, gate, up, gelu, out); })
      .def("add", [](PyTape& t, int x, int y) { t.tape.add(x, y); })
      .def("gather", [](PyTape& t, int in, int out) { t.tape.gather(in, out); })
      .def("head", [](PyTape& t, int in, int weight) { t.tape.head(in, weight); })
      .def("run", [](PyTape& t, KvCache* kv, Ints tokens, Ints positions, Ints row_start, Ints cached, Flags is_tree,
                     Masks ancestors, Ints2 tables, Ints table_row, Ints output, Matrix logits, IntsOut argmax) {
        const size_t T = tokens.size(), R = cached.size();
        need(positions.size() == T && row_start.size() == R + 1 && is_tree.size() == R && ancestors.size() == T &&
             table_row.size() == R && argmax.size() == output.size(), "run: array lengths differ");
        const Step step{int(T), int(R), int(output.size()), int(logits.shape(0)),
                        int(tables.shape(0)), int(tables.shape(1)),
                        tokens.data(), positions.data(), row_start.data(), cached.data(), is_tree.data(),
                        ancestors.data(), tables.data(), table_row.data(), output.data(), logits.data(), argmax.data()};
        const auto start = std::chrono::steady_clock::now();
        {
          nb::gil_scoped_release release;
          t.tape.run(step, kv);
        }
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      }, "kv"_a.none(), "tokens"_a, "positions"_a, "row_start"_a, "cached"_a, "is_tree"_a, "ancestors"_a, "tables"_a,
         "table_row"_a, "output"_a, "logits"_a, "argmax"_a)
      .def("read", [](PyTape& t, int buffer, int rows) {
        const float* p = t.tape.rows(buffer, rows);
        Aligned<float> out(size_t(rows) * size_t(t.tape.width(buffer)));
        std::memcpy(out.data(), p, out.size() * 4);
        return own(std::move(out), {size_t(rows), size_t(t.tape.width(buffer))});
      })
      .def("write", [](PyTape& t, int buffer, nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu> x) {
        need(int(x.shape(1)) == t.tape.width(buffer), "write: width");
        std::memcpy(t.tape.rows(buffer, int(x.shape(0))), x.data(), x.size() * 4);
      })
      .def("profile", [](PyTape& t) {
        std::vector<double> seconds = t.tape.profile;
        t.tape.profile.assign(10, 0.0);
        return seconds;
      }, "Seconds by kind of operation since the last call (empty the first time, which turns profiling on).");
}
