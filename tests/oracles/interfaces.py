"""A network of bounded interfaces as one graph, segment by segment and position by position: the definition.

    x_t        = x0_t + Dec_k(m_k[s])                          t in segment s;  x0_t alone in segment 0
    h          = Φ_k(x)                                        the region's layers, at every position
    m_{k+1}[s] = LN(m_k[s] + α_k Enc_k(pool_s(h)))             s = 1..S-1;  m_0 = 0, α_0 = 1
    L          = the mean of -log softmax(readout(h))[target]  behind the last region

The pool of state s is h at the last position of segment s - 1 (tail), or the mean of h over segment s - 1
(mean), or over all the segments before s (cumulative). Not causal: one state, the mean of all positions,
read by all positions. LN(v) = (v - mean(v)) / std(v).

Shapes: x0, x, h (batch, T, width), m[s] (batch, rank). T may be shorter than the context; a state whose
segment is not over does not exist. Nothing is left out because nobody reads it, and all is alive at once.
Cost: every region at all T positions, and Dec at each. Call `.backward()` on the loss: the engines of
`interfaces/` must give these gradients.

Source: "LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces", §3.1, eqs. 4-5, made causal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from topograd.topology.dag import Topology

IGNORED = -100


def interface_forward(stack: Any, topology: Topology, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits (batch, T, vocab) of the last region, and m_1 ... m_{K-1}, each (batch, states, rank)."""
    x0 = stack.embed(inputs)
    ctx = stack.layer_context(x0, inputs)
    last = len(topology.stages) - 1
    states: list[Tensor] = []
    messages = []
    for k, region in enumerate(topology.stages):
        x = x0
        if k > 0:
            x = canvas_with_states(stack.relay(region.sources[0].relay), x0, states)
        h = x
        for layer in range(region.start, region.stop):
            h = stack.layers[layer](h, ctx)
        if k < last:
            relay = stack.relay(topology.stages[k + 1].sources[0].relay)
            messages.append(torch.stack(next_states(relay, h, states), dim=1))
            states = list(messages[-1].unbind(1))
    return stack.readout(h, last), messages


def interface_loss(stack: Any, topology: Topology, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of the last region, with its whole graph; targets of -100 do not count."""
    logits, _ = interface_forward(stack, topology, inputs)
    losses = []
    for row, answers in zip(logits, targets, strict=True):
        for z, y in zip(row, answers, strict=True):
            if int(y) != IGNORED:
                losses.append(torch.logsumexp(z, dim=0) - z[int(y)])
    return torch.stack(losses).mean()


def canvas_with_states(relay: Any, x0: Tensor, states: list[Tensor]) -> Tensor:
    """What a region reads: at every position the canvas, and what its segment's state decodes to."""
    read = []
    for t, x in enumerate(x0.unbind(1)):
        s = t // relay.segment if relay.settings.causal else 1
        read.append(x if s == 0 else x + relay.decode(states[s - 1]))
    return torch.stack(read, dim=1)


def next_states(relay: Any, h: Tensor, states: list[Tensor]) -> list[Tensor]:
    """m_{k+1}[1], m_{k+1}[2], ... of a region's output and m_k[1], m_k[2], ...; region 0 has none."""
    following = []
    for s, pooled in enumerate(pools(relay, h)):
        m = relay.encode(pooled)
        if states:
            m = states[s] + relay.alpha * m
        following.append(normalized(m))
    return following


def pools(relay: Any, h: Tensor) -> list[Tensor]:
    """pool_1(h), pool_2(h), ..., each (batch, width), for the segments that are over."""
    settings, length, time = relay.settings, relay.segment, h.shape[1]
    if not settings.causal:
        return [mean_over(h, 0, time)]
    pooled = []
    for s in range(1, settings.segments):
        end = s * length
        if end > time:
            break
        if settings.pool == "tail":
            pooled.append(h[:, end - 1])
        elif settings.pool == "mean":
            pooled.append(mean_over(h, end - length, end))
        else:
            pooled.append(mean_over(h, 0, end))
    return pooled


def mean_over(h: Tensor, start: int, stop: int) -> Tensor:
    total = torch.zeros_like(h[:, 0])
    for t in range(start, stop):
        total = total + h[:, t]
    return total / (stop - start)


def normalized(m: Tensor) -> Tensor:
    """LN without a gain, and without the ε that a relay needs only where all numbers are equal."""
    centred = m - m.mean(-1, keepdim=True)
    return centred / centred.square().mean(-1, keepdim=True).sqrt()
