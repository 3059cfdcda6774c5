"""Forms of interfaces in words, and one of one's own."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from raising import refused
from topograd.errors import ConfigError
from topograd.nn.config import EncoderConfig, SegmentInterface
from topograd.nn.gpt import GPT
from topograd.nn.interface import add_interfaces
from topograd.nn.interface_config import (
    INTERFACES,
    PublishedInterface,
    ResidualInterface,
    parse_interface,
    parse_interfaces,
)
from topograd.nn.preparation import prepare
from topograd.nn.relays import BoundedRelay
from topograd.nn.stack import LayerContext
from topograd.topology.dag import Topology


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("S=4,r=4", SegmentInterface(segments=4, rank=4)),
        ("segments:S=4,r=4", SegmentInterface(segments=4, rank=4)),
        ("residual:r=8", ResidualInterface(rank=8)),
        ("residual: r = 8 , basis=learned,seed=3", ResidualInterface(rank=8, basis="learned", seed=3)),
        ("published:r=16", PublishedInterface(rank=16)),
    ],
)
def test_forms_in_words(text: str, expected: object) -> None:
    assert parse_interface(text) == expected


@pytest.mark.parametrize(
    ("text", "setting", "given"),
    [
        ("", "interface", ""),
        ("residual", "interface", "residual"),
        ("residual:", "interface", ""),
        ("residual:S=4", "interface", "S=4"),
        ("residual:r=0", "rank", 0),
        ("residual:basis=data", "basis", "data"),
        ("residual:seed=-1", "seed", -1),
        ("published:r=2", "rank", 2),
        ("published:causal=true", "interface", "causal=true"),
        ("butterfly:r=8", "interface", "butterfly"),
        ("no_such_package:Form:r=8", "interface", "no_such_package:Form"),
        ("no_such_package:Form", "interface", "no_such_package:Form"),
        ("os.path:join:r=8", "interface", "os.path:join"),
        ("collections:OrderedDict", "interface", "collections:OrderedDict"),
    ],
)
def test_bad_forms(text: str, setting: str, given: object) -> None:
    with refused(ConfigError, setting=setting, given=given):
        parse_interface(text)


def test_a_rank_above_the_width_is_refused() -> None:
    ResidualInterface(rank=8).check(16, 8)
    with refused(ConfigError, setting="rank", given=9):
        ResidualInterface(rank=9).check(16, 8)


@pytest.mark.parametrize("text", ["S=2/4/4,r=4", "S=8/4/2,r=4", "attention:S=4/2/4,r=4"])
def test_boundaries_cut_the_context_alike(text: str) -> None:
    """A state of a longer segment, added to one of a shorter, would tell of later positions."""
    with refused(ConfigError, setting="segments"):
        parse_interfaces(text)


def test_boundaries_are_cut_alike_in_python_too() -> None:
    stack = GPT(layers=3, width=8, heads=2, vocab=11, context=8)
    with refused(ConfigError, setting="segments", given="2/4"):
        add_interfaces(stack, (SegmentInterface(segments=2), SegmentInterface(segments=4)), 3, 8, 8)
    assert not stack.learned_relays()


@pytest.mark.parametrize("text", ["S=2,r=4", "attention:S=2,r=4"])
def test_an_encoder_s_sequence_is_not_cut(text: str) -> None:
    stack = EncoderConfig(layers=3, width=8, heads=2, vocab=11, context=8).build(Topology.regions("1,1,1"))
    with refused(ConfigError, setting="interface"):
        add_interfaces(stack, parse_interface(text), 3, 8, 8)
    assert not stack.learned_relays()


class HalfRelay(BoundedRelay):
    """Half of the hidden state crosses."""

    segment = 1

    def __init__(self, settings: Half) -> None:
        super().__init__()
        self.settings = settings
        self.gain = nn.Parameter(torch.tensor(1.0))

    def send(self, h: Tensor, received: Tensor | None) -> Tensor:
        return h[..., : h.shape[-1] // 2]

    def receive(self, message: Tensor, ctx: LayerContext) -> Tensor:
        return ctx.x0 + self.gain * torch.cat((message, torch.zeros_like(message)), -1)


class Half:
    """A form that this package does not have."""

    first_region: ClassVar[int] = 1
    causal: ClassVar[bool] = True

    @classmethod
    def parse(cls, text: str) -> Half:
        return cls()

    def check(self, context: int, width: int) -> None: ...

    def build(self, width: int, context: int, before: Any) -> HalfRelay:
        return HalfRelay(self)


@pytest.mark.parametrize("settings", ["", ":", ":x=1"])
def test_a_form_of_ones_own_needs_no_change_here(settings: str) -> None:
    assert "residual" in INTERFACES
    stack = GPT(layers=3, width=8, heads=2, vocab=11, context=4)
    prepare(stack, Topology.regions("1,1,1", f"{__name__}:Half{settings}"))
    assert {type(relay) for relay in stack.learned_relays().values()} == {HalfRelay}
