// The little of msgpack that a run and its answer are written in.
#pragma once
#include <cstdint>
#include <cstring>
#include <string>

namespace lazygt {

// Reads what is there; whatever it does not know makes it fail, and from then on it gives nothing.
class Packed {
 public:
  Packed(const void* bytes, size_t size)
      : at_(static_cast<const uint8_t*>(bytes)), end_(at_ + size) {}

  bool fine() const { return fine_; }
  bool ended() const { return at_ == end_; }
  uint8_t peek() { return at_ < end_ ? *at_ : (fine_ = false, 0xc1); }

  bool nil() { return token(0xc0); }
  bool truth() { return token(0xc3); }
  bool falsehood() { return token(0xc2); }
  bool real() { return peek() == 0xcb; }

  size_t array() {
    uint8_t kind = byte();
    if ((kind & 0xf0) == 0x90) return kind & 0x0f;
    if (kind == 0xdc) return big(2);
    if (kind == 0xdd) return big(4);
    return fail();
  }
  // A number of at least 0.
  uint64_t count() {
    uint8_t kind = byte();
    if (kind < 0x80) return kind;
    if (kind >= 0xcc && kind <= 0xcf) return big(size_t(1) << (kind - 0xcc));
    return fail();
  }
  // A number below 0, where one is next.
  bool negative(int64_t& number) {
    uint8_t kind = peek();
    if (kind >= 0xe0) {
      number = int8_t(byte());
      return true;
    }
    if (kind < 0xd0 || kind > 0xd3) return false;
    byte();
    size_t size = size_t(1) << (kind - 0xd0);
    uint64_t bits = big(size);
    unsigned unused = 64 - 8 * unsigned(size);
    number = int64_t(bits << unused) >> unused;
    return true;
  }
  double number() {
    byte();
    uint64_t bits = big(8);
    double value;
    std::memcpy(&value, &bits, 8);
    return value;
  }
  // Some bytes; nullptr where there are not so many.
  const char* bytes(size_t& size) {
    uint8_t kind = byte();
    if (kind < 0xc4 || kind > 0xc6) return fail(), nullptr;
    size = big(size_t(1) << (kind - 0xc4));
    return skip(size);
  }
  // Passes what is written exactly so.
  bool exactly(const std::string& expected) {
    if (size_t(end_ - at_) < expected.size()) return false;
    if (std::memcmp(at_, expected.data(), expected.size()) != 0) return false;
    at_ += expected.size();
    return true;
  }

 private:
  size_t fail() {
    fine_ = false;
    at_ = end_;
    return 0;
  }
  uint8_t byte() { return at_ < end_ ? *at_++ : (fine_ = false, 0xc1); }
  bool token(uint8_t kind) {
    if (peek() != kind) return false;
    ++at_;
    return true;
  }
  uint64_t big(size_t size) {
    const char* from = skip(size);
    uint64_t value = 0;
    for (size_t i = 0; from && i < size; ++i) value = value << 8 | uint8_t(from[i]);
    return value;
  }
  const char* skip(size_t size) {
    if (size_t(end_ - at_) < size) return fail(), nullptr;
    at_ += size;
    return reinterpret_cast<const char*>(at_ - size);
  }

  const uint8_t *at_, *end_;
  bool fine_ = true;
};

// -- writing, as msgpack's own packer does: as short as it can be -----------------------------------

inline void pack_big(std::string& to, uint64_t bits, int bytes) {
  for (int shift = 8 * bytes - 8; shift >= 0; shift -= 8) to.push_back(char(bits >> shift));
}

// A number of at least 0.
inline void pack_count(std::string& to, uint64_t number) {
  if (number < 0x80) {
    to.push_back(char(number));
    return;
  }
  int power = number <= 0xff ? 0 : number <= 0xffff ? 1 : number <= 0xffffffff ? 2 : 3;
  to.push_back(char(0xcc + power));
  pack_big(to, number, 1 << power);
}

inline void pack_int(std::string& to, int64_t number) {
  if (number >= 0) return pack_count(to, uint64_t(number));
  if (number >= -32) {
    to.push_back(char(number));
    return;
  }
  int power = number >= INT8_MIN ? 0 : number >= INT16_MIN ? 1 : number >= INT32_MIN ? 2 : 3;
  to.push_back(char(0xd0 + power));
  pack_big(to, uint64_t(number), 1 << power);
}

inline void pack_real(std::string& to, double number) {
  uint64_t bits;
  std::memcpy(&bits, &number, 8);
  to.push_back(char(0xcb));
  pack_big(to, bits, 8);
}

inline void pack_truth(std::string& to, bool truth) { to.push_back(char(truth ? 0xc3 : 0xc2)); }
inline void pack_nil(std::string& to) { to.push_back(char(0xc0)); }

inline void pack_array(std::string& to, size_t size) {
  if (size < 16) {
    to.push_back(char(0x90 | size));
  } else {
    to.push_back(char(size <= 0xffff ? 0xdc : 0xdd));
    pack_big(to, size, size <= 0xffff ? 2 : 4);
  }
}

// At most 255 of them.
inline void pack_bytes(std::string& to, const std::string& bytes) {
  to.push_back(char(0xc4));
  to.push_back(char(bytes.size()));
  to += bytes;
}
}  // namespace lazygt
