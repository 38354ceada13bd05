"""StableHLO modules and their refinement: the documented import path `keepdim.refine`."""

from .stablehlo.refine import Hlo

__all__ = ["Hlo"]
