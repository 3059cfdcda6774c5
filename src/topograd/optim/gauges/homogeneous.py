"""Rescaling gauges of homogeneous networks: a ReLU pair, a chain of them, and the gain of a norm.

Statement. An activation of degree p has σ(c x) = c^p σ(x) for c > 0: ReLU p = 1, ReLU² p = 2. Hence

    ReLURescale          (W_1, b_1, W_2) → (c W_1, c b_1, c^{-p} W_2)
    ChainedReLURescale   (W_1..W_L) → (c_1 W_1..c_L W_L),  Π_b c_b^{w_b} = 1
    LNScale              (γ_i, β_i, W_:i) → (c_i γ_i, c_i β_i, c_i^{-1} W_:i)   for each channel i

leave the function alone. In a chain with degree p_l behind layer l, layer 1's factor comes out as
c_1^{p_1 p_2 ... p_{L-1}}, so that the network sees

    Π_b c_b^{w_b},   w_b = Π_{l=b}^{L-1} p_l,   w_L = 1

(derived here). For degree 1 everywhere w = 1, and the group is the L - 1 translations of the log-norms with
sum zero. For a pair w = (p, 1): invariant is (p, 1) / √(1 + p²), the orbit's (1, -p) / √(1 + p²).

Biases. The first layer's joins block 1, since both scale by c_1. Layer l's, 1 < l < L, scales as its
pre-activation does, by Π_{b≤l} c_b^{e_b} with e_b = Π_{k=b}^{l-1} p_k: it is a follower. The last layer's
bias does not move and is not part of the gauge.

Symbols and shapes. W_1 (h, ...), W_2 (out, h, ...); γ, β (C,), and readers with the
channels in dimension `dim`: 1 for nn.Linear, 0 for layouts such as GPT-2's Conv1D.

Cost: as in `rescaling.py`. Source: "Dead Directions: Geometric Singular Learning" section 11.1, gauges
ReLURescaleGauge, LNScaleGauge, ChainedReLURescaleGauge. Degrees and biases in chains are derived here.

Limits. ReLURescale is one factor for a whole layer, as in the paper. Two pairs that share a layer do not
compose: name the chain.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from topograd.errors import OptimError
from topograd.optim.gauges.base import Gauge, Parameters, distinct, find, names_of
from topograd.optim.gauges.rescaling import Follower, Piece, Rescaling


@dataclass(frozen=True)
class ReLURescale(Rescaling):
    """(W_1, b_1, W_2) → (c W_1, c b_1, c^{-p} W_2) around an activation of degree p.

    >>> ReLURescale("up.weight", "down.weight", degree=2).covector
    (2, 1.0)
    """

    up: str
    down: str
    bias: str | None = None
    degree: float = 1.0

    def __post_init__(self) -> None:
        distinct(self)
        _check_degrees(self, [self.degree])

    @property
    def blocks(self) -> tuple[tuple[Piece, ...], ...]:
        return _pieces(self.up, self.bias), _pieces(self.down)

    @property
    def covector(self) -> tuple[float, ...]:
        return self.degree, 1.0

    def check(self, parameters: Parameters) -> None:
        find(self, parameters)
        hidden = _paired(self, parameters, self.up, self.down)
        _check_bias(self, parameters, self.bias, hidden)


@dataclass(frozen=True)
class ChainedReLURescale(Rescaling):
    """(c_1 W_1..c_L W_L) with Π_b c_b^{w_b} = 1; `biases` of layers 1..L-1, None where there is none.

    >>> ChainedReLURescale(["a", "b", "c"]).covector, ChainedReLURescale(["a", "b"], degrees=[2]).covector
    ((1.0, 1.0, 1.0), (2.0, 1.0))
    """

    weights: Sequence[str]
    biases: Sequence[str | None] = ()
    degrees: Sequence[float] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", tuple(self.weights))
        inner = len(self.weights) - 1
        object.__setattr__(self, "biases", tuple(self.biases) or (None,) * inner)
        object.__setattr__(self, "degrees", tuple(self.degrees) or (1.0,) * inner)
        if inner < 1 or len(self.biases) != inner or len(self.degrees) != inner:
            raise OptimError(
                f"{self}: L ≥ 2 weights go with L - 1 biases and L - 1 degrees, or with none",
                setting="weights",
                given=self.weights,
            )
        distinct(self)
        _check_degrees(self, self.degrees)

    @property
    def blocks(self) -> tuple[tuple[Piece, ...], ...]:
        first, *rest = self.weights
        return _pieces(first, self.biases[0]), *(_pieces(weight) for weight in rest)

    @property
    def covector(self) -> tuple[float, ...]:
        return tuple(float(math.prod(self.degrees[b:])) for b in range(len(self.weights)))

    @property
    def followers(self) -> tuple[Follower, ...]:
        def powers(layer: int) -> tuple[float, ...]:
            before = [float(math.prod(self.degrees[b:layer])) for b in range(layer + 1)]
            return *before, *(0.0 for _ in self.weights[layer + 1 :])

        later = enumerate(self.biases[1:], start=1)
        return tuple(Follower(Piece(bias), powers(layer)) for layer, bias in later if bias is not None)

    def check(self, parameters: Parameters) -> None:
        find(self, parameters)
        for layer, bias in enumerate(self.biases):
            hidden = _paired(self, parameters, self.weights[layer], self.weights[layer + 1])
            _check_bias(self, parameters, bias, hidden)


@dataclass(frozen=True)
class LNScale(Rescaling):
    """(γ_i, β_i, W_:i) → (c_i γ_i, c_i β_i, W_:i / c_i) for each channel i; all maps that read the norm."""

    scale: str
    readers: Sequence[str]
    bias: str | None = None
    dim: int = 1
    """The dimension of the readers that counts channels."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "readers", names_of(self.readers))
        distinct(self, minimum=2)
        if self.dim not in (0, 1):
            raise OptimError(setting="dim", given=self.dim, allowed="0 or 1, the channels of a matrix")

    @property
    def blocks(self) -> tuple[tuple[Piece, ...], ...]:
        gains = [Piece(name, 0) for name in (self.scale, self.bias) if name is not None]
        return tuple(gains), tuple(Piece(reader, self.dim) for reader in self.readers)

    @property
    def covector(self) -> tuple[float, ...]:
        return 1.0, 1.0

    def check(self, parameters: Parameters) -> None:
        find(self, parameters)
        gain = parameters[self.scale]
        for name in self.names:
            dims, dim = (2, self.dim) if name in self.readers else (1, 0)
            tensor = parameters[name]
            if gain.dim() != 1 or tensor.dim() != dims or tensor.shape[dim] != len(gain):
                raise OptimError(
                    f"{self}: {self.scale!r} has shape {tuple(gain.shape)}, which does not pair with "
                    f"dimension {dim} of {name!r} {tuple(tensor.shape)}",
                    setting="gauges",
                    given=name,
                )


def _pieces(*names: str | None) -> tuple[Piece, ...]:
    return tuple(Piece(name) for name in names if name is not None)


def _paired(gauge: Gauge, parameters: Parameters, up: str, down: str) -> int:
    """The units between two maps; OptimError if they do not pair."""
    one, other = parameters[up], parameters[down]
    if min(one.dim(), other.dim()) >= 2 and one.shape[0] == other.shape[1]:
        return one.shape[0]
    raise OptimError(
        f"{gauge}: outputs of {up!r} {tuple(one.shape)} are not inputs of {down!r} {tuple(other.shape)}",
        setting="gauges",
        given=down,
    )


def _check_bias(gauge: Gauge, parameters: Parameters, bias: str | None, hidden: int) -> None:
    if bias is not None and (shape := tuple(parameters[bias].shape)) != (hidden,):
        raise OptimError(
            f"{gauge}: {bias!r} {shape} is no bias of {hidden} units", setting="gauges", given=bias
        )


def _check_degrees(gauge: Gauge, degrees: Sequence[float]) -> None:
    if any(not degree > 0 for degree in degrees):
        raise OptimError(
            f"{gauge} has a degree that is not positive",
            setting="degree",
            given=tuple(degrees),
            allowed="above 0: ReLU has 1 and ReLU² has 2",
        )
