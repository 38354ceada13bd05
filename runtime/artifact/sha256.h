// SHA-256 (FIPS 180-4), to avoid a dependency for apps.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/error.h"

namespace keepdim {

class KEEPDIM_API Sha256 {
 public:
  Sha256& update(const void* data, size_t bytes);
  std::array<uint8_t, 32> digest();  // finalises
  std::string hex();                 // digest as 64 hex digits

 private:
  void block(const uint8_t* data);

  std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> rest_{};
  uint64_t bytes_ = 0;
};

// SHA-256 of a file as 64 hex digits; throws if it cannot be read.
KEEPDIM_API std::string file_sha256(const std::string& path);

}  // namespace keepdim
