"""Language models: the documented import path `keepdim.llm`."""

from .models.decoder import LanguageModel, export_llm, lower_llm

__all__ = ["LanguageModel", "export_llm", "lower_llm"]
