// Ops whose position is given when they run: the native side of record/positions.py.
#pragma once
#include "words.h"

#include <c10/util/ArrayRef.h>

#include <string>

namespace lazygt {
// What metas in graphs show of every position.
constexpr int64_t SAMPLE = 1;

// How such an op is recorded.
struct Moved {
  Words key;  // of its step: as the op's, with a tag in the place of each number; empty: it can't be
  c10::SmallVector<int64_t, 4> numbers;  // the positions, counted from the front
};

// What an op's key is once its position is a number of the run; sizes are its first argument's.
using MoveRule = void (*)(const Words& key, c10::IntArrayRef sizes, Moved& to);
// The rule of an op that has a position.
MoveRule move_rule(const std::string& op);
}  // namespace lazygt
