"""A progress bar."""

from __future__ import annotations

import sys
import time


class Progress:
    """A progress bar on standard error, if that is a terminal."""

    def __init__(self, total: int, unit: str = "texts"):
        self.total, self.unit, self.start, self.shown = total, unit, time.monotonic(), 0.0
        self.visible = sys.stderr.isatty()

    def __call__(self, done: int) -> None:
        """Update the number of completed items."""
        now = time.monotonic()
        if not self.visible or (now - self.shown < 0.1 and done < self.total):
            return
        self.shown = now
        speed = done / max(now - self.start, 1e-9)
        bar, left = "#" * (30 * done // self.total), (self.total - done) / speed
        end = "\n" if done == self.total else ""
        sys.stderr.write(f"\r[{bar:<30}] {done}/{self.total}  {speed:.0f} {self.unit}/s  {left:.0f} s left \033[K{end}")
        sys.stderr.flush()
