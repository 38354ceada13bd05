"""StableHLO modules and their refinement: `keepdim.refine`, where it always was."""

from .stablehlo.refine import Hlo

__all__ = ["Hlo"]
