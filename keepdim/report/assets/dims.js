// Dims: rows of a table in topological order, each over earlier ones. As Python's and C++'s: // and % round down.
const OPS = {
  add: (v) => v.reduce((a, b) => a + b),
  mul: (v) => v.reduce((a, b) => a * b),
  max: (v) => v.reduce((a, b) => (a > b ? a : b)),
  min: (v) => v.reduce((a, b) => (a < b ? a : b)),
  mod: ([a, b]) => { const m = a % b; return m != 0 && m < 0 !== b < 0 ? m + b : m; },
  floordiv: ([a, b]) => (a - OPS.mod([a, b])) / b,
};

// Every row's number for these values of the symbols. Numbers are exact up to 2^53; beyond, BigInt takes over.
function evalRows(rows, symbols, as = Number) {
  const out = new Array(rows.length);
  for (let i = 0; i < rows.length; i++) {
    const [kind, arg] = rows[i];
    if (kind === "const") out[i] = as(arg);
    else if (kind === "sym") out[i] = as(symbols[arg]);
    else out[i] = OPS[kind](arg.map((j) => out[j]));
    if (as === Number && !Number.isSafeInteger(out[i])) return evalRows(rows, symbols, BigInt);
  }
  return out;
}

const CMP = {
  eq: (a, b) => a == b, ne: (a, b) => a != b, lt: (a, b) => a < b,
  le: (a, b) => a <= b, gt: (a, b) => a > b, ge: (a, b) => a >= b,
};
