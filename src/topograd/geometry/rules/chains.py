"""Predicted rates of chains: the power of t at every node.

Statement. A node is read by its second moment along the dead direction (amplitudes where it says so). In a
chain take a graph whose weights cost α_{i,l}, identity skips 0, projected skips 1, and a bias t^κ an entry
of cost κ. With D_b(l) the least cost from z_l to the output and D_f(l) from the input to h_l,

    G_l  ~ t^{2 D_b(l)}        A_l ~ t^{2 D_f(l)}        A_{l-1} G_l ~ t^{2 (D_f(l-1) + D_b(l))}
    σ_min(H_l) ~ t^{D_f(l)}    K ~ t^{2 D_f(L)}

which in a plain chain is G_l ~ t^{2(L-l)}, A_{l-1} ~ t^{2(l-1)}, product t^{2(L-1)}, K ~ t^{2L}. Without
label noise the residual is t^{D_f(L)}, and every G gains 2 D_f(L): 2(2L-l). Norms change the backward
amplitude b_l = D_b(l):

    LayerNorm at q   b_q = 0              its backward map adds the mean gradient to the dead unit, O(1)
    RMSNorm at q     b_q = min(b_{q+1} + 1, q)    it adds -ẑ_d ⟨g, ẑ⟩/d with ẑ_d ~ t^q
    BatchNorm at q   b_q = b_{q+1} + 1 - f_q      it divides the dead unit by its spread t^{f_q}; f is 0 above
    GroupNorm at q   as LayerNorm, where live units share the dead one's group; as BatchNorm, where none do

where linear and ReLU chains obey the second at their topmost RMSNorm only: below it ⟨g, ẑ⟩ = 0 by scale
invariance.

Symbols: architectures.py. Cost: O(L + skips). Blocks of attention and gated MLPs: blocks.py.
Source: "Dead Directions: Geometric Singular Learning", Theorem 21 (ladder), Remark 23 (noise-free), Theorem
36 (cross-entropy), Theorem 43 and Definition 49 (graphs), Theorems 103, 106, 112 (widths, directions,
biases). Derived here: the rules for norms (Proposition 60 gives a bracket for LayerNorm and carries the
ladder over to RMSNorm unchanged, which our measurement contradicts), and the symmetric zero of a square
softmax head.
Limits. Exponents as t → 0: what a finite window adds is not in them.
"""

from dataclasses import dataclass
from typing import Literal

from topograd.geometry.rules.architectures import Chain

PAPER = "Dead Directions"
DERIVED = "derived here"


@dataclass(frozen=True)
class Prediction:
    """The expected reading of a node: a slope, or (slope None) exactly zero, or no reading at all."""

    node: str
    slope: float | None
    source: str
    note: str = ""
    expected: Literal["rate", "zero", "refusal"] = "rate"


@dataclass(frozen=True)
class Distances:
    """Amplitudes of one dead direction: `backward[layer]` at z_l and `forward[layer]` at h_l, l = 0 … L."""

    backward: tuple[int, ...]
    forward: tuple[int, ...]


def predict_chain(chain: Chain) -> tuple[Prediction, ...]:
    """Nodes G_l, A_l, product_l, sigma_min(H_l), K, and lambda_min(G_l) of a linear chain under a softmax."""
    if chain.rotated_out_of_reach:
        return _rotated(chain)
    if chain.norm_at:
        return _normed(chain)
    predictions: list[Prediction] = []
    for i in range(chain.directions):
        predictions += _direction(chain, i)
    if chain.loss == "cross-entropy" and chain.activation == "linear" and has_dead_column(chain):
        predictions += _smallest_eigenvalues(chain)
    reach = min(distances(chain, i).forward[-1] for i in range(chain.directions))
    if chain.loss == "squared-error" and reach > 0:
        predictions.append(Prediction("K", 2.0 * reach, f"{PAPER}, Theorem 2 with 21"))
    return tuple(predictions)


def node(kind: str, layer: int, direction: int, chain: Chain) -> str:
    """The name of a node; the dead direction is named only where there are several."""
    return f"{kind}_{layer}" + (f"[{direction + 1}]" if chain.directions > 1 else "")


def distances(chain: Chain, direction: int) -> Distances:
    """D_b and D_f of one dead direction, over the chain with its skips and biases.

    >>> distances(Chain(4, skips=((1, 3),)), 0)
    Distances(backward=(2, 1, 2, 1, 0), forward=(0, 1, 2, 1, 2))
    """
    alpha, L = chain.powers[direction], chain.depth
    skip = 0 if chain.skip == "identity" else 1
    backward, forward = [0] * (L + 1), [0] * (L + 1)
    for layer in range(L - 1, -1, -1):
        ways = [alpha[layer] + backward[layer + 1]] + [
            skip + backward[b] for a, b in chain.skips if a == layer
        ]
        backward[layer] = min(ways)
    for layer in range(1, L + 1):
        ways = [alpha[layer - 1] + forward[layer - 1]] + [
            skip + forward[a] for a, b in chain.skips if b == layer
        ]
        forward[layer] = min([*ways, chain.bias] if chain.bias else ways)
    return Distances(tuple(backward), tuple(forward))


def has_dead_column(chain: Chain) -> bool:
    """Whether the smallest singular value of a layer is its last unit's: square, one direction, canonical."""
    return not (chain.widths or chain.bias or chain.rotation or chain.directions > 1)


def _direction(chain: Chain, i: int) -> list[Prediction]:
    D, source, layers = distances(chain, i), _source(chain), range(1, chain.depth + 1)
    residual = D.forward[-1] if chain.noise == 0 else 0
    note = f"noise-free: the residual t^{residual} adds {2 * residual}" if residual else ""
    backward = {layer: 2.0 * (D.backward[layer] + residual) for layer in layers}
    forward = {layer: 2.0 * D.forward[layer] for layer in range(chain.depth)}
    predictions = [Prediction(node("G", layer, i, chain), backward[layer], source, note) for layer in layers]
    predictions += [
        Prediction(node("A", layer, i, chain), forward[layer], source) for layer in range(chain.depth)
    ]
    predictions += [
        Prediction(node("product", layer, i, chain), forward[layer - 1] + backward[layer], source, note)
        for layer in layers
    ]
    if has_dead_column(chain):
        predictions += [
            Prediction(
                f"sigma_min(H_{layer})", float(D.forward[layer]), f"{PAPER}, Corollary 26", "an amplitude"
            )
            for layer in range(1, chain.depth)
        ]
    return predictions


def _source(chain: Chain) -> str:
    places = [
        ("Theorem 36", chain.loss == "cross-entropy"),
        ("Theorem 43", chain.skips),
        ("Theorem 103", chain.widths),
        ("Theorem 106", chain.exponents),
        ("Theorem 112", chain.bias),
        ("Proposition 118", chain.rotation),
        ("Remark 23", chain.noise == 0),
    ]
    cited = [place for place, holds in places if holds] or ["Theorem 21"]
    return f"{PAPER}, {', '.join(cited)}"


def _smallest_eigenvalues(chain: Chain) -> list[Prediction]:
    """λ_min of G_l by its Schur complement on the dead row. A square head makes it zero by symmetry."""
    D, layers = distances(chain, 0), range(1, chain.depth + 1)
    if chain.head == "simplex":
        note = "the simplex head has no shift gauge"
        return [
            Prediction(f"lambda_min(G_{layer})", 2.0 * D.backward[layer], DERIVED, note) for layer in layers
        ]
    note = "gauge zero: J v = 1 shifts all logits; the rate is in the dead entry (the paper differs)"
    return [Prediction(f"lambda_min(G_{layer})", None, DERIVED, note, "zero") for layer in layers]


def _rotated(chain: Chain) -> tuple[Prediction, ...]:
    note = "theorem-reach exceeded: a rotated dead direction is no unit of a nonlinear layer"
    source = f"{PAPER}, Proposition 119"
    return tuple(
        Prediction(node("G", layer, 0, chain), None, source, note, "refusal")
        for layer in range(1, chain.depth + 1)
    )


def _normed(chain: Chain) -> tuple[Prediction, ...]:
    centred = chain.norm in ("layernorm", "groupnorm")
    amplitudes = _amplitudes(chain)
    dead = "identically 0: LayerNorm's leak is negative and the ReLU above it switches the dead unit off"
    bracket = "LayerNorm resets the amplitude (the paper gives a bracket)"
    cap = "RMSNorm caps the amplitude (the paper carries the ladder over)"
    why = {"rmsnorm": cap, "batchnorm": "BatchNorm divides the dead unit by its own spread"}
    predictions = []
    for layer in range(1, chain.depth + 1):
        if centred and chain.activation == "relu" and min(chain.norm_at) < layer < chain.depth:
            predictions.append(Prediction(f"G_{layer}", None, DERIVED, dead, "zero"))
            continue
        plain = amplitudes[layer] == chain.depth - layer
        note = "" if plain else why.get(chain.norm, bracket)
        predictions.append(Prediction(f"G_{layer}", 2.0 * amplitudes[layer], DERIVED, note))
    return tuple(predictions)


def _amplitudes(chain: Chain) -> list[int]:
    """b_l of a chain with norms, from b_{l+1} + 1 on.

    LayerNorm, and a group with live units, begin again at 0. BatchNorm takes away the amplitude f that the
    dead unit has there, so that b may be below 0. RMSNorm caps by its place q: each (smooth σ), or the last.
    """
    smooth = chain.activation in ("gelu", "tanh")
    backward = [0] * (chain.depth + 1)
    for layer in range(chain.depth - 1, 0, -1):
        b = backward[layer + 1] + 1
        if layer in chain.norm_at:
            if chain.norm == "batchnorm":
                b -= layer - max((q for q in chain.norm_at if q < layer), default=0)
            elif chain.norm != "rmsnorm":
                b = 0
            elif smooth or layer == max(chain.norm_at):
                b = min(b, layer)
        backward[layer] = b
    return backward
