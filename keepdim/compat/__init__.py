"""What we change in torch, ExecuTorch, transformers and jax while we work with them.

Owns the lock under which torch is used for lowering, the kernels that keep sizes symbolic while a model is traced,
and the ShapeEnv that decides no size. Each change is a context manager that puts things back. Never changes anything
for good.
"""
