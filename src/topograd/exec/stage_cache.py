"""The decoding states of one stage, for every sequence of a cache, in PyTorch.

    receive, layers, send    run new positions of some sequences, packed (`nn/slots.py`), through the stage
    truncate, copy           roll back a sequence; start one with the positions of another
    open, move, close        add a sequence, move it to a larger place, remove it

A layer with `supports_varlen` keeps its keys and values in slots that all sequences share, and runs all of
them at once. Any other layer has a state for each sequence: recurrent states of sequences with equally many
new positions run as one batch, the rest sequence by sequence. A causal relay has a history for each sequence.
A stage with a layer that keeps no state is run on the whole prefix each time (`from_start`).

Limits: inside `torch.inference_mode()`; one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from topograd.nn.layer_state import History, LayerState
from topograd.nn.slots import KVSlots, Place, SlotBuffer
from topograd.topology.plan import EdgeOutput, PlannedStage

if TYPE_CHECKING:
    from torch import Tensor

    from topograd.nn.mamba.recurrent import RecurrentState
    from topograd.nn.relays import Relay
    from topograd.nn.stack import LayerContext, Stack


@dataclass
class SequenceStates:
    """The states of one sequence that are not in slots."""

    layers: list[LayerState | None]
    histories: dict[EdgeOutput, History]

    def all(self) -> list[LayerState]:
        return [*(state for state in self.layers if state is not None), *self.histories.values()]


def is_causal(stack: Stack, relay: str) -> bool:
    """Whether what a relay sends at a position depends on earlier ones."""
    from topograd.nn.relays import CausalRelay

    return isinstance(stack.relay(relay), CausalRelay)


class StageCache:
    """KV caches, recurrent states and histories of one stage."""

    def __init__(self, stack: Stack | None, planned: PlannedStage, capacity: int) -> None:
        """`stack` is None where a runtime has packed layers that pass their hidden states on as they are."""
        self.stack, self.planned, self.capacity = stack, planned, capacity
        modules: list[Any] = [None if stack is None else stack.layers[i] for i in planned.layers]
        self.modules = modules
        self.from_start = stack is not None and not all(hasattr(each, "new_state") for each in modules)
        """Whether a run must be given every position of its sequences."""
        varlen = [getattr(module, "supports_varlen", False) and not self.from_start for module in modules]
        self.slots: list[KVSlots | None] = [
            module.new_slots() if on else None for module, on in zip(modules, varlen, strict=True)
        ]
        outputs = (*(output for output, _ in planned.inputs), *planned.outputs)
        self._histories = [o for o in outputs if stack is not None and is_causal(stack, o.relay)]
        self._states: dict[Place, SequenceStates] = {}

    @property
    def _buffers(self) -> list[SlotBuffer]:
        """Keys and values of all layers that keep them in slots."""
        return [buffer for kv in self.slots if kv is not None for buffer in (kv.keys, kv.values)]

    @property
    def position_bytes(self) -> int:
        """Bytes of a position of a sequence in slots."""
        return sum(slots.position_bytes for slots in self.slots if slots is not None)

    @property
    def cuts_anywhere(self) -> bool:
        """Whether `copy` gives any number of positions: recurrent states and histories may give fewer."""
        return all(slots is not None for slots in self.slots) and not self._histories

    # Sequences

    def open(self, place: Place) -> None:
        """A new sequence at a place."""
        layers = [
            None if self.from_start or slots is not None else module.new_state(1, self.capacity)
            for module, slots in zip(self.modules, self.slots, strict=True)
        ]
        histories = {} if self.from_start else {output: History(self.capacity) for output in self._histories}
        self._states[place] = SequenceStates(layers, histories)

    def close(self, place: Place) -> None:
        del self._states[place]

    def truncate(self, place: Place, length: int) -> int:
        """Roll back to `length` positions of a sequence or fewer; returns the number that remain."""
        for state in self._states[place].all():
            length = state.truncate(length)
        return length

    def copy(self, source: Place, target: Place, length: int, slots: int) -> int:
        """Give a sequence the first positions of another; returns how many, at most `length`."""
        self.move(source, target, length, slots)
        own = self._states[source]
        self._states[target] = SequenceStates(
            [None if state is None else state.copy() for state in own.layers],
            {output: history.copy() for output, history in own.histories.items()},
        )
        return self.truncate(target, length)

    def move(self, old: Place, new: Place, length: int, slots: int) -> None:
        """Copy the slots of a sequence to another place, in a room with so many slots."""
        for buffer in self._buffers:
            buffer.copy(old, new, length, slots)

    def grow(self, old: int, new: int) -> None:
        """Make a room larger, for all sequences in it."""
        for buffer in self._buffers:
            buffer.grow(old, new)

    def keep_rooms(self, rooms: list[int]) -> None:
        """Free the buffers of other rooms."""
        for buffer in self._buffers:
            buffer.keep_rooms(rooms)

    # Running

    def layers(self, h: Tensor, ctx: LayerContext) -> dict[int, Tensor]:
        """The hidden state after each layer, by the number of layers of the stack."""
        after = {}
        for place, (layer, module) in enumerate(zip(self.planned.layers, self.modules, strict=True)):
            slots = self.slots[place]
            h = self._each(module, place, h, ctx) if slots is None else module(h, ctx, slots)
            after[layer + 1] = h
        return after

    def _each(self, module: Any, layer: int, h: Tensor, ctx: LayerContext) -> Tensor:
        """A layer with a state of its own for each sequence."""
        import torch

        from topograd.nn.mamba.recurrent import RecurrentState

        assert ctx.spans is not None, "a cache runs spans"
        spans = ctx.spans
        states: list[Any] = [self._states[place].layers[layer] for place in spans.places]
        if len(states) > 1 and all(isinstance(state, RecurrentState) for state in states):
            return self._joined(module, states, h, ctx)
        each = zip(spans.slices(), spans.contexts, states, strict=True)
        parts = [module(h[:, columns], own, state) for columns, own, state in each]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _joined(self, module: Any, states: list[RecurrentState], h: Tensor, ctx: LayerContext) -> Tensor:
        import torch

        from topograd.nn.mamba.recurrent import RecurrentState

        assert ctx.spans is not None
        parts, first = [], 0
        for group in ctx.spans.groups:
            some = states[first : first + group.rows]
            first += group.rows
            batch = RecurrentState.joined(some)
            x0, inputs = group.unpack(ctx.x0, 1), group.unpack(ctx.inputs, 1)
            assert self.stack is not None
            own = self.stack.layer_context(x0, inputs, group.starts[0] if group.even else group.positions)
            y = module(group.unpack(h, 1), own, batch)
            parts.append(y.reshape(1, -1, *y.shape[2:]))
            for index, state in enumerate(some):
                state.take(batch, index, group.count)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def receive(self, relay: Relay, output: EdgeOutput, message: Tensor, ctx: LayerContext) -> Tensor:
        """The stage's input at the new positions."""
        from topograd.nn.relays import CausalRelay

        if not isinstance(relay, CausalRelay):
            return relay.receive(message, ctx)
        if self.from_start:
            return relay.receive_next(message, ctx)
        return self._with_history(output, message, ctx, relay.receive_next)

    def send(
        self, relay: Relay, output: EdgeOutput, h: Tensor, received: Tensor, ctx: LayerContext
    ) -> Tensor:
        """The stage's message at the new positions."""
        from topograd.nn.relays import CausalRelay

        if not isinstance(relay, CausalRelay):
            return relay.send(h, received)
        if self.from_start:
            return relay.send_next(h, received, ctx)
        assert ctx.spans is not None
        each = iter([received[:, columns] for columns in ctx.spans.slices()])
        return self._with_history(
            output, h, ctx, lambda history, own: relay.send_next(history, next(each), own)
        )

    def _with_history(
        self,
        output: EdgeOutput,
        values: Tensor,
        ctx: LayerContext,
        act: Callable[[Tensor, LayerContext], Tensor],
    ) -> Tensor:
        import torch

        assert ctx.spans is not None
        spans, parts = ctx.spans, []
        for place, columns, own in zip(spans.places, spans.slices(), spans.contexts, strict=True):
            history = self._states[place].histories[output].append(values[:, columns])
            parts.append(act(history, replace(own, x0=ctx.x0[:, columns])))  # x0 or a canvas of layers
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
