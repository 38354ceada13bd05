"""An index out of range is an error of that call, and of that call alone; threads change no bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

import keepdim
from keepdim import KeepdimError
from support.engines import BACKENDS

SIZE = 5  # of what is indexed
aten = torch.ops.aten


class Apply(nn.Module):
    """A function of x [5, 3] and an index [n]."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> Any:
        return self.fn(x, i)


def columns(i: torch.Tensor) -> torch.Tensor:
    return i[:, None].expand(-1, 3)


READS = {
    "embedding": lambda x, i: F.embedding(i, x),
    "embedding_bag": lambda x, i: F.embedding_bag(i, x, torch.zeros(1, dtype=torch.int64)),
    "index_select": lambda x, i: x.index_select(0, i),
    "gather": lambda x, i: x.gather(0, columns(i)),
    "index": lambda x, i: x[i],
    "index of two": lambda x, i: x[i, i - i],
}
WRITES = {
    "index_put": lambda x, i: x.index_put((i,), torch.tensor(1.0)),
    "index_add": lambda x, i: x.index_put((i,), torch.tensor(1.0), accumulate=True),
    "index_put of two": lambda x, i: x.index_put((i, i - i), torch.tensor(1.0)),
    "scatter": lambda x, i: x.scatter(0, columns(i), 2.0),
    "scatter_reduce": lambda x, i: x.scatter_add(0, columns(i), columns(i).float()),
}
WRAPS = ("index", "index of two", "index_put", "index_add", "index_put of two")


def lower(fn: Callable[..., torch.Tensor], dtype: torch.dtype, engine: str) -> keepdim.Module:
    i = torch.zeros(3, dtype=dtype)
    shapes = (None, {0: Dim("n", min=0, max=20000)})
    module = keepdim.lower(Apply(fn), (torch.randn(SIZE, 3), i), dynamic_shapes=shapes, engine=engine)
    assert module.report.delegates == [BACKENDS[engine]] and not module.report.remaining, str(module.report)
    return module


@pytest.mark.parametrize("name", [*READS, *WRITES])
def test_an_index_out_of_range_is_an_error_of_the_call(name: str, engine: str) -> None:
    """The sentence names the op, the first bad index and the range; the next good call is right."""
    fn = {**READS, **WRITES}[name]
    module = lower(fn, torch.int64, engine)
    x = torch.randn(SIZE, 3)
    low = -SIZE if name in WRAPS else 0
    for n in (1, 4, 20000):
        good = torch.arange(n) % SIZE
        for bad in (SIZE, low - 1, 2**40, -(2**62)):
            i = good.clone()
            i[n // 2] = bad
            i[n // 2 :: 7] = bad
            with pytest.raises(
                KeepdimError, match=rf"\[run\] {name.split()[0]} .*index {bad} is out of range {low}\.\.4"
            ):
                module(x, i)
            torch.testing.assert_close(module(x, good), fn(x, good))
    if low:
        i = torch.arange(4) - SIZE
        torch.testing.assert_close(module(x, i), fn(x, i))


def test_an_index_into_nothing_is_an_error_of_the_call(engine: str) -> None:
    """No element is there to be read."""
    m = Dim("m", min=0, max=9)
    args = (torch.randn(2, 3), torch.zeros(3, dtype=torch.int64))
    shapes = ({0: m}, {0: Dim("n", min=0, max=9)})
    module = keepdim.lower(Apply(lambda x, i: x[i]), args, dynamic_shapes=shapes, engine=engine)
    with pytest.raises(KeepdimError, match="index 0 is not in an empty dim"):
        module(torch.randn(0, 3), torch.zeros(2, dtype=torch.int64))
    assert module(torch.randn(0, 3), torch.zeros(0, dtype=torch.int64)).shape == (0, 3)
    x = torch.randn(2, 3)
    assert torch.equal(module(x, torch.tensor([1, -1])), x[[1, 1]])


def test_a_mask_that_takes_more_than_there_is_is_an_error_of_the_call(engine: str) -> None:
    """masked_scatter with fewer numbers than places, as torch refuses it; as many, more, or none at all are right."""
    n, k = Dim("n", min=0, max=9), Dim("k", min=0, max=9)
    args = (torch.ones(3, dtype=torch.bool), torch.randn(4))
    model = Apply(lambda mask, source: torch.zeros_like(mask, dtype=torch.float32).masked_scatter(mask, source))
    module = keepdim.lower(model, args, dynamic_shapes=({0: n}, {0: k}), engine=engine)
    assert module.report.delegates == [BACKENDS[engine]] and not module.report.remaining, str(module.report)
    for mask, count in (([1, 1, 1], 2), ([0, 1], 0), ([1] * 9, 8)):
        with pytest.raises(RuntimeError):
            model(torch.tensor(mask).bool(), torch.randn(count))
        with pytest.raises(
            KeepdimError, match=rf"\[run\] index_select .*index {count + 1} is out of range 0\.\.{count}"
        ):
            module(torch.tensor(mask).bool(), torch.randn(count))
        for good, many in (([1, 0, 1], 2), ([0, 0], 0), ([], 0), ([1, 0], 9)):
            m, source = torch.tensor(good).bool(), torch.randn(many)
            assert torch.equal(module(m, source), model(m, source))


def test_bags_that_are_none_are_an_error_of_the_call(engine: str) -> None:
    """Offsets begin at 0, do not fall, and end where the indices end; the next good call is right."""

    def fn(x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(torch.arange(5), x, starts, mode="sum")

    module = lower(fn, torch.int64, engine)
    x = torch.randn(SIZE, 3)
    for starts, fact in (
        ([1, 2], "offset 0 is 1, expected 0"),
        ([0, 3, 2], r"bag 1 is 3\.\.2 of 5 indices"),
        ([0, 6], r"bag 0 is 0\.\.6 of 5 indices"),
        ([0, -(2**62)], r"bag 0 is 0\.\.-4611686018427387904 of 5 indices"),
    ):
        with pytest.raises(KeepdimError, match=rf"\[run\] embedding_bag .*{fact}"):
            module(x, torch.tensor(starts))
        good = torch.tensor([0, 2, 2, 5])
        torch.testing.assert_close(module(x, good), fn(x, good))


ORDERED = {
    "sum": lambda x, i: x.sum(),
    "columns": lambda x, i: x.view(-1, 3).sum(0),
    "var": lambda x, i: x.var(),
    "prod": lambda x, i: (x * 0.01 + 1).prod(),
    "argmax": lambda x, i: x.argmax(),
    "softmax": lambda x, i: x.softmax(0),
    "sort": lambda x, i: x.sort()[1],
    "index_add": lambda x, i: torch.zeros(7).index_put((i,), x, accumulate=True),
    "index_add rows": lambda x, i: torch.zeros(7, 3).index_put((i[::3],), x.view(-1, 3), accumulate=True),
    "scatter_add": lambda x, i: torch.zeros(7).scatter_add(0, i, x),
    "embedding_bag": lambda x, i: F.embedding_bag(i, x.view(-1, 3)[:7], torch.arange(x.size(0) // 3) * 3),
    "cdist": lambda x, i: torch.cdist(x.view(-1, 3), x.view(-1, 3)[:70]),
    "scatter, the last wins": lambda x, i: torch.zeros(7).scatter(0, i, x),
}


def test_threads_change_no_bit(threads: Any, engine: str) -> None:
    """Whatever their number: sums have their order, and what is written twice has its own."""
    torch.manual_seed(0)
    x, i = torch.randn(90000), torch.randint(0, 7, (90000,))
    n = 3 * Dim("n", min=1, max=30000)
    model = Apply(lambda x, i: {name: fn(x, i) for name, fn in ORDERED.items()})
    module = keepdim.lower(model, (x[:9], i[:9]), dynamic_shapes=({0: n}, {0: n}), engine=engine)
    results: dict[str, list[torch.Tensor]] = {name: [] for name in ORDERED}
    for count in (1, 2, 3, 4, 7):
        threads(count)
        for name, result in module(x, i).items():
            results[name].append(result)
    assert [name for name, r in results.items() if not all(torch.equal(t, r[0]) for t in r)] == []
