"""CIFAR's ResNet-20 has its published size, and shortcuts without parameters."""

import torch

from topograd.nn.images.config import ImageConfig
from topograd.nn.images.convolutional import BasicBlock
from topograd.nn.images.stack import make_image_stack


def test_resnet20_has_the_published_parameters() -> None:
    """0.27 million (He et al. 2016, table 6), without the heads that other widths would have."""
    stack = make_image_stack(ImageConfig(network="resnet20", shape=(3, 32, 32)))
    assert sum(p.numel() for p in stack.parameters()) == 269_722
    assert [given for _, given in stack.shapes] == [(16, 32, 32)] * 3 + [(32, 16, 16)] * 3 + [(64, 8, 8)] * 3


def test_a_shortcut_takes_every_second_place_and_adds_channels_of_zeros() -> None:
    block = BasicBlock(2, 5, stride=2).double().eval()
    torch.nn.init.zeros_(block.norm2.weight)
    h = torch.rand(1, 2, 5, 5, dtype=torch.float64)
    out = block(h, None)
    assert out.shape == (1, 5, 3, 3)
    assert torch.equal(out[:, :2], h[:, :, ::2, ::2])
    assert not out[:, 2:].any()


def test_vgg_halves_where_channels_grow() -> None:
    stack = make_image_stack(ImageConfig(network="vgg", widths=(4, 4, 8, 16), shape=(1, 28, 28)))
    assert [given for _, given in stack.shapes] == [(4, 28, 28), (4, 28, 28), (8, 14, 14), (16, 7, 7)]
