"""Tiny GPTs whose stages disagree, engines over them, and a record of which layer ran on which positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from topograd.decode.engine import Engine
from topograd.nn.gpt import GPT
from topograd.nn.mamba.mixers import Mamba2, Mamba3
from topograd.nn.stack import LayerContext, Stack
from topograd.nn.transformer.block import Block, MixerBlock
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan

VOCAB, CONTEXT = 50, 24


def random_gpt(seed: int = 0, heads_of_their_own: int = 0, later: float = 1.0, **settings: Any) -> GPT:
    """A float64 GPT, every parameter normal; four layers unless told otherwise.

    What the layers behind the first add is multiplied by `later`: with 1 no two stages agree, with less they
    sometimes do.
    """
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"layers": 4, "width": 32, "heads": 2, "vocab": VOCAB, "context": CONTEXT}
    model = GPT(**sizes | settings).double().eval()
    if heads_of_their_own:
        model.add_heads(range(heads_of_their_own))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        for layer in model.layers[1:]:
            if isinstance(layer, MixerBlock):
                assert isinstance(layer.mixer, Mamba2 | Mamba3)
                layer.mixer.out_proj.weight.mul_(later)
                continue
            assert isinstance(layer, Block)
            layer.attention.output.weight.mul_(later)
            layer.mlp.down.weight.mul_(later)
    return model


def engine_of(stack: Stack, topology: Topology | str = "1,1,1,1", context: int = CONTEXT) -> Engine:
    topology = Topology.chain(topology) if isinstance(topology, str) else topology
    return Engine(stack, Plan.of(topology, len(stack.layers)), context)


@pytest.fixture(scope="session")
def make_gpt() -> Callable[..., GPT]:
    return random_gpt


@pytest.fixture(scope="session")
def make_engine() -> Callable[..., Engine]:
    return engine_of


@pytest.fixture(scope="session")
def mild() -> GPT:
    """A model whose stages often agree, but not always; not to be changed."""
    return random_gpt(later=0.15)


@pytest.fixture(scope="session")
def mild_engine(mild: GPT) -> Engine:
    return engine_of(mild)


@pytest.fixture(scope="session")
def gpt() -> GPT:
    """Four layers, a head for each; not to be changed."""
    return random_gpt(heads_of_their_own=4)


@pytest.fixture(scope="session")
def engine(gpt: GPT) -> Engine:
    """The GPT in four stages of one layer."""
    return engine_of(gpt)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Ragged rows; the last is longer than the context."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in (1, 5, 2, CONTEXT, 31)]


class Plain(nn.Module):
    """A layer without memory."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, h: Tensor, ctx: LayerContext) -> Tensor:
        out: Tensor = self.layer(h, ctx)
        return out


@pytest.fixture(scope="session")
def forgetful() -> Engine:
    """The same model as `engine`, recomputed for each token."""
    model = random_gpt(heads_of_their_own=4)
    model.layers = nn.ModuleList(Plain(layer) for layer in model.layers)
    return engine_of(model)


class Visits:
    """For each layer the positions (rows, time) of each of its calls."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.clear()
        self._hooks = [
            layer.register_forward_pre_hook(self._note_of(i)) for i, layer in enumerate(stack.layers)
        ]

    def _note_of(self, index: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def note(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            h, ctx = arguments[:2]
            assert isinstance(h, Tensor)
            assert isinstance(ctx, LayerContext)
            self.calls[index].append(ctx.positions.expand(h.shape[:2]).tolist())

        return note

    def clear(self) -> None:
        self.calls: list[list[list[list[int]]]] = [[] for _ in self.stack.layers]

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()


@pytest.fixture
def visits_of() -> Iterator[Callable[[Stack], Visits]]:
    """Begin to record a stack's layers; the test's end is the record's end."""
    made: list[Visits] = []

    def make(stack: Stack) -> Visits:
        made.append(Visits(stack))
        return made[-1]

    yield make
    for visits in made:
        visits.stop()
