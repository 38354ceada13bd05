"""Sentence encoders: `keepdim.embed`, where it always was."""

from .models.encoder import Encoder, lower_model, model_folder

__all__ = ["Encoder", "lower_model", "model_folder"]
