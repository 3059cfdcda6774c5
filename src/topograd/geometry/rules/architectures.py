"""Descriptions of networks whose rates are known.

Statement. Every description fixes a network and an approach to a singularity: all its weights are
blockdiag(R, t) with a random live block R of their own and one dead unit that the layers share, t → 0. A
field departs from that: other powers of t, other widths, a bias, skips, a norm, a rotation, another loss, a
dead unit in every head.

Symbols. L layers, z_l = W_l h_{l-1}, h_l = σ(z_l), h_0 = x, the last layer linear; d the width; α_{i,l} the
power of t of dead direction i in W_l; κ that of a bias; q a norm between h_q and W_{q+1}; M blocks of
attention or of a gated MLP.
Cost: none. Source: "Dead Directions: Geometric Singular Learning", §3 (approach), §9 and appendix A
(departures).
Limits. Not covered, GeometryError: gated skips, norms after the sum or on both sides of a branch, and two
departures without a known joint rule. Any module at all: `topograd.geometry.freeze_probe`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from topograd.errors import GeometryError

ACTIVATIONS = ("linear", "relu", "gelu", "tanh")
LIVE = 24
"""Least width of a ReLU chain under a norm. 2^(1-d) of all samples have no live channel: at d = 8 they
alone make the entries above a LayerNorm t^4, t^2, … where all other samples have exactly 0."""
OUTSIDE = {
    "gated": "a gated skip has no fixed cost in powers of t",
    "peri": "Peri-LN also normalises the branch before the sum",
    "post": "a norm after the sum resets the skip's amplitude",
}
"""Sites and parts that the theory leaves out, with the reason."""


@dataclass(frozen=True)
class Chain:
    """A feedforward chain of `depth` weights.

    >>> print(Chain(4, skips=((2, 4),)))
    chain L=4 d=8 linear, skip 2→4
    """

    depth: int
    width: int = 8
    activation: str = "linear"
    """One of ACTIVATIONS, after every layer but the last."""
    widths: tuple[int, ...] = ()
    """d_0, …, d_L of a rectangular chain; the narrowest has the dead unit. Empty: `width` everywhere."""
    exponents: tuple[tuple[int, ...], ...] = ()
    """α_{i,l}: one row of L powers for every dead direction. Empty: one direction, all 1."""
    bias: int = 0
    """κ of a bias t^κ on the dead unit of every layer; 0 for no bias."""
    loss: str = "squared-error"
    """Or "cross-entropy", with the expected Fisher: labels drawn from the model."""
    head: str = "simplex"
    """Logits of a cross-entropy: "simplex" (B z, B orthonormal with Bᵀ1 = 0) or "square" (z itself)."""
    skips: tuple[tuple[int, int], ...] = ()
    """(a, b): h_a is added to h_b, over the weights a+1, …, b."""
    skip: str = "identity"
    """Or "projected": each skip carries a blockdiag(R, t) of its own."""
    norm: str = "none"
    """Or "layernorm", "rmsnorm", "batchnorm" (statistics of the batch), "groupnorm" (two groups, live units
    in the dead one's); no gain, no offset, no ε."""
    norm_at: tuple[int, ...] = ()
    """Positions q of the norm, between h_q and W_{q+1}."""
    noise: float = 1.0
    """σ of the label noise; 0 is a teacher without noise, whose residual vanishes along the approach."""
    rotation: float = 0.0
    """ρ: every weight is Q blockdiag(R, t) Qᵀ with Q = exp(ρ S), S a random skew matrix."""
    live: str = "random"
    """Or "identity": R = 1, units that never meet, where a constant is derived for that."""

    def __post_init__(self) -> None:
        _whole("depth", self.depth, 1)
        _whole("width", self.width, 2)
        _whole("bias", self.bias, 0)
        _one_of("activation", self.activation, ACTIVATIONS)
        _one_of("loss", self.loss, ("squared-error", "cross-entropy"))
        _one_of("head", self.head, ("simplex", "square"))
        _one_of("skip", self.skip, ("identity", "projected"))
        _one_of("norm", self.norm, ("none", "layernorm", "rmsnorm", "batchnorm", "groupnorm"))
        _one_of("live", self.live, ("random", "identity"))
        self._check_shape()
        self._check_norm()
        self._check_together()

    def _check_shape(self) -> None:
        depth = self.depth
        if self.widths and (len(self.widths) != depth + 1 or min(self.widths) < 2):
            _refuse("widths", self.widths, f"{depth + 1} numbers of at least 2, d_0 to d_L")
        if any(len(row) != depth or min(row) < 1 for row in self.exponents):
            _refuse("exponents", self.exponents, f"{depth} whole powers from 1 for every dead direction")
        if self.directions >= self.rank:
            _refuse("exponents", self.directions, f"fewer dead directions than the width {self.rank}")
        for name, number in (("noise", self.noise), ("rotation", self.rotation)):
            if not 0 <= number < math.inf:
                _refuse(name, number, "finite and at least 0")
        if any(not 0 <= a < b <= depth for a, b in self.skips) or len(set(self.skips)) < len(self.skips):
            _refuse("skips", self.skips, f"different pairs (a, b) with 0 <= a < b <= {depth}")

    def _check_norm(self) -> None:
        if (self.norm == "none") != (not self.norm_at):
            _refuse("norm_at", self.norm_at, "given with a norm, and only then")
        if any(not 1 <= q < self.depth for q in self.norm_at) or len(set(self.norm_at)) < len(self.norm_at):
            _refuse("norm_at", self.norm_at, f"different positions from 1 to {self.depth - 1}")
        if self.norm_at and self.activation == "relu" and self.width < LIVE:
            _refuse("width", self.width, f"at least {LIVE} for a ReLU under a norm")

    def _check_together(self) -> None:
        """Departures whose joint rule has not been derived."""
        graph = {"exponents": self.exponents, "bias": self.bias, "skips": self.skips}
        frame = {"widths": self.widths, "cross-entropy": self.loss == "cross-entropy"}
        alone = {"norm": self.norm_at, "rotation": self.rotation, "noise-free": self.noise == 0}
        given = [name for name, value in (graph | frame | alone).items() if value]
        fine = set(graph) | set(frame) if not any(alone.values()) else {"noise-free", "widths"}
        joint = set(given) <= fine and not {"widths", "skips"} <= set(given)
        if len(given) > 1 and not joint:
            raise GeometryError(
                f"no joint rule is known for {' with '.join(given)}",
                setting=given[0],
                given=given,
                remedy="describe one at a time",
            )

    @property
    def layer_widths(self) -> tuple[int, ...]:
        """d_0, …, d_L."""
        return self.widths or (self.width,) * (self.depth + 1)

    @property
    def rank(self) -> int:
        """Width of the subspace that all layers share; its last units are the dead ones."""
        return min(self.layer_widths)

    @property
    def directions(self) -> int:
        """How many dead directions there are."""
        return max(len(self.exponents), 1)

    @property
    def powers(self) -> tuple[tuple[int, ...], ...]:
        """α_{i,l} for every dead direction i and layer l."""
        return self.exponents or ((1,) * self.depth,)

    @property
    def rotated_out_of_reach(self) -> bool:
        """A rotated dead direction is no unit of a nonlinear layer."""
        return self.rotation > 0 and self.activation != "linear"

    def __str__(self) -> str:
        size = "-".join(map(str, self.widths)) if self.widths else str(self.width)
        parts = [f"chain L={self.depth} d={size} {self.activation}"]
        if self.exponents:
            parts.append("α=" + ",".join(f"({','.join(map(str, row))})" for row in self.exponents))
        if self.bias:
            parts.append(f"bias t^{self.bias}")
        if self.loss == "cross-entropy":
            parts.append(f"cross-entropy, {self.head} head")
        if self.skips:
            kind = "skip" if self.skip == "identity" else "projected skip"
            parts.append(f"{kind} " + " ".join(f"{a}→{b}" for a, b in self.skips))
        if self.norm_at:
            parts.append(f"{self.norm} at {','.join(map(str, self.norm_at))}")
        if self.noise == 0:
            parts.append("noise-free")
        if self.rotation:
            parts.append(f"rotated {self.rotation:g}")
        if self.live == "identity":
            parts.append("identity live block")
        return ", ".join(parts)


@dataclass(frozen=True)
class Attention:
    """`blocks` of softmax attention, W_Q, W_K, W_V, W_O all blockdiag(R, t).

    >>> print(Attention(3, causal=True))
    attention M=3 d=16 n=8, causal
    """

    blocks: int
    width: int = 16
    tokens: int = 8
    heads: int = 1
    causal: bool = False
    wiring: str = "chain"
    """"chain" (x ← attend(x)), "residual" (x ← x + attend(x)), "pre-norm" (x ← x + attend(LN(x)))."""
    powers: tuple[int, ...] = ()
    """α_h: the last channel of every head is dead, with t^α in all weights. Empty: that of the last, t."""
    kv_heads: int = 0
    """Heads of keys and values, which groups of heads share; the dead channel is that of the last group's
    keys and values, and of all its queries. 0: as many as heads."""
    positions: str = "none"
    """"rope", rotary embedding with both channels of the last pair dead, or "rope-single", with one."""
    memory: bool = False
    """Cross-attention: keys and values of a fixed memory whose dead channel has size 1."""

    def __post_init__(self) -> None:
        _whole("blocks", self.blocks, 1)
        _whole("tokens", self.tokens, 2)
        _whole("heads", self.heads, 1)
        _whole("width", self.width, 2 * self.heads)
        _one_of("wiring", self.wiring, ("chain", "residual", "pre-norm"))
        if self.width % self.heads:
            _refuse("width", self.width, f"a multiple of the {self.heads} heads")
        if self.powers and (len(self.powers) != self.heads or min(self.powers) < 1):
            _refuse("powers", self.powers, f"{self.heads} whole powers from 1, one a head")
        self._check_variant()

    def _check_variant(self) -> None:
        """Grouped heads, rotary embedding and a memory."""
        _whole("kv_heads", self.kv_heads, 0)
        _one_of("positions", self.positions, ("none", "rope", "rope-single"))
        if self.kv_heads and (self.heads % self.kv_heads or self.width <= self.heads * 2):
            _refuse("kv_heads", self.kv_heads, f"a divisor of the {self.heads} heads, of 3 channels or more")
        if self.positions != "none" and (self.width // self.heads) % 2:
            _refuse("width", self.width, "an even number of channels a head, for rotated pairs")
        given = [self.powers, self.kv_heads, self.positions != "none", self.memory]
        open_chain = self.wiring != "chain" and (self.memory or self.positions == "rope-single")
        if sum(map(bool, given)) > 1 or open_chain or (self.memory and self.causal):
            raise GeometryError(
                "no joint rule is known for these parts of an attention",
                setting="attention",
                given=str(self),
                remedy="describe one at a time, in a chain",
            )

    @property
    def grouped(self) -> int:
        """How many heads share keys and values."""
        return self.heads // self.kv_heads if self.kv_heads else 1

    @property
    def dead(self) -> dict[int, int]:
        """The power of t of each dead channel, by its place."""
        each = self.width // self.heads
        if self.positions == "rope":
            return {self.width - 2: 1, self.width - 1: 1}
        if not self.powers:
            return {self.width - 1 - each * i: 1 for i in reversed(range(self.grouped))}
        return {(head + 1) * each - 1: power for head, power in enumerate(self.powers)}

    def node(self, name: str, direction: int) -> str:
        """The name of a node; the head is named only where each has a dead channel."""
        return f"{name}[{direction + 1}]" if self.powers else name

    def __str__(self) -> str:
        text = f"attention M={self.blocks} d={self.width} n={self.tokens}"
        text += f", {self.heads} heads" if self.heads > 1 else ""
        text += f", α=({','.join(map(str, self.powers))})" if self.powers else ""
        text += f" on {self.kv_heads}" if self.kv_heads else ""
        text += f", {self.positions}" if self.positions != "none" else ""
        text += ", memory" if self.memory else ""
        text += ", causal" if self.causal else ""
        return text if self.wiring == "chain" else f"{text}, {self.wiring}"


@dataclass(frozen=True)
class GatedStack:
    """`blocks` of W_d [gate(W_g x) ⊙ W_u x] without residuals, all weights blockdiag(R, t).

    >>> print(GatedStack(2))
    swiglu M=2 d=8
    """

    blocks: int
    kind: str = "swiglu"
    """"swiglu", "geglu" or "reglu": the gate is SiLU, GELU or ReLU."""
    width: int = 8

    def __post_init__(self) -> None:
        _whole("blocks", self.blocks, 1)
        _whole("width", self.width, 2)
        _one_of("kind", self.kind, ("swiglu", "geglu", "reglu"))

    def __str__(self) -> str:
        return f"{self.kind} M={self.blocks} d={self.width}"


@dataclass(frozen=True)
class Block:
    """One block of a composition: "mlp" of some weights, "residual" (x + W x), "attention", "experts" (two
    weights each, a top-2 softmax router that reads the dead channel with t) or "scan" (a state-space layer
    with a gate, whose five projections read it with t)."""

    kind: str
    weights: int = 1

    def __post_init__(self) -> None:
        _one_of("kind", self.kind, ("mlp", "residual", "attention", "experts", "scan"))
        _whole("weights", self.weights, 1)
        if self.kind != "mlp" and self.weights != 1:
            _refuse("weights", self.weights, f"1 in a block {self.kind}: only an mlp counts its weights")

    def after(self, before: int) -> int:
        """The amplitude of the dead component behind the block: one more, or twice as much."""
        if self.kind == "scan":
            return 2 * before + 3
        return before + {"mlp": self.weights, "residual": 0}.get(self.kind, 2)

    def back(self, above: int, before: int) -> int:
        """The amplitude of its gradient in front of the block: of all ways, the shortest."""
        if self.kind == "attention":
            return 2 + min(above, before)
        if self.kind in ("experts", "scan"):
            return min(above + self.after(before) - before, 1)
        return above + self.after(0)

    def __str__(self) -> str:
        return f"mlp{self.weights}" if self.kind == "mlp" else self.kind


@dataclass(frozen=True)
class Composition:
    """Blocks of several kinds one after another, over tokens.

    >>> print(Composition((Block("mlp", 2), Block("residual"))))
    mlp2 → residual
    """

    blocks: tuple[Block, ...]
    width: int = 16
    tokens: int = 8

    def __post_init__(self) -> None:
        _whole("width", self.width, 2)
        _whole("tokens", self.tokens, 2)
        if not self.blocks:
            _refuse("blocks", self.blocks, "one or more")

    def __str__(self) -> str:
        return " → ".join(map(str, self.blocks))


@dataclass(frozen=True)
class Mixer:
    """`blocks` of a pre-norm transformer: x ← x + attend(norm(x)), x ← x + mlp(norm(x)).

    >>> print(Mixer(2, "swiglu"))
    pre-norm transformer M=2 d=16 swiglu+rmsnorm
    """

    blocks: int
    mlp: str = "gelu"
    """"gelu", under LayerNorm, or "swiglu", under RMSNorm: the two usual pairs."""
    width: int = 16
    tokens: int = 8

    def __post_init__(self) -> None:
        _whole("blocks", self.blocks, 1)
        _whole("width", self.width, 2)
        _whole("tokens", self.tokens, 2)
        _one_of("mlp", self.mlp, ("gelu", "swiglu"))

    @property
    def norm(self) -> str:
        return "layernorm" if self.mlp == "gelu" else "rmsnorm"

    def __str__(self) -> str:
        return f"pre-norm transformer M={self.blocks} d={self.width} {self.mlp}+{self.norm}"


Architecture = Chain | Attention | GatedStack | Composition | Mixer


def _whole(name: str, given: int, least: int) -> None:
    if not isinstance(given, int) or isinstance(given, bool) or given < least:
        _refuse(name, given, f"a whole number of at least {least}")


def _one_of(name: str, given: str, allowed: Sequence[str]) -> None:
    reasons = [why for site, why in OUTSIDE.items() if given == site or given.startswith(f"{site}-")]
    if given not in allowed:
        _refuse(name, given, f"one of {', '.join(allowed)}", *reasons[:1])


def _refuse(setting: str, given: object, allowed: str, reason: str = "") -> NoReturn:
    raise GeometryError(setting=setting, given=given, allowed=allowed, remedy=reason)
