"""Models that people bring by name: decoders, encoders, GGUF files and checkpoint folders.

Owns `LanguageModel` and `lower_llm`, the text side (`Writer`, `Sampling`), sentence encoders, and the readers of GGUF
files and of folders of transformers. Takes files and folders as data; gives lowered models. Never runs code of a
checkpoint.
"""
