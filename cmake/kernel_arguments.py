"""Write the argument types of ExecuTorch's kernels as a C++ table, from the schemas that torch and ExecuTorch have.

Usage: kernel_arguments.py OUTPUT. `runtime/artifact/kernel_signatures.cpp` includes it; every kernel call of a file is
compared with it, since a kernel ends the process when an argument has another type.
"""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

LISTED = re.compile(r"^- (?:op|func): ([^\n(]+)(\(.*)?$", re.MULTILINE)
# Kernels of the optimized library that the list of portable kernels does not have.
OPTIMIZED = ("_fft_c2r.out", "_fft_r2c.out", "linear.out")
CODES = {"Tensor": "t", "int": "i", "SymInt": "i", "float": "d", "number": "n", "Scalar": "n", "bool": "b", "str": "s"}
LISTS = {"i": "I", "d": "D", "b": "B", "t": "L", "?t": "O"}


def code(kind: str) -> str:
    """The letters of a type, "?" before those of an optional one; "-" for what only None can be.

    >>> code("Optional[List[int]]"), code("List[Optional[Tensor]]"), code("Device")
    ('?I', 'O', '-')
    """
    if inner := re.fullmatch(r"Optional\[(.*)\]", kind):
        return "?" + code(inner.group(1))
    if inner := re.fullmatch(r"List\[(.*)\]", kind):
        return LISTS[code(inner.group(1))]
    return CODES.get(kind, "-")


def row(name: str, schema: torch._C.FunctionSchema) -> str:
    """One kernel: its name and the letters of its arguments, "!" before a tensor that it writes."""
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    letters = "".join("!" * w + code(str(a.type)) for w, a in zip(written, schema.arguments, strict=True))
    return f'    {{"{name}", "{letters}"}},\n'


def rows() -> list[str]:
    """Every kernel, in the order of its name."""
    root = Path(next(iter(find_spec("executorch").submodule_search_locations)))
    listed = dict(LISTED.findall((root / "kernels/portable/functions.yaml").read_text()))
    known = {f"{s.name}.{s.overload_name}".rstrip("."): s for s in torch._C._jit_get_all_schemas()}
    out = []
    for name, arguments in sorted({**listed, **dict.fromkeys(OPTIMIZED, "")}.items()):
        full = name.strip() if "::" in name else f"aten::{name.strip()}"
        out.append(row(full, torch._C.parse_schema(full + arguments) if arguments else known[full]))
    return out


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("".join(sorted(rows())))
