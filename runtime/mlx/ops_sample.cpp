// Rows of samples of an image, patches added up, distances between points, and bags of a table's rows.
#include <algorithm>
#include <cmath>

#include "../geometry.h"
#include "op.h"

namespace keepdim::mlx {
namespace {

Array num(const Array& like, double value) { return number(value, like.dtype()); }

// ---- samples of an image

enum class Border { zeros, border, reflection };

struct Grid {
  Border border;
  bool corners;
  int size;  // of the image in this dim
};

// -1..1 to positions of the image.
Array unnormalised(const Array& x, const Grid& g) {
  const Array shifted = mx::add(x, num(x, 1));
  if (g.corners) return mx::multiply(mx::divide(shifted, num(x, 2)), num(x, g.size - 1));
  return mx::divide(mx::subtract(mx::multiply(shifted, num(x, g.size)), num(x, 1)), num(x, 2));
}

Array clipped(const Array& x, int size) { return mx::clip(x, num(x, 0), num(x, size - 1)); }

// There and back between the ends, which are the outermost elements or half an element outside of them.
Array reflected(const Array& x, const Grid& g) {
  const double low = g.corners ? 0 : -0.5, span = g.corners ? g.size - 1 : g.size;
  if (span == 0) return mx::zeros_like(x);
  const Array at = mx::abs(mx::subtract(x, num(x, low)));
  const Array turns = mx::floor(mx::divide(at, num(x, span)));
  const Array rest = mx::subtract(at, mx::multiply(turns, num(x, span)));
  const Array even = mx::equal(mx::remainder(turns, num(x, 2)), num(x, 0));
  return mx::where(even, mx::add(rest, num(x, low)), mx::add(mx::subtract(num(x, span), rest), num(x, low)));
}

// Where a position outside is read instead; whole ones and those between.
Array inside(const Array& x, const Grid& g) {
  if (g.border == Border::zeros) return x;
  Array y = g.border == Border::reflection ? reflected(x, g) : x;
  y = clipped(y, g.size);
  return mx::where(mx::isnan(y), num(y, 0), y);
}

// One dim's taps: positions, and what each counts.
struct Taps {
  std::vector<Array> at, weight;
};
Taps taps(const Array& x, const Grid& g, int count) {
  const Array place = unnormalised(x, g);
  if (count == 1) return {{mx::round(inside(place, g), 0)}, {num(x, 1)}};
  if (count == 2) {
    const Array p = inside(place, g), left = mx::floor(p), right = mx::subtract(p, left);
    return {{left, mx::add(left, num(x, 1))}, {mx::subtract(num(x, 1), right), right}};
  }
  const Array left = mx::floor(place), t = mx::subtract(place, left);
  constexpr double a = -0.75;
  const auto poly = [&](const Array& v, double c3, double c2, double c1, double c0) {
    const Array q = mx::add(mx::multiply(mx::add(mx::multiply(num(v, c3), v), num(v, c2)), v), num(v, c1));
    return mx::add(mx::multiply(q, v), num(v, c0));
  };
  const auto near = [&](const Array& v) { return poly(v, a + 2, -(a + 3), 0, 1); };
  const auto far = [&](const Array& v) { return poly(v, a, -5 * a, 8 * a, -4 * a); };
  const Array one = num(x, 1);
  Taps out{{}, {far(mx::add(t, one)), near(t), near(mx::subtract(one, t)), far(mx::subtract(num(x, 2), t))}};
  for (int i = -1; i < 3; ++i) out.at.push_back(inside(mx::add(left, num(x, i)), g));
  return out;
}

Array grid_sample(Op& op) {
  const Array &x = op.in(0), &grid = op.in(1);
  const int rank = rank_of(x) - 2;
  bool fit = (rank == 2 || rank == 3) && grid.ndim() == x.ndim() && op.rank() == rank_of(x) && grid.shape(-1) == rank && grid.shape(0) == x.shape(0);
  for (int d = 0; fit && d < rank; ++d) fit = grid.shape(d + 1) == op.shape()[d + 2];
  if (!fit) op.refuse("grid " + dims_text(grid.shape()) + " does not take " + dims_text(x.shape()) + " to " + dims_text(op.shape()) + ".");
  const int count = 1 << op.choice("mode", {"nearest", "bilinear", "bicubic"});
  if (rank == 3 && count == 4) op.refuse("bicubic is for images of two dims.");
  const auto border = static_cast<Border>(op.choice("padding_mode", {"zeros", "border", "reflection"}));
  const int plane = static_cast<int>(count_of(mx::Shape(x.shape().begin() + 2, x.shape().end())));
  if (plane < 1) op.refuse("an image of " + dims_text(x.shape()) + " is empty.");
  const int batch = x.shape(0), channels = x.shape(1), places = static_cast<int>(grid.size()) / (batch * rank);
  const Array flat = mx::reshape(x, {batch, channels, plane}), points = mx::reshape(grid, {batch, places, rank});
  std::vector<Taps> dims;  // of the image, outermost first; the grid has the innermost first
  for (int d = 0; d < rank; ++d) {
    const int k = rank - 1 - d;
    const Array line = mx::squeeze(mx::slice(points, {0, 0, k}, {batch, places, k + 1}), 2);
    dims.push_back(taps(line, {border, op.flag("align_corners"), x.shape(d + 2)}, count));
  }
  Array sum = num(x, 0);
  for (int tap = 0, all = static_cast<int>(std::pow(count, rank)); tap < all; ++tap) {
    Array weight = num(x, 1), at = whole(0, mx::int64), there = Array(true);
    for (int d = 0, rest = tap; d < rank; ++d, rest /= count) {
      const Array& p = dims[d].at[rest % count];
      const int size = x.shape(d + 2);
      const Array fine = mx::logical_and(mx::greater_equal(p, num(p, 0)), mx::less_equal(p, num(p, size - 1)));  // no NaN either
      there = mx::logical_and(there, fine);
      at = mx::add(mx::multiply(at, whole(size, mx::int64)), mx::astype(mx::where(fine, p, num(p, 0)), mx::int64));
      weight = mx::multiply(weight, dims[d].weight[rest % count]);
    }
    const Array index = mx::broadcast_to(mx::expand_dims(at, 1), {batch, channels, places});
    const Array read = mx::where(mx::expand_dims(there, 1), mx::take_along_axis(flat, index, 2), num(x, 0));
    sum = mx::add(sum, count == 1 ? read : mx::multiply(read, mx::expand_dims(weight, 1)));  // a NaN in the grid stays one
  }
  return mx::reshape(sum, op.shape());
}

// ---- patches added up, one position of the kernel after the other

Array fold(Op& op) {
  const Array& x = op.in(0);
  const auto two = [&](const char* name, int64_t least) {
    const std::vector<int64_t> list = op.sizes(name);
    if (list.size() != 2) op.refuse(std::string(name) + " has " + std::to_string(list.size()) + " numbers, expected 2.");
    for (int64_t n : list)
      if (n < least || n > INT32_MAX) op.refuse(std::string(name) + " = " + std::to_string(n) + " is out of range.");
    return list;
  };
  const auto kernel = two("kernel", 1), stride = two("stride", 1), padding = two("padding", 0), dilation = two("dilation", 1);
  if (x.ndim() < 2 || op.rank() != rank_of(x) + 1) op.refuse("patches " + dims_text(x.shape()) + " are not those of " + dims_text(op.shape()) + ".");
  int64_t blocks[2], room[2];
  for (int d = 0; d < 2; ++d) {
    const int64_t size = op.shape()[op.rank() - 2 + d];
    room[d] = size + 2 * padding[d];
    blocks[d] = static_cast<int64_t>(stops({kernel[d], stride[d], padding[d], dilation[d]}, size));
  }
  const int channels = op.shape()[op.rank() - 3];
  if (x.shape(-1) != blocks[0] * blocks[1] || x.shape(-2) != channels * kernel[0] * kernel[1] || room[0] > INT32_MAX || room[1] > INT32_MAX)
    op.refuse("patches " + dims_text(x.shape()) + " are not those of " + dims_text(op.shape()) + ".");
  const auto of = [](int64_t n) { return static_cast<int>(n); };
  const int planes = static_cast<int>(count_of(op.shape()) / (int64_t{op.shape()[op.rank() - 1]} * op.shape()[op.rank() - 2]));
  const Array patches = mx::reshape(x, {planes, of(kernel[0]), of(kernel[1]), of(blocks[0]), of(blocks[1])});
  Array y = mx::zeros({planes, of(room[0]), of(room[1])}, x.dtype());
  for (int i = 0; i < kernel[0]; ++i)
    for (int j = 0; j < kernel[1]; ++j) {
      const Array one = mx::reshape(mx::slice(patches, {0, i, j, 0, 0}, {planes, i + 1, j + 1, of(blocks[0]), of(blocks[1])}), {planes, of(blocks[0]), of(blocks[1])});
      const int top = of(i * dilation[0]), left = of(j * dilation[1]);
      const mx::Shape start{0, top, left}, stop{planes, of(top + (blocks[0] - 1) * stride[0] + 1), of(left + (blocks[1] - 1) * stride[1] + 1)},
          step{1, of(stride[0]), of(stride[1])};
      y = mx::slice_update(y, mx::add(mx::slice(y, start, stop, step), one), start, stop, step);
    }
  const int top = of(padding[0]), left = of(padding[1]), h = op.shape()[op.rank() - 2], w = op.shape()[op.rank() - 1];
  return mx::reshape(mx::slice(y, {0, top, left}, {planes, top + h, left + w}), op.shape());
}

// ---- distances

// The p-norm of the last dim.
Array norm(Op& op, const Array& difference) {
  const double p = op.number("p");
  if (!(p >= 0)) op.refuse("p = " + std::to_string(p) + " is negative.");
  const Array x = mx::abs(difference);
  const Axes last{-1};
  if (x.shape(-1) == 0) return mx::sum(x, last);
  if (p == 0) return mx::sum(mx::astype(mx::not_equal(x, num(x, 0)), x.dtype()), last);
  if (p == 1) return mx::sum(x, last);
  if (p == 2) return mx::sqrt(mx::sum(mx::square(x), last));
  if (std::isinf(p)) return mx::max(x, last);
  return mx::power(mx::sum(mx::power(x, num(x, p)), last), num(x, 1 / p));
}

Array cdist(Op& op) {
  const Array &x = op.in(0), &y = op.in(1);
  if (x.ndim() < 2 || y.ndim() < 2 || x.shape(-1) != y.shape(-1)) op.refuse(dims_text(op.shape()) + " are not the distances of " + dims_text(x.shape()) + " and " + dims_text(y.shape()) + ".");
  const int rows = x.shape(-2);
  const int64_t each = count_of(op.shape()) / std::max(rows, 1) * x.shape(-1);
  return in_parts(rows, each, -2, [&](int from, int to) {
    return norm(op, mx::subtract(mx::expand_dims(span(x, -2, from, to), -2), mx::expand_dims(y, -3)));
  });
}

Array pdist(Op& op) {
  const Array& x = op.in(0);
  if (x.ndim() != 2) op.refuse(dims_text(x.shape()) + " is no list of points.");
  std::vector<int64_t> from, to;
  for (int64_t i = 0; i < x.shape(0); ++i)
    for (int64_t j = i + 1; j < x.shape(0); ++j) from.push_back(i), to.push_back(j);
  const auto count = static_cast<int>(from.size());
  const Array first = host(from, {count}), second = host(to, {count});
  return in_parts(count, x.shape(1), 0, [&](int begin, int end) {
    return norm(op, mx::subtract(mx::take(x, span(first, 0, begin, end), 0), mx::take(x, span(second, 0, begin, end), 0)));
  });
}

// ---- bags

Array embedding_bag(Op& op) {
  const Array& table = op.in(0);
  const Array indices = mx::astype(op.in(1), mx::int64), offsets = mx::astype(op.in(2), mx::int64);
  const int mode = op.choice("mode", {"sum", "mean", "max"});
  const int bags = op.shape()[0];
  if (table.ndim() != 2 || indices.ndim() != 1 || offsets.ndim() != 1 || offsets.shape(0) != bags + (op.flag("include_last_offset") ? 1 : 0))
    op.refuse("offsets " + dims_text(offsets.shape()) + " do not take rows of " + dims_text(table.shape()) + " to " + dims_text(op.shape()) + ".");
  if (op.has(3) && (mode != 0 || op.in(3).shape() != indices.shape())) op.refuse("weights " + dims_text(op.in(3).shape()) + " are not those of a sum of " + dims_text(indices.shape()) + ".");
  const int count = indices.shape(0);
  const Array starts = mx::slice(offsets, {0}, {bags});
  const Array last = whole(count, mx::int64);
  const Array ends = op.flag("include_last_offset") ? mx::slice(offsets, {1}, {bags + 1}) : mx::concatenate({mx::slice(offsets, {1}, {bags}), mx::reshape(last, {1})}, 0);
  const Array zero = whole(0, mx::int64);
  op.expect(mx::equal(mx::squeeze(mx::slice(starts, {0}, {1})), zero), [starts] {
    return "offset 0 is " + std::to_string(mx::squeeze(mx::slice(starts, {0}, {1})).item<int64_t>()) + ", expected 0.";
  });
  const Array ordered = mx::logical_and(mx::logical_and(mx::greater_equal(starts, zero), mx::less_equal(starts, ends)), mx::less_equal(ends, last));
  op.expect(mx::all(ordered), [ordered, starts, ends, count] {
    const int bag = static_cast<int>(mx::argmin(mx::astype(ordered, mx::int32)).item<uint32_t>());
    const auto at = [bag](const Array& x) { return std::to_string(mx::squeeze(mx::slice(x, {bag}, {bag + 1})).item<int64_t>()); };
    return "bag " + std::to_string(bag) + " is " + at(starts) + ".." + at(ends) + " of " + std::to_string(count) + " indices.";
  });
  const mx::Dtype type = to_mlx(compute_type(op.type()));
  const Array nothing = mx::zeros(op.shape(), type);
  if (count == 0) return nothing;
  if (table.shape(0) == 0) op.fault("index " + std::to_string(mx::squeeze(mx::slice(indices, {0}, {1})).item<int64_t>()) + " is not in an empty dim.");
  Array rows = mx::astype(mx::take(table, op.index(indices, table.shape(0), false), 0), type);
  if (op.has(3)) rows = mx::multiply(rows, mx::expand_dims(mx::astype(op.in(3), type), 1));
  // Which bag an index is in: as many bags as begin before it. Whether the offsets are such is seen after the run.
  const Array place = mx::arange(0.0, count, 1.0, mx::int64), one = whole(1, mx::int64);
  const Array begins = mx::clip(starts, zero, last);
  const Array marks = mx::scatter_add(mx::zeros({count + 1}, mx::int64), begins, mx::ones({bags, 1}, mx::int64), 0);
  const Array bag = mx::clip(mx::subtract(mx::slice(mx::cumsum(marks, 0), {0}, {count}), one), zero, whole(bags - 1, mx::int64));
  Array member = mx::less(place, mx::take(ends, bag, 0));
  if (op.attr("padding_idx")) member = mx::logical_and(member, mx::not_equal(indices, whole(op.size("padding_idx"), mx::int64)));
  const Array each = mx::expand_dims(member, 1), lowest = number(-HUGE_VAL, type);
  const auto by_bag = [&](const Array& x) { return mx::reshape(x, {count, 1, x.shape(1)}); };
  const Array sizes = mx::scatter_add(mx::zeros({bags, 1}, type), bag, by_bag(mx::astype(each, type)), 0);
  if (mode == 2) {  // as torch: of NaNs only a first one stays
    const Array known = mx::where(mx::logical_and(each, mx::logical_not(mx::isnan(rows))), rows, lowest);
    const Array most = mx::scatter_max(mx::full(op.shape(), lowest), bag, by_bag(known), 0);
    const Array own = mx::expand_dims(mx::where(member, place, last), 1);
    const Array begin = mx::squeeze(mx::scatter_min(mx::full({bags, 1}, last), bag, by_bag(own), 0), 1);
    const Array first = mx::take(rows, mx::minimum(begin, whole(count - 1, mx::int64)), 0);
    return mx::where(mx::greater(sizes, number(0, type)), mx::where(mx::isnan(first), first, most), number(0, type));
  }
  const Array sum = mx::scatter_add(nothing, bag, by_bag(mx::where(each, rows, number(0, type))), 0);
  if (mode == 0) return sum;
  // As torch, which counts for the last bag what lies behind its end.
  const Array is_last = mx::equal(mx::arange(0.0, bags, 1.0, mx::int64), whole(bags - 1, mx::int64));
  const Array behind = mx::where(mx::logical_and(is_last, mx::greater(ends, starts)), mx::subtract(last, ends), zero);
  return mx::divide(sum, mx::maximum(mx::add(sizes, mx::expand_dims(mx::astype(behind, type), 1)), number(1, type)));
}

constexpr Row kRows[] = {
    {"grid_sample", grid_sample},
    {"fold", fold},
    {"cdist", cdist},
    {"pdist", pdist},
    {"embedding_bag", embedding_bag},
};

}  // namespace

Table sample_rows() { return {kRows, std::size(kRows)}; }

}  // namespace keepdim::mlx
