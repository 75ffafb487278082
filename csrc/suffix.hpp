// Finding earlier occurrences of a context, in a request's own text and in a store shared by requests.
//
// Both are indexed by hash chains, as in LZ77 compressors: for each of a few context lengths a table leads from the
// hash of a context to its latest occurrence, and each occurrence leads to the one before it. Hashes only find
// candidates; tokens are compared before anything is believed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace nanobind {
class module_;
}

namespace forerun {

using Token = std::int32_t;
using Slot = std::uint32_t;

inline constexpr int kMaxMatch = 32;            // matches are measured up to this many tokens
inline constexpr std::size_t kMaxLevels = 32;  // context lengths of one index

// Hashes of the contexts that end at `last`, for ascending lengths. `have` tokens lie at and before `last`; returns how
// many of the lengths fit into them.
int context_hashes(const Token* last, std::size_t have, const std::vector<int>& lengths, std::uint64_t salt,
                   std::uint32_t* out);

// One growing text. Appending and taking back cost a few steps per token and length.
class SuffixText {
 public:
  explicit SuffixText(std::vector<int> lengths);

  void append(const Token* tokens, std::size_t n);
  void truncate(std::size_t n);
  std::size_t size() const { return tokens_.size(); }
  std::size_t bytes() const;
  const Token* data() const { return tokens_.data(); }
  const std::vector<int>& lengths() const { return lengths_; }

  // Latest position before `position` whose context has the same hash at length number `level`; -1: none.
  std::int32_t earlier(std::size_t position, std::size_t level) const {
    return links_[position * lengths_.size() + level];
  }
  // Tokens, at most kMaxMatch, that agree when the text is read backwards from `position` and from its end.
  int match(std::size_t position) const;

 private:
  void rebuild(std::size_t buckets);
  void link(std::size_t position);

  std::vector<int> lengths_;
  std::vector<Token> tokens_;
  std::vector<std::int32_t> links_;  // [position][level]
  std::vector<std::int32_t> heads_;  // [level][bucket]
  std::size_t buckets_ = 0;
};

// Finished texts under a memory cap, the least recently used one leaving first. Texts lie in pages; a slot is a place for
// one token, slot 0 and page 0 mean none. All memory is reserved at the first text and never grows.
class SuffixStore {
 public:
  static constexpr Slot kPage = 64;
  static constexpr int kKnown = 64;  // a beginning is known when at least this many tokens of it are in the store

  SuffixStore(std::vector<int> lengths, std::size_t max_bytes);

  void insert(const std::string& scope, const Token* tokens, std::size_t n);
  void clear();
  std::vector<std::vector<Token>> documents(const std::string& scope) const;  // oldest insertion first

  std::size_t bytes() const;
  std::size_t used_bytes() const { return used_pages_ * page_bytes(); }
  std::size_t max_bytes() const { return max_bytes_; }
  std::size_t tokens() const { return n_tokens_; }
  std::size_t n_documents() const { return n_documents_; }
  std::size_t n_scopes() const { return scopes_.size(); }
  std::size_t evicted() const { return evicted_; }
  void check() const;  // throws std::logic_error when the books disagree

  const std::vector<int>& lengths() const { return lengths_; }
  int scope_of(const std::string& scope) const;  // -1: no text of it here
  std::uint64_t salt(int scope) const;
  Slot latest(std::size_t level, std::uint32_t hash) const { return heads_[level * n_slots_ + bucket(hash)]; }
  Slot earlier(Slot slot, std::size_t level) const { return links_[slot * lengths_.size() + level].older; }
  Token token(Slot slot) const { return tokens_[slot]; }
  Slot next(Slot slot) const {
    if ((slot + 1) % kPage != 0 && slot % kPage + 1 < pages_[slot / kPage].count) return slot + 1;
    return pages_[slot / kPage].next * kPage;
  }
  Slot previous(Slot slot) const {
    if (slot % kPage != 0) return slot - 1;
    const Slot page = pages_[slot / kPage].previous;
    return page == 0 ? 0 : page * kPage + pages_[page].count - 1;
  }
  int scope_at(Slot slot) const { return pages_[pages_[slot / kPage].first].scope; }
  void touch(Slot slot);
  // As SuffixText::match, of the text that ends at `slot` with the context that ends at `last`.
  int match(Slot slot, const Token* last, std::size_t have) const;

 private:
  struct Page {
    Slot next, previous, first, count;
    // Only of a text's first page:
    Slot newer, older;  // by use
    std::int32_t scope;
    std::uint32_t length;
    std::uint64_t stamp;
  };
  struct Link {  // in a chain; both ways, so that a text can leave from the middle
    Slot older, newer;
  };
  struct Scope {
    int id;
    std::size_t texts;
  };
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  template <class T>
  using Array = std::unique_ptr<T[], Free>;

  static constexpr std::size_t kScopeBytes = 256;  // bound of a scope's record; every scope has a page
  std::size_t page_bytes() const;
  // Where the chains of tokens [from, to) begin, and how many levels each has. Neighbours in a chain lie anywhere in
  // memory, so that texts come and go in small batches, whose places are fetched together.
  static constexpr std::size_t kBatch = 32;
  struct Batch {
    std::size_t levels[kBatch];
    Slot head[kBatch][kMaxLevels];
  };
  void locate(int scope, const Token* tokens, std::size_t from, std::size_t to, Batch& batch) const;
  std::size_t bucket(std::uint32_t hash) const { return (std::uint64_t(hash) * n_slots_) >> 32; }
  void reserve();
  void add(int scope, const Token* tokens, std::size_t n);
  void evict(Slot first);
  void unlink_use(Slot first);
  void link_use(Slot first);
  std::size_t known_beginning(int scope, const Token* tokens, std::size_t n);
  std::vector<Token> read(Slot first) const;

  std::vector<int> lengths_;
  std::size_t max_bytes_;
  std::size_t n_pages_ = 0, n_slots_ = 0;
  std::size_t used_pages_ = 0, n_tokens_ = 0, n_documents_ = 0, evicted_ = 0;
  std::uint64_t stamp_ = 0;
  Slot free_ = 0, untouched_ = 1;  // list of pages given back; pages from here on were never used
  Slot newest_ = 0, oldest_ = 0;   // by use
  Array<Token> tokens_;
  Array<Link> links_;  // [slot][level]
  Array<Slot> heads_;  // [level][bucket]
  Array<Page> pages_;
  std::map<std::string, Scope> scopes_;
  std::vector<std::string> names_;  // by scope id
  std::vector<int> free_ids_;
};

// What a proposal is judged by. escape[i]: how many occurrences of a context of lengths[i] tokens it takes to believe a
// continuation as much as not.
struct SuffixRule {
  std::vector<double> escape;
  double shared_weight;  // an occurrence in the store counts as this many in the own text
  double min_survival;   // nodes less likely to be reached and accepted are not proposed
  int max_depth;
  int own_limit, shared_limit;  // occurrences looked at
};

struct SuffixTree {
  std::vector<Token> tokens;
  std::vector<int> parents;
  std::vector<double> confidence;
};

// The most probable continuations, best first. `store` may be null; `doubt` multiplies every escape.
SuffixTree propose_suffix(const SuffixText& text, SuffixStore* store, const std::string& scope, int budget,
                          const SuffixRule& rule, double doubt);

void register_suffix(nanobind::module_& m);

}  // namespace forerun
