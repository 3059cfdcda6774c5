"""Convolutional networks: VGG-like, and CIFAR's ResNets.

    VGG       h ← relu(BN(conv3×3(h))), behind a 2 × 2 max-pooling where the channels grow
    ResNet    h ← relu(s(h) + BN(conv3×3(relu(BN(conv3×3(h))))))
              s the identity, or every second place and channels of zeros

A ResNet of 6n + 2 layers (He et al. 2016, §4.2) has a stem and 3n blocks of two convolutions; widths grow and
places halve at the first block of each third. Shortcuts have no parameters (option A). The stem is part of
the first block, so that a network of 3n layers is cut at blocks. Shapes: h (batch, channels, height, width).

BatchNorm. In training a batch is normalised by its own statistics, of which running means are kept for
inference. A frozen stage is run with its running means (`exec/train_step.py`), so that it does not move.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.nn.images.stack import ImageStack, Shape
from topograd.nn.stack import LayerContext


def conv3x3(taken: int, given: int, stride: int = 1) -> nn.Conv2d:
    """A 3 × 3 convolution without a bias: BatchNorm brings one."""
    conv = nn.Conv2d(taken, given, 3, stride, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


class ConvUnit(nn.Module):
    """Convolution, BatchNorm and ReLU, behind a max-pooling if `halved`."""

    def __init__(self, taken: int, given: int, halved: bool = False) -> None:
        super().__init__()
        self.halved = halved
        self.conv, self.norm = conv3x3(taken, given), nn.BatchNorm2d(given)

    def forward(self, h: Tensor, ctx: LayerContext) -> Tensor:
        h = F.max_pool2d(h, 2) if self.halved else h
        return F.relu(self.norm(self.conv(h)), inplace=True)


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut; the first block of a network has the stem before it."""

    def __init__(self, taken: int, given: int, stride: int = 1, stem: int | None = None) -> None:
        """`stem` is how many channels the stem takes."""
        super().__init__()
        self.stem = None if stem is None else ConvUnit(stem, taken)
        self.conv1, self.norm1 = conv3x3(taken, given, stride), nn.BatchNorm2d(given)
        self.conv2, self.norm2 = conv3x3(given, given), nn.BatchNorm2d(given)
        self.stride, self.more = stride, given - taken

    def forward(self, h: Tensor, ctx: LayerContext) -> Tensor:
        if self.stem is not None:
            h = self.stem(h, ctx)
        out = F.relu(self.norm1(self.conv1(h)), inplace=True)
        out = self.norm2(self.conv2(out))
        if self.stride > 1:
            h = h[:, :, :: self.stride, :: self.stride]
        shortcut = F.pad(h, (0, 0, 0, 0, 0, self.more)) if self.more else h
        return F.relu(out.add_(shortcut), inplace=True)


class ZeroBlock(nn.Module):
    """h + BN(conv(relu(BN(conv(h))))): the identity at first, for the last gain is zero."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = conv3x3(channels, channels), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = conv3x3(channels, channels), nn.BatchNorm2d(channels)
        nn.init.zeros_(self.norm2.weight)

    def forward(self, h: Tensor, ctx: LayerContext) -> Tensor:
        return h + self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(h)))))


class VGG(ImageStack):
    """A chain of convolutions."""

    def layer(self, depth: int, shape: Shape) -> tuple[nn.Module, Shape]:
        widths = self.config.own_widths
        given = widths[depth]
        halved = depth > 0 and given > widths[depth - 1] and min(shape[1:]) > 1
        channels, height, width = shape
        if halved:
            height, width = height // 2, width // 2
        return ConvUnit(channels, given, halved), (given, height, width)

    def extra(self, shape: Shape) -> nn.Module:
        return ZeroBlock(shape[0])


class ResNet(ImageStack):
    """CIFAR's residual networks: resnet8, resnet14, resnet20 and so on."""

    def layer(self, depth: int, shape: Shape) -> tuple[nn.Module, Shape]:
        widths, blocks = self.config.own_widths, self.config.blocks
        given = widths[depth // blocks]
        if depth == 0:
            return BasicBlock(given, given, stem=shape[0]), (given, *shape[1:])
        stride = 2 if depth % blocks == 0 else 1
        sides = ((side + stride - 1) // stride for side in shape[1:])
        return BasicBlock(shape[0], given, stride), (given, *sides)

    def extra(self, shape: Shape) -> nn.Module:
        return ZeroBlock(shape[0])
