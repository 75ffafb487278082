#include "suffix.hpp"

#include <algorithm>
#include <stdexcept>
#include <type_traits>
#include <utility>

namespace forerun {

int context_hashes(const Token* last, std::size_t have, const std::vector<int>& lengths, std::uint64_t salt,
                   std::uint32_t* out) {
  std::uint64_t h = salt;
  std::size_t read = 0;
  int level = 0;
  for (const int length : lengths) {
    if (std::size_t(length) > have) break;
    for (; read < std::size_t(length); read++) h = h * 0x9E3779B97F4A7C15u + std::uint32_t(*(last - read)) + 1;
    out[level++] = std::uint32_t(((h ^ (h >> 32)) * 0xD6E8FEB86659FD93u) >> 32);
  }
  return level;
}

namespace {

std::vector<int> checked(std::vector<int> lengths) {
  if (lengths.empty() || lengths.size() > kMaxLevels || lengths.front() < 1 || lengths.back() > kMaxMatch)
    throw std::invalid_argument("context lengths must be 1 to 32 numbers from 1 to 32");
  for (std::size_t i = 1; i < lengths.size(); i++)
    if (lengths[i] <= lengths[i - 1]) throw std::invalid_argument("context lengths must ascend");
  return lengths;
}

}  // namespace

// -- one text

SuffixText::SuffixText(std::vector<int> lengths) : lengths_(checked(std::move(lengths))) {}

std::size_t SuffixText::bytes() const {
  return tokens_.capacity() * sizeof(Token) + (links_.capacity() + heads_.capacity()) * sizeof(std::int32_t);
}

void SuffixText::link(std::size_t position) {
  std::uint32_t hashes[kMaxLevels];
  const int levels = context_hashes(&tokens_[position], position + 1, lengths_, 0, hashes);
  std::int32_t* links = &links_[position * lengths_.size()];
  for (int l = 0; l < levels; l++) {
    std::int32_t& head = heads_[std::size_t(l) * buckets_ + (hashes[l] & (buckets_ - 1))];
    links[l] = head;
    head = std::int32_t(position);
  }
  for (std::size_t l = std::size_t(levels); l < lengths_.size(); l++) links[l] = -1;
}

void SuffixText::rebuild(std::size_t buckets) {
  buckets_ = buckets;
  heads_.assign(lengths_.size() * buckets, -1);
  for (std::size_t i = 0; i < tokens_.size(); i++) link(i);
}

void SuffixText::append(const Token* tokens, std::size_t n) {
  const std::size_t old = tokens_.size();
  if (old + n > std::size_t(INT32_MAX)) throw std::length_error("a text may have 2147483647 tokens at most");
  tokens_.insert(tokens_.end(), tokens, tokens + n);
  links_.resize(tokens_.size() * lengths_.size());
  if (tokens_.size() > buckets_) {
    std::size_t buckets = 256;
    while (buckets < tokens_.size()) buckets *= 2;
    rebuild(buckets);
  } else {
    for (std::size_t i = old; i < tokens_.size(); i++) link(i);
  }
}

void SuffixText::truncate(std::size_t n) {
  if (n >= tokens_.size()) return;
  std::uint32_t hashes[kMaxLevels];
  for (std::size_t i = tokens_.size(); i-- > n;) {
    const int levels = context_hashes(&tokens_[i], i + 1, lengths_, 0, hashes);
    for (int l = 0; l < levels; l++)
      heads_[std::size_t(l) * buckets_ + (hashes[l] & (buckets_ - 1))] = earlier(i, std::size_t(l));
  }
  tokens_.resize(n);
  links_.resize(n * lengths_.size());
}

int SuffixText::match(std::size_t position) const {
  const Token* there = &tokens_[position];
  const Token* here = &tokens_.back();
  const int most = int(std::min<std::size_t>(kMaxMatch, position + 1));
  int m = 0;
  while (m < most && *(there - m) == *(here - m)) m++;
  return m;
}

// -- the shared store

SuffixStore::SuffixStore(std::vector<int> lengths, std::size_t max_bytes)
    : lengths_(checked(std::move(lengths))), max_bytes_(max_bytes) {
  n_pages_ = max_bytes / page_bytes();
  n_pages_ = std::min(n_pages_, (std::size_t(1) << 32) / kPage / lengths_.size() - 1);  // so that indices fit 32 bits
  n_slots_ = n_pages_ * kPage;
  if (n_pages_ < 4)
    throw std::invalid_argument("a store needs at least " + std::to_string(4 * page_bytes()) + " bytes");
}

std::size_t SuffixStore::page_bytes() const {
  return kPage * (sizeof(Token) + 3 * lengths_.size() * sizeof(Slot)) + sizeof(Page) + kScopeBytes;
}

std::size_t SuffixStore::bytes() const { return pages_ ? n_pages_ * page_bytes() : 0; }

void SuffixStore::reserve() {
  // Zeroed memory of this size comes from the system untouched: what isn't used yet takes no physical memory.
  const auto take = [](auto& array, std::size_t n) {
    using T = std::remove_reference_t<decltype(array[0])>;
    array.reset(static_cast<T*>(std::calloc(n, sizeof(T))));
    if (!array) throw std::bad_alloc();
  };
  take(tokens_, n_slots_);
  take(links_, n_slots_ * lengths_.size());
  take(heads_, n_slots_ * lengths_.size());
  take(pages_, n_pages_);
}

void SuffixStore::clear() {
  tokens_.reset();
  links_.reset();
  heads_.reset();
  pages_.reset();
  scopes_.clear();
  names_.clear();
  free_ids_.clear();
  used_pages_ = n_tokens_ = n_documents_ = 0;
  free_ = newest_ = oldest_ = 0;
  untouched_ = 1;
}

int SuffixStore::scope_of(const std::string& scope) const {
  const auto found = scopes_.find(scope);
  return found == scopes_.end() ? -1 : found->second.id;
}

std::uint64_t SuffixStore::salt(int scope) const { return std::uint64_t(scope + 1) * 0xC2B2AE3D27D4EB4Fu; }

int SuffixStore::match(Slot slot, const Token* last, std::size_t have) const {
  const int most = int(std::min<std::size_t>(kMaxMatch, have));
  int m = 0;
  for (; m < most && slot != 0 && tokens_[slot] == *(last - m); m++) slot = previous(slot);
  return m;
}

void SuffixStore::unlink_use(Slot first) {
  Page& page = pages_[first];
  (page.newer ? pages_[page.newer].older : newest_) = page.older;
  (page.older ? pages_[page.older].newer : oldest_) = page.newer;
}

void SuffixStore::link_use(Slot first) {
  Page& page = pages_[first];
  page.newer = 0;
  page.older = newest_;
  (newest_ ? pages_[newest_].newer : oldest_) = first;
  newest_ = first;
}

void SuffixStore::touch(Slot slot) {
  const Slot first = pages_[slot / kPage].first;
  if (first == newest_) return;
  unlink_use(first);
  link_use(first);
}

std::vector<Token> SuffixStore::read(Slot first) const {
  std::vector<Token> tokens;
  tokens.reserve(pages_[first].length);
  for (Slot page = first; page != 0; page = pages_[page].next)
    tokens.insert(tokens.end(), &tokens_[page * kPage], &tokens_[page * kPage] + pages_[page].count);
  return tokens;
}

void SuffixStore::locate(int scope, const Token* tokens, std::size_t from, std::size_t to, Batch& batch) const {
  std::uint32_t hashes[kMaxLevels];
  for (std::size_t i = from; i < to; i++) {
    const std::size_t levels = std::size_t(context_hashes(tokens + i, i + 1, lengths_, salt(scope), hashes));
    batch.levels[i - from] = levels;
    for (std::size_t l = 0; l < levels; l++) {
      const Slot head = Slot(l * n_slots_ + bucket(hashes[l]));
      batch.head[i - from][l] = head;
      __builtin_prefetch(&heads_[head], 1);
    }
  }
}

void SuffixStore::evict(Slot first) {
  const std::vector<Token> tokens = read(first);
  const std::size_t L = lengths_.size(), n = tokens.size();
  const int scope = pages_[first].scope;
  Batch batch;
  Slot slot = first * kPage;
  for (std::size_t from = 0; from < n; from += kBatch) {
    const std::size_t count = std::min(kBatch, n - from);
    locate(scope, tokens.data(), from, from + count, batch);
    Slot ahead = slot;
    for (std::size_t i = 0; i < count; i++, ahead = next(ahead))
      for (std::size_t l = 0; l < batch.levels[i]; l++) {
        const Link link = links_[ahead * L + l];
        __builtin_prefetch(&links_[link.older * L + l], 1);
        __builtin_prefetch(&links_[link.newer * L + l], 1);
      }
    for (std::size_t i = 0; i < count; i++, slot = next(slot))
      for (std::size_t l = 0; l < batch.levels[i]; l++) {
        const Link link = links_[slot * L + l];
        (link.newer ? links_[link.newer * L + l].older : heads_[batch.head[i][l]]) = link.older;
        if (link.older) links_[link.older * L + l].newer = link.newer;
      }
  }
  unlink_use(first);
  n_tokens_ -= tokens.size();
  n_documents_--;
  evicted_++;
  for (Slot page = first; page != 0;) {
    const Slot after = pages_[page].next;
    pages_[page].next = free_;
    free_ = page;
    used_pages_--;
    page = after;
  }
  const auto record = scopes_.find(names_[std::size_t(scope)]);
  if (--record->second.texts == 0) {
    free_ids_.push_back(scope);
    names_[std::size_t(scope)].clear();
    scopes_.erase(record);
  }
}

// How many first tokens lie in texts of this scope already, in long stretches. The same instructions before every
// request and a conversation that comes back longer each time are then kept once. Cut texts overlap by the longest
// context, so that what follows is found as before.
std::size_t SuffixStore::known_beginning(int scope, const Token* tokens, std::size_t n) {
  const std::size_t level = lengths_.size() - 1, length = std::size_t(lengths_.back());
  std::uint32_t hashes[kMaxLevels];
  std::size_t known = 0;
  while (n - known >= std::size_t(kKnown)) {
    const Token* from = tokens + known;
    context_hashes(from + length - 1, length, lengths_, salt(scope), hashes);
    std::size_t best = 0;
    Slot where = 0;
    int looks = kKnown;
    for (Slot end = latest(level, hashes[level]); end != 0 && looks-- > 0; end = earlier(end, level)) {
      if (scope_at(end) != scope || match(end, from + length - 1, length) < int(length)) continue;
      std::size_t same = length;
      for (Slot slot = next(end); slot != 0 && known + same < n && tokens_[slot] == from[same]; slot = next(slot)) same++;
      if (same > best) best = same, where = end;
    }
    if (best < std::size_t(kKnown)) break;
    touch(where);
    if (known + best == n) return n;
    known += best - length;
  }
  return known;
}

void SuffixStore::insert(const std::string& scope, const Token* tokens, std::size_t n) {
  const int id = scope_of(scope);
  if (id >= 0) {
    const std::size_t known = known_beginning(id, tokens, n);
    tokens += known;
    n -= known;
  }
  if (n < 2) return;  // nothing follows anything
  if (!pages_) reserve();
  const std::size_t most = (n_pages_ - 1) * kPage;
  if (n > most) tokens += n - most, n = most;
  const std::size_t need = (n + kPage - 1) / kPage;
  while (n_pages_ - 1 - used_pages_ < need) evict(oldest_);

  auto [record, fresh] = scopes_.try_emplace(scope);
  if (fresh) {
    int new_id = int(names_.size());
    if (free_ids_.empty()) {
      names_.emplace_back();
    } else {
      new_id = free_ids_.back();
      free_ids_.pop_back();
    }
    names_[std::size_t(new_id)] = scope;
    record->second = {new_id, 0};
  }
  record->second.texts++;
  add(record->second.id, tokens, n);
}

void SuffixStore::add(int scope, const Token* tokens, std::size_t n) {
  const std::size_t L = lengths_.size();
  Batch batch;
  Slot first = 0, last = 0;
  for (std::size_t i = 0; i < n; i++) {
    if (i % kPage == 0) {
      Slot page = free_;
      if (page != 0) free_ = pages_[page].next;
      else page = untouched_++;
      used_pages_++;
      if (first == 0) first = page;
      pages_[page] = {};
      pages_[page].previous = last;
      pages_[page].first = first;
      if (last != 0) pages_[last].next = page;
      last = page;
    }
    const std::size_t at = i % kBatch;
    if (at == 0) {
      const std::size_t count = std::min(kBatch, n - i);
      locate(scope, tokens, i, i + count, batch);
      for (std::size_t j = 0; j < count; j++)
        for (std::size_t l = 0; l < batch.levels[j]; l++)
          __builtin_prefetch(&links_[heads_[batch.head[j][l]] * L + l], 1);
    }
    const Slot slot = last * kPage + Slot(i % kPage);
    pages_[last].count++;
    tokens_[slot] = tokens[i];
    for (std::size_t l = 0; l < batch.levels[at]; l++) {
      Slot& head = heads_[batch.head[at][l]];
      links_[slot * L + l] = {head, 0};
      if (head) links_[head * L + l].newer = slot;
      head = slot;
    }
  }
  pages_[first].scope = scope;
  pages_[first].length = std::uint32_t(n);
  pages_[first].stamp = ++stamp_;
  link_use(first);
  n_tokens_ += n;
  n_documents_++;
}

std::vector<std::vector<Token>> SuffixStore::documents(const std::string& scope) const {
  const int id = scope_of(scope);
  std::vector<std::pair<std::uint64_t, Slot>> order;
  for (Slot first = newest_; first != 0; first = pages_[first].older)
    if (pages_[first].scope == id) order.emplace_back(pages_[first].stamp, first);
  std::sort(order.begin(), order.end());
  std::vector<std::vector<Token>> out;
  for (const auto& [stamp, first] : order) out.push_back(read(first));
  return out;
}

void SuffixStore::check() const {
  const auto need = [](bool ok, const char* what) {
    if (!ok) throw std::logic_error(std::string("the shared store is damaged: ") + what);
  };
  if (!pages_) return need(n_tokens_ == 0 && used_pages_ == 0 && scopes_.empty(), "texts without memory");
  const std::size_t L = lengths_.size();
  std::size_t pages = 0, tokens = 0, texts = 0, free = 0, counted = 0;
  std::uint32_t hashes[kMaxLevels];
  for (Slot first = newest_; first != 0; first = pages_[first].older, texts++) {
    need(pages_[first].first == first, "a page in use by two texts");
    need((pages_[first].older ? pages_[pages_[first].older].newer : first) == first, "order of use");
    for (Slot page = first; page != 0; page = pages_[page].next, pages++) need(pages_[page].first == first, "page lists");
    const std::vector<Token> text = read(first);
    need(text.size() == pages_[first].length, "length of a text");
    tokens += text.size();
    Slot slot = first * kPage, before = 0;
    for (std::size_t i = 0; i < text.size(); i++, before = slot, slot = next(slot)) {
      need(previous(slot) == before, "order of slots");
      const int levels = context_hashes(&text[i], i + 1, lengths_, salt(pages_[first].scope), hashes);
      for (std::size_t l = 0; l < std::size_t(levels); l++) {
        const Link link = links_[slot * L + l];
        need((link.newer ? earlier(link.newer, l) : latest(l, hashes[l])) == slot, "a chain");
        need(link.older == 0 || links_[link.older * L + l].newer == slot, "a chain");
      }
    }
    need(slot == 0, "end of a text");
  }
  for (Slot page = free_; page != 0; page = pages_[page].next) free++;
  for (const auto& [name, scope] : scopes_) {
    need(names_[std::size_t(scope.id)] == name && scope.texts > 0, "scopes");
    counted += scope.texts;
  }
  need(pages == used_pages_ && pages + free + 1 == untouched_ && untouched_ <= n_pages_, "number of pages");
  need(tokens == n_tokens_ && texts == n_documents_ && counted == texts, "counts");
}

}  // namespace forerun
