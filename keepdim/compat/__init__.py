"""What we change in torch, ExecuTorch, transformers and gguf while we call them, and which of their internals we use.

Owns the lock under which torch is used for lowering, and the table of every such change (patch.py), each declared in
the module named for what it changes (tracing, shape_env, executorch, transformers, ...), with its reason, the version
it was written for, and what the library would have to change. A `@patch` is a context manager; a function that it
replaces is replaced for one thread, and others call the library's own. A `@lasting` change is not tied to a block: one
ends by itself, one empties a cache that the library fills again, one is made in forked processes alone. Changes that
C++ makes are declared here as `native`.
Never leaves a library other than it was found.
"""
