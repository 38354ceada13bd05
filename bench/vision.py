"""Vision models at several batches and image sizes: ours against eager, XNNPACK, ONNX Runtime and OpenVINO.

    pip install 'keepdim[bench]' && pip install --no-deps torchvision==0.28.0
    python bench/vision.py [--quick] [--models resnet18,unet] [--peers ours,openvino] [--csv bench/results/vision.csv]
    python bench/vision.py --draw                                   # only the picture, from the CSV

The models are torchvision's and a small diffusion-style U-Net, in f32, each lowered once with a dynamic batch, height
and width (vit_b_16 takes only 224 x 224). Weights are random, with batch norm statistics of random images: neither
changes the time. A model is timed at 224 x 224 (the U-Net at 256 x 256), at batch 4, and at 160 x 256; the best call of
several turns counts. 40 new sizes are called one after the other, several times: the first pass over them is divided by
the median of the others, size by size. How peers are set up and take turns: `bench/whole_models.py`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from whole_models import Case, define_torchvision_ops, main, new_sizes  # in this folder

MODELS = """resnet18 resnet50 mobilenet_v3_small mobilenet_v2 efficientnet_b0 convnext_tiny vit_b_16 regnet_y_400mf
    densenet121""".split()
BATCH = (1, 4, 1)
SIDE = (64, 320, 1)
NEW_IMAGES = new_sizes("1x3x{height}x{width}", height=range(136, 321, 8), width=range(136, 321, 8))


# ---------------------------------------------------------------- a U-Net
class Residual(nn.Module):
    """Two 3 x 3 convolutions, each after group norm and SiLU."""

    def __init__(self, ins: int, outs: int):
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(8, ins), nn.GroupNorm(8, outs)])
        self.convs = nn.ModuleList([nn.Conv2d(ins, outs, 3, padding=1), nn.Conv2d(outs, outs, 3, padding=1)])
        self.skip = nn.Conv2d(ins, outs, 1) if ins != outs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, ins, h, w] → [batch, outs, h, w]
        y = x
        for norm, conv in zip(self.norms, self.convs, strict=True):
            y = conv(F.silu(norm(y)))
        return self.skip(x) + y


class Attention(nn.Module):
    """Self-attention over the pixels, with heads of 64 channels."""

    def __init__(self, channels: int):
        super().__init__()
        self.heads = channels // 64
        self.norm = nn.GroupNorm(8, channels)
        self.qkv, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, channels, h, w]
        batch, channels, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(batch, 3, self.heads, 64, h * w).transpose(3, 4).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v)  # [batch, heads, h * w, 64]
        return x + self.out(y.transpose(2, 3).reshape(batch, channels, h, w))


class UNet(nn.Module):
    """As in diffusion models, without the time: three levels down and up, skips by cat, attention at the lowest."""

    def __init__(self, channels: tuple[int, ...] = (32, 64, 128, 256)):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, channels[0], 3, padding=1), nn.Conv2d(channels[0], 3, 3, padding=1)
        steps = list(zip(channels[:-1], channels[1:], strict=True))
        self.left = nn.ModuleList(Residual(c, c) for c in channels[:-1])
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in steps)
        lowest = channels[-1]
        self.middle = nn.Sequential(Residual(lowest, lowest), Attention(lowest), Residual(lowest, lowest))
        self.up = nn.ModuleList(nn.Conv2d(b, a, 3, padding=1) for a, b in reversed(steps))
        self.right = nn.ModuleList(Residual(2 * c, c) for c in reversed(channels[:-1]))
        self.norm = nn.GroupNorm(8, channels[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, 3, h, w]
        x, skips = self.first(x), []
        for block, down in zip(self.left, self.down, strict=True):
            skips.append(block(x))
            x = down(skips[-1])
        x = self.middle(x)
        for up, block in zip(self.up, self.right, strict=True):
            x = up(F.interpolate(x, scale_factor=2.0, mode="nearest"))
            x = block(torch.cat([x, skips.pop()], 1))
        return self.last(F.silu(self.norm(x)))


# ---------------------------------------------------------------- the weights
def randomize(model: nn.Module) -> None:
    """No parameter is constant (as zero biases and layer scales of 1e-6 are, which would hide errors), and batch norms
    have the statistics of random images."""
    for p in model.parameters():
        if p.numel() > 1 and p.min() == p.max():
            p.add_(torch.randn_like(p), alpha=0.1)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    for m in norms:
        m.reset_running_stats()
        m.momentum = None  # the plain mean of the batches
        m.train()
    if norms:
        for _ in range(2):
            model(torch.randn(4, 3, 160, 160))
    model.eval()


def image_model(name: str) -> Case:
    """A model of torchvision, lowered for every image size that it takes."""
    if name == "vit_b_16":
        shapes, dims, ranges = ("1x3x224x224", "4x3x224x224"), "batchx3x224x224", {"batch": (1, 8, 1)}
        example, new = "2x3x224x224", new_sizes("{batch}x3x224x224", batch=range(5, 9))
    else:
        shapes, dims = ("1x3x224x224", "4x3x224x224", "1x3x160x256"), "batchx3xheightxwidth"
        ranges, example, new = {"batch": BATCH, "height": SIDE, "width": SIDE}, "2x3x192x160", NEW_IMAGES

    def make() -> nn.Module:
        define_torchvision_ops()
        from torchvision import models

        return getattr(models, name)(weights=None)

    return Case(make, dims, example, shapes, ranges, new, randomize)


def unet() -> Case:
    shapes, multiple = ("1x3x256x256", "4x3x256x256", "1x3x160x256"), (SIDE[0], SIDE[1], 8)
    ranges = {"batch": BATCH, "height": multiple, "width": multiple}
    return Case(UNet, "batchx3xheightxwidth", "2x3x96x64", shapes, ranges, NEW_IMAGES, randomize)


CASES = {**{name: image_model(name) for name in MODELS}, "unet": unet()}

if __name__ == "__main__":
    main(__file__, __doc__, CASES)
