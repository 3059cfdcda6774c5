"""The `Stack` base class: the interface of every model.

A stack is an embedding, a list of layers and a readout:

    x0  = stack.embed(inputs)                   (batch, time, ...)
    ctx = stack.layer_context(x0, inputs)       what every layer may read
    h   = layer(h, ctx)                         shapes may change from layer to layer
    z   = stack.readout(h, stage)               logits (..., vocab), on any leading shape

A layer that can decode also has `new_state(batch, capacity)` and takes `layer(h, ctx, state)`, for one
token or many; the state's `truncate(length)` rolls back and `copy()` forks (`layer_state.py`,
`mamba/recurrent.py`). A layer with `takes_rows` also takes `rows`, the positions at which its output is
needed. A layer with `supports_varlen` decodes new positions of several sequences that are packed into one
sequence, over the slots that its `new_slots()` gives (`slots.py`); other layers are run sequence by
sequence. The stage index only chooses among per-stage heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from topograd.errors import StackError
from topograd.nn.mkl_linear import packed
from topograd.nn.relays import RELAYS, Relay

if TYPE_CHECKING:
    from topograd.nn.heads import Head
    from topograd.nn.slots import Spans
    from topograd.topology.plan import Plan


@dataclass(frozen=True)
class LayerContext:
    """The arguments of every layer beside its hidden state."""

    x0: Tensor
    inputs: Tensor
    positions: Tensor
    rotary: Any = None
    """cos and sin of the positions; in decoding forms one complex table."""
    local_rotary: Any = None
    """The same for layers with a window, where these have frequencies of their own."""
    mask: Tensor | None = None
    """An attention mask for all layers, in place of the causal one."""
    masks: dict[tuple[int, int], Tensor | None] = field(default_factory=dict)
    """Causal masks so far, by number of keys and window; layers share them."""
    additive_masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """The same with 0 and -inf, for fused attention."""
    calls: Sequence[Any] = ()
    """The arguments of each layer of an adapted model."""
    canvas: Tensor | None = None
    """What a region's interface adds to, where that is not x0 and comes by no message."""
    spans: Spans | None = None
    """The sequences of the packed positions, while several decode as one batch (`slots.py`)."""


@dataclass(frozen=True)
class Projection:
    """A readout that is a linear map of normalize(h): with its matrix, losses need no whole logits."""

    normalize: Callable[[Tensor], Tensor]
    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    low_rank: tuple[Tensor, Tensor] | None = None
    """(U, V) where the matrix is weight + U V."""


class Stack(nn.Module):
    """Base of every model here. Subclasses set `layers` and write `embed` and `readout`."""

    layers: nn.ModuleList
    reads_ahead: bool = False
    """Whether a layer lets a position read later ones, as an encoder's do."""

    def embed(self, inputs: Tensor, previous: Tensor | None = None) -> Tensor:
        """x0 from the inputs; `previous` is the token before them, for stacks that embed it too."""
        raise _undefined(self, "embed")

    def readout(self, h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
        """Logits of h by the head of `stage`, for all of the vocabulary or for `rows` of it."""
        raise _undefined(self, "readout")

    def layer_context(self, x0: Tensor, inputs: Tensor, offset: int | Tensor = 0) -> LayerContext:
        """The context of inputs whose first position is `offset`, or whose positions (batch, time) it is."""
        if isinstance(offset, Tensor):
            return LayerContext(x0, inputs, offset)
        time = x0.shape[1] if x0.dim() > 1 else 1
        return LayerContext(x0, inputs, torch.arange(offset, offset + time, device=x0.device))

    def projection(self, stage: int) -> Projection | None:
        """The readout's matrix where it has one; None means that only `readout` may be used."""
        return None

    @property
    def shared_head(self) -> Head | None:
        """The one head that all stages read through, with deltas of their own; None where there is none."""
        return None

    def add_relay(self, name: str, relay: nn.Module) -> None:
        """Add a relay with parameters; edges of a topology name it."""
        if "relays" not in self._modules:
            self.relays = nn.ModuleDict()
        self.relays[name] = relay

    def learned_relays(self) -> dict[str, nn.Module]:
        """The relays with parameters, and auxiliary modules of objectives, by name."""
        return dict(self.relays.items()) if "relays" in self._modules else {}

    def relay(self, name: str) -> Relay:
        """The relay called `name`."""
        if name in RELAYS:
            return RELAYS[name]
        own: Mapping[str, Any] = self.learned_relays()
        if name not in own:
            known = sorted({*RELAYS, *own})
            problem = f"relay {name!r} is unknown"
            raise StackError(problem, setting="relay", given=name, remedy=f"known are {known}")
        return own[name]

    def validate_plan(self, plan: Plan) -> None:
        """Check a plan before heads are added; for stacks whose layers have different shapes."""

    def add_heads(self, stages: Iterable[int], rank: int | None = None) -> bool:
        """Give these stages heads of their own where they lack them; True if parameters were added."""
        problem = f"{type(self).__name__} has one head for all stages"
        remedy = "use heads='shared' or define add_heads"
        raise StackError(problem, setting="heads", given="per-stage", remedy=remedy)

    def has_head(self, stage: int) -> bool:
        """Whether `stage` has a head of its own."""
        return False

    @property
    def width(self) -> int:
        """Numbers in a hidden state, which learned relays are sized by."""
        raise _undefined(self, "width")

    @property
    def vocab(self) -> int:
        """Tokens, or classes, that the readout has logits for."""
        raise _undefined(self, "vocab")

    @property
    def context(self) -> int:
        """Positions that the stack sees, which interfaces are sized by."""
        raise _undefined(self, "context")

    def features(self, h: Tensor) -> Tensor:
        """The numbers (..., width) that a head reads of a hidden state."""
        return h

    def feature_width(self, shape: tuple[int, ...]) -> int:
        """How many numbers `features` gives for a hidden state of some shape."""
        return shape[-1]

    def input_shape(self, layer: int) -> tuple[int, ...]:
        """The shape of a layer's input, without batch and positions."""
        return (self.width,)

    def output_shape(self, layer: int) -> tuple[int, ...]:
        """The shape of a layer's output, without batch and positions."""
        return (self.width,)

    def after_step(self) -> None:
        """Called after the optimizers' step: updates modules that follow the weights, such as EMA copies."""
        for module in self.learned_relays().values():
            follow = getattr(module, "after_step", None)
            if callable(follow):
                follow(self)

    def head_parameters(self, stage: int) -> list[nn.Parameter]:
        """Parameters that only the head of `stage` has, which a specialist on a frozen base may train."""
        return []

    def for_decoding(self) -> Stack:
        """The same model for inference only, with weights laid out for small batches."""
        return packed(self)

    @property
    def last_stage(self) -> int:
        """The stage whose head `forward` reads."""
        return 0

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits through all the layers in order: the model that backprop trains.

        For other topologies use `Predictor` (`exec/forward.py`).
        """
        if self.learned_relays():
            problem = f"this {type(self).__name__} has relays, so its layers are not a plain chain"
            raise StackError(problem, setting="relays", remedy="call Predictor(stack, plan) instead")
        h = self.embed(inputs)
        ctx = self.layer_context(h, inputs)
        for layer in self.layers:
            h = layer(h, ctx)
        return self.readout(h, self.last_stage)


def _undefined(stack: Stack, name: str) -> StackError:
    return StackError(f"{type(stack).__name__} has no {name}", setting=name, remedy="a stack must define it")


def check_stack(model: object) -> Stack:
    """`model` if it is a stack; raises StackError for any other module."""
    if not isinstance(model, Stack):
        kind = type(model).__name__
        problem = f"the model is a {kind}, not a tg.Stack"
        remedy = "wrap it with tg.adapt(model, ...), or inherit tg.Stack"
        raise StackError(problem, setting="stack", given=kind, remedy=remedy)
    return model
