"""The settings of networks on pictures: sizes, and what is refused."""

from typing import Any

import pytest

from topograd.errors import TopogradError
from topograd.nn.images.config import ImageConfig


@pytest.mark.parametrize(
    ("model", "layers"),
    [("mlp", 3), ("vgg", 6), ("resnet20", 9), ("resnet8", 3), ("vit", 6), ("forward-forward", 2)],
)
def test_layers(model: str, layers: int) -> None:
    assert ImageConfig(network=model).layers == layers


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"network": "resnet21"}, "6n . 2"),
        ({"network": "no"}, "unknown; choose one of mlp"),
        ({"network": "a.b:C"}, "give depth"),
        ({"network": "mlp", "depth": 3}, "layers of its own"),
        ({"network": "mlp", "widths": (10,)}, "taken for them"),
        ({"network": "mlp", "widths": (0,)}, "widths"),
        ({"network": "resnet20", "widths": (4,)}, "three"),
        ({"network": "vgg", "activation": "sigmoid"}, "only an mlp"),
        ({"network": "mlp", "patch": 2}, "only a vit"),
        ({"network": "vit", "patch": 5}, "divide both"),
        ({"network": "vit", "widths": (6,)}, "multiple"),
        ({"std": (0.0,)}, "above 0"),
        ({"shape": (1, 0, 3)}, "channels, height and width"),
        ({"eval_images": 0}, "at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(TopogradError, match=words):
        ImageConfig(**settings)
