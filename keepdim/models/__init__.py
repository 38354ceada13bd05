"""Models opened by name or path: decoders, encoders, GGUF files and checkpoint folders.

Owns `LanguageModel` and `lower_llm`, text generation (`Writer`, `Sampling`), sentence encoders, and the readers of
GGUF files and of checkpoint folders of transformers. Takes files and folders as data; returns lowered models. Never
runs code of a checkpoint.
"""
