"""Text generation: the documented import path `keepdim.generate`."""

from .models.generate import Figures, Sampling, Stream, Text, Writer, open_model, packaged

__all__ = ["Figures", "Sampling", "Stream", "Text", "Writer", "open_model", "packaged"]
