"""Several implementations of one function, each for a range of some size: declared, checked, tuned, exported."""

from .branches import Leaf, implementations, recording
from .declare import Dispatch, Implementation, dispatch

__all__ = ["Dispatch", "Implementation", "Leaf", "dispatch", "implementations", "recording"]
