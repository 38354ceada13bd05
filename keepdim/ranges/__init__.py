"""Dispatch by size: several implementations of one function, each for a range of some size, declared or tuned.

Owns `dispatch`, its checks and its tuning, the leaves of nested `torch.cond` in a graph, and the thresholds of the
engines. Takes functions and axes; returns a module that can be exported, and tables of ranges. Never lowers anything.
"""

from .branches import Leaf, implementations, recording
from .declare import Dispatch, Implementation, dispatch

__all__ = ["Dispatch", "Implementation", "Leaf", "dispatch", "implementations", "recording"]
