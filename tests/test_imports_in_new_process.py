"""Each public function alone in a new process: none may live on what another one has imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODEL = """
import sys, torch, keepdim
from torch.export import Dim, export
model, x, shapes = torch.nn.Linear(8, 4).eval(), torch.randn(3, 8), ({0: Dim("n", min=1, max=8)},)
"""
USES = {
    "lower": "torch.testing.assert_close(keepdim.lower(model, (x,), dynamic_shapes=shapes)(x[:1]), model(x[:1]))",
    "to_stablehlo": "assert keepdim.to_stablehlo(model, (x,), dynamic_shapes=shapes)(x[:2]).shape == (2, 4)",
    "audit": "keepdim.audit(model, (x,), dynamic_shapes=shapes, tries=False).check()",
    "dispatch": "assert keepdim.dispatch is not None and 'dispatch' in keepdim.__all__",
    "lower_llm": """
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=2, num_hidden_layers=1, vocab_size=64)
assert keepdim.lower_llm(LlamaForCausalLM(LlamaConfig(**sizes)).eval(), 16)([1, 2]).shape == (1, 64)
""",
    "GgmlPartitioner": """
from executorch.exir import to_edge_transform_and_lower
edge = to_edge_transform_and_lower(export(model, (x,), dynamic_shapes=shapes), partitioner=[keepdim.GgmlPartitioner()])
assert [str(r) for r in edge.exported_program().range_constraints.values()] == ["VR[1, 8]"]
""",
    "refine": """
from keepdim.refine import Hlo
text = "func.func @main(%x: tensor<?xf32>) -> tensor<?xf32> { return %x : tensor<?xf32> }"
assert Hlo.parse(text.encode()).run(["remove-dynamism"], ["tensor<4xf32>"]).static and "jax" not in sys.modules
""",
}
NEEDS = {"to_stablehlo": "jax", "refine": "jaxlib", "lower_llm": "transformers"}


@pytest.mark.parametrize("name", USES)
def test_alone(name: str) -> None:
    """It works, and says nothing of another part."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    done = subprocess.run([sys.executable, "-c", MODEL + USES[name]], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
