"""6,000 mutated Programs: each is refused with a sentence or runs. Never a crash, a hang or another exception.

A crash would take pytest with it, so this file runs itself as a script in a process of its own.
"""

import copy
import faulthandler
import json
import random
import sys
from collections import Counter
from pathlib import Path

from keepdim.shapes.blocks import BLOCKS  # elements and bytes

COUNT = 6000
# Its own promises, broken.
BROKEN = ("[build] ggml: ", "': built ", ": no kernel for", "[run] ggml: the graph", "[run] mlx: ")
LARGE = 1_000_000  # elements of one tensor; larger ones are not run
WIDTH = {
    "f32": "f4",
    "f16": "f2",
    "bf16": "u2",
    "f64": "f8",
    "i8": "i1",
    "u8": "u1",
    "i16": "i2",
    "i32": "i4",
    "i64": "i8",
    "bool": "?",
}

# op: (operands, attributes, result); a shape is "dtype dims", a weight has a "!" before it. What follows an op's name
# tells its seeds apart.
UNARY = """neg abs sign relu reciprocal ceil floor round trunc sqrt rsqrt exp exp2 expm1 log log1p log2 log10 sin cos
    tan asin acos atan sinh cosh asinh acosh atanh tanh erf erfc sigmoid silu hardsigmoid hardswish gelu""".split()
BINARY = "add sub mul div div_floor div_trunc fmod remainder pow atan2 maximum minimum".split()
BITS = "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift".split()
OPS = {op: (["f32 s 8"], {}, "f32 s 8") for op in UNARY}
OPS |= {op: (["f32 s 8", "f32 1 8"], {}, "f32 s 8") for op in BINARY}
OPS |= {op: (["f32 s 8", "f32 1 8"], {}, "bool s 8") for op in ("eq", "ne", "lt", "le", "gt", "ge")}
OPS |= {op: (["i64 s 8", "i64 1 8"], {}, "i64 s 8") for op in BITS}
OPS |= {op: (["f32 s t 8"], {"dims": ["0", "2"]}, "f32 1 t 1") for op in ("sum", "mean", "amax", "amin", "prod")}
OPS |= {op: (["bool s t 8"], {"dims": ["1"]}, "bool s 8") for op in ("any", "all")}
OPS |= {op: (["f32 s t 8"], {"dims": ["0", "1", "2"]}, "i64") for op in ("argmax", "argmin")}
OPS |= {op: (["f32 s t 8"], {"dim": "1"}, "f32 s t 8") for op in ("softmax", "log_softmax", "cumsum", "cumprod")}
OPS |= {op: (["f32 2 s t"], {"diagonal": "1"}, "f32 2 s t") for op in ("tril", "triu")}
POOL = {"kernel": ["3", "2"], "stride": ["1", "2"], "padding": ["1", "1"]}
OPS |= {op: (["f32 2 s 8"], POOL | {"dilation": ["1", "1"]}, "f32 2 s 5") for op in ("max_pool", "max_pool 2")}
SCAN = ["f32 t s 8", "!f32 8 8", "!f32 8", "f32 s 8"]
OPS |= {op: (SCAN, {"reverse": True}, "f32 t s 8") for op in ("rnn_tanh_scan", "rnn_relu_scan")}
OPS |= {
    "clamp": (["f32 s 8"], {"min": 0.5, "max": "s"}, "f32 s 8"),
    "leaky_relu": (["f32 s 8"], {"negative_slope": 0.1}, "f32 s 8"),
    "elu": (["f32 s 8"], {"alpha": 1.0}, "f32 s 8"),
    "softplus": (["f32 s 8"], {"beta": 1.0, "threshold": 20.0}, "f32 s 8"),
    "where": (["bool s 8", "f32 s 8", "f32 1 8"], {}, "f32 s 8"),
    "cached_attention": (
        ["f32 1 4 s 8", "f32 1 2 s 8", "f32 1 2 s 6", "i64 1", "~f32 1 2 256 8", "~f32 1 2 256 6"],
        {"scale": 0.5, "window": "3"},
        "f32 1 4 s 6",
    ),
    "cached_attention turned": (
        [
            "f32 1 4 s 8",
            "f32 1 2 s 8",
            "f32 1 2 s 8",
            "i64 1",
            "~f16 1 2 256 8",
            "~f16 1 2 256 8",
            "f32 s 8",
            "f32 s 8",
        ],
        {"scale": 0.5},
        "f32 1 4 s 8",
    ),
    "cached_attention blocks": (
        ["f32 1 4 s 32", "f32 1 2 s 32", "f32 1 2 s 32", "i64 1", "~q8_0 1 2 512 32", "~q8_0 1 2 512 32"],
        {"scale": 0.5},
        "f32 1 4 s 32",
    ),
    "sdpa": (["f32 2 s 8", "f32 2 t 8", "f32 2 t 8"], {"scale": 0.5}, "f32 2 s 8"),
    "sdpa rows": (["f32 1 2 s 8", "f32 1 1 t 8", "f32 1 1 t 5", "bool t", "i64 s"], {"scale": 0.5}, "f32 1 2 s 5"),
    "sdpa mask": (
        ["f32 s 4 t 8", "f32 1 2 s 8", "f32 1 2 s 5", "bool t s"],
        {"scale": 0.5, "causal": True, "safe": False},
        "f32 s 4 t 5",
    ),
    "cast": (["f32 s 8"], {}, "i64 s 8"),
    "matmul": (["f32 2 s 8", "f32 1 8 t"], {}, "f32 2 s t"),
    "matmul packed": (["f32 2 s 8", "!f32 8 5"], {}, "f32 2 s 5"),
    "linear": (["f32 s 8", "!f32 4 8", "!f32 4"], {"activation": "gelu"}, "f32 s 4"),
    "linear rows": (["f32 1 s 8", "!f32 4 8", "!f32 4", "i64 s"], {}, "f32 1 s 4"),
    "linear input": (["f32 s t", "f32 8 t", "f32 8"], {}, "f32 s 8"),
    "layer_norm": (["f32 s 8", "!f32 8", "!f32 8"], {"eps": 1e-5, "axes": "1"}, "f32 s 8"),
    "rms_norm": (["f32 s 8", "!f32 8"], {"eps": 1e-5, "axes": "1"}, "f32 s 8"),
    "group_norm": (["f32 s 8 t", "!f32 8", "!f32 8"], {"eps": 1e-5, "groups": "2"}, "f32 s 8 t"),
    "batch_norm": (["f32 s 8 t", *["!f32 8"] * 4], {"eps": 1e-5}, "f32 s 8 t"),
    "swiglu": (["f32 s 8", "f32 s 8"], {}, "f32 s 8"),
    "rope": (["f32 s t 8", "f32 t 8", "f32 t 1"], {}, "f32 s t 8"),
    "var": (["f32 s t 8"], {"dims": ["0"], "correction": 1.0}, "f32 t 8"),
    "argsort": (["f32 s+t 8"], {"dim": "0", "descending": True}, "i64 t 8"),
    "reshape": (["f32 s 8"], {}, "f32 8 s"),
    "permute": (["f32 s t 8"], {"dims": ["2", "0", "1"]}, "f32 8 s t"),
    "expand": (["f32 1 8"], {}, "f32 s t 8"),
    "cat": (["f32 s 8", "f32 t 8"], {"dim": "0"}, "f32 s+t 8"),
    "slice": (["f32 s+t 8"], {"dim": "0", "start": "s", "step": "1"}, "f32 t 8"),
    "slice_scatter": (["f32 s+t 8", "f32 t 8"], {"dim": "0", "start": "s", "step": "1"}, "f32 s+t 8"),
    "select": (["f32 s+t 8"], {"dim": "0", "index": "s"}, "f32 8"),
    "diagonal": (["f32 s 8 s"], {"offset": "0", "dims": ["0", "2"]}, "f32 8 s"),
    "unfold": (["f32 s+t 8"], {"dim": "0", "step": "1"}, "f32 s 8 t"),
    "as_strided": (["f32 s+t"], {"strides": ["1", "1"], "offset": "0"}, "f32 s t"),
    "flip": (["f32 s t 8"], {"dims": ["0", "2"]}, "f32 s t 8"),
    "arange": ([], {"start": "s", "step": "2"}, "i64 t"),
    "full": ([], {"value": "s"}, "f32 s 8"),
    "flatnonzero": (["bool 1 s"], {}, "i64 s"),
    "embedding": (["!f32 4 8", "i64 s"], {}, "f32 s 8"),
    "gather": (["f32 s 8", "i64 t 8"], {"dim": "0"}, "f32 t 8"),
    "index_select": (["f32 s 8", "i32 t"], {"dim": "1"}, "f32 s t"),
    "index": (["f32 8 s 8", "i64 t 1", "i32 s"], {"dims": ["0", "2"]}, "f32 t s s"),
    "index_put": (["f32 8 s", "f32 t 1", "i64 t"], {"dims": ["0"]}, "f32 8 s"),
    "index_add": (["f32 8 s 8", "f32 s 1", "i64 t 1", "i64 s"], {"dims": ["0", "1"]}, "f32 8 s 8"),
    "scatter": (["f32 s 8", "i64 t 8", "f32 t 8"], {"dim": "0"}, "f32 s 8"),
    "scatter_reduce": (["f32 s 8", "i32 s t", "f32 s t"], {"dim": "1", "reduce": "amax"}, "f32 s 8"),
    "conv": (
        ["f32 2 4 s t", "!f32 6 4 3 1", "!f32 6"],
        {"stride": ["1", "1"], "padding": ["1", "0"], "dilation": ["1", "1"], "groups": "1", "transposed": False},
        "f32 2 6 s t",
    ),
    "conv depthwise": (
        ["f32 2 4 8 s", "f32 4 1 2 5"],
        {"stride": ["2", "1"], "padding": ["0", "4"], "dilation": ["1", "2"], "groups": "4", "transposed": False},
        "f32 2 4 4 s",
    ),
    "conv transposed": (
        ["f32 2 4 s", "!f32 4 3 3", "f32 6"],
        {"stride": ["2"], "padding": ["1"], "dilation": ["1"], "groups": "2", "transposed": True},
        "f32 2 6 2*s",
    ),
    "max_pool_index": (["f32 2 s 8"], POOL | {"dilation": ["1", "1"]}, "i64 2 s 5"),
    "avg_pool": (["f32 2 s 8"], POOL | {"count_include_pad": True, "divisor": "3"}, "f32 2 s 5"),
    "adaptive_avg_pool": (["f32 2 s t"], {"axes": "2"}, "f32 2 3 s"),
    "adaptive_max_pool": (["f32 2 s t"], {"axes": "2"}, "f32 2 3 s"),
    "adaptive_max_pool_index": (["f32 2 s t"], {"axes": "1"}, "i64 2 s 3"),
    "pad": (["f32 2 t 2"], {"mode": "constant", "before": ["s", "0"], "value": 0.5}, "f32 2 s+t 2"),
    "pad circular": (["f32 2 s t"], {"mode": "circular", "before": ["0", "t"], "value": 0.0}, "f32 2 s s+t"),
    "nearest": (["f32 2 3 s t"], {"exact": True, "scale_1": 0.5}, "f32 2 3 s+t 8"),
    "resample": (["f32 2 3 s t"], {"mode": "cubic", "align_corners": False, "scale_0": 1.5}, "f32 2 3 s+t 8"),
    "grid_sample": (
        ["f32 2 3 s t", "f32 2 t 8 2"],
        {"mode": "bicubic", "padding_mode": "reflection", "align_corners": False},
        "f32 2 3 t 8",
    ),
    "fold": (
        ["f32 2 6 s"],
        {"kernel": ["3", "1"], "stride": ["1", "1"], "padding": ["1", "0"], "dilation": ["1", "1"]},
        "f32 2 2 s 1",
    ),
    "cdist": (["f32 2 s 8", "f32 1 t 8"], {"p": 3.0}, "f32 2 s t"),
    "pdist": (["f32 4 s"], {"p": 2.0}, "f32 6"),
    "embedding_bag": (
        ["!f32 4 8", "i64 8", "i64 s", "f32 8"],
        {"mode": "sum", "include_last_offset": False, "padding_idx": "2"},
        "f32 s 8",
    ),
    "lstm_scan": (["f32 t s 32", "!f32 32 8", "!f32 32", "f32 s 8", "f32 s 8"], {}, "f32 2 t s 8"),
    "gru_scan": (["f32 t s 6", "f32 6 2", "!f32 6", "f32 s 2"], {}, "f32 t s 2"),
}
OPS |= {f"linear {q}": (["f32 s 256", f"!{q} 5 256", "!f32 5"], {}, "f32 s 5") for q in (*BLOCKS, "f16", "bf16")}
OPS |= {f"embedding {q}": ([f"!{q} 4 256", "i64 s"], {}, "f32 s 256") for q in (*BLOCKS, "f16", "bf16")}
SIZES = ["s", "t", "s+t", "2*s", *map(str, (*range(9), 32, 256, 512, -1, 2**20, 2**31, 2**62, -(2**63)))]


def hand_made(name):
    """A program of one op over s and t, with an integer input and an item as the symbols' sources, as plain JSON."""
    operands, attrs, result = OPS[name]
    row = SIZES.index
    dims = [["sym", 0], ["sym", 1], ["add", [0, 1]], ["add", [0, 0]], *(["const", int(n)] for n in SIZES[4:])]
    source = {"input": 0, "index": 0, "mul": row("1"), "add": row("0")}
    symbols = [
        {"name": "s", "lo": 1, "hi": 64, "source": source | {"kind": "int"}},
        {"name": "t", "lo": 1, "hi": 64, "source": source | {"kind": "item", "input": 1, "index": 1}},
    ]
    inputs = [{"name": "s", "dtype": "int", "dims": [0]}, {"name": "pos", "dtype": "i64", "dims": [row("2")]}]
    values, ids = [], []
    for i, text in enumerate(operands):
        kept = {"!": "const", "~": "state"}.get(text[0])
        dtype, *sizes = text.lstrip("!~").split()
        spec = {"name": f"a{i}", "dtype": dtype, "dims": [row(d) for d in sizes]}
        ids.append(("value", len(values)) if kept else ("input", len(inputs)))
        (values if kept else inputs).append(spec | ({"kind": kept, "key": f"w{i}"} if kept else {}))
    dtype, *sizes = result.split()
    out = {"name": "out", "dtype": dtype, "dims": [row(d) for d in sizes]}
    ins = [i if kind == "input" else len(inputs) + i for kind, i in ids]
    plain = {k: [row(d) for d in v] if isinstance(v, list) else row(v) if v in SIZES else v for k, v in attrs.items()}
    node = {"op": name.split()[0], "ins": ins, "outs": [len(inputs) + len(values)], "attrs": plain, "regions": []}
    check = [{"lhs": 2, "cmp": "le", "rhs": row("32"), "sentence": "it has to fit"}]
    contract = {"dims": dims, "symbols": symbols, "inputs": inputs, "constraints": check, "outputs": [out]}
    values = [*values, out | {"kind": "temp", "key": ""}]
    return {"version": 1, "contract": contract, "values": values, "nodes": [node], "results": node["outs"]}


def lowered():
    """Programs of nine small models, as plain JSON."""
    import torch
    from torch import nn
    from torch.export import Dim

    import keepdim
    from keepdim.artifact import pte

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.n = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

        def forward(self, x):
            return x + self.b(nn.functional.silu(self.a(self.n(x))))

    class Attend(nn.Module):
        def forward(self, q, k):
            return torch.softmax(q @ k.transpose(1, 2) * 0.5, -1) @ k

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(16, 8)

        def forward(self, ids):
            return self.e(ids) + torch.arange(ids.shape[1]).unsqueeze(-1)

    class Pieces(nn.Module):
        def forward(self, x):
            a, b = torch.cat([x, 2 * x])[x.shape[0] :].chunk(2, -1)
            return (a * b).reshape(-1, 2, 2).permute(2, 0, 1).expand(2, -1, 2)

    class Sizes(nn.Module):
        def forward(self, x):
            return x * x.shape[0] + torch.full((x.shape[0], 1), 2.0), x.shape[0] * 2

    class Reduce(nn.Module):
        def forward(self, x):
            return x.mean(0), x.sum((0, 1)), x.amax(1), (x - x.amax()).exp().clamp(max=0.5)

    class Derived(nn.Module):
        def forward(self, x, y):
            return torch.cat([x, x]) + y

    class Choice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x):
            def rest(x):
                return torch.cond(x.shape[0] < 9, lambda x: (x.exp(), self.a(x)), lambda x: (x + 1, x.sin()), (x,))

            return torch.cond(x.shape[0] < 3, lambda x: (self.a(x), x * 2), rest, (x,))

    s = Dim("s", min=1, max=32)
    x, ids = torch.randn(3, 8), torch.ones(2, 5, dtype=torch.int64)
    models = [
        (Block(), (x,), ({0: s},)),
        (nn.Linear(8, 4), (x,), ({0: s},)),
        (Attend(), (torch.randn(2, 3, 8), torch.randn(2, 5, 8)), ({1: s}, {1: Dim("t", min=1, max=32)})),
        (Tokens(), (ids,), ({1: s},)),
        (Pieces(), (torch.randn(4, 8),), ({0: s},)),
        (Sizes(), (x,), ({0: s},)),
        (Reduce(), (x,), ({0: s},)),
        (Choice(), (x,), ({0: s},)),
        (Derived(), (x, torch.randn(6, 8)), ({0: s}, {0: 2 * s})),
    ]
    out = []
    for model, args, shapes in models:
        module = keepdim.lower(model.eval(), args, dynamic_shapes=shapes)
        out += [json.loads(d.program.to_json()) for d in pte.delegates(module.path) if d.program is not None]
    return out


# ---------------------------------------------------------------- mutating
NUMBERS = [-1, 0, 1, 2, 3, 7, 63, 2**20, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, -(2**63), 2**70, -(2**31) - 1]
MODES = "tanh reflect replicate linear sum mean max zeros border nearest bilinear".split()
WORDS = [*WIDTH, *BLOCKS, *(name.split()[0] for name in OPS), "inf", "nan", "x", ""]
WORDS += "int python temp const state size item sym floordiv mod max min le ne".split()


def places(x):
    """Every (container, key) below x."""
    items = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
    for key, value in list(items):
        yield x, key
        yield from places(value)


def mutate(program, rng):
    """One change anywhere."""
    everywhere = list(places(program))
    at, key = rng.choice(everywhere)
    value = at[key]
    kind = rng.randrange(8)
    if kind == 0 and isinstance(at, list):
        del at[key]
    elif kind == 1 and isinstance(at, list):
        at.insert(rng.randrange(len(at) + 1), copy.deepcopy(value))
    elif kind == 2 and isinstance(at, list) and len(at) > 1:
        other = rng.randrange(len(at))
        at[key], at[other] = at[other], at[key]
    elif kind == 3:
        twin = rng.choice([v for v in (c[k] for c, k in everywhere) if type(v) is type(value)])
        at[key] = copy.deepcopy(twin)
    elif isinstance(value, bool):
        at[key] = rng.choice([not value, 1, 0.5])
    elif isinstance(value, int) and kind < 7:
        at[key] = value + rng.choice([-2, -1, 1, 2]) if kind < 6 else rng.choice(NUMBERS)
    elif isinstance(value, str) and kind < 7:
        at[key] = rng.choice(WORDS)
    elif isinstance(value, dict) and value and kind < 6:
        del value[rng.choice(list(value))]
    else:
        at[key] = rng.choice([None, 0.5, -1.0, 1e300, True, "x", [], {}, [0], rng.choice(NUMBERS)])


def bend(program, rng):
    """One change that mostly passes the verifier, so that the engine has to refuse it: dtype, shape, attribute."""
    contract, rows = program["contract"], len(program["contract"]["dims"])
    specs = program["values"] + contract["inputs"] + contract["outputs"]
    node, spec = rng.choice(program["nodes"]), rng.choice(specs)
    kind = rng.randrange(4)
    if kind == 0:
        old, new = spec["dtype"], rng.choice([*WIDTH, *BLOCKS])
        for s in specs:
            s["dtype"] = new if s["dtype"] == old else s["dtype"]
    elif kind == 1 and node["attrs"]:
        key = rng.choice(list(node["attrs"]))
        value = node["attrs"][key]
        if isinstance(value, list) and value and rng.random() < 0.7:
            value[rng.randrange(len(value))] = rng.randrange(rows)
        elif isinstance(value, float) and rng.random() < 0.7:
            node["attrs"][key] = rng.choice([0.0, -1.0, 1e-300, 1e300, 2.0**62])
        else:
            odd = [*range(rows), -1.0, 0.5, 1e300, "nan", True, [0], [0, 1], [2, 1, 0], *MODES]
            node["attrs"][key] = rng.choice(odd)
    elif kind == 2:
        node["op"] = rng.choice(list(OPS)).split()[0]
    elif spec["dims"]:
        spec["dims"][rng.randrange(len(spec["dims"]))] = rng.randrange(rows)
        spec["dims"] += [rng.randrange(rows)] if rng.random() < 0.2 else []
    made = contract["inputs"] + program["values"]
    for out, result in zip(contract["outputs"], program["results"], strict=True):  # as the result now is
        if result >= 0:
            out |= {"dtype": made[result]["dtype"], "dims": list(made[result]["dims"])}


def mutants(seeds, count):
    """`count` mutated programs, the same ones every time."""
    rng = random.Random(0)
    for i in range(count):
        program = copy.deepcopy(seeds[i % len(seeds)])
        change = rng.choice([mutate, bend])
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            change(program, rng)
        yield json.dumps(program).encode()


# ---------------------------------------------------------------- running
class TooLarge(Exception):
    """Not run here: the program is legal, its smallest sizes are not small."""


def array(spec, values, rng):
    """Data for one tensor at these sizes; integers are small, so that some are indices in range."""
    import numpy as np

    shape = [values[d] for d in spec["dims"]]
    if np.prod([float(n) for n in shape]) > LARGE or max(shape, default=0) > LARGE:
        raise TooLarge
    if spec["dtype"] in BLOCKS:
        block, size = BLOCKS[spec["dtype"]]
        return rng.integers(0, 256, int(np.prod(shape)) // block * size).astype("u1")
    x = rng.integers(0, 4, shape)
    if spec["dtype"] in ("i32", "i64") and x.ndim == 1 and x.size:
        x = np.sort(x) - x.min()  # as offsets of bags have to be
    return x.astype(WIDTH[spec["dtype"]])


def attempt(engine, data, rng):
    """One program: verified, loaded, run at two sizes; the answer is what became of it."""
    from keepdim import _native

    try:
        _native.verify(data)
        contract = json.loads(data)["contract"]
        runs = []
        for step in (0, 3):
            lows = [s["lo"] if s["lo"] is not None else min(0, s["hi"] or 0) for s in contract["symbols"]]
            tops = [s["hi"] if s["hi"] is not None else 2**62 for s in contract["symbols"]]
            runs.append([min(lo + step, hi) for lo, hi in zip(lows, tops, strict=True)])
        values = _native.eval_dims(data, runs[0])
        kept = [v for v in json.loads(data)["values"] if v["kind"] != "temp"]
        weights = {v["key"]: array(v, values, rng).tobytes() for v in kept}
        delegate = _native.Delegate(engine, data, weights)
    except _native.Error:
        return "refused"
    except TooLarge:
        return "large"
    ran = False
    for symbols in (*runs, runs[0]):
        try:
            delegate.run(arguments(contract, symbols, _native.eval_dims(data, symbols), rng))
            ran = True
        except (_native.Error, TooLarge) as e:
            if any(text in str(e) for text in BROKEN):
                raise
    return "ran" if ran else "refused at run"


def arguments(contract, symbols, values, rng):
    """Inputs that bind to these symbols, elements that are read as symbols included."""
    args = [values[s["dims"][0]] if s["dtype"] == "int" else array(s, values, rng) for s in contract["inputs"]]
    for symbol, value in zip(contract["symbols"], symbols, strict=True):
        source = symbol["source"]
        if source["kind"] == "item":
            place = values[source["mul"]] * value + values[source["add"]]
            flat = args[source["input"]].reshape(-1)
            if source["index"] < flat.size and abs(place) < 2 ** (8 * flat.itemsize - 1):
                flat[source["index"]] = place
    return args


def main(engine, current, folder):
    """Print what became of every mutant; `current` holds the program under way, for whoever finds us dead."""
    import numpy as np

    from keepdim import _native

    faulthandler.enable()
    before = _native.options()
    _native.set_options(memory_limit=256 << 20, threads=1)
    seeds = lowered() + [hand_made(op) for op in OPS]
    rng = np.random.default_rng(0)
    healthy = Counter(attempt(engine, json.dumps(s).encode(), rng) for s in seeds)
    counts = Counter()
    for i, data in enumerate(mutants(seeds, COUNT)):
        Path(current).write_bytes(data)
        if folder:
            Path(folder, f"{i:04}.json").write_bytes(data)
        counts[attempt(engine, data, rng)] += 1
    _native.set_options(**before)
    print(
        json.dumps(
            {
                "seeds": len(seeds),
                "healthy": healthy["ran"],
                "ops": sorted({n["op"] for s in seeds for n in s["nodes"]}),
                **counts,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
