"""The signature of a file is data: it is read without importing or calling anything, and checked in every part."""

import copy
import json
import random
import re
import shutil
import subprocess
import sys
from collections import OrderedDict, defaultdict, deque, namedtuple
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch
import torch.utils._pytree as pytree
from torch.export import Dim

import keepdim
from keepdim import KeepdimError
from keepdim.artifact import pte, treespec
from keepdim.artifact.outline import OUTLINE_METHOD, Outline
from keepdim.artifact.range_table import RangeTable
from keepdim.artifact.signature import CONTRACT_METHOD, Signature

PACKAGE = Path(keepdim.__file__).parent
AXES = ("ranges", "axes.py")  # compiles the axes that a program declares
LEAF = {"type": None, "context": None, "children_spec": []}
N = {0: Dim("n", min=1, max=8)}


class Point(NamedTuple):
    """A result with names, known to this program."""

    x: torch.Tensor
    y: torch.Tensor


class Unnamed(NamedTuple):
    """One that no file can name."""

    x: torch.Tensor


class Colour(Enum):
    """A key that would need an import."""

    RED = 1


class Box:
    """A class with a function of its own for reading files."""

    def __init__(self, content):
        self.content = content


pytree._register_namedtuple(Point, serialized_type_name="keepdim.tests.Point")
pytree.register_pytree_node(
    Box,
    lambda b: ([b.content], None),
    lambda v, _: Box(*v),
    serialized_type_name="keepdim.tests.Box",
    to_dumpable_context=lambda c: c,
    from_dumpable_context=lambda c: pytest.fail("called from the text of a file"),
)


def node(kind, context, *children):
    """A node as it is written in a file."""
    return {"type": kind, "context": context, "children_spec": list(children)}


def text(spec):
    return json.dumps([1, spec])


class Cumulative(torch.nn.Module):
    """Changes an input, takes an integer and a constant."""

    def forward(self, x, n: int, scale: float, bias):
        x.add_(1.0)
        return {"y": x * n * scale, "z": (x + bias, [bias])}


@pytest.fixture(scope="module")
def lowered(tmp_path_factory):
    """A file whose signature has something of everything, and its text."""
    path = tmp_path_factory.mktemp("signature") / "m.pte"
    args = (torch.randn(3, 4), 5, 0.5, torch.randn(4))
    shapes = (N, torch.export.Dim.DYNAMIC(min=2, max=9), None, None)
    keepdim.lower(Cumulative(), args, dynamic_shapes=shapes).save(path)
    return path, pte.contract_text(path, CONTRACT_METHOD)


# ---------------------------------------------------------------- the format
def trees():
    """Structures that can be written."""
    yield from (
        0,
        (),
        [],
        {},
        (1, [2, {"a": 3, 7: (4,)}]),
        OrderedDict(b=1, a=(2,)),
        Point(1, [2]),
        ([Point(1, 2)], {}),
    )
    yield {f"key {i} \u00e9\U0001f600": i for i in range(100)}


def test_text_is_that_of_torch():
    """Files of earlier versions load, and what is written now is what torch would write."""
    for tree in trees():
        spec = pytree.tree_structure(tree)
        assert treespec.dumps(spec) == pytree.treespec_dumps(spec)
        assert treespec.loads(treespec.dumps(spec)) == spec
        leaves = list(range(spec.num_leaves))
        assert type(pytree.tree_unflatten(leaves, treespec.loads(treespec.dumps(spec)))) is type(tree)


def test_results_of_torch_s_ops_have_names() -> None:
    """Torch has none for them, and is not given any."""
    t = torch.zeros(2)
    for tree in (t.unsqueeze(0).max(0), t.topk(1), torch.return_types.sort((t, t))):
        spec = pytree.tree_structure(tree)
        assert f'"torch.return_types.{type(tree).__name__}"' in treespec.dumps(spec)
        assert type(pytree.tree_unflatten([0, 1], treespec.loads(treespec.dumps(spec)))) is type(tree)
        with pytest.raises(NotImplementedError, match="serialized_type_name"):
            pytree.treespec_dumps(spec)


@pytest.mark.parametrize(
    ("tree", "fact"),
    [
        (defaultdict(list, a=1), "have a defaultdict, which cannot be written to a file. Use a dict."),
        (deque([1]), "have a deque, which cannot be written to a file. Use a list."),
        (Unnamed(1), "have a Unnamed, which has no name for files. Register the class"),
        (namedtuple("Other", "a b")(1, 2), "have a Other, which has no name for files. Register the class"),
        (Box(1), "reading Box from a file would call its from_dumpable_context. Register the class without"),
        ({Colour.RED: 1}, "the key <Colour.RED: 1>, which cannot be written to a file. Use keys that are str or int."),
        ({True: 1}, "the key True, which cannot be written to a file. Use keys"),
        ({None: 1}, "the key None, which cannot be written"),
        ({0.5: 1}, "the key 0.5, which cannot be written"),
        ({(1, 2): 1}, "the key (1, 2), which cannot be written"),
        ({"\ud800": 1}, "the key '\\ud800', which cannot be written"),
    ],
    ids=lambda x: type(x).__name__ if not isinstance(x, str) else "",
)
def test_what_cannot_be_written(tree, fact):
    """Refused when it is lowered, with what to do."""
    with pytest.raises(KeepdimError, match=r"^\[lower\] signature: ") as e:
        treespec.dumps(pytree.tree_structure(tree))
    assert fact in str(e.value)


def test_a_model_that_returns_a_deque_is_refused():
    """By `lower`, not by the program that loads the file."""

    class Model(torch.nn.Module):
        def forward(self, x):
            return deque([x * 2])

    with pytest.raises(KeepdimError, match=r"\[lower\] signature: .* have a deque.* Use a list\.$"):
        keepdim.lower(Model(), (torch.randn(3, 4),), dynamic_shapes=(N,))


def test_named_tuples_travel_through_a_file(tmp_path):
    """As argument and as result, of a class that this program registered."""

    class Model(torch.nn.Module):
        def forward(self, p):
            return Point(p.x + p.y, (p.x * p.y,))

    path = tmp_path / "m.pte"
    keepdim.lower(Model(), (Point(torch.randn(3), torch.randn(3)),), dynamic_shapes=(Point(N, N),)).save(path)
    x, y = torch.randn(5), torch.randn(5)
    out = keepdim.load(path)(Point(x, y))
    assert type(out) is Point
    torch.testing.assert_close(out, Point(x + y, (x * y,)))


def enum(name, member):
    return json.dumps([{"__enum__": True, "fqn": name, "name": member}])


FORGED = {
    "imports a module": node("builtins.dict", enum("keepdim_payload:E", "A"), LEAF),
    "loads a library": node("builtins.dict", enum("ctypes:cdll", "./weights.gguf"), LEAF),
    "enum in an OrderedDict": node("collections.OrderedDict", enum("keepdim_payload:E", "A"), LEAF),
    "calls a factory": node("collections.defaultdict", {"default_factory_module": "os", "default_factory_name": "abort",
                                                        "dict_context": ["y"]}, LEAF),
    "factory as text": node("collections.defaultdict", json.dumps({"default_factory_module": "os"}), LEAF),
    "deque": node("collections.deque", "null", LEAF),
    "a callback of the program": node("keepdim.tests.Box", "null", LEAF),
    "no name": node(pytree.NO_SERIALIZED_TYPE_NAME_FOUND, "null", LEAF),
    "unknown class": node("os.system", "null", LEAF),
    "unknown named tuple": node("collections.namedtuple", "os.stat_result", LEAF),
    "named tuple of a dict": node("collections.namedtuple", "builtins.dict", LEAF),
    "named tuple of nothing": node("collections.namedtuple", None, LEAF),
    "named tuple by its own name": node("keepdim.tests.Point", "null", LEAF, LEAF),
    "named tuple with one value": node("collections.namedtuple", "keepdim.tests.Point", LEAF),
    "result type with one value": node("torch.return_types.max", "null", LEAF),
    "result type with a context": node("torch.return_types.max", "[]", LEAF, LEAF),
    "keys without values": node("builtins.dict", '["a", "b"]', LEAF),
    "a key twice": node("builtins.dict", '["a", "a"]', LEAF, LEAF),
    "a bool as key": node("builtins.dict", "[true]", LEAF),
    "an oversized key": node("builtins.dict", "[1" + "0" * 6000 + "]", LEAF),
    "half a surrogate pair": node("builtins.dict", '["\\ud800"]', LEAF),
    "a tuple with a context": node("builtins.tuple", "[1]", LEAF),
    "a leaf with children": {**LEAF, "children_spec": [LEAF]},
    "a leaf with a context": {**LEAF, "context": "null"},
    "one more field": {**LEAF, "more": 1},
    "no children": {"type": None, "context": None},
    "not a node": [1, 2],
}  # fmt: skip


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED.keys())
def test_forged_structures(forged, monkeypatch):
    """Each is a sentence, and nothing was imported for it."""
    monkeypatch.setattr("importlib.import_module", lambda *_: pytest.fail("imported from the text of a file"))
    with pytest.raises(KeepdimError, match=r"^\[load\] signature: "):
        treespec.loads(text(forged))


def test_context_of_a_registered_class_stays_data(monkeypatch):
    """What torch would import for is a dict like any other."""
    monkeypatch.setattr("importlib.import_module", lambda *_: pytest.fail("imported from the text of a file"))
    context = treespec.loads(text(node("torch.Size", enum("keepdim_payload:E", "A"), LEAF))).context
    assert context == [{"__enum__": True, "fqn": "keepdim_payload:E", "name": "A"}]


@pytest.mark.parametrize(
    "raw",
    [
        "", "null", "[]", "[1]", "[2, {}]", '["1", {}]', "[1, null]", "{", "\ud800", "[" * 10**6,
        text(LEAF) + " 1", '[2, {"type": null, "context": null, "children_spec": []}]',
        " " * (treespec.MAX_LENGTH + 1),
        '[1, ' + '{"type": "builtins.list", "context": "null", "children_spec": [' * 101 + "]}" * 101 + "]",
        '[1, ' + '{"type": "builtins.list", "context": "null", "children_spec": [' * 50_000 + "]}" * 50_000 + "]",
        text(node("torch.Size", "[" * 101 + "]" * 101)), text(node("torch.Size", "[" * 10**6)),
    ],
    ids=lambda raw: re.sub(r"\W", "", raw[:20]) + str(len(raw)),
)  # fmt: skip
def test_text_that_is_no_structure(raw):
    """Of any kind, length and depth."""
    with pytest.raises(KeepdimError, match=r"^\[load\] signature: "):
        treespec.loads(raw)


# ---------------------------------------------------------------- files
def forged_file(path, which, spec, monkeypatch):
    """A file with a sealed signature that `lower` would not write."""
    real = Signature.to_json

    class Written(Exception):
        pass

    def keep(written, *_):
        shutil.copy(written, path)
        raise Written

    def to_json(self):
        body = json.loads(real(self))
        body["signature"][which] = text(spec)
        return json.dumps(body)

    with monkeypatch.context() as patch:
        patch.setattr(Signature, "to_json", to_json)
        patch.setattr("keepdim.module.Module", keep)
        with pytest.raises(Written):
            keepdim.lower(torch.nn.Linear(4, 4).eval(), (torch.randn(3, 4),), dynamic_shapes=(N,))


@pytest.mark.parametrize("name", ["imports a module", "loads a library", "calls a factory"])
def test_a_file_runs_nothing(name, tmp_path, monkeypatch):
    """Neither `load` nor `inspect` imports what is beside a file, loads it as a library, or calls what it names."""
    (tmp_path / "keepdim_payload.py").write_text("open('PWNED', 'w')\nclass E: pass\n")
    (tmp_path / "weights.gguf").write_bytes(b"not a library")
    forged_file(tmp_path / "forged.pte", "out_spec", FORGED[name], monkeypatch)
    script = (
        "import keepdim, sys, torch\n"
        "from keepdim.cli.commands import main\n"
        "seen = []\n"
        "sys.addaudithook(lambda event, args: event in ('ctypes.dlopen', 'os.system', 'subprocess.Popen')"
        " and seen.append((event, args)))\n"
        "try:\n"
        "    keepdim.load('forged.pte')(torch.randn(2, 4))['missing']\n"
        "except keepdim.KeepdimError as e:\n"
        "    print(e)\n"
        "assert main(['inspect', 'forged.pte']) == 1\n"
        "assert main(['inspect', 'forged.pte', '--html', 'page.html']) == 1\n"
        "assert not [s for s in seen if 'weights' in str(s)], seen\n"
        "assert 'keepdim_payload' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[load] signature: ")
    assert not (tmp_path / "PWNED").exists()


def test_a_stablehlo_file_runs_nothing(tmp_path, monkeypatch):
    """The same reader serves StableHLO files."""
    pytest.importorskip("jaxlib")
    program = keepdim.to_stablehlo(torch.nn.Linear(8, 4).eval(), (torch.randn(3, 8),), dynamic_shapes=(N,))
    body = json.loads(program.signature.to_json())
    body["signature"]["out_spec"] = text(FORGED["loads a library"])
    with monkeypatch.context() as patch:
        patch.setattr(Signature, "to_json", lambda self: json.dumps(body))
        program.save(tmp_path / "forged.stablehlo")
    with pytest.raises(KeepdimError, match=r"^\[load\] signature: a builtins\.dict .* has no valid context"):
        keepdim.load_stablehlo(tmp_path / "forged.stablehlo")


def test_nothing_in_the_package_reads_code():
    """No reader that runs what a file says: torch's of structures, pickle, yaml, `eval` of a text from outside."""
    unsafe = re.compile(
        r"treespec_loads|pickle\.loads?\(|\beval\([^)]|\bexec\([^)]|yaml\.load\(|allow_pickle=True|weights_only=False"
        r"|trust_remote_code=True"
    )
    found = [
        f"{path.name}:{i}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for i, line in enumerate(path.read_text().splitlines(), 1)
        if unsafe.search(line) and ".eval(" not in line and "def eval(" not in line and path.parts[-2:] != AXES
    ]
    assert not found


# ---------------------------------------------------------------- the rest of the signature
def changed(raw, **parts):
    """The text with parts of its signature changed."""
    body = json.loads(raw)
    body["signature"] |= parts
    return json.dumps(body)


def test_signature_comes_back(lowered):
    """What is read is what was written."""
    signature = Signature.from_json(lowered[1])
    assert signature.to_json() == lowered[1]
    assert (signature.mutated, signature.parameters) == ([0], ["x", "n", "scale", "bias"])
    assert [t.kind for t in signature.transports] == ["", "size", "", ""] and signature.constants[2] == 0.5


FOUR = node("builtins.tuple", "null", LEAF, LEAF, LEAF, LEAF)
NAMED = node("builtins.dict", "[]")


@pytest.mark.parametrize(
    "parts",
    [
        {"mutated": [4]}, {"mutated": [-1]}, {"mutated": [0, 0]}, {"mutated": [1]}, {"mutated": [2**70]},
        {"mutated": ["x"]}, {"transports": []}, {"transports": [["", 0]] * 5}, {"transports": [["size", 0]] * 4},
        {"transports": [["", 0], ["other", 0], ["", 0], ["", 0]]},
        {"transports": [["", 0], ["size", 3], ["", 0], ["", 0]]},
        {"transports": [["", 0], ["size", -(2**40)], ["", 0], ["", 0]]},
        {"transports": [["", 0], ["size", 2**70], ["", 0], ["", 0]]},
        {"transports": [["", 0], ["item", 1], ["", 0], ["", 0]]},
        {"constants": []}, {"constants": [None] * 5}, {"constants": [[[]]] * 4}, {"constants": [{}] * 4},
        {"parameters": ["x", "x"]}, {"parameters": [1]}, {"parameters": "x"},
        {"in_spec": text(LEAF)}, {"in_spec": text(FOUR)}, {"in_spec": text(node("builtins.tuple", "null", FOUR, FOUR))},
        {"in_spec": text(node("builtins.list", "null", FOUR, NAMED))},
        {"in_spec": text(node("builtins.tuple", "null", FOUR, NAMED, NAMED))},
        {"in_spec": text(node("builtins.tuple", "null", NAMED, NAMED))},
        {"in_spec": text(node("builtins.tuple", "null", FOUR, node("builtins.dict", '["bias"]', LEAF)))},
        {"in_spec": text(node("builtins.tuple", "null", node("builtins.tuple", "null", LEAF, LEAF, LEAF),
                              node("builtins.dict", "[1]", LEAF)))},
        {"out_spec": text(LEAF)}, {"out_spec": text(NAMED)}, {"out_spec": None}, {"tables": [1]}, {"mapped": []},
        {"tables": [{"name": "", "axes": {"s": "x"}, "domain": {}, "rows": []}]},
    ],
    ids=lambda parts: re.sub(r"\s", "", str(parts))[:60],
)  # fmt: skip
def test_parts_that_do_not_fit(parts, lowered):
    """The structure against the contract, integers against their ranges, names and indices."""
    with pytest.raises(KeepdimError, match=r"^\[(load|dispatch)\] "):
        Signature.from_json(changed(lowered[1], **parts))


def test_results_of_a_class_that_does_not_take_them(monkeypatch, tmp_path):
    """A registered class gets only what the file says; where it refuses that, it is a sentence."""

    class Picky:
        def __init__(self, a):
            self.a = a

    pytree.register_pytree_node(
        Picky, lambda p: ([p.a], ["a"]), lambda v, c: Picky(**dict(zip(c, v, strict=True))),
        serialized_type_name="keepdim.tests.Picky",
    )  # fmt: skip
    for key in ("a", "b"):
        forged_file(tmp_path / "m.pte", "out_spec", node("keepdim.tests.Picky", f'["{key}"]', LEAF), monkeypatch)
        module = keepdim.load(tmp_path / "m.pte")
        if key == "a":
            assert module(torch.randn(2, 4)).a.shape == (2, 4)
        else:
            with pytest.raises(KeepdimError, match=r"^\[run\] results: cannot be returned as .*TypeError"):
                module(torch.randn(2, 4))


# ---------------------------------------------------------------- mutants
VALUES = [None, True, -1, 0, 1, 2**40, 2**70, 0.5, "", "x", "\x00", "builtins.dict", [], {}, [[]], [0], "[" * 200]


def mutants(raw, count):
    """Texts of JSON in which one to three values were replaced, removed or repeated."""
    rng, first = random.Random(0), json.loads(raw)

    def places(value):
        for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            yield value, key
            yield from places(value[key])

    for _ in range(count):
        body = copy.deepcopy(first)
        for _ in range(rng.randint(1, 3)):
            if not (found := list(places(body))):
                break
            where, key = rng.choice(found)
            how = rng.random()
            if how < 0.15:
                del where[key]
            elif how < 0.3 and isinstance(where, list):
                where.append(copy.deepcopy(where[key]))
            elif isinstance(where[key], str) and how < 0.6:
                at = rng.randrange(len(where[key]) + 1)
                where[key] = where[key][:at] + rng.choice('[]{}",:0"\\ x') + where[key][at + rng.randint(0, 1) :]
            else:
                where[key] = rng.choice(VALUES)
        yield json.dumps(body)


def test_mutants_of_a_signature(lowered):
    """Each is read or refused; what is read prints, and no module is imported meanwhile."""
    before, read = set(sys.modules), 0
    for mutant in mutants(lowered[1], 3000):
        try:
            signature = Signature.from_json(mutant)
        except KeepdimError:
            continue
        str(signature.contract), [str(t) for t in signature.tables]
        read += 1
    assert read > 30  # names may be anything
    assert set(sys.modules) == before


def test_mutants_of_a_structure():
    """The text inside the text."""
    raw = treespec.dumps(pytree.tree_structure(((1, {"a": Point(1, [2])}), {"b": torch.zeros(1).max(0)})))
    for mutant in mutants(raw, 2000):
        try:
            spec = treespec.loads(mutant)
        except KeepdimError:
            continue
        assert treespec.loads(treespec.dumps(spec)) == spec


class Between(torch.nn.Module):
    """An op that stays with ExecuTorch, in a branch."""

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x.cumsum(0) * 2, lambda x: x - 1, (x,))


def test_mutants_of_an_outline(tmp_path):
    """What only people read may be wrong, never a crash of the page."""
    path = tmp_path / "m.pte"
    model = keepdim.lower(Between(), (torch.randn(3, 4),), dynamic_shapes=(N,), partitioner=[])
    model.save(path)
    raw = pte.contract_text(path, OUTLINE_METHOD)
    assert any(step.bodies for step in Outline.from_json(raw).steps)
    from keepdim.report.page import _Page

    contract = model.contract
    for mutant in (*mutants(raw, 1500), "", "[]", "{}", "[" * 10**6, '{"symbols": 1, "dims": []}', "\ud800"):
        try:
            page = _Page(contract, [])
            page.outline(Outline.from_json(mutant), 0)
            page.where(), msgspec.json.encode(page.data())
        except KeepdimError:
            continue


def test_mutants_of_a_table():
    """Of a dispatch, as it is stored in a file."""
    table = {"name": "f", "axes": {"s": "x.shape[0]"}, "domain": {"s": [1, 9]}, "noise": 0.1, "machine": "m",
             "rows": [{"ranges": {"s": [1, 9]}, "implementation": "a"}], "versions": {"torch": "2"},
             "measured": [{"sizes": {"s": 3}, "times": {"a": 1.0, "b": 2.0}}] * 2}  # fmt: skip
    assert "noise" in str(RangeTable.from_json(json.dumps(table).encode()))
    for mutant in mutants(json.dumps(table), 2000):
        try:
            str(RangeTable.from_json(mutant.encode()))
        except KeepdimError:
            continue
