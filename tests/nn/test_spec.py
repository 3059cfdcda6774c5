"""Model specs: kinds by name, tables there and back, and what is refused."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from raising import refused
from topograd.errors import ConfigError, StackError
from topograd.nn.adapted.spec import AdaptedConfig
from topograd.nn.config import GPTConfig
from topograd.nn.images.config import ImageConfig
from topograd.nn.spec import MODELS, ModelSpec, read_spec
from topograd.nn.stack import Stack
from topograd.nn.transformer.attention import Attention
from topograd.nn.transformer.config import TransformerConfig
from topograd.topology.dag import Topology

LLAMA: dict[str, Any] = {
    "layers": 2,
    "width": 16,
    "heads": 4,
    "kv_heads": 2,
    "head_width": 4,
    "mlp_width": 24,
    "vocab": 23,
    "context": 9,
}


@dataclass(frozen=True, kw_only=True)
class OwnSpec(ModelSpec):
    layers: int = 3
    width: int = 4
    vocab: int = 5
    context: int = 6

    def build(self, topology: Topology) -> Stack:
        stack = Stack()
        stack.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(topology.layers))
        return stack


SPECS = {
    "gpt": GPTConfig(layers=2, windows=(3, 0)),
    "gpt-own-mixer": GPTConfig(architecture="a.package:Mixer"),
    "mamba2": GPTConfig(architecture="mamba2"),
    "hybrid": GPTConfig(architecture="hybrid"),
    "llama": TransformerConfig(family="llama", **LLAMA),
    "gemma2-shortened": TransformerConfig(family="gemma2", **LLAMA, trained_context=20, windows=(3, 0)),
    "resnet8": ImageConfig(network="resnet8"),
    "vit": ImageConfig(network="vit", heads=2, depth=2),
    "own-images": ImageConfig(network="a.package:Net", depth=3),
    "hf": AdaptedConfig(settings="{}", list="h", head="lm", layers=2, width=3, vocab=4, context=5),
    "own": OwnSpec(width=8),
}


@pytest.mark.parametrize("name", SPECS)
def test_a_table_gives_the_spec_back(name: str) -> None:
    spec = SPECS[name]
    table = {key: value for key, value in spec.to_dict().items() if value is not None}
    assert read_spec(table) == spec
    assert table["kind"] == spec.kind


@pytest.mark.parametrize("name", SPECS)
def test_every_spec_has_its_sizes(name: str) -> None:
    spec = SPECS[name]
    assert all(getattr(spec, size) >= 1 for size in ("layers", "width", "vocab", "context"))
    assert spec.task == ("images" if isinstance(spec, ImageConfig) else "text")


def test_kinds_are_what_a_table_says() -> None:
    assert [
        SPECS[name].kind for name in ("gpt", "gpt-own-mixer", "mamba2", "llama", "resnet8", "own-images")
    ] == [*("gpt", "gpt", "mamba2", "llama", "resnet8", "image")]
    assert read_spec({}) == GPTConfig()
    assert read_spec({"kind": "mamba3", "layers": 2}) == GPTConfig(architecture="mamba3", layers=2)
    assert read_spec({"kind": "resnet"}) == ImageConfig(network="resnet20")
    assert set(MODELS) >= {"gpt", "llama", "mamba2", "hybrid", "resnet", "hf"}


@pytest.mark.parametrize(
    ("table", "setting"),
    [
        ({"kind": "lama"}, "model kind"),
        ({"kind": 3}, "model.kind"),
        ({"kind": "math:sqrt"}, "model.kind"),
        ({"kind": "nowhere.at_all:Spec"}, "model kind"),
        ({"kind": "gpt", "wdith": 3}, "model.wdith"),
        ({"kind": "llama", "layers": 2}, "model.width"),
        ({"kind": "mlp", "widths": [3, "x"]}, "model.widths[1]"),
    ],
)
def test_a_bad_table_is_one_line(table: dict[str, Any], setting: str) -> None:
    with refused(ConfigError, setting=setting):
        read_spec(table)


def test_a_spec_builds_the_layers_of_its_topology() -> None:
    topology = Topology.chain("2,3")
    for spec in (
        GPTConfig(layers=5, width=8, heads=2),
        TransformerConfig(family="qwen3", **LLAMA),
        OwnSpec(),
    ):
        assert len(spec.build(topology).layers) == 5
    with refused(ConfigError, setting="build"):
        ModelSpec().build(topology)


def test_a_published_family_on_the_meta_device_has_no_memory() -> None:
    with torch.device("meta"):
        stack = TransformerConfig(family="llama", **LLAMA).build(Topology.chain("2"))
    assert all(parameter.is_meta for parameter in stack.parameters())


def test_a_shorter_context_keeps_what_the_model_was_made_for() -> None:
    spec = TransformerConfig(family="gpt2", **{**LLAMA, "kv_heads": 4})
    short = spec.seeing(5)
    assert (short.context, short.positions, spec.positions) == (5, 9, 9)
    assert short.seeing(9) == spec
    stack = short.build(Topology.chain("2"))
    assert stack.layers[0].positions.weight.shape == (9, 16)  # type: ignore[union-attr]
    with refused(StackError, setting="trained_context", given=3):
        replace(spec, trained_context=3)


def test_attention_is_a_mixer_like_the_others() -> None:
    from topograd.nn.config import MIXERS

    config = GPTConfig(layers=2, width=8, heads=2, vocab=11, context=6)
    mixer = MIXERS["attention"](config, 1)
    assert isinstance(mixer, Attention)
    assert mixer.new_state(2, 6).keys.shape == (2, 2, 6, 4)
