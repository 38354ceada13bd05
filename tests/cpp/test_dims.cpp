#include "core/dims.h"
#include "test.h"

using namespace keepdim;

namespace {

const std::vector<Bounds> kRanges = {{1, 256}, {0, {}}, {{}, {}}, {-4, 4}};  // s, t, u, v
const std::vector<std::string> kNames = {"s", "t", "u", "v"};

struct Table : DimTable {
  DimId constant(int64_t v) { return add(DimOp::constant, v, {}); }
  DimId symbol(int64_t i) { return add(DimOp::symbol, i, {}); }
  DimId op(DimOp op, const std::vector<DimId>& args) { return add(op, 0, args); }
  std::string range(DimId id) const {
    const Bounds& b = bounds(id);
    return (b.lo ? std::to_string(*b.lo) : "") + ".." + (b.hi ? std::to_string(*b.hi) : "");
  }

 private:
  DimId add(DimOp op, int64_t value, const std::vector<DimId>& args) {
    push(op, value, args, kRanges);
    return static_cast<DimId>(size() - 1);
  }
};

int64_t value_of(DimOp op, int64_t a, int64_t b) {
  Table t;
  t.op(op, {t.constant(a), t.constant(b)});
  std::vector<int64_t> out(t.size());
  t.eval(nullptr, out.data());
  return out.back();
}

}  // namespace

TEST(dims_divide_as_python) {
  for (int64_t a = -9; a <= 9; ++a) {
    for (int64_t b : {-4, -3, -1, 1, 2, 5}) {
      const int64_t q = value_of(DimOp::floordiv, a, b), r = value_of(DimOp::mod, a, b);
      CHECK_EQUAL(q * b + r, a);
      CHECK(r == 0 || (r < 0) == (b < 0));
      CHECK(std::abs(r) < std::abs(b));
    }
  }
  CHECK_EQUAL(value_of(DimOp::floordiv, -7, 2), -4);
  CHECK_EQUAL(value_of(DimOp::mod, -7, 2), 1);
  CHECK_EQUAL(value_of(DimOp::mod, INT64_MIN, -1), 0);
}

TEST(dims_overflow_is_refused) {
  CHECK_FAILS(value_of(DimOp::add, INT64_MAX, 1), "[verify] dim 2: its bounds overflow int64.");
  CHECK_FAILS(value_of(DimOp::mul, INT64_MIN, -1), "[verify] dim 2: its bounds overflow int64.");
  CHECK_FAILS(value_of(DimOp::floordiv, INT64_MIN, -1), "[verify] dim 2: its bounds overflow int64.");
  Table t;
  const DimId large = t.op(DimOp::mul, {t.symbol(1), t.symbol(1)});  // unbounded: overflow is detected at call time
  std::vector<int64_t> out(t.size());
  int64_t symbols[] = {1, int64_t{1} << 32, 0, 0};
  CHECK_FAILS(t.eval(symbols, out.data()), "[bind] dim 2: its value does not fit int64.");
  CHECK_FAILS(t.eval_one(large, symbols), "[bind] dim 2: its value does not fit int64.");
  symbols[1] = int64_t{1} << 31;
  t.eval(symbols, out.data());
  CHECK_EQUAL(out[large], int64_t{1} << 62);
}

TEST(dims_bounds) {
  Table t;
  const DimId s = t.symbol(0), n = t.symbol(1), u = t.symbol(2), v = t.symbol(3), two = t.constant(2), minus = t.constant(-3);
  CHECK_EQUAL(t.range(t.op(DimOp::add, {s, two})), "3..258");
  CHECK_EQUAL(t.range(t.op(DimOp::add, {s, n})), "1..");
  CHECK_EQUAL(t.range(t.op(DimOp::mul, {s, minus})), "-768..-3");
  CHECK_EQUAL(t.range(t.op(DimOp::mul, {n, minus})), "..0");
  CHECK_EQUAL(t.range(t.op(DimOp::mul, {v, n})), "..");
  CHECK_EQUAL(t.range(t.op(DimOp::mul, {u, t.constant(0)})), "0..0");
  CHECK_EQUAL(t.range(t.op(DimOp::floordiv, {s, two})), "0..128");
  CHECK_EQUAL(t.range(t.op(DimOp::floordiv, {v, s})), "-4..4");
  CHECK_EQUAL(t.range(t.op(DimOp::floordiv, {u, minus})), "..");
  CHECK_EQUAL(t.range(t.op(DimOp::mod, {u, two})), "0..1");
  CHECK_EQUAL(t.range(t.op(DimOp::mod, {s, t.constant(300)})), "1..256");
  CHECK_EQUAL(t.range(t.op(DimOp::mod, {s, minus})), "-2..0");
  CHECK_EQUAL(t.range(t.op(DimOp::max, {v, u, two})), "2..");
  CHECK_EQUAL(t.range(t.op(DimOp::min, {s, n})), "0..256");
  CHECK_FAILS(t.op(DimOp::mod, {s, v}), "[verify] dim 22: the divisor (dim 3) can be zero.");
}

TEST(dims_text) {
  Table t;
  const DimId s = t.symbol(0), n = t.symbol(1), two = t.constant(2), minus = t.constant(-1), three = t.constant(-3);
  const auto text = [&](DimId id) { return t.text(id, kNames); };
  const DimId twice = t.op(DimOp::mul, {two, s});
  CHECK_EQUAL(text(t.op(DimOp::add, {twice, t.constant(1)})), "2*s + 1");
  CHECK_EQUAL(text(t.op(DimOp::mul, {s, n})), "s*t");
  const DimId negative = t.op(DimOp::mul, {minus, n});
  CHECK_EQUAL(text(negative), "-t");
  CHECK_EQUAL(text(t.op(DimOp::add, {s, negative})), "s - t");
  const DimId less = t.op(DimOp::add, {s, three});
  CHECK_EQUAL(text(less), "s - 3");
  const DimId half = t.op(DimOp::floordiv, {less, two});
  CHECK_EQUAL(text(half), "(s - 3)//2");
  CHECK_EQUAL(text(t.op(DimOp::mul, {two, half})), "2*((s - 3)//2)");
  CHECK_EQUAL(text(t.op(DimOp::mod, {n, two})), "t % 2");
  CHECK_EQUAL(text(t.op(DimOp::max, {twice, n})), "max(2*s, t)");
  CHECK_EQUAL(text(three), "-3");
  DimId deep = s;
  for (int i = 0; i < 200; ++i) deep = t.op(DimOp::max, {deep, deep});  // 2^200 symbols if printed in full
  CHECK(text(deep).size() < 20000);
}

TEST(dims_eval_one_needs_only_its_own_symbols) {
  Table t;
  const DimId s = t.symbol(0);
  t.op(DimOp::mul, {t.symbol(1), t.symbol(1)});  // its symbol is not bound yet
  const DimId twice = t.op(DimOp::add, {s, s});
  const int64_t symbols[] = {21, INT64_MAX, 0, 0};
  CHECK_EQUAL(t.eval_one(twice, symbols), 42);
  CHECK_EQUAL(t.last_symbol(twice), 0);
}
