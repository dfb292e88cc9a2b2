// Keys of steps: 64-bit words, compared one by one. Each begins with a tag, so that no two kinds of
// arguments are ever taken for one another.
#pragma once
#include <c10/util/SmallVector.h>

#include <cstdint>

namespace lazygt {
enum Tag : uint8_t {
  OP = 1,   // which one
  TENSOR,   // a value of the trace: its number
  UNDEFINED,
  NONE,
  DEFAULT,  // what the schema says
  PARAM,    // a number that the run is given: its kind
  POSITION,  // so, the place of something
  INT,
  WIDE_INT,  // and the number in a word of its own
  DOUBLE,    // its bits in a word of its own
  COMPLEX,   // its bits in two words
  BOOL,
  STRING,
  DEVICE,
  LIST,   // so many items follow
  INPUT,  // a value enters: its meta, and how it is stored
  BLANK,  // torch.empty's memory is needed after all
  WRITE_BACK,
};

constexpr uint64_t PAYLOAD = 0x00ffffffffffffffull;
inline uint64_t word(Tag tag, uint64_t payload) { return uint64_t(tag) << 56 | (payload & PAYLOAD); }
inline Tag tag_of(uint64_t word) { return Tag(word >> 56); }
inline uint64_t tensor_word(int32_t index) { return word(TENSOR, uint32_t(index)); }

struct Words : c10::SmallVector<uint64_t, 64> {
  void put(uint64_t w) { push_back(w); }
  void put_int(int64_t number) {
    if (number < (1ll << 54) && number > -(1ll << 54)) {
      push_back(word(INT, uint64_t(number)));
    } else {
      push_back(word(WIDE_INT, 0));
      push_back(uint64_t(number));
    }
  }
};
}  // namespace lazygt
