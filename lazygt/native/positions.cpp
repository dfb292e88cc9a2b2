#include "positions.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <unordered_map>

namespace lazygt {
namespace {
// Reads a key from a word on.
struct Reader {
  const Words& key;
  size_t at;

  Tag tag() const { return at < key.size() ? Tag(key[at] >> 56) : DEFAULT; }
  bool tensors(int count) {
    for (; count > 0 && tag() == TENSOR; --count) ++at;
    return count == 0;
  }
  bool number(int64_t& to) {
    if (tag() == INT) {
      to = int64_t(key[at] << 8) >> 8;
      ++at;
      return true;
    }
    if (tag() != WIDE_INT) return false;
    to = int64_t(key[at + 1]);
    at += 2;
    return true;
  }
  // One that may be left out.
  bool optional(int64_t& to) {
    if (tag() != NONE && tag() != DEFAULT) return number(to);
    ++at;
    return true;
  }
  bool list(c10::SmallVector<int64_t, 8>& to) {
    if (tag() != LIST) return false;
    to.resize(size_t(key[at++] & PAYLOAD));
    for (int64_t& item : to) {
      if (!number(item)) return false;
    }
    return true;
  }
};

bool wrap(int64_t& number, int64_t size) {
  if (number < -size || number >= size) return false;
  if (number < 0) number += size;
  return true;
}

// Words [begin, end) of a key give way to numbers.
void replace(const Words& key, size_t begin, size_t end, c10::IntArrayRef numbers, Moved& to) {
  to.key.append(key.begin(), key.begin() + begin);
  to.key.append(numbers.size(), word(POSITION, 0));
  to.key.append(key.begin() + end, key.end());
  to.numbers.append(numbers.begin(), numbers.end());
}

// A dim, and an index in it.
void move_index(Reader from, c10::IntArrayRef sizes, Moved& to) {
  int64_t dim, index;
  if (!from.number(dim) || !wrap(dim, int64_t(sizes.size()))) return;
  size_t begin = from.at;
  if (sizes[dim] < 2 || !from.number(index) || !wrap(index, sizes[dim])) return;
  replace(from.key, begin, from.at, index, to);
}

void select(const Words& key, c10::IntArrayRef sizes, Moved& to) {
  Reader from{key, 1};
  if (from.tensors(1)) move_index(from, sizes, to);
}

void select_scatter(const Words& key, c10::IntArrayRef sizes, Moved& to) {
  Reader from{key, 1};
  if (from.tensors(2)) move_index(from, sizes, to);
}

void select_backward(const Words& key, c10::IntArrayRef, Moved& to) {
  Reader from{key, 1};
  c10::SmallVector<int64_t, 8> sizes;
  if (from.tensors(1) && from.list(sizes)) move_index(from, sizes, to);
}

int64_t clipped(int64_t index, int64_t size) {
  return std::clamp<int64_t>(index < 0 ? index + size : index, 0, size);
}

// As a narrow: a dim, where it begins, and its length.
void slice(const Words& key, c10::IntArrayRef sizes, Moved& to) {
  Reader from{key, 1};
  int64_t dim = 0, start = 0, end = INT64_MAX, step = 1;
  if (!from.tensors(1) || !from.optional(dim) || !from.optional(start) || !from.optional(end) ||
      !from.optional(step) || step != 1) {
    return;
  }
  int64_t place = dim;
  if (!wrap(place, int64_t(sizes.size()))) return;
  int64_t first = clipped(start, sizes[place]), length = clipped(end, sizes[place]) - first;
  if (length <= 0 || length == sizes[place]) return;
  to.key.append(key.begin(), key.begin() + 2);
  to.key.put_int(dim);
  to.key.put(word(POSITION, 0));
  to.key.put_int(length);
  to.numbers.push_back(first);
}

void narrow(const Words& key, c10::IntArrayRef, Moved& to) {
  Reader from{key, 1};
  int64_t dim, start;
  if (!from.tensors(1) || !from.number(dim)) return;
  size_t begin = from.at;
  if (from.number(start)) replace(key, begin, from.at, start, to);
}

void roll(const Words& key, c10::IntArrayRef, Moved& to) {
  Reader from{key, 1};
  c10::SmallVector<int64_t, 8> shifts;
  if (!from.tensors(1)) return;
  size_t begin = from.at + 1;
  if (from.list(shifts) && !shifts.empty()) replace(key, begin, from.at, shifts, to);
}
}  // namespace

MoveRule move_rule(const std::string& op) {
  static const auto* rules = new std::unordered_map<std::string, MoveRule>{
      {"aten.narrow.default", narrow},
      {"aten.roll.default", roll},
      {"aten.select.int", select},
      {"aten.select_backward.default", select_backward},
      {"aten.select_scatter.default", select_scatter},
      {"aten.slice.Tensor", slice},
  };
  auto rule = rules->find(op);
  TORCH_CHECK(rule != rules->end(), op, " has a position, and no rule here");
  return rule->second;
}
}  // namespace lazygt
