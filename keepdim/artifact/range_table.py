"""A table of ranges: which implementation runs at which sizes, the measurements behind it, the machine and versions.

It can be printed, stored as JSON and plotted. `ranges/tuning.py` measures.
"""

from __future__ import annotations

import math
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from ..errors import fail
from ..files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class RangeRow(msgspec.Struct, frozen=True):
    """Inclusive ranges by axis, and the implementation for them."""

    ranges: dict[str, tuple[int, int]]
    implementation: str


class Measured(msgspec.Struct, frozen=True):
    """Microseconds of every implementation at one point."""

    sizes: dict[str, int]
    times: dict[str, float]


class RangeTable(msgspec.Struct, frozen=True):
    """The ranges of one dispatch. A declared table has no measurements."""

    name: str
    axes: dict[str, str]
    domain: dict[str, tuple[int, int]]
    rows: list[RangeRow]
    measured: list[Measured] = []
    noise: float = 0.0  # relative; smaller differences are not significant
    machine: str = ""
    versions: dict[str, str] = {}

    def to_json(self) -> bytes:
        """The JSON that is stored in a file."""
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(data: bytes) -> RangeTable:
        """Parse and check the JSON of a file."""
        try:
            table = msgspec.json.decode(data, type=RangeTable)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as e:
            fail("dispatch", "table", f"cannot be read ({e})", "Tune the dispatch again", e)
        table.check()
        return table

    def check(self) -> None:
        """Raise if axes, ranges and measurements are inconsistent."""
        axes, names = self.axes.keys(), {n for m in self.measured for n in m.times}
        fits = axes <= self.domain.keys()
        if not fits or any(not axes <= m.sizes.keys() or m.times.keys() != names or not names for m in self.measured):
            fail("dispatch", f"table {self.name!r:.80}", "its axes, ranges and measurements do not belong together",
                 "Tune the dispatch again")  # fmt: skip

    def __str__(self) -> str:
        """
        >>> rows = [RangeRow({"s": (1, 4)}, "a"), RangeRow({"s": (5, 9)}, "b")]
        >>> print(RangeTable("f", {"s": "x.shape[0]"}, {"s": (1, 9)}, rows))
        f: s = x.shape[0] in 1..9
        s in 1..4 -> a
        s in 5..9 -> b
        """
        about = ", ".join(f"{n} = {text} in {_span(self.domain[n])}" for n, text in self.axes.items())
        lines = [f"{self.name}: {about}"]
        for row in self.rows:
            where = " and ".join(f"{n} in {_span(r)}" for n, r in row.ranges.items())
            lines.append(f"{where} -> {row.implementation}")
        if self.measured:
            lines += [*self._figures(), f"noise {self.noise:.1%}; {self.machine}; {_versions(self.versions)}"]
        return "\n".join(lines)

    def _figures(self) -> list[str]:
        names = list(self.measured[0].times)
        rows = [[*self.axes, *(f"{n} us" for n in names)]]
        for m in self.measured:
            best = min(m.times.values())
            times = [f"{m.times[n]:.1f}{'*' if m.times[n] == best else ' '}" for n in names]
            rows.append([*(str(m.sizes[a]) for a in self.axes), *times])
        widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
        return ["  ".join(c.rjust(w) for c, w in zip(r, widths, strict=True)) for r in rows]

    def plot(self, path: str | Path) -> Path:
        """Write a PNG: time over size for every implementation, with the thresholds as lines. Needs the extra `plot`.

        Of two axes the first is the x-axis, or their product if the ranges are over it; one line per value of the
        second.
        """
        if not self.measured:
            fail("dispatch", self.name, "was declared, not measured: there is nothing to draw", "Call tune() first")
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError as e:
            fail("dispatch", "matplotlib", "is not installed", "Install the extra: pip install 'keepdim[plot]'", e)
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        self._draw(figure.add_subplot())
        path = Path(path)
        with atomic_write(path, "dispatch") as file:
            figure.savefig(file, dpi=120, format="png", metadata={"Software": None})
        return path

    def _draw(self, plot: Axes) -> None:
        (across, *other), names = list(self.axes), list(self.measured[0].times)
        product = next((n for r in self.rows for n in r.ranges if n not in self.axes), None)
        styles = ("-", "--", ":", "-.")
        values = sorted({m.sizes[other[0]] for m in self.measured}) if other else [None]
        for i, name in enumerate(names):
            for k, value in enumerate(values):
                points = sorted(
                    (math.prod(m.sizes.values()) if product else m.sizes[across], m.times[name])
                    for m in self.measured
                    if value is None or m.sizes[other[0]] == value
                )
                label = name if k == 0 else None
                style = styles[k % len(styles)]
                plot.plot(*zip(*points, strict=True), style, marker=".", color=f"C{i}", label=label)
        column = product or across
        spans = [row.ranges[column] for row in self.rows]
        for at in sorted({hi for _, hi in spans} - {max(hi for _, hi in spans)}):
            plot.axvline(at, color="0.6", linewidth=1)
        about = column if product else f"{across} = {self.axes[across]}"
        plot.set(xscale="log", yscale="log", xlabel=about, ylabel="microseconds")
        plot.set_title(f"{self.name} on {self.machine}", fontsize="small")
        plot.grid(alpha=0.3)
        plot.legend()


def _span(r: tuple[int, int]) -> str:
    return f"{r[0]}..{r[1]}"


def _versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{k} {v}" for k, v in versions.items())


def machine() -> str:
    """The CPU and torch's thread count, for which a measurement is valid."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    """Package versions that the times depend on."""
    found = {}
    for name in ("keepdim", "torch", "executorch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
