"""Sentence encoders: the documented import path `keepdim.embed`."""

from .models.encoder import Encoder, lower_model, model_folder

__all__ = ["Encoder", "lower_model", "model_folder"]
