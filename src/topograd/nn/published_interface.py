"""The bounded interface of "LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces", as published.

Statement (§3.1, eqs. 4-5, and the authors' code where the paper leaves it open):

    m_0     = Enc_0(mean_t x0_t)                             from the tokens
    x_t     = x0_t + Dec_k(m_k)                              every region, the first too
    m_{k+1} = LN_k(m_k + tanh(α_k) Enc_k(mean_t h_t))

Enc and Dec are two linear layers with biases and a SiLU between them, as wide as the model inside; LN has a
gain, a shift and PyTorch's ε; α begins at 0.5. Nothing begins at zero. The last region's Enc, whose state
nobody reads, is left out.

Where ranks differ from boundary to boundary, m_k is cut to the first r_{k+1} numbers, or zeros are added. A
region whose settings say read=message gets Dec(m_k) alone at every position: the loss of the last one is then
a function of m_K, as the paper's theorem has it.

Shapes: h (batch, T, width), m (batch, 1, r). Cost per boundary: one Enc and one Dec for a sequence, about
2 width² multiply-adds each. Limits: every position reads the mean of all positions, so it is for encoders; as
a next-token model it sees the future. The canvas is the stack's own x0, which a GPT of this package
normalises and the authors do not.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from topograd.nn.interface_config import PublishedInterface
from topograd.nn.relays import BoundedRelay, fit_rank
from topograd.nn.stack import LayerContext

ALPHA = 0.5
"""What α is at first."""


def perceptron(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Enc or Dec."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.SiLU(), nn.Linear(hidden, outputs))


class FirstPublishedRelay(BoundedRelay):
    """What region 0 reads the canvas through: m_0 and Dec_0."""

    def __init__(self, settings: PublishedInterface, width: int) -> None:
        super().__init__()
        self.settings = settings
        self.start = perceptron(width, width, settings.rank)
        self.decode = perceptron(settings.rank, width, width)

    def send(self, h: Tensor, received: Tensor | None) -> Tensor:
        return h

    def receive(self, message: Tensor, ctx: LayerContext) -> Tensor:
        return message + self.decode(self.start(message.mean(1, keepdim=True)))


class PublishedRelay(BoundedRelay):
    """One boundary: Enc, α and LN where a region sends, Dec where the next one receives."""

    def __init__(self, settings: PublishedInterface, width: int, start: nn.Module | None) -> None:
        """`start` makes m_0, for the boundary behind region 0; it stays the first relay's."""
        super().__init__()
        self.settings: PublishedInterface = settings
        self.encode = perceptron(width, width, settings.rank)
        self.decode = perceptron(settings.rank, width, width)
        self.norm = nn.LayerNorm(settings.rank)
        self.alpha = nn.Parameter(torch.tensor(ALPHA))
        self._start = () if start is None else (start,)  # in a tuple, so that it is no part of this module

    def rows(self, context: int) -> int:
        return self.settings.rank

    def send(self, h: Tensor, received: Tensor | None) -> Tensor:
        assert received is not None, "every region receives a state or the canvas"
        for start in self._start:
            received = start(received.mean(1, keepdim=True))
        made = torch.tanh(self.alpha) * self.encode(h.mean(1, keepdim=True))
        return self.norm(fit_rank(received, made.shape[-1]) + made)

    def receive(self, message: Tensor, ctx: LayerContext) -> Tensor:
        decoded = self.decode(message)
        return decoded.expand_as(ctx.x0) if self.settings.read == "message" else ctx.x0 + decoded

    def parameters_by_end(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        sending = [*self.encode.parameters(), *self.norm.parameters(), self.alpha]
        return sending, list(self.decode.parameters())
