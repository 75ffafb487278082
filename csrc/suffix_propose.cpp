#include "suffix.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace forerun {

namespace {

struct Occurrence {
  Token token;  // what follows here, once read
  int rank;     // order of preference: longer context, own text, later
  int match;
  bool own;
  std::int64_t cursor;  // position or slot of the next token to read
  Slot origin;
};

struct Child {
  double survival, confidence;
  int rank, parent, depth;
  Token token;
  int from, to;  // its occurrences
};

struct LessWorth {
  bool operator()(const Child& a, const Child& b) const {
    if (a.survival != b.survival) return a.survival < b.survival;
    return a.rank > b.rank;
  }
};

bool positive(double x) { return x > 0 && std::isfinite(x); }

constexpr std::size_t kClasses = 8;
constexpr int kStrangers = 64;  // occurrences of other contexts, brought by hash collisions, before a search gives up
constexpr double kNegligible = 0.02;  // what longer contexts leave open, to be worth a look at shorter ones
constexpr int kFollowed = 24;  // occurrences that decide what follows a node; the first node has them all

class Proposal {
 public:
  Proposal(const SuffixText& text, SuffixStore* store, const std::string& scope, const SuffixRule& rule,
           double doubt)
      : text_(text), store_(store), rule_(rule), lengths_(text.lengths()) {
    for (std::size_t c = 0; c < lengths_.size(); c++) escape_[c] = rule.escape[c] * doubt;
    if (store_ != nullptr && (scope_ = store_->scope_of(scope)) < 0) store_ = nullptr;
  }

  SuffixTree grow(int budget) {
    SuffixTree tree;
    if (text_.size() == 0) return tree;
    collect();
    expand(tree, -1, 0, 1.0, 0, int(found_.size()));
    while (!heap_.empty() && int(tree.tokens.size()) < budget) {
      std::pop_heap(heap_.begin(), heap_.end(), LessWorth());
      const Child child = heap_.back();
      heap_.pop_back();
      const int node = int(tree.tokens.size());
      tree.tokens.push_back(child.token);
      tree.parents.push_back(child.parent);
      tree.confidence.push_back(child.confidence);
      if (child.depth == 1)
        for (int i = child.from; i < child.to; i++)
          if (!found_[std::size_t(i)].own) store_->touch(found_[std::size_t(i)].origin);
      if (child.depth < rule_.max_depth && node + 1 < budget)
        expand(tree, node, child.depth, child.survival, child.from, child.to);
    }
    return tree;
  }

 private:
  // Occurrences of the longest contexts first; the search ends where shorter ones would hardly count.
  void collect() {
    const std::size_t n = text_.size();
    const Token* last = text_.data() + n - 1;
    std::uint32_t hashes[kMaxLevels];
    if (store_ != nullptr) context_hashes(last, n, lengths_, store_->salt(scope_), hashes);
    // Occurrences that the level above has taken cost a look, hash collisions count for themselves.
    int own_looks = 4 * rule_.own_limit, shared_looks = 4 * rule_.shared_limit;
    int own_strangers = kStrangers, shared_strangers = kStrangers;
    int own = 0, shared = 0;
    double left = 1.0;
    for (std::size_t l = lengths_.size(); l-- > 0 && left > kNegligible;) {
      if (n < std::size_t(lengths_[l])) continue;
      const int low = lengths_[l], high = l + 1 < lengths_.size() ? lengths_[l + 1] : kMaxMatch + 1;
      const std::size_t before = found_.size();
      for (std::int32_t p = text_.earlier(n - 1, l); p >= 0 && own < rule_.own_limit; p = text_.earlier(std::size_t(p), l)) {
        const int m = text_.match(std::size_t(p));
        int& looks = m < low ? own_strangers : own_looks;
        if (looks == 0) break;
        looks--;
        if (m < low || m >= high) continue;
        found_.push_back({0, int(found_.size()), m, true, p + 1, 0});
        own++;
      }
      Slot s = store_ == nullptr ? 0 : store_->latest(l, hashes[l]);
      for (; s != 0 && shared < rule_.shared_limit; s = store_->earlier(s, l)) {
        const int m = store_->scope_at(s) == scope_ ? store_->match(s, last, n) : 0;
        int& looks = m < low ? shared_strangers : shared_looks;
        if (looks == 0) break;
        looks--;
        const Slot follows = store_->next(s);
        if (m < low || m >= high || follows == 0) continue;
        found_.push_back({0, int(found_.size()), m, false, std::int64_t(follows), s});
        shared++;
      }
      if (found_.size() == before) continue;
      double count = 0;
      for (std::size_t i = before; i < found_.size(); i++) count += found_[i].own ? 1.0 : rule_.shared_weight;
      left *= escape_[l] / (count + escape_[l]);
    }
  }

  // The tokens that follow at a node, with the share of its occurrences [from, to) that each of them gets. Occurrences
  // of one token stay in order of rank.
  void expand(const SuffixTree& tree, int node, int depth, double survival, int from, int to) {
    int end = from;
    bool sorted = true;
    for (int i = from; i < to; i++) {
      Occurrence o = found_[std::size_t(i)];
      if (!read(o, tree, node, depth)) continue;
      sorted = sorted && (end == from || found_[std::size_t(end - 1)].token <= o.token);
      found_[std::size_t(end++)] = o;
    }
    if (end == from) return;
    if (!sorted)
      std::sort(found_.begin() + from, found_.begin() + end, [](const Occurrence& a, const Occurrence& b) {
        return a.token != b.token ? a.token < b.token : a.rank < b.rank;
      });

    // Each child's occurrences by length of the context that they share with the node.
    const std::size_t classes = lengths_.size();
    double total[kClasses] = {};
    int kinds[kClasses] = {};  // children that were seen after a context of this length or a longer one
    shares_.clear();
    for (int i = from; i < end;) {
      Share share{i, i, 0.0, 0.0, {}};
      std::size_t longest = 0;
      for (const Token token = found_[std::size_t(i)].token; i < end && found_[std::size_t(i)].token == token; i++) {
        const Occurrence& o = found_[std::size_t(i)];
        const std::size_t c = class_of(o.match + depth);
        share.weight[c] += o.own ? 1.0 : rule_.shared_weight;
        longest = std::max(longest, c);
      }
      share.to = i;
      for (std::size_t c = 0; c < classes; c++) {
        total[c] += share.weight[c];
        kinds[c] += c <= longest;
      }
      shares_.push_back(share);
    }
    // From the longest contexts to the shortest: each takes its part of what the longer ones left open.
    double left = 1.0, seen = 0.0;
    for (std::size_t c = classes; c-- > 0;) {
      for (Share& share : shares_) share.count += share.weight[c];
      if (total[c] == 0) continue;
      seen += total[c];
      const double escape = escape_[c] * kinds[c];
      for (Share& share : shares_) share.probability += left * (share.count / (seen + escape));
      left *= escape / (seen + escape);
    }
    for (const Share& share : shares_) {
      const double reached = survival * share.probability;
      if (reached < rule_.min_survival) continue;
      const Occurrence& best = found_[std::size_t(share.from)];
      heap_.push_back({reached, share.probability, best.rank, node, depth + 1, best.token, share.from,
                       std::min(share.to, share.from + kFollowed)});
      std::push_heap(heap_.begin(), heap_.end(), LessWorth());
    }
  }

  // Own text goes on in the draft itself, as in LZ77: after "abab" the occurrence two tokens back proposes "abab...".
  bool read(Occurrence& o, const SuffixTree& tree, int node, int depth) const {
    if (!o.own) {
      if (o.cursor == 0) return false;
      o.token = store_->token(Slot(o.cursor));
      o.cursor = store_->next(Slot(o.cursor));
      return true;
    }
    const std::int64_t past = o.cursor - std::int64_t(text_.size());
    if (past < 0) {
      o.token = text_.data()[o.cursor];
    } else {
      for (std::int64_t up = depth - 1 - past; up > 0; up--) node = tree.parents[std::size_t(node)];
      o.token = tree.tokens[std::size_t(node)];
    }
    o.cursor++;
    return true;
  }

  std::size_t class_of(int match) const {
    std::size_t c = lengths_.size() - 1;
    while (c > 0 && lengths_[c] > match) c--;
    return c;
  }

  struct Share {  // of one child
    int from, to;
    double count, probability;
    double weight[kClasses];
  };

  const SuffixText& text_;
  SuffixStore* store_;
  int scope_ = -1;
  const SuffixRule& rule_;
  const std::vector<int>& lengths_;
  double escape_[kClasses];
  std::vector<Occurrence> found_;
  std::vector<Child> heap_;
  std::vector<Share> shares_;
};

}  // namespace

SuffixTree propose_suffix(const SuffixText& text, SuffixStore* store, const std::string& scope, int budget,
                          const SuffixRule& rule, double doubt) {
  if (text.lengths().size() > kClasses || rule.escape.size() != text.lengths().size())
    throw std::invalid_argument("proposals need one escape for each context length, 8 at most");
  if (store != nullptr && store->lengths() != text.lengths())
    throw std::invalid_argument("text and store index contexts of different lengths");
  if (!positive(doubt)) throw std::invalid_argument("doubt must be positive and finite");
  return Proposal(text, store, scope, rule, doubt).grow(budget);
}

// -- the Python face

namespace {

// Token ids of a list or tuple, without a copy of the objects.
class Ids {
 public:
  explicit Ids(nb::handle sequence) : items_(nb::steal(PySequence_Fast(sequence.ptr(), "tokens must be a sequence"))) {
    if (!items_.is_valid()) nb::raise_python_error();
  }
  std::size_t size() const { return std::size_t(PySequence_Fast_GET_SIZE(items_.ptr())); }
  std::vector<Token> from(std::size_t first) const {
    std::vector<Token> out;
    if (first >= size()) return out;
    out.reserve(size() - first);
    // An id's __index__ may change the list: neither its items nor its size are believed for longer than one id.
    for (std::size_t i = first; i < size(); i++) {
      const nb::object item = nb::borrow(PySequence_Fast_GET_ITEM(items_.ptr(), Py_ssize_t(i)));
      const long id = PyLong_AsLong(item.ptr());
      if (id == -1 && PyErr_Occurred()) nb::raise_python_error();
      if (id < 0 || id > INT32_MAX) throw std::invalid_argument("token ids must be from 0 to 2147483647, got " + std::to_string(id));
      out.push_back(Token(id));
    }
    return out;
  }

 private:
  nb::object items_;
};

std::string text_of(const nb::bytes& scope) { return {scope.c_str(), scope.size()}; }

// The text becomes `tokens`, of which it knows the beginning already.
void follow(SuffixText& text, nb::handle tokens) {
  const Ids ids(tokens);
  text.truncate(ids.size());
  const std::vector<Token> fresh = ids.from(text.size());
  text.append(fresh.data(), fresh.size());
}

template <class T>
nb::list list_of(const std::vector<T>& values) {
  nb::list out;
  for (const T& value : values) out.append(value);
  return out;
}

// Continuation of the latest earlier occurrence of the longest indexed context, and how long a context agrees there.
std::pair<nb::list, int> latest(const SuffixText& text, int most) {
  nb::list out;
  const std::size_t n = text.size();
  int strangers = kStrangers;
  for (std::size_t l = text.lengths().size(); l-- > 0;) {
    if (n < std::size_t(text.lengths()[l])) continue;
    for (std::int32_t p = text.earlier(n - 1, l); p >= 0; p = text.earlier(std::size_t(p), l)) {
      const int match = text.match(std::size_t(p));
      if (match < text.lengths()[l]) {
        if (strangers-- == 0) return {out, 0};
        continue;
      }
      // Past the end of the text it repeats itself, as in LZ77.
      const std::size_t period = n - 1 - std::size_t(p);
      for (int i = 0; i < most; i++) out.append(text.data()[std::size_t(p) + 1 + std::size_t(i) % period]);
      return {out, match};
    }
  }
  return {out, 0};
}

}  // namespace

void register_suffix(nb::module_& m) {
  nb::class_<SuffixText>(m, "SuffixText", "A growing text, indexed by contexts of a few lengths.")
      .def(nb::init<std::vector<int>>(), "lengths"_a)
      .def("__len__", &SuffixText::size)
      .def_prop_ro("bytes", &SuffixText::bytes, "Memory of the text and its index.")
      .def("follow", &follow, "tokens"_a,
           "Become `tokens`: cut to their number if longer, append those that are missing. The beginning isn't compared.")
      .def("truncate", &SuffixText::truncate, "n_tokens"_a, "Forget the tokens from `n_tokens` on, if there are any.")
      .def("copy", [](const SuffixText& text) { return SuffixText(text); }, "The same text with an index of its own.")
      .def("latest", &latest, "most"_a,
           "(continuation of the latest earlier occurrence of the longest indexed context, tokens that agree before it).");

  nb::class_<SuffixRule>(m, "SuffixRule", "What a proposal is judged by.")
      .def("__init__", [](SuffixRule* self, std::vector<double> escape, double shared_weight, double min_survival,
                          int max_depth, int own_limit, int shared_limit) {
        for (const double e : escape)
          if (!positive(e)) throw std::invalid_argument("escapes must be positive and finite");
        if (!positive(shared_weight) || !positive(min_survival) || max_depth < 1 || own_limit < 1 || shared_limit < 1)
          throw std::invalid_argument("weights, thresholds and limits must be positive and finite");
        new (self) SuffixRule{std::move(escape), shared_weight, min_survival, max_depth, own_limit, shared_limit};
      }, "escape"_a, "shared_weight"_a, "min_survival"_a, "max_depth"_a, "own_limit"_a, "shared_limit"_a);

  nb::class_<SuffixStore>(m, "SuffixStore", "Finished texts by scope, under a memory cap; the least recently used one leaves first.")
      .def(nb::init<std::vector<int>, std::size_t>(), "lengths"_a, "max_bytes"_a)
      .def("insert", [](SuffixStore& store, const nb::bytes& scope, nb::handle tokens) {
        const std::vector<Token> ids = Ids(tokens).from(0);
        store.insert(text_of(scope), ids.data(), ids.size());
      }, "scope"_a, "tokens"_a)
      .def("clear", &SuffixStore::clear, "Forget all texts and give the memory back.")
      .def("documents", [](const SuffixStore& store, const nb::bytes& scope) {
        nb::list out;
        for (const auto& text : store.documents(text_of(scope))) out.append(list_of(text));
        return out;
      }, "scope"_a, "The texts of a scope as they are kept, in the order in which they came.")
      .def("check_integrity", &SuffixStore::check, "Raises RuntimeError where the books disagree.")
      .def_prop_ro("max_bytes", &SuffixStore::max_bytes)
      .def_prop_ro("bytes", &SuffixStore::bytes, "Memory reserved, 0 before the first text.")
      .def_prop_ro("used_bytes", &SuffixStore::used_bytes, "Memory of the pages that hold texts.")
      .def_prop_ro("n_tokens", &SuffixStore::tokens)
      .def_prop_ro("n_documents", &SuffixStore::n_documents)
      .def_prop_ro("n_scopes", &SuffixStore::n_scopes)
      .def_prop_ro("evicted", &SuffixStore::evicted, "Texts that had to leave, in all.");

  m.def("propose_suffix", [](const SuffixText& text, SuffixStore* store, const nb::bytes& scope, int budget,
                             const SuffixRule& rule, double doubt) {
    const SuffixTree tree = propose_suffix(text, store, text_of(scope), budget, rule, doubt);
    return nb::make_tuple(list_of(tree.tokens), list_of(tree.parents), list_of(tree.confidence));
  }, "text"_a, "store"_a.none(), "scope"_a, "budget"_a, "rule"_a, "doubt"_a = 1.0,
     "(tokens, parents, confidence) of the most probable continuations, best first.");
}

}  // namespace forerun
