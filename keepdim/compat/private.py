"""Notable parts of other libraries that are not public and that we call or read, without changing them.

They are used elsewhere in keepdim; this file says why, and what would replace them. A test looks each up by its name.
"""

from __future__ import annotations

from .patch import use

TORCH, EXECUTORCH, JAX, TRANSFORMERS = "2.13.0", "1.5.1", "0.10.2", "5.22.2"

use(
    "torch.fx.experimental._config.backed_size_oblivious",
    of="torch",
    version=TORCH,
    reason="without it torch.export takes every size to be at least 2",
    upstream="torch.export takes ranges that begin at 0 or 1 as they are declared",
)
for table in ("source_name_to_debug_name", "var_to_sources"):
    use(
        f"torch.fx.experimental.symbolic_shapes.ShapeEnv.{table}",
        of="torch",
        version=TORCH,
        reason="errors name the sizes of an ExportedProgram as the Dims that they were declared with",
        upstream="an ExportedProgram maps its symbols to the names of their Dims, also after torch.export.load",
    )
use(
    "torch.utils._pytree.SUPPORTED_SERIALIZED_TYPES",
    of="torch",
    version=TORCH,
    reason="a file names the classes of a method's arguments as the program registered them, and torch's own reader of "
    "such texts imports modules",
    upstream="torch's reader of tree specs reads data alone",
)
use(
    "torch.utils._python_dispatch._disable_current_modes",
    of="torch",
    version=TORCH,
    reason="implementations of a dispatch are tried while a model is traced, outside the trace",
    upstream="torch has a public function that disables all modes",
)
use(
    "executorch.exir.operator.convert.to_out_variant",
    of="executorch",
    version=EXECUTORCH,
    reason="an op without a kernel is reported before the program is emitted, where the error would be unclear",
    upstream="to_executorch names all ops without a kernel of the runtime",
)
use(
    "jax._src.export.shape_poly.shape_assertion",
    of="jax",
    version=JAX,
    reason="the constraints of a contract become checks in the exported module",
    upstream="jax.export has a public shape assertion",
)
use(
    "jax._src.core.max_dim",
    of="jax",
    version=JAX,
    reason="sizes are the larger or smaller of two sizes",
    upstream="jax.export has max and min of symbolic dimensions",
)
use(
    "jax._src.xla_bridge.get_backend",
    of="jax",
    version=JAX,
    reason="a refined module is compiled and run without being traced again",
    upstream="jax compiles a StableHLO module that it is given",
)
use(
    "transformers.integrations.gguf.gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS",
    of="transformers",
    version=TRANSFORMERS,
    reason="a GGUF file whose tokenizer splits text in a way that transformers does not know is refused",
    upstream="AutoTokenizer refuses it",
)
