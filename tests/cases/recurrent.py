"""Cases of recurrent layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .table import B, N, case, family

family("recurrent")
case("lstm_scan", nn.LSTM(6, 8), x="n b 6", n=N, b=B)
case("lstm_scan", nn.LSTM(6, 8, num_layers=2, bidirectional=True, batch_first=True), "both ways", x="b n 6", n=N, b=B)
case("lstm_scan", nn.LSTM(6, 20, bias=False), "no bias", x="n b 6", n=N, b=B)
case("lstm_scan", nn.LSTM(6, 8), "no batch", x="n 6", n=N)
case("gru_scan", nn.GRU(6, 8), x="n b 6", n=N, b=B)
case("gru_scan", nn.GRU(6, 20, num_layers=2, bidirectional=True, batch_first=True), "both ways", x="b n 6", n=N, b=B)
case("gru_scan", nn.GRU(6, 8, bias=False), "nan", x="f32 nan: n b 6", n=N, b=B)
case("rnn_tanh_scan", nn.RNN(6, 8, num_layers=2), x="n b 6", n=N, b=B)
case("rnn_relu_scan", nn.RNN(6, 8, nonlinearity="relu", bidirectional=True), x="n b 6", n=N, b=B)


class States(nn.Module):
    """An LSTM that goes on from given states."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(6, 8)

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Any:
        return self.layer(x, (h, c))


case("lstm_scan", States(), "with states", x="n b 6", h="1 b 8", c="1 b 8", n=N, b=B)
