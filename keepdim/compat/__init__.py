"""What we change in torch, ExecuTorch, transformers and jax while we work with them.

Owns every patch of somebody else's internals, each a context manager that puts things back, and the lock under which
they are applied.
"""
