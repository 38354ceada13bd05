#include "artifact/sha256.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

namespace keepdim {

namespace {

constexpr uint32_t kRound[64] = {0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
                                 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
                                 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
                                 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
                                 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
                                 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
                                 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
                                 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t rotate(uint32_t x, int count) { return (x >> count) | (x << (32 - count)); }

uint32_t big_endian(const uint8_t* p) {
  return static_cast<uint32_t>(p[0]) << 24 | static_cast<uint32_t>(p[1]) << 16 | static_cast<uint32_t>(p[2]) << 8 | p[3];
}

}  // namespace

void Sha256::block(const uint8_t* data) {
  uint32_t w[64];
  for (int i = 0; i < 16; ++i) w[i] = big_endian(data + 4 * i);
  for (int i = 16; i < 64; ++i) {
    const uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ (w[i - 15] >> 3);
    const uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (int i = 0; i < 64; ++i) {
    const uint32_t s1 = rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25);
    const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
    const uint32_t s0 = rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22);
    const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
  }
  const uint32_t added[8] = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < 8; ++i) state_[i] += added[i];
}

Sha256& Sha256::update(const void* data, size_t bytes) {
  const auto* from = static_cast<const uint8_t*>(data);
  const size_t held = bytes_ % 64;
  bytes_ += bytes;
  if (held) {
    const size_t more = std::min(bytes, 64 - held);
    std::memcpy(rest_.data() + held, from, more);
    if (held + more < 64) return *this;
    block(rest_.data());
    from += more, bytes -= more;
  }
  for (; bytes >= 64; from += 64, bytes -= 64) block(from);
  if (bytes) std::memcpy(rest_.data(), from, bytes);
  return *this;
}

std::array<uint8_t, 32> Sha256::digest() {
  const uint64_t bits = bytes_ * 8;
  const uint8_t one = 0x80, zero = 0;
  update(&one, 1);
  while (bytes_ % 64 != 56) update(&zero, 1);
  uint8_t length[8];
  for (int i = 0; i < 8; ++i) length[i] = static_cast<uint8_t>(bits >> (56 - 8 * i));
  update(length, 8);
  std::array<uint8_t, 32> out;
  for (size_t i = 0; i < 32; ++i) out[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
  return out;
}

std::string Sha256::hex() {
  static const char* const digits = "0123456789abcdef";
  std::string out;
  for (const uint8_t byte : digest()) {
    out += digits[byte >> 4];
    out += digits[byte & 15];
  }
  return out;
}

std::string file_sha256(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  std::vector<char> chunk(size_t{1} << 20);
  Sha256 sum;
  ssize_t got = -1;
  while (file >= 0 && ((got = read(file, chunk.data(), chunk.size())) > 0 || (got < 0 && errno == EINTR))) {
    if (got > 0) sum.update(chunk.data(), static_cast<size_t>(got));
  }
  const std::string why = std::strerror(errno);
  if (file >= 0) close(file);
  if (got < 0) fail(Code::invalid_argument, "[load] " + path + ": cannot be read (" + why + ").");
  return sum.hex();
}

}  // namespace keepdim
