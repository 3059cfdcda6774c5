"""The settings of networks on images: sizes, and what is refused."""

from typing import Any

import pytest

from raising import refused
from topograd.errors import TopogradError
from topograd.nn.images.config import ImageConfig


@pytest.mark.parametrize(
    ("model", "layers"),
    [("mlp", 3), ("vgg", 6), ("resnet20", 9), ("resnet8", 3), ("vit", 6), ("forward-forward", 2)],
)
def test_layers(model: str, layers: int) -> None:
    assert ImageConfig(network=model).layers == layers


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"network": "resnet21"}, "network"),
        ({"network": "no"}, "model"),
        ({"network": "a.b:C"}, "depth"),
        ({"network": "mlp", "depth": 3}, "depth"),
        ({"network": "mlp", "widths": (10,)}, "widths"),
        ({"network": "mlp", "widths": (0,)}, "widths"),
        ({"network": "resnet20", "widths": (4,)}, "widths"),
        ({"network": "vgg", "activation": "sigmoid"}, "activation"),
        ({"network": "mlp", "patch": 2}, "patch"),
        ({"network": "vit", "patch": 5}, "patch"),
        ({"network": "vit", "widths": (6,)}, "widths"),
        ({"std": (0.0,)}, "mean"),
        ({"shape": (1, 0, 3)}, "shape"),
        ({"eval_images": 0}, "eval_images"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], setting: str) -> None:
    with refused(TopogradError, setting=setting):
        ImageConfig(**settings)
