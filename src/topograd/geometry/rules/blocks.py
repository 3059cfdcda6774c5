"""Predicted rates of attention chains, gated MLPs, compositions and pre-norm transformers.

Statement. With f_m the amplitude of the dead component after block m (f_0 = 0) and b_m that of the gradient
at the input of block m (b_{M+1} = 0), blocks whose transfer is scalar add their rates β_m:

    f_m = f_{m-1} + β_m,   b_m = β_m + b_{m+1},   β = s (mlp of s weights), 0 (residual), 2 (attention).

Attention has a second way back, through the scores: their gradient is O(1) from the live channels and meets
a dead key of amplitude 1 + f_{m-1}, so

    b_m = 2 + min(b_{m+1}, f_{m-1}).

In a chain of M attention blocks the second-moment slopes at the outputs of block p's projections are
therefore

    ρ_Q = ρ_K = 4p - 2,        ρ_O = 4 min(M - p, p + 1),        ρ_V = ρ_O + 2,

and with a residual around each block O 0, V 2, Q and K 2. A gated MLP is quadratic in the dead component,
t³ x_d² / 2, so M of them have f_M = 3 (2^M - 1), not 3M, and b_m = 3 (2^M - 2^{m-1}).

Symbols: architectures.py. Cost: O(M).
Source: "Dead Directions: Geometric Singular Learning", Theorem 30 (additivity), Theorems 66 and 67 and
Proposition 69 (attention), Remark 56 (residuals), Proposition 114 (gated MLP). Derived here: the min with
f_{m-1}, which gives the D* = p + 1 that the paper fits as 2 and leaves open (Remark 72), and the doubling
of gated stacks (Remark 115 adds). Corollary 68 reports additivity for all pairs of an attention block and
an mlp of two weights; with attention first the gradient at the input has slope 4 in our measurement, not 8.
Where every head h has a dead channel with t^{α_h}, each has α_h times these rates: a head's scores and values
do not depend on another head's dead channel. (Derived here; the paper leaves several heads open.)

Derived here too, and measured: heads that share keys and values, and rotary embedding with a whole pair dead,
have the rules of plain attention. With one channel of a pair dead, the partner's live key reaches the dead
query: Q and K 0, b_m = min(b_{m+1} + 2, 1). Cross-attention to a memory whose dead channel has size 1 has
f_m = b_m = 2, Q 2, K 2 (1 + f_{m-1}). Experts of two weights have f_m = f_{m-1} + 2 and, through the router,
b_m = min(b_{m+1} + 2, 1); a scan with a gate f_m = 2 f_{m-1} + 3 and b_m = min(b_{m+1} + f_{m-1} + 3, 1).

Limits. Dead units in the same places of all blocks.
"""

from dataclasses import replace

from topograd.errors import GeometryError
from topograd.geometry.rules.architectures import (
    Architecture,
    Attention,
    Block,
    Chain,
    Composition,
    GatedStack,
    Mixer,
)
from topograd.geometry.rules.chains import DERIVED, PAPER, Prediction, predict_chain


def predict(architecture: Architecture) -> tuple[Prediction, ...]:
    """The rate at every node of a described network.

    >>> [p.slope for p in predict(Chain(3)) if p.node.startswith("G")]
    [4.0, 2.0, 0.0]
    """
    match architecture:
        case Chain():
            return predict_chain(architecture)
        case Attention():
            return _attention(architecture)
        case GatedStack():
            return _gated(architecture)
        case Composition():
            return _composition(architecture)
        case Mixer():  # nothing vanishes beside an identity
            source, blocks = f"{PAPER}, Corollary 58", range(1, architecture.blocks + 1)
            sigmas = [Prediction(f"sigma_min(stream_{m})", 0.0, source, "an amplitude") for m in blocks]
            return (*sigmas, *(Prediction(f"gradient_{m}", 0.0, source) for m in blocks))
    raise GeometryError(
        setting="architecture",
        given=architecture,
        allowed="a Chain, Attention, GatedStack, Composition or Mixer",
    )


def amplitudes(blocks: tuple[Block, ...]) -> tuple[list[int], list[int]]:
    """f_0 … f_M and b_1 … b_{M+1}.

    >>> amplitudes((Block("mlp", 3), Block("attention"), Block("mlp", 1)))
    ([0, 3, 5, 6], [6, 3, 1, 0])
    """
    forward = [0]
    for block in blocks:
        forward.append(block.after(forward[-1]))
    backward = [0]
    for block, before in zip(reversed(blocks), reversed(forward[:-1]), strict=True):
        backward.insert(0, block.back(backward[0], before))
    return forward, backward


def _attention(net: Attention) -> tuple[Prediction, ...]:
    predictions: list[Prediction] = []
    beside = [  # blocks beside an identity, one dead channel
        Prediction(f"{part}_{p}", slope, f"{PAPER}, Remark 56")
        for p in range(1, net.blocks + 1)
        for part, slope in (("Q", 2.0), ("K", 2.0), ("V", 2.0), ("O", 0.0))
    ]
    for i, power in enumerate(net.powers or (1,)):
        own = beside if net.wiring != "chain" else _attention_chain(net)
        note = "its own head's scores and values alone carry it: α times the rate of t" if net.powers else ""
        predictions += [
            replace(
                one,
                node=net.node(one.node, i),
                slope=None if one.slope is None else power * one.slope,
                source=DERIVED if net.powers else one.source,
                note=note or one.note,
            )
            for one in own
        ]
    return tuple(predictions)


def _attention_chain(net: Attention) -> list[Prediction]:
    """Blocks in a chain, one dead channel."""
    if net.memory or net.positions == "rope-single":
        return _open_attention(net)
    forward, backward = amplitudes((Block("attention"),) * net.blocks)
    refined = f"{PAPER}, Proposition 69"
    predictions = []
    for p in range(1, net.blocks + 1):
        out = 2.0 * backward[p]
        capped = p + 1 < net.blocks - p
        note = f"through the scores of block {p + 1}: D* = p + 1 (the paper fits 2)" if capped else ""
        source = DERIVED if capped else refined
        predictions += [Prediction(f"{part}_{p}", 4.0 * p - 2, refined) for part in "QK"]
        predictions += [Prediction(f"V_{p}", out + 2, source, note), Prediction(f"O_{p}", out, source, note)]
    predictions.append(Prediction("output", 2.0 * forward[-1], f"{PAPER}, Theorem 66"))
    note = "not additive: through the scores of block 1" if net.blocks > 1 else ""
    predictions.append(
        Prediction("input gradient", 2.0 * backward[0], f"{PAPER}, Theorem 67, Remark 32", note)
    )
    return predictions


def _open_attention(net: Attention) -> list[Prediction]:
    """A chain whose scores have a live way to the dead channel: of a rotated partner, or of a memory."""
    M, note = net.blocks, "a fixed memory" if net.memory else "its partner's live key reaches the dead query"
    forward, backward = [0], [0]
    for _ in range(M):
        forward.append(2 if net.memory else forward[-1] + 2)
        backward.insert(0, 2 if net.memory else min(backward[0] + 2, 1))
    predictions = []
    for p in range(1, M + 1):
        query, key = (2.0, 2.0 * (1 + forward[p - 1])) if net.memory else (0.0, 0.0)
        out = 2.0 * backward[p]
        nodes = (("Q", query), ("K", key), ("V", out + 2), ("O", out))
        predictions += [Prediction(f"{part}_{p}", slope, DERIVED, note) for part, slope in nodes]
    predictions.append(Prediction("output", 2.0 * forward[-1], DERIVED, note))
    predictions.append(Prediction("input gradient", 2.0 * backward[0], DERIVED, note))
    return predictions


def _gated(net: GatedStack) -> tuple[Prediction, ...]:
    M, source = net.blocks, f"{PAPER}, Proposition 114"
    note = "quadratic in the dead component: 3 (2^M - 1), not 3 M (the paper adds)" if M > 1 else ""
    predictions = [Prediction("output", 6.0 * (2**M - 1), DERIVED if M > 1 else source, note)]
    for m in range(1, M + 1):
        predictions.append(Prediction(f"gradient_{m}", 6.0 * (2**M - 2 ** (m - 1)), DERIVED))
    return tuple(predictions)


def _composition(net: Composition) -> tuple[Prediction, ...]:
    forward, backward = amplitudes(net.blocks)
    source, predictions = f"{PAPER}, Theorem 30", []
    for m in range(1, len(net.blocks) + 1):
        added = sum(block.after(0) for block in net.blocks[m - 1 :])
        additive = backward[m - 1] == added
        note = (
            ""
            if additive
            else f"not additive ({2 * added}): scores, a router or a scan are a shorter way back"
        )
        where = source if additive else DERIVED
        predictions.append(Prediction(f"gradient_{m}", 2.0 * backward[m - 1], where, note))
    predictions += [Prediction(f"output_{m}", 2.0 * f, source) for m, f in enumerate(forward) if m]
    return tuple(predictions)
