"""Every op keepdim lowers, a file a family; `table` has what their rows are made of."""

from . import attention, elementwise, index, product, recurrent, reduce, shape, window  # noqa: F401
from .shape import dim_order_rows
from .table import ROWS, Args, Row, Shape, Sink, Unsupported, aten, op

__all__ = ["ROWS", "WHOLE", "Args", "Row", "Shape", "Sink", "Unsupported", "dim_order_rows", "op"]

# Composite ops that are better whole than in pieces; they stay so where every use of them is taken.
WHOLE = (
    aten.linear.default, aten.matmul.default, aten.softmax.int, aten.layer_norm.default, aten.rms_norm.default,
    aten.gelu.default,
    aten.silu.default,
    aten.embedding.default,
    aten.rsub.Scalar,
    aten.hardswish.default,
    aten.hardsigmoid.default,
    aten.softplus.default,
    aten.exp2.default,
    aten.erfc.default,
    aten.bitwise_left_shift.Tensor,
    aten.bitwise_right_shift.Tensor,
    aten.__lshift__.Scalar,
    aten.__lshift__.Tensor,
    aten.__rshift__.Scalar,
    aten.__rshift__.Tensor,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.scaled_dot_product_attention.default,
    aten.bilinear.default,
    aten.log_softmax.int,
    aten.all.default,
    aten.all.dim,
    aten.all.dims,
    aten.tril.default,
    aten.triu.default,
    aten.roll.default,
    aten.select_scatter.default,
    aten.std.correction,
    aten.var_mean.correction,
    aten.std_mean.correction,
    aten.argsort.default,
    aten.argsort.stable,
    aten.empty_like.default,
    aten.new_empty.default,
    *window.WHOLE,
    aten.lstm.input,
    aten.gru.input,
    aten.rnn_tanh.input,
    aten.rnn_relu.input,
    aten.mv.default,
    aten.dot.default,
    aten.baddbmm.default,
)  # fmt: skip
