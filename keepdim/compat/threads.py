"""torch's threads in a process that was forked. Needs no torch: `import keepdim` imports this."""

from __future__ import annotations

import os
import sys

from .patch import lasting


@lasting(
    of="torch",
    version="2.13.0",
    reason="torch's threads do not exist in a forked process, and its parallel kernels wait for them forever",
    upstream="torch starts its threads again in a forked process, or computes there without them",
)
def one_thread_after_fork() -> None:
    """A process that is forked from this one computes with one torch thread, until it sets another number. Nothing is
    restored: the threads never come back. This process keeps its number."""
    os.register_at_fork(after_in_child=_use_one_torch_thread)


def _use_one_torch_thread() -> None:
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "set_num_threads"):
        torch.set_num_threads(1)


__all__ = ["one_thread_after_fork"]
