"""Small networks of every kind, and a batch for them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from topograd.nn.images.config import ImageConfig
from topograd.nn.images.stack import ImageStack, make_image_stack
from topograd.topology.dag import Topology

SMALL: dict[str, ImageConfig] = {
    "mlp": ImageConfig(network="mlp", widths=(12, 9), shape=(1, 8, 8), classes=3),
    "vgg": ImageConfig(network="vgg", widths=(4, 4, 6), shape=(1, 8, 8), classes=3),
    "resnet": ImageConfig(network="resnet8", widths=(4, 6, 8), shape=(1, 8, 8), classes=3),
    "vit": ImageConfig(network="vit", widths=(8,), heads=2, depth=3, shape=(1, 8, 8), classes=3),
    "forward-forward": ImageConfig(network="forward-forward", widths=(10, 7, 6), shape=(1, 8, 8), classes=3),
}
"""Three layers each."""


@pytest.fixture(params=SMALL)
def network(request: pytest.FixtureRequest) -> ImageConfig:
    return SMALL[request.param]


@pytest.fixture
def small() -> Callable[..., ImageStack]:
    """A network by name, float64, for a topology."""

    def make(name: str, topology: Topology | str | None = None) -> ImageStack:
        torch.manual_seed(0)
        return make_image_stack(SMALL[name], topology).double()

    return make


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (6, 1, 8, 8), generator=generator, dtype=torch.uint8)
    return images, torch.randint(0, 3, (6,), generator=generator)
