"""The Program: JSON and text round trips, and one invalid example per rule on both sides."""

import copy
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepdim import KeepdimError, _native
from keepdim.ir.program import NONE, Node, Part, Pass, Program, Region, Value, schema, verify
from keepdim.ir.text import parse_program
from keepdim.shapes.blocks import BLOCKS
from keepdim.shapes.contract import Constraint, Contract, Source, Spec, Symbol
from keepdim.shapes.dim import Dim, dmax

ONE, ZERO = Dim.const(1), Dim.const(0)
S, P = Dim.symbol("s", 1, 256), Dim.symbol("p", 0, 15)
EIGHT = Dim.const(8)


def good():
    """x [s, 8] through a linear and a data attribute, with an integer input, a constraint and an integer output."""
    symbols = (
        Symbol("s", 1, 256, Source("size", 0, 0, ONE, ZERO)),
        Symbol("p", 0, 15, Source("int", 1, 0, ONE, ZERO)),
    )
    inputs = (Spec("x", "f32", (S, EIGHT)), Spec("p", "int", (P,)), Spec("ids", "i64", (2 * S,)))
    checks = (Constraint(P + S, "le", Dim.const(270), "torch._check(p + s <= 270)"), Constraint(S % 2, "ne", P))
    contract = Contract(symbols, inputs, checks, (Spec("y", "f32", (S, EIGHT)), Spec("n", "int", (P + S,))))
    values = (
        Value("w", "f32", (EIGHT, EIGHT), "const", "sha-w"),
        Value("t", "f32", (S, EIGHT), "temp"),
        Value("u", "f32", (S, EIGHT), "temp"),
    )
    nodes = (Node("linear", (0, 3, NONE), (4,)), Node("mul", (4,), (5,), {"other": P}))
    passes = (Pass("drop_dead", 3, 2), Pass("fold_scalars", 2, 2))
    return verify(Program(contract, values, nodes, (5, NONE), passes, (Part("layers.0.up", ("t", "u")),)))


def with_regions():
    """A node with two regions, one nested, every kind of attribute, and state."""
    contract = Contract(good().contract.symbols[:1], good().contract.inputs[:1], (), (Spec("y", "f32", (S, EIGHT)),))
    shape = (S, EIGHT)
    values = (
        Value("kv", "f16", (Dim.const(4), EIGHT), "state", "layer.0/kv"),
        Value("a", "f32", shape, "temp"),
        Value("b", "f32", shape, "temp"),
        Value("c", "f32", shape, "temp"),
        Value("region_1", "f32", shape, "temp"),
        Value("yield_1", "f32", (dmax(S // 2, 3), -(-S // 4), (S + 1) % 7), "temp"),
        Value("output", "f32", shape, "temp"),
    )
    attrs = {
        "yes": True,
        "no": False,
        "dim": S // 2 - 3,
        "none": (),
        "dims": (S, dmax(S, 4), -S // 3),
        "eps": 1e-05,
        "one": 1.0,
        "big": 1e300,
        "tiny": -5e-324,
        "inf": math.inf,
        "minus": -math.inf,
        "text": 'a "b"; {c} = d(e), \\',
        "empty": "",
    }
    inner = Region((Node("silu", (0,), (2,)),), (2,))
    outer = Region((Node("cond", (0,), (3,), {"k": 2.5}, (inner,)),), (3,))
    nodes = (
        Node("cond", (0,), (4, 5), dict(sorted(attrs.items())), (outer, Region((), (0,)))),
        Node("shape", (1, 4), (6,), {"nan": math.nan}),
        Node("relu", (5,), (7,)),
    )
    return verify(Program(contract, values, nodes, (7,)))


def quantised():
    """A weight of each dtype of blocks, and one linear."""
    symbols = (Symbol("s", 1, 256, Source("size", 0, 0, ONE, ZERO)),)
    k = Dim.const(256)
    contract = Contract(symbols, (Spec("x", "f32", (S, k)),), (), (Spec("y", "f32", (S, EIGHT)),))
    weights = [Value(f"w_{q}", q, (EIGHT, k), "const", f"key/{q}") for q in BLOCKS]
    nodes = (Node("linear", (0, 1, NONE), (1 + len(weights),)),)
    return verify(Program(contract, (*weights, Value("y", "f32", (S, EIGHT), "temp")), nodes, (1 + len(weights),)))


PROGRAMS = {"good": good, "with_regions": with_regions, "quantised": quantised}


def same(a, b):
    """Equal, where a nan equals a nan."""
    return repr(a) == repr(b)


# ---------------------------------------------------------------- round trips
@pytest.mark.parametrize("name", PROGRAMS)
def test_json_and_text_round_trip(name):
    """Both forms give the program back, and C++ takes the JSON."""
    p = PROGRAMS[name]()
    data = p.to_json()
    assert same(Program.from_json(data), p) and Program.from_json(data).to_json() == data
    assert same(parse_program(str(p)), p) and str(parse_program(str(p))) == str(p)
    _native.verify(data)


def test_golden_text(golden, request):
    """The text form is stable: it is stored in a file."""
    path = golden / "program.txt"
    text = str(good()) + "\n" + str(with_regions())
    if request.config.getoption("--regen-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text


DIMS = st.sampled_from(
    [ZERO, ONE, EIGHT, S, 2 * S, S + P, S // 2, -(-S // 4), dmax(S, 4) - 1, S * S, P % 5, Dim.const(2**20)]
)
DTYPES = st.sampled_from(["f32", "f16", "bf16", "f64", "i8", "u8", "i16", "i32", "i64", "bool"])
TEXT = st.text(st.characters(codec="utf-8"), max_size=8).filter(lambda t: t not in ("inf", "-inf", "nan"))
FLOATS = st.floats() | st.floats(width=32)
ATTR = st.booleans() | DIMS | FLOATS | TEXT | st.lists(DIMS, max_size=3).map(tuple)
CONSTANTS = st.lists(st.sampled_from([EIGHT, ONE, ZERO]), max_size=3)
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,6}", fullmatch=True)
ATTRS = st.dictionaries(NAMES, ATTR, max_size=3).map(lambda d: dict(sorted(d.items())))  # as the text has them


@st.composite
def programs(draw):
    """A small valid program in the order of its text: constants first, then temps as nodes make them."""
    base = good().contract
    values = [
        Value(f"w{i}", draw(DTYPES), tuple(draw(CONSTANTS)), draw(st.sampled_from(["const", "state"])), f"key/{i}")
        for i in range(draw(st.integers(0, 2)))
    ]
    first = len(base.inputs)

    def nodes(defined, depth):
        out = []
        for _ in range(draw(st.integers(0 if depth else 1, 3))):
            ins = tuple(draw(st.lists(st.sampled_from([NONE, *defined]), max_size=3)))
            regions = []
            for _ in range(draw(st.integers(0, 1)) if depth < 2 else 0):
                inner = list(defined)
                body = nodes(inner, depth + 1)
                regions.append(Region(body, tuple(draw(st.lists(st.sampled_from(inner), max_size=2)))))
            outs = []
            for _ in range(draw(st.integers(0 if depth else 1, 2))):
                outs.append(first + len(values))
                values.append(Value(f"t{len(values)}", draw(DTYPES), tuple(draw(st.lists(DIMS, max_size=2))), "temp"))
            defined += outs
            out.append(Node(draw(NAMES), ins, tuple(outs), draw(ATTRS), tuple(regions)))
        return tuple(out)

    defined = [0, 2, *range(first, first + len(values))]
    body = nodes(defined, 0)
    results = draw(st.lists(st.sampled_from([d for d in defined if d != 1]), min_size=1, max_size=3))
    program = Program(base, tuple(values), body, ())
    outputs = [Spec(f"o{i}", program.value(r).dtype, program.value(r).dims) for i, r in enumerate(results)]
    outputs.append(Spec("n", "int", (draw(DIMS),)))
    contract = Contract(base.symbols, base.inputs, base.constraints, tuple(outputs))
    return Program(contract, tuple(values), body, (*results, NONE))


@settings(max_examples=100)
@given(programs())
def test_random_programs_round_trip(p):
    """Any valid program survives JSON and text, and both verifiers take it."""
    assert verify(p) is p
    data = p.to_json()
    _native.verify(data)
    assert same(Program.from_json(data), p)
    assert same(parse_program(str(p)), p)


@pytest.mark.parametrize(
    "change, sentence",
    [
        (("linear(x, w, -)", "linear(x, w, -"), "cannot be read"),
        (("linear(x, w, -)", "linear(x, q, -)"), "cannot be read: 'q'"),
        (("keepdim program 1", "keepdim program 2"), "format version 2 is not 1"),
        (("from x.size(0)", "from z.size(0)"), "is read from unknown input 'z'"),
        (("{other=p}", "{other=q}"), "cannot be read at 'q'"),
        (("output n: int[p + s]", "outpu n: int[p + s]"), "cannot be read"),
    ],
)
def test_unreadable_text_is_a_sentence(change, sentence):
    """A KeepdimError, not a Python one."""
    text = str(good())
    assert change[0] in text
    with pytest.raises(KeepdimError) as e:
        parse_program(text.replace(*change))
    assert sentence in str(e.value)


# ---------------------------------------------------------------- verify: one invalid example a rule
def put(*path_and_value):
    """A change of the JSON: everything but the last is the path to the field, the last its new value."""
    *path, last, value = path_and_value

    def change(j):
        at = j
        for key in path:
            at = at[key]
        if isinstance(at, list) and last == len(at):
            at.append(value)
        else:
            at[last] = value

    return change


def drop(*path):
    def change(j):
        at = j
        for key in path[:-1]:
            at = at[key]
        del at[path[-1]]

    return change


def both(*changes):
    def change(j):
        for c in changes:
            c(j)

    return change


def nested(depth):
    """Regions inside regions."""
    node = {"op": "a", "ins": [], "outs": [], "attrs": {}, "regions": []}
    for _ in range(depth):
        node = {"op": "a", "ins": [], "outs": [], "attrs": {}, "regions": [{"nodes": [node], "results": []}]}
    return node


C, SYM, IN, OUT = "contract", ("contract", "symbols"), ("contract", "inputs"), ("contract", "outputs")
TEMP = {"name": "z", "dtype": "f32", "dims": [], "kind": "temp", "key": ""}


def row(text):
    """The row of the good program's table that prints so."""
    return _native.dim_texts(good().to_json()).index(text)


R8, RS, RP, R1, R0, RSUM = (row(t) for t in ("8", "s", "p", "1", "0", "p + s"))
ROWS = len(msgspec.json.decode(good().to_json())["contract"]["dims"])


def dims(*rows):
    """Append rows to the table."""

    def change(j):
        j["contract"]["dims"] += rows

    return change


# rule, change, a fragment of both sentences
INVALID = [
    ("version newer", put("version", 2), "format version 2 is newer than this build reads (1). Upgrade keepdim."),
    ("version older", put("version", 0), "format version 0"),
    ("version is a bool", put("version", True), "version"),
    ("version is text", put("version", "1"), "version"),
    ("no contract", drop("contract"), "contract"),
    ("contract is a list", put("contract", []), "contract"),
    ("values missing", drop("values"), "values"),
    ("nodes are an object", put("nodes", {}), "nodes"),
    ("results missing", drop("results"), "results"),
    ("symbols missing", drop(C, "symbols"), "contract"),
    ("ensures in a program", put(C, "ensures", [{"lhs": R8, "cmp": "le", "rhs": R8}]), "contract"),
    ("outputs missing", drop(C, "outputs"), "outputs"),
    ("field of another type", put(*IN, 0, "name", 3), ""),
    ("dims not a list", put(C, "dims", {}), "dims"),
    ("dim op unknown", dims(["xor", [R8, RS]]), f"dim {ROWS}"),
    ("dim not a pair", dims(["const"]), f"dim {ROWS}"),
    ("dim operand is a bool", dims(["const", True]), f"dim {ROWS}"),
    ("dim operand is a float", dims(["const", 1.5]), f"dim {ROWS}"),
    ("add of one", dims(["add", [RS]]), f"dim {ROWS}"),
    ("floordiv of three", dims(["floordiv", [RS, R8, R8]]), f"dim {ROWS}"),
    ("operand is the dim itself", dims(["add", [RS, ROWS]]), f"operand {ROWS}"),
    ("operand is later", dims(["add", [RS, ROWS + 1]], ["const", 1]), f"operand {ROWS + 1}"),
    ("operand negative", dims(["add", [RS, -1]]), "operand -1"),
    ("symbol of a dim does not exist", dims(["sym", 2]), "symbol 2"),
    ("divisor can be zero", dims(["mod", [RS, RP]]), "can be zero"),
    ("constant overflows", dims(["const", 2**63]), "overflow"),
    ("bounds overflow", dims(["const", 2**62], ["mul", [ROWS, RS]]), "overflow"),
    ("symbol without a name", put(*SYM, 0, "name", ""), ""),
    ("symbol twice", put(*SYM, 1, "name", "s"), "symbol"),
    ("empty range", put(*SYM, 0, "lo", 300), "range"),
    ("range overflows", put(*SYM, 0, "hi", 2**63), ""),
    ("range is text", put(*SYM, 0, "lo", "1"), ""),
    ("source missing", drop(*SYM, 0, "source"), "source"),
    ("source kind unknown", put(*SYM, 0, "source", "kind", "here"), "'here'"),
    ("source input does not exist", put(*SYM, 0, "source", "input", 3), "symbol 's'"),
    ("source input negative", put(*SYM, 0, "source", "input", -1), "symbol 's'"),
    ("source dim does not exist", put(*SYM, 0, "source", "index", 2), "symbol 's'"),
    ("source index negative", put(*SYM, 1, "source", "index", -1), "symbol 'p'"),
    ("source index huge", put(*SYM, 1, "source", "index", 2**40), "symbol 'p'"),
    ("size of an integer", put(*SYM, 0, "source", "input", 1), "symbol 's'"),
    ("integer of a tensor", put(*SYM, 1, "source", "input", 0), "symbol 'p'"),
    (
        "item of floats",
        put(*SYM, 1, "source", {"kind": "item", "input": 0, "index": 0, "mul": R1, "add": R0}),
        "symbol 'p'",
    ),
    (
        "item that may not exist",
        put(*SYM, 1, "source", {"kind": "item", "input": 2, "index": 2, "mul": R1, "add": R0}),
        "symbol 'p'",
    ),
    ("mul does not exist", put(*SYM, 0, "source", "mul", 99), "99"),
    ("add negative", put(*SYM, 0, "source", "add", -1), "-1"),
    ("add over its own symbol", put(*SYM, 0, "source", "add", RS), "not bound before it"),
    ("mul over a later symbol", put(*SYM, 0, "source", "mul", RP), "not bound before it"),
    ("mul can be zero", put(*SYM, 0, "source", "mul", R0), "can be zero"),
    (
        "mul can be zero by its bounds",
        both(dims(["const", -8], ["add", [RS, ROWS]]), put(*SYM, 1, "source", "mul", ROWS + 1)),
        "can be zero",
    ),
    ("dims of a spec", put(*IN, 0, "dims", 0, 99), "99"),
    ("dim of a spec is a float", put(*IN, 0, "dims", 0, 1.5), ""),
    ("dtype unknown", put(*IN, 0, "dtype", "f8"), "'f8'"),
    ("python input", put(*IN, 2, {"name": "ids", "dtype": "python", "dims": []}), ""),
    ("python output", both(put(*OUT, 2, {"name": "o", "dtype": "python", "dims": []}), put("results", 2, 0)), ""),
    ("integer of two dims", put(*IN, 1, "dims", [RP, RP]), "'p'"),
    ("integer of no dims", put(*OUT, 1, "dims", []), "'n'"),
    (
        "negative size",
        both(dims(["const", -1], ["mul", [ROWS, RS]]), put(*IN, 2, "dims", [ROWS + 1])),
        "can be negative",
    ),
    ("size without a lower end", put(*SYM, 0, "lo", None), "can be negative"),
    ("bytes overflow", both(dims(["const", 2**60]), put(*IN, 2, "dims", [ROWS])), "overflow"),
    ("cmp unknown", put(C, "constraints", 0, "cmp", "<="), "'<='"),
    ("constraint dim does not exist", put(C, "constraints", 0, "lhs", 99), "99"),
    ("constraint sentence is a number", put(C, "constraints", 0, "sentence", 1), ""),
    ("value without a name", put("values", 0, "name", ""), "name"),
    ("value named like an input", put("values", 0, "name", "x"), "'x'"),
    ("inputs of one name", put(*IN, 2, "name", "x"), "'x'"),
    ("value of dtype int", put("values", 0, "dtype", "int"), "'w'"),
    ("blocks that are not whole", put("values", 0, "dtype", "q8_0"), "not a multiple of 32 elements, as q8_0 needs"),
    (
        "blocks without dims",
        both(put("values", 0, "dtype", "q4_k"), put("values", 0, "dims", [])),
        "not a multiple of 256 elements",
    ),
    ("temp of blocks", put("values", 1, "dtype", "q8_0"), "dtype q8_0 is only for a const or state"),
    ("input of blocks", put(*IN, 0, "dtype", "q8_0"), "dtype q8_0 is only for a const or state"),
    ("kind unknown", put("values", 0, "kind", "input"), "'input'"),
    ("const without a key", put("values", 0, "key", ""), "a const needs a key"),
    (
        "state without a key",
        both(put("values", 0, "kind", "state"), put("values", 0, "key", "")),
        "a state needs a key",
    ),
    ("temp with a key", put("values", 1, "key", "k"), "a temp has no key"),
    ("const with a symbolic size", put("values", 0, "dims", 0, RS), "constant"),
    (
        "const with a computed size",
        both(dims(["const", 4], ["add", [ROWS, ROWS]]), put("values", 0, "dims", [ROWS + 1, ROWS + 1])),
        "constant",
    ),
    ("temp that no node makes", put("values", 3, TEMP), "'z'"),
    ("node without an op", put("nodes", 0, "op", ""), "op"),
    ("operand does not exist", put("nodes", 0, "ins", 0, 6), "6"),
    ("operand is -2", put("nodes", 0, "ins", 0, -2), "-2"),
    ("operand made later", put("nodes", 0, "ins", 0, 5), "before it"),
    ("node reads its own out", put("nodes", 0, "ins", 0, 4), "before it"),
    ("out is a const", put("nodes", 0, "outs", 0, 3), "not a temp"),
    ("out is an input", put("nodes", 0, "outs", 0, 0), "not a temp"),
    ("out does not exist", put("nodes", 0, "outs", 0, 6), "6"),
    ("made twice", put("nodes", 1, "outs", 0, 4), "'t'"),
    ("made twice by one node", put("nodes", 0, "outs", [4, 4]), "'t'"),
    ("attribute's dim does not exist", put("nodes", 1, "attrs", "other", 99), "99"),
    ("attribute's dims do not exist", put("nodes", 1, "attrs", "dims", [0, 99]), "99"),
    ("attribute is null", put("nodes", 1, "attrs", "other", None), ""),
    ("attribute is an object", put("nodes", 1, "attrs", "other", {}), ""),
    ("attribute is a list of floats", put("nodes", 1, "attrs", "other", [0.5]), ""),
    ("attrs are a list", put("nodes", 1, "attrs", []), ""),
    ("region is a number", put("nodes", 0, "regions", [3]), ""),
    ("region without nodes", put("nodes", 0, "regions", [{"results": []}]), "nodes"),
    ("region result not defined", put("nodes", 0, "regions", [{"nodes": [], "results": [5]}]), ""),
    (
        "region's node reads what is later",
        put("nodes", 0, "regions", [{"nodes": [{"op": "a", "ins": [5], "outs": []}], "results": []}]),
        "before it",
    ),
    (
        "region's value seen outside",
        both(
            put("values", 3, TEMP),
            put("nodes", 0, "regions", [{"nodes": [{"op": "a", "ins": [], "outs": [6]}], "results": [6]}]),
            put("nodes", 1, "ins", 0, 6),
        ),
        "before it",
    ),
    ("regions too deep", put("nodes", 2, nested(33)), "deeper than 32"),
    ("more results than outputs", put("results", 2, 5), "results"),
    ("result not defined", put("results", 0, 9), "9"),
    ("result of another dtype", put(*OUT, 0, "dtype", "f16"), "'y'"),
    ("result of other dims", put(*OUT, 0, "dims", [R8, RS]), "'y'"),
    ("result of equal dims in other rows", both(dims(["const", 8]), put(*OUT, 0, "dims", 1, ROWS)), "'y'"),
    ("no value for a tensor", put("results", 0, -1), "y"),
    ("a value for an integer", put("results", 1, 5), ""),
    ("result is a float", put("results", 0, 5.0), ""),
    ("passes are not a list", put("passes", {}), "passes"),
    ("a pass without a name", put("passes", 0, "name", ""), "pass ''"),
    ("a pass without a count", drop("passes", 0, "after"), "after"),
    ("a pass with a negative count", put("passes", 0, "after", -1), "pass 'drop_dead'"),
    ("modules are not a list", put("modules", {}), "modules"),
    ("a module without a path", put("modules", 0, "path", ""), "module ''"),
    ("a path with a blank", put("modules", 0, "path", "a b"), "module 'a b'"),
    ("a value of a module that is none", put("modules", 0, "values", 1, "v"), "module 'layers.0.up'"),
    ("a count that overflows", put("passes", 1, "before", 2**63), "pass 'fold_scalars'"),
]


@pytest.mark.parametrize("change, fragment", [r[1:] for r in INVALID], ids=[r[0] for r in INVALID])
def test_invalid_programs_are_refused_on_both_sides(change, fragment):
    """One example a rule; the sentence names what is wrong."""
    j = msgspec.json.decode(good().to_json())
    change(j)
    data = msgspec.json.encode(j)
    for error, read in ((KeepdimError, Program.from_json), (_native.Error, _native.verify)):
        with pytest.raises(error) as e:
            read(data)
        assert str(e.value).startswith("[verify] ") and fragment in str(e.value), str(e.value)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"null", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"version": 1e400}', b'{"version": 1}']
)
def test_what_is_no_json_is_refused_on_both_sides(data):
    """Empty, cut, not UTF-8, nested without end."""
    for error, read in ((KeepdimError, Program.from_json), (_native.Error, _native.verify)):
        with pytest.raises(error, match=r"^\[verify\] program"):
            read(data)


def test_newer_versions_say_the_same():
    """The one sentence of a newer file, for programs and contracts."""
    j = msgspec.json.decode(good().to_json()) | {"version": 7}
    data = msgspec.json.encode(j)
    sentence = "[verify] program: format version 7 is newer than this build reads (1). Upgrade keepdim."
    for read in (Program.from_json, Contract.from_json, _native.verify, _native.Contract):
        with pytest.raises((KeepdimError, _native.Error)) as e:
            read(data)
        assert str(e.value) == sentence


def test_valid_oddities_are_taken_on_both_sides():
    """Unknown fields, missing optional ones, a name twice among outputs, an unused row."""
    j = msgspec.json.decode(good().to_json())
    j["comment"], j["contract"]["extra"], j["nodes"][0]["why"] = "x", [1], None
    del (
        j["nodes"][0]["attrs"],
        j["nodes"][0]["regions"],
        j["values"][1]["key"],
        j["contract"]["constraints"][1]["sentence"],
    )
    j["contract"]["dims"].append(["max", [RS, RP, R8]])
    data = msgspec.json.encode(j)
    _native.verify(data)
    assert Program.from_json(data) == good()
    deep = copy.deepcopy(j)
    deep["nodes"].append(nested(32))
    _native.verify(msgspec.json.encode(deep))
    Program.from_json(msgspec.json.encode(deep))


def test_schema():
    """A JSON Schema that names every struct, resolves its references and describes a real program."""
    s = schema()
    assert set(s["$defs"]) == {
        "Program",
        "Pass",
        "Part",
        "Contract",
        "Symbol",
        "Source",
        "Spec",
        "Constraint",
        "Value",
        "Node",
        "Region",
    }
    references = {r for r in _strings(s) if r.startswith("#/")}
    assert references and all(r.removeprefix("#/$defs/") in s["$defs"] for r in references)
    j = msgspec.json.decode(with_regions().to_json())
    assert set(j["values"][0]) == set(s["$defs"]["Value"]["properties"])
    assert set(j["nodes"][0]) == set(s["$defs"]["Node"]["properties"])
    assert set(j["contract"]) == {"dims", *s["$defs"]["Contract"]["required"]}
    msgspec.json.encode(s)


def _strings(x):
    if isinstance(x, dict):
        x = list(x.values())
    return [x] if isinstance(x, str) else [t for y in x for t in _strings(y)] if isinstance(x, list) else []
