"""Draft stages: one more stage behind a frozen model, which predicts one token further.

    u_t = A norm(x0_t) + B norm(f_{t-1})        f: the last stage's state, of the position before
    g_t = Layer(u_0 .. u_t)                     one layer of the model's own kind
    q_t = softmax(W_V norm'(g_t))               over a draft vocabulary V of the likeliest tokens

With several `depths`, f = Σ_d F_d norm(h_d) of the states h_d at the ends of these stages. At first F is the
identity of the last one.

In a topology it is a stage that reads the last one through a relay with a shift of one position
(`PreviousRelay`), with λ = 0: the base never learns and never changes. So it needs the token x_t and the
state f_{t-1}, and both are known before the model has run x_t: g_t predicts x_{t+1} before the model starts
on it. What it shares with the base (the embedding, the rows V of the head) is referred to, not copied into
its weights.

    a chain     `slots` is 1: for the next draft, g_t takes the place of f_t, and a draft is a pass
    a block     `slots` is k: one pass guesses k tokens. Behind the last token t stand k - 1 empty slots; slot
                j has position t + j, a learned vector m_j in the place of x0 and the state f_{t-1}, and sees
                the slots before it

Training unrolls it (`unroll`): in step j, position t reads g^{(j-1)}_{t-1}, or m_j and f_{t-1-j}. It attends,
as it will when it drafts, to the keys of step 1 up to position t-j+1 and to those of steps 2..j behind them.

Shapes: states (batch, time, depths, width). Cost: (2 + depths) width² for the join, one layer, |V| width for
the head. Sources: "EAGLE" (Li et al. 2024) §3, "EAGLE-3" (Li et al. 2025) §3.1 for depths and §3.2 for
training on own states, "FR-Spec" (Zhao et al. 2025) for the draft vocabulary, "DFlash" (2026) for a pass a
block. Limits: transformers of this package; a chain of drafts, no tree; one layer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.errors import StackError
from topograd.nn.capabilities import draftable
from topograd.nn.heads import Head
from topograd.nn.relays import CausalRelay, at_positions
from topograd.nn.stack import LayerContext, Stack

FIRST_GAIN = 0.2
"""The first gain of the stage's norm over the base's: an untrained stage should be uncertain."""


class PreviousRelay(nn.Module, CausalRelay):
    """Sends h; the receiver joins the sender's state of the position before with its own token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Linear(width, width, bias=False)
        self.state = nn.Linear(width, width, bias=False)

    def join(self, x0: Tensor, previous: Tensor) -> Tensor:
        """A norm(x0) + B norm(previous): (batch, time, width) each."""
        return self.token(unit(x0)) + self.state(unit(previous))

    def send(self, h: Tensor, received: Tensor | None) -> Tensor:
        return h

    def receive(self, message: Tensor, ctx: LayerContext) -> Tensor:
        return self.join(ctx.x0, shifted(message))

    def send_next(self, history: Tensor, received: Tensor, ctx: LayerContext) -> Tensor:
        return at_positions(history, ctx.positions)

    def receive_next(self, history: Tensor, ctx: LayerContext) -> Tensor:
        before = F.pad(history, (0, 0, 1, 0))  # slot p holds the state of position p - 1
        return self.join(ctx.x0, at_positions(before, ctx.positions))

    def needed(self, time: int) -> tuple[int, Tensor | None]:
        return max(time - 1, 1), None

    def send_pooled(self, pooled: Tensor, received: Tensor | None) -> Tensor:
        return pooled


def unit(x: Tensor) -> Tensor:
    """x / rms(x); 0 stays 0."""
    return F.rms_norm(x, x.shape[-1:])


def shifted(states: Tensor, by: int = 1) -> Tensor:
    """The state so many positions before, at each position; 0 at the first ones."""
    return F.pad(states, (0, 0, by, 0))[:, : states.shape[1]]


class DraftStage(nn.Module):
    """The stage's own parameters: the relay, a layer, a norm. Embedding and head rows are the base's."""

    vocabulary: Tensor
    depths: Tensor | None
    """The exits whose states it reads, from 0, the last one behind the others; None if it is that alone."""

    def __init__(
        self, base: Stack, vocabulary: Tensor, depths: Sequence[int] | None = None, slots: int = 1
    ) -> None:
        super().__init__()
        parts = draftable(base)
        if parts is None:
            kind = type(base).__name__
            problem = f"{kind} can be given no draft stage"
            raise StackError(problem, setting="base", given=kind, remedy="a transformer can")
        self.register_buffer("vocabulary", vocabulary.long())
        several = depths is not None and len(depths) > 1
        self.register_buffer("depths", torch.tensor(depths) if several else None)
        like, width = parts.embedding.weight, base.width
        self.relay = PreviousRelay(width)
        nn.init.eye_(self.relay.state.weight)
        self.fusion = nn.Linear(len(depths) * width, width, bias=False) if depths and several else None
        if self.fusion is not None:
            nn.init.zeros_(self.fusion.weight)
            nn.init.eye_(self.fusion.weight.data[:, -width:])
        self.masks = nn.Parameter(torch.randn(slots - 1, width)) if slots > 1 else None
        self.layer = parts.draft_layer()
        self.norm = parts.draft_norm(FIRST_GAIN)
        self.to(like.device, like.dtype)
        bias = None if parts.head.bias is None else parts.head.bias.detach()[self.vocabulary]
        rows = parts.head.matrix(base.last_stage, self.vocabulary).detach()
        head = Head(rows, bias, softcap=parts.head.softcap)
        # in a tuple: the base's parameters are not this module's
        self._base = (base, parts.with_one_layer(self.layer, self.norm, head))

    @property
    def slots(self) -> int:
        """Tokens that one pass guesses."""
        return 1 if self.masks is None else len(self.masks) + 1

    def pick(self, states: Tensor) -> Tensor:
        """Of states (..., exits, width) those that it reads."""
        return states[..., -1:, :] if self.depths is None else states[..., self.depths.tolist(), :]

    def fuse(self, states: Tensor) -> Tensor:
        """f (..., width) of the states (..., depths, width) that it reads."""
        return states[..., -1, :] if self.fusion is None else self.fusion(unit(states).flatten(-2))

    @property
    def stack(self) -> Stack:
        """A stack of this one layer, with the base's embedding and its head on the draft vocabulary."""
        return self._base[1]

    def base_logits(self, states: Tensor) -> Tensor:
        """The base's logits from its last states, on the draft vocabulary."""
        base = self._base[0]
        return base.readout(states, base.last_stage, self.vocabulary)

    def places(self) -> Tensor:
        """For each token of the base its place in the draft vocabulary, or -1."""
        base = self._base[0]
        places = torch.full((base.vocab,), -1, device=self.vocabulary.device)
        places[self.vocabulary] = torch.arange(len(self.vocabulary), device=places.device)
        return places

    def forward(self, ctx: LayerContext, previous: Tensor, memory: object = None) -> Tensor:
        """g (batch, time, width) from the tokens and the states of the positions before."""
        h = self.relay.join(ctx.x0, previous)
        return self.layer(h, ctx) if memory is None else self.layer(h, ctx, memory)

    def readout(self, g: Tensor) -> Tensor:
        """Logits (..., draft vocabulary)."""
        return self.stack.readout(g, 0)

    def unroll(self, inputs: Tensor, states: Tensor, steps: int) -> Iterator[Tensor]:
        """g of each step (batch, time, width), from the states (batch, time, depths, width) that it reads.

        The first reads them; each later one the states of the one before, or the empty slots of a block.
        """
        x0, read = self.stack.embed(inputs), self.fuse(states)
        plain = self.stack.layer_context(x0, inputs)
        memory, g = _Steps(), read
        for step in range(steps):
            if step and self.masks is not None:
                x0 = unit(self.masks[step - 1]).expand_as(x0)
                plain, g = self.stack.layer_context(x0, torch.zeros_like(inputs)), shifted(read, step)
            ctx = replace(plain, mask=step_mask(inputs.shape[1], step, x0.device))
            g = self(ctx, shifted(g), memory)
            yield g


class _Steps:
    """Keys and values of all steps so far, concatenated."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.pairs.append((k, v))
        keys, values = (torch.cat([pair[i] for pair in self.pairs], dim=2) for i in range(2))
        return keys, values


def step_mask(time: int, step: int, device: torch.device) -> Tensor:
    """(time, (step + 1) time): what a query of step `step`, counted from 0, sees of steps 0..step.

    Of step 0 the positions up to t - step, of step i > 0 the position t - step + i: the drafted chain.
    """
    behind = torch.arange(time, device=device)[:, None] - torch.arange(time, device=device)
    return torch.cat([behind >= step, *(behind == step - i for i in range(1, step + 1))], dim=1)


def rank_tokens(tokens: Sequence[int] | Tensor, vocab: int, size: int) -> Tensor:
    """The `size` most frequent token ids, in ascending order; ties go to the smaller id."""
    counts = torch.bincount(torch.as_tensor(tokens).flatten().long(), minlength=vocab)[:vocab]
    order = counts.argsort(descending=True, stable=True)
    return order[: min(size, vocab)].sort().values
