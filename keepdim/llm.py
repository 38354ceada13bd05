"""Language models: `keepdim.llm`, where it always was."""

from .models.decoder import LanguageModel, export_llm, lower_llm

__all__ = ["LanguageModel", "export_llm", "lower_llm"]
