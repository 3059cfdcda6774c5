"""Tiny stacks, batches and topologies, shared by the tests of this folder.

A test that takes `case` runs once for each entry of CASES; `tiny` has the builders and the comparisons.
Everything is float64 unless a test says otherwise, and every parameter is random: a fresh GPT has zero
output matrices, behind which most gradients are zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from topograd.exec.forward import Predictor
from topograd.exec.objectives import Logits, teacher_logits
from topograd.nn.gpt import GPT
from topograd.nn.learned_relays import LEARNED
from topograd.nn.preparation import prepare
from topograd.topology.configuration import Configuration
from topograd.topology.dag import EMBEDDING, PLAIN_RELAYS, Edge, Stage, Topology

Gradients = dict[str, Tensor]


def per_stage(partition: str) -> Configuration:
    return Configuration.parse(partition, heads="per-stage")


@dataclass(frozen=True)
class Case:
    """A topology, and what its GPT has beside the defaults."""

    name: str
    topology: Topology
    settings: Mapping[str, Any] = field(default_factory=dict)


BACKPROP = Topology.chain("4")
HARD = Topology.chain("1,1,2")
DIAMOND = Topology(
    5,
    (
        Stage(0, 2, (Edge(EMBEDDING, grad_scale=0.5),), weight=0.0),
        Stage(2, 3, (Edge(0, grad_scale=1.0),), weight=2.0),
        Stage(3, 4, (Edge(0, layer=1, grad_scale=0.3),), objective="residual"),
        Stage(2, 5, (Edge(1, grad_scale=0.7), Edge(2, grad_scale=1.0), Edge(0)), weight=0.5),
    ),
)
"""Two arms from a soft root without a loss, one tapped early; the stage that joins them overlaps one."""

FAN = Topology(
    4,
    (
        Stage(0, 1, (Edge(EMBEDDING, grad_scale=0.5),)),
        Stage(1, 2, (Edge(0, grad_scale=1.0), Edge(EMBEDDING, grad_scale=0.3))),
        Stage(2, 3, (Edge(0, grad_scale=0.3),)),
        Stage(3, 4, (Edge(0, grad_scale=0.7), Edge(2))),
    ),
)
"""Three stages answer one message, two the embedding."""

RELAYED = Topology.chain("1,1,2", grad_scale=0.3)
BUSES = {
    "gated": Edge(EMBEDDING, relay="gate"),
    "low-rank": Edge(0, layer=1, relay="low-rank"),
    "soft": Edge(0, layer=1, grad_scale=0.4, relay="residual-gate"),
}

CASES = (
    Case("next", replace(Topology.chain("1,1,1,1", grad_scale=1.0), reach="next")),
    Case("next-diamond", replace(DIAMOND, reach="next")),
    Case("backprop", BACKPROP),
    Case("hard", HARD),
    Case("hard-tied-softcap", Topology.chain("2,2"), {"tied": True, "softcap": 15.0}),
    Case("hierarchical", Topology.chain("1,1,2", grad_scale=1.0)),
    Case("hierarchical-soft", Topology.chain("1,3", grad_scale=0.3)),
    Case("per-stage", Topology.chain(per_stage("1,1,2"))),
    Case("per-stage-low-rank", Topology.chain(per_stage("2,2"), grad_scale=0.3), {"head_rank": 3}),
    Case("local", Topology.chain(per_stage("1,1,1,1"), bus="detached")),
    Case("residual", Topology.chain("1,1,2", objective="residual")),
    Case("residual-per-stage", Topology.chain(per_stage("1,3"), grad_scale=0.3, objective="residual")),
    Case("distillation", Topology.chain("1,3", objective="distillation")),
    Case("z-loss", Topology.chain(per_stage("1,3"), grad_scale=0.3, objective="z-loss")),
    Case("decoders", Topology.chain(per_stage("1,1"), objective="residual").with_decoders(1)),
    Case("decoders-forest", Topology.forest(["1,1", "1"]).with_decoders(1)),
    Case("soft", Topology.soft([0.2, 0.5, 1.0])),
    Case("soft-per-stage", Topology.soft([0.9, 0.0, 0.4], heads="per-stage"), {"head_rank": 2}),
    Case("forest", Topology.forest(["1,1", "2"])),
    Case("cover", Topology.cover([(0, 2), (1, 3), (2, 4)])),
    Case("cover-per-stage", Topology.cover([(0, 3), (0, 1), (2, 4)], heads="per-stage")),
    Case("input-bus", HARD.with_input_bus()),
    Case("input-bus-early", Topology.chain("2,1,1").with_input_bus(Edge(0, 1)).with_input_bus()),
    Case("detached-bus", Topology.chain("1,1,2", grad_scale=0.3, bus="detached").with_input_bus()),
    Case("sum", Topology.chain("1,1,2", reduction="sum")),
    Case("specialist", Topology.chain("1,2").with_specialist(1)),
    Case("specialist-residual", Topology.chain("2", grad_scale=1.0).with_specialist(2, "residual")),
    Case("fan", FAN),
    Case("diamond", DIAMOND),
    *(Case(f"relay-{kind}", RELAYED.with_relays(kind)) for kind in (*PLAIN_RELAYS, *LEARNED)),
    Case("relay-hard-residual", Topology.chain("1,1,2", objective="residual").with_relays("gate")),
    Case("relay-specialist", Topology.chain("1,2").with_specialist(1).with_relays("residual-gate")),
    *(Case(f"input-bus-{n}", Topology.chain("2,1,1").with_input_bus(e)) for n, e in BUSES.items()),
    Case(
        "input-bus-concatenated",
        Topology.chain("2,1,1").with_relays("linear").with_input_bus(Edge(EMBEDDING, relay="linear")),
    ),
    Case("forest-gated", Topology.forest(["1,1", "2"]).with_relays("gate")),
    Case("diamond-detached", replace(DIAMOND, bus="detached", reduction="sum", heads="per-stage")),
)


class Tiny:
    """Builders and comparisons."""

    vocab = 50
    width = 16

    @classmethod
    def gpt(
        cls,
        topology: Topology = BACKPROP,
        *,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
        **settings: Any,
    ) -> GPT:
        """A GPT that fits `topology`, heads included, with random parameters."""
        torch.manual_seed(seed)
        shape: dict[str, Any] = {"width": cls.width, "heads": 2, "vocab": cls.vocab, "context": 16}
        stack = GPT(**{**shape, "layers": topology.layers, **settings}).to(dtype)
        prepare(stack, replace(topology, relay_rank=3))
        with torch.no_grad():
            for parameter in stack.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        return stack

    @classmethod
    def teacher(cls, inputs: Tensor, seed: int = 7) -> Logits:
        """What another GPT, trained by backprop, predicts."""
        return teacher_logits(Predictor(cls.gpt(seed=seed), BACKPROP), inputs)

    @classmethod
    def batch(cls, seed: int = 1) -> tuple[Tensor, Tensor]:
        """Inputs and targets (2, 12); three targets are ignored."""
        generator = torch.Generator().manual_seed(seed)
        inputs, targets = torch.randint(0, cls.vocab, (2, 2, 12), generator=generator)
        targets[0, 3:5] = targets[1, 11] = -100
        return inputs, targets

    @staticmethod
    def gradients(stack: torch.nn.Module) -> Gradients:
        """Take every gradient out of the stack; a parameter without one has zero."""
        taken = {
            name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in stack.named_parameters()
        }
        stack.zero_grad(set_to_none=True)
        return taken

    @staticmethod
    def assert_same(actual: Gradients, expected: Gradients, tolerance: float = 1e-12) -> None:
        """Equal to `tolerance` of the largest gradient of all; 0 means bit for bit. Names what differs."""
        assert actual.keys() == expected.keys()
        scale = max(float(g.abs().max()) for g in expected.values())
        assert scale > 0, "all gradients are zero: the comparison would show nothing"
        worst = {name: float((actual[name] - g).abs().max()) / scale for name, g in expected.items()}
        wrong = {name: error for name, error in worst.items() if not error <= tolerance}
        assert not wrong, f"these gradients differ, by that share of the largest one: {wrong}"


class LogitsWatch(TorchDispatchMode):
    """Watches every tensor (..., rows, vocab) that torch makes, forward and backward.

    `rows` is the most that one tensor had, `peak` the most elements that were alive at once. The matrix of a
    head, seen as (width, vocab), does not count.
    """

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.vocab, self.width = vocab, width
        self.rows = self.peak = 0
        self.operations: list[str] = []
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations.append(func.overloadpacket.__name__)
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            shape = tensor.shape[-2:] if isinstance(tensor, Tensor) else ()
            if len(shape) == 2 and shape[1] == self.vocab and shape[0] != self.width:
                self._made(tensor)
        return result

    def _made(self, tensor: Tensor) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        self._alive[reference.cdata] = reference, elements
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.rows = max(self.rows, tensor.numel() // self.vocab)
        self.peak = max(self.peak, sum(elements for _, elements in self._alive.values()))


@pytest.fixture(scope="session")
def tiny() -> type[Tiny]:
    return Tiny


@pytest.fixture(scope="session")
def logits_watch() -> type[LogitsWatch]:
    return LogitsWatch


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    chosen: Case = request.param
    return chosen
