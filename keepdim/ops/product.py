"""Matrix products and linear layers."""

from __future__ import annotations

from .table import Args, Lower, Shape, Sink, Unsupported, aten, broadcast, op


def _matmul(x: str, y: str) -> Lower:
    def lower(b: Sink, name: str, a: Args, out: Shape) -> int:
        p, q = a.tensor(x), a.tensor(y)
        if min(len(b.shape(p).dims), len(b.shape(q).dims)) < 2:
            raise Unsupported("a vector operand is not handled")
        for v in (p, q):
            dims = b.shape(v).dims[:-2]
            for have, want in zip(reversed(dims), reversed(out.dims[:-2]), strict=False):
                if have != want and have.value != 1:
                    raise Unsupported(f"broadcasting {have} to {want} is not decided by the contract")
        return b.emit(name, [p, q], out)

    return lower


def _addmm(b: Sink, name: str, a: Args, out: Shape) -> int:
    product = b.emit("matmul", [a.tensor("mat1"), a.tensor("mat2")], out)
    return b.emit("add", [product, broadcast(b, a.tensor("self"), out)], out)


op("linear", aten.linear.default)
op("matmul", aten.matmul.default, lower=_matmul("self", "other"))
op("matmul", aten.mm.default, aten.bmm.default, lower=_matmul("self", "mat2"))
op("matmul", aten.addmm.default, lower=_addmm)
