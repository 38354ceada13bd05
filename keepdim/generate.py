"""The text of language models: `keepdim.generate`, where it always was."""

from .models.generate import Figures, Sampling, Stream, Text, Writer, open_model, packaged

__all__ = ["Figures", "Sampling", "Stream", "Text", "Writer", "open_model", "packaged"]
