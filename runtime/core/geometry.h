// Index arithmetic of convolution, pooling, padding and resampling along one dim, shared by all engines. Safe for arbitrary
// sizes from a file.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

namespace keepdim {

// A sliding window along one dim.
struct WindowDim {
  int64_t kernel, stride, padding, dilation;
};

// Number of window positions over `in` elements; transposed: the minimum output size for an input of `in`.
inline __int128 window_count(const WindowDim& s, int64_t in, bool transposed = false) {
  const __int128 size = in, extent = static_cast<__int128>(s.dilation) * (s.kernel - 1) + 1;
  if (transposed) return (size - 1) * s.stride - 2 * s.padding + extent;
  return size + 2 * s.padding < extent ? 0 : (size + 2 * s.padding - extent) / s.stride + 1;
}

// Whether `out` is a valid output size; a transposed convolution may have output padding.
inline bool is_conv_size(const WindowDim& s, int64_t in, int64_t out, bool transposed) {
  const __int128 min_out = window_count(s, in, transposed);
  return s.kernel >= 1 && out >= min_out && out <= min_out + (transposed ? std::max(s.stride, s.dilation) - 1 : 0);
}

// One pooling output reads inputs begin, begin + dilation, … < end; `weight` is the factor of this dim in the divisor.
struct Window {
  int64_t begin, end, weight;

  // A dilated window may be empty (all taps in the padding), which gives -inf as in torch.
  bool valid(int64_t in, int64_t dilation) const { return begin < end || (dilation > 1 && in > 0); }
};

// Window of output o of a pooling with fixed kernel and stride, clipped to the input.
inline Window window_of(const WindowDim& s, int64_t in, int64_t o, bool count_padding) {
  const int64_t first = o * s.stride - s.padding, last = first + (s.kernel - 1) * s.dilation + 1;
  const int64_t taps_in_padding = first < 0 ? (-first + s.dilation - 1) / s.dilation : 0;
  const int64_t begin = first + taps_in_padding * s.dilation, end = std::min(last, in);
  return {begin, end, count_padding ? std::min(last, in + s.padding) - first : end - begin};
}

// Window of output o of an adaptive pooling.
inline Window adaptive_window(int64_t in, int64_t out, int64_t o) {
  const __int128 size = in;
  const auto begin = static_cast<int64_t>(o * size / out), end = static_cast<int64_t>(((o + 1) * size + out - 1) / out);
  return {begin, end, end - begin};
}

enum class Padding : uint8_t { constant, reflect, replicate, circular };
constexpr int64_t kConstant = -1, kTooSmall = -2;

// Input index for padded position `at` (0: first element), kConstant, or kTooSmall if the input is too small for the padding.
inline int64_t padded_index(Padding mode, int64_t size, int64_t at) {
  if (at >= 0 && at < size) return at;
  if (mode == Padding::constant) return kConstant;
  const int64_t from = mode == Padding::reflect     ? (at < 0 ? -at : 2 * (size - 1) - at)
                       : mode == Padding::replicate ? (at < 0 ? 0 : size - 1)
                       : at < 0                     ? at + size
                                                    : at - size;
  return from < 0 || from >= size ? kTooSmall : from;
}

// Input step per output of a resampled dim, with torch's arithmetic in T. `scale_factor`: outputs per input, 0 if not given.
template <class T>
T resample_scale(double scale_factor, int64_t in, int64_t out) {
  return scale_factor > 0 ? static_cast<T>(1 / scale_factor) : static_cast<T>(in) / static_cast<T>(out);
}

template <class T>
int64_t nearest_index(int64_t o, int64_t in, T scale, bool exact) {
  const T at = std::floor((static_cast<T>(o) + (exact ? T(0.5) : T(0))) * scale);
  return at < static_cast<T>(in) ? static_cast<int64_t>(at) : in - 1;
}

// One output of a resampled dim: a weighted sum of the inputs at `index`.
struct Sample {
  int64_t index[4];
  float weight[4];
};

inline Sample linear_sample(float at, int64_t in) {
  at = std::clamp(at, 0.0f, static_cast<float>(in));
  const int64_t first = std::min(static_cast<int64_t>(at), in - 1);
  const float frac = std::min(std::max(at - static_cast<float>(first), 0.0f), 1.0f);
  return {{first, std::min(first + 1, in - 1)}, {1 - frac, frac}};
}

inline Sample cubic_sample(float at, int64_t in) {
  at = std::min(at, static_cast<float>(in));
  const float floor = std::floor(at), t = at - floor, a = -0.75f;
  const auto near = [&](float x) { return ((a + 2) * x - (a + 3)) * x * x + 1; };
  const auto far = [&](float x) { return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a; };
  Sample sample{{}, {far(t + 1), near(t), near(1 - t), far(2 - t)}};
  for (int64_t i = 0; i < 4; ++i) sample.index[i] = std::clamp<int64_t>(static_cast<int64_t>(floor) - 1 + i, 0, in - 1);
  return sample;
}

// Resampling of one dim.
struct ResampleDim {
  int64_t in, out;
  int taps;             // 2: linear, 4: cubic
  bool align_corners;   // torch's align_corners
  double scale_factor;  // as in resample_scale

  Sample at(int64_t o) const {
    const float scale = !align_corners ? resample_scale<float>(scale_factor, in, out)
                        : out > 1      ? static_cast<float>(in - 1) / static_cast<float>(out - 1)
                                       : 0.0f;
    const float position = align_corners ? static_cast<float>(o) * scale : (static_cast<float>(o) + 0.5f) * scale - 0.5f;
    return taps == 2 ? linear_sample(position, in) : cubic_sample(position, in);
  }
};

}  // namespace keepdim
