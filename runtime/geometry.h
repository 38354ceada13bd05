// Where an output of one dim reads its input: convolutions, pools, padding, resampling. Numbers alone, the same for every
// engine; sizes may be any that a file has.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

namespace keepdim {

// A kernel on its way along one dim.
struct Slide {
  int64_t kernel, stride, padding, dilation;
};

// How many places it stops at; transposed, the fewest outputs that it makes of `in` places.
inline __int128 stops(const Slide& s, int64_t in, bool transposed = false) {
  const __int128 size = in, reach = static_cast<__int128>(s.dilation) * (s.kernel - 1) + 1;
  if (transposed) return (size - 1) * s.stride - 2 * s.padding + reach;
  return size + 2 * s.padding < reach ? 0 : (size + 2 * s.padding - reach) / s.stride + 1;
}

// Whether a convolution has `out` outputs; a transposed one may have some more than the fewest.
inline bool convolves(const Slide& s, int64_t in, int64_t out, bool transposed) {
  const __int128 least = stops(s, in, transposed);
  return s.kernel >= 1 && out >= least && out <= least + (transposed ? std::max(s.stride, s.dilation) - 1 : 0);
}

// Inputs begin, begin + dilation, … below end give one output of a pool; `weight` is this dim's factor of the divisor.
struct Window {
  int64_t begin, end, weight;

  // Whether it can be computed: between the taps of a dilated one there may be nothing, which is -inf as in torch.
  bool valid(int64_t in, int64_t dilation) const { return begin < end || (dilation > 1 && in > 0); }
};

// Windows begin in the padding at the earliest, and reach over it.
inline Window window_of(const Slide& s, int64_t in, int64_t o, bool count_padding) {
  const int64_t first = o * s.stride - s.padding, last = first + (s.kernel - 1) * s.dilation + 1;
  const int64_t skipped = first < 0 ? (-first + s.dilation - 1) / s.dilation : 0;
  const int64_t begin = first + skipped * s.dilation, end = std::min(last, in);
  return {begin, end, count_padding ? std::min(last, in + s.padding) - first : end - begin};
}

// Windows that share out the whole input.
inline Window share_of(int64_t in, int64_t out, int64_t o) {
  const __int128 size = in;
  const auto begin = static_cast<int64_t>(o * size / out), end = static_cast<int64_t>(((o + 1) * size + out - 1) / out);
  return {begin, end, end - begin};
}

enum class Padding : uint8_t { constant, reflect, replicate, circular };
constexpr int64_t kConstant = -1, kTooFar = -2;

// What stands `at` places behind the first element: a position, kConstant, or kTooFar where the input is too small.
inline int64_t padded(Padding mode, int64_t size, int64_t at) {
  if (at >= 0 && at < size) return at;
  if (mode == Padding::constant) return kConstant;
  const int64_t from = mode == Padding::reflect     ? (at < 0 ? -at : 2 * (size - 1) - at)
                       : mode == Padding::replicate ? (at < 0 ? 0 : size - 1)
                                                    : at < 0 ? at + size : at - size;
  return from < 0 || from >= size ? kTooFar : from;
}

// Inputs per output of a resampled dim, as torch computes it, in T; `given`: outputs per input, 0 where nobody said.
template <class T>
T scale_of(double given, int64_t in, int64_t out) {
  return given > 0 ? static_cast<T>(1 / given) : static_cast<T>(in) / static_cast<T>(out);
}

template <class T>
int64_t nearest_to(int64_t o, int64_t in, T scale, bool exact) {
  const T at = std::floor((static_cast<T>(o) + (exact ? T(0.5) : T(0))) * scale);
  return at < static_cast<T>(in) ? static_cast<int64_t>(at) : in - 1;
}

// An output of a resampled dim: inputs at `index`, with their weights.
struct Sample {
  int64_t index[4];
  float weight[4];
};

inline Sample linear_sample(float at, int64_t in) {
  at = std::clamp(at, 0.0f, static_cast<float>(in));
  const int64_t first = std::min(static_cast<int64_t>(at), in - 1);
  const float right = std::min(std::max(at - static_cast<float>(first), 0.0f), 1.0f);
  return {{first, std::min(first + 1, in - 1)}, {1 - right, right}};
}

inline Sample cubic_sample(float at, int64_t in) {
  at = std::min(at, static_cast<float>(in));
  const float floor = std::floor(at), t = at - floor, a = -0.75f;
  const auto near = [&](float x) { return ((a + 2) * x - (a + 3)) * x * x + 1; };
  const auto far = [&](float x) { return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a; };
  Sample sample{{}, {far(t + 1), near(t), near(1 - t), far(2 - t)}};
  for (int64_t i = 0; i < 4; ++i)
    sample.index[i] = std::clamp<int64_t>(static_cast<int64_t>(floor) - 1 + i, 0, in - 1);
  return sample;
}

// Resampling of one dim.
struct Resampled {
  int64_t in, out;
  int taps;      // 2: linear, 4: cubic
  bool corners;  // first and last elements stay at the ends
  double given;  // as in scale_of

  Sample at(int64_t o) const {
    const float scale = !corners ? scale_of<float>(given, in, out)
                        : out > 1 ? static_cast<float>(in - 1) / static_cast<float>(out - 1) : 0.0f;
    const float place = corners ? static_cast<float>(o) * scale : (static_cast<float>(o) + 0.5f) * scale - 0.5f;
    return taps == 2 ? linear_sample(place, in) : cubic_sample(place, in);
  }
};

}  // namespace keepdim
