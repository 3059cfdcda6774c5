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
        ({"model": "resnet21"}, "6n . 2"),
        ({"model": "no"}, "unknown; choose one of mlp"),
        ({"model": "a.b:C"}, "give depth"),
        ({"model": "mlp", "depth": 3}, "layers of its own"),
        ({"model": "mlp", "widths": (10,)}, "taken for them"),
        ({"model": "mlp", "widths": (0,)}, "widths"),
        ({"model": "resnet20", "widths": (4,)}, "three"),
        ({"model": "vgg", "activation": "sigmoid"}, "only an mlp"),
        ({"model": "mlp", "patch": 2}, "only a vit"),
        ({"model": "vit", "patch": 5}, "divide both"),
        ({"model": "vit", "widths": (6,)}, "multiple"),
        ({"std": (0.0,)}, "above 0"),
        ({"shape": (1, 0, 3)}, "channels, height and width"),
        ({"eval_images": 0}, "at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(TopogradError, match=words):
        ImageConfig(**settings)
