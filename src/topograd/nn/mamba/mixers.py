"""The mixer protocol, and Mamba-2 and Mamba-3 as mixers of a stack.

A mixer of your own is made by `make(config, index)`, a class or a function, and named in the settings as
`package.module:make` (`model.architecture`), or registered under a name (`topograd.nn.config.MIXERS`). It
takes the normed hidden state (batch, time, width) and returns what the layer adds to it.

- With a state it continues from the positions of the state, for one position or many, and must return the
  same as for the whole sequence.
- Its output matrix should start at zero, as those of the others do: then a new layer starts as the identity.
- Position t may depend on nothing after t, and a sequence of the batch on no other.

The Mamba mixers are twice as wide as the residual stream (expand 2), with heads as wide as the GPT's and one
group. Their cost per token, in multiply-adds forward: about 6 width² for the projections, and chunk + 2 state
times 2 width for the scan, whatever the context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from topograd.nn.config import GPTConfig
from topograd.nn.layer_state import LayerState
from topograd.nn.mamba.mamba2 import Mamba2Mixer
from topograd.nn.mamba.mamba3 import Mamba3Mixer
from topograd.nn.mamba.recurrent import RecurrentState

if TYPE_CHECKING:
    from topograd.nn.stack import LayerContext

EXPAND = 2


class Mixer(Protocol):
    """An nn.Module with a decoding state. `with_mlp = False` leaves out the layer's MLP."""

    def __call__(self, x: Tensor, ctx: LayerContext, state: Any = None) -> Tensor: ...

    def new_state(self, batch: int, capacity: int) -> LayerState: ...


class RowMixer(Mixer, Protocol):
    """A mixer with `takes_rows = True`: `rows` (E,) are the positions at which its output is needed."""

    def __call__(
        self, x: Tensor, ctx: LayerContext, state: Any = None, rows: Tensor | None = None
    ) -> Tensor: ...


class _Recurrent:
    """Mixin that makes a recurrent mixer one of the stack: sizes from its config."""

    with_mlp, takes_rows = False, True
    out_proj: nn.Linear

    def __init__(self, config: GPTConfig, index: int) -> None:
        sizes = {"heads": EXPAND * config.heads, "head_dim": config.width // config.heads}
        super().__init__(width=config.width, state=config.ssm_state, **sizes)  # type: ignore[call-arg]
        nn.init.zeros_(self.out_proj.weight)

    def forward(
        self, x: Tensor, ctx: LayerContext, state: RecurrentState | None = None, rows: Tensor | None = None
    ) -> Tensor:
        return super().forward(x, state, rows)  # type: ignore[misc]

    def new_state(self, batch: int, capacity: int = 0) -> RecurrentState:
        """The state of `batch` sequences; its size does not depend on the capacity."""
        return super().new_state(batch)  # type: ignore[misc]


class Mamba2(_Recurrent, Mamba2Mixer):  # type: ignore[misc]
    """Mamba-2 as a mixer of the stack."""


class Mamba3(_Recurrent, Mamba3Mixer):  # type: ignore[misc]
    """Mamba-3 as a mixer of the stack."""
