"""Optional capabilities of a stack, as protocols.

    per-stage heads    `Stack.add_heads`, `has_head`, `head_parameters`; `HeadedStack` implements all three
    a shared head      `Stack.shared_head`: the one matrix that stages read through, or None
    decoding           layers with `new_state`: they keep a state from token to token (`nn/stack.py`)
    a decoding form    `Stack.for_decoding`: the same function, laid out for small batches
    growth             `Growable`: layers can be appended
    a draft stage      `Draftable`: one more layer of the model's own kind can draft tokens
    operators          `OperatorForm`: embedding, blocks, norm and head can be written for other runtimes

Code that needs a capability and does not find it raises an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from torch import Tensor, nn

from topograd.nn.heads import Head, HeadedStack

if TYPE_CHECKING:
    from topograd.nn.transformer.config import BlockConfig
    from topograd.nn.transformer.parts import Norm


@runtime_checkable
class Growable(Protocol):
    """A stack to which layers can be appended; they are the identity until they learn."""

    def append_layers(self, count: int, index: int | None = None) -> None: ...


class Draftable(Protocol):
    """A stack that lends its embedding, head and one new layer to a draft stage."""

    embedding: nn.Embedding
    head: Head

    def draft_layer(self) -> nn.Module: ...

    def draft_norm(self, gain: float) -> nn.Module: ...

    def with_one_layer(self, layer: nn.Module, last_norm: nn.Module, head: Head) -> HeadedStack: ...


class OperatorForm(Protocol):
    """A stack whose parts other runtimes read: tables, blocks, rotations, last norm, head."""

    config: BlockConfig
    embedding: nn.Embedding
    previous: nn.Embedding | None
    layers: nn.ModuleList
    norm: Norm
    head: Head

    def rotations(self, positions: Tensor, like: Tensor) -> Mapping[str, Any]: ...


def operator_form(stack: object) -> OperatorForm | None:
    """The stack as an `OperatorForm`, where it has all of its parts."""
    return cast(OperatorForm, stack) if _has_parts(stack, OperatorForm) else None


def draftable(stack: object) -> Draftable | None:
    """The stack as a `Draftable`, where it has all of its parts."""
    return cast(Draftable, stack) if _has_parts(stack, Draftable) else None


def _has_parts(stack: object, capability: type) -> bool:
    # isinstance does not see submodules since Python 3.12: nn.Module keeps them in a dict behind __getattr__
    names = {*capability.__annotations__, *vars(capability)}
    return all(hasattr(stack, name) for name in names if not name.startswith("_"))
