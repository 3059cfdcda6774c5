"""Symmetry groups of a network: their tangents, and projection of a direction off them.

Statement. A group G acts on some weights θ and leaves the network's function alone. The tangent of the orbit
G·θ is flat for every network of that shape, whatever was learnt. On the straight line along
it K ~ t⁴, as the orbit bends away; so a scan that does not take it out first reads every symmetry as a dead
direction of order 2. The groups here, each with its tangent at θ:

    Mixing        P → (1+X) P, C → C (1+X)⁻ᵖ         dP = X P,  dC = -p C X    for each block of `size` units
    ChannelScale  γ → c γ (and β), W → W c⁻¹          dγ = c γ,  dW = -W c      a norm's gain and its readers
    Shift         W → W + 1 aᵀ                        dW = 1 aᵀ                 the rows of a softmax's head,
                                                                                or of a map before LayerNorm
    KernelShift   W → W + a uᵀ, b → b - ⟨u, β⟩ a      dW = a uᵀ, db = -⟨u, β⟩ a a map after LayerNorm
    HeadShift     W → W + Δ, W_k → W_k - Δ            dW = Δ,  dW_k = -Δ        a shared head and its stages'

Mixing covers GL(d_h) of a head's values and outputs, GL(d_h) of its queries and keys (C = Qᵀ), where a
rotation of positions is between them the numbers that commute with it (one complex number for each
frequency: `form` "half" or "pairs") or one factor for each block ("scalar"), hidden units of homogeneous
activations (size 1, of degree p: ReLU 1, ReLU² 2), and neighbouring linear maps (size = width). Where several
heads share one (GQA) C has the columns of all of them. p = 1 unless the size is 1.

Projection on a tangent space is orthogonal. For Mixing, with R = dP Pᵀ - p Cᵀ dC, X solves

    X (P Pᵀ) + p² (CᵀC) X = R,

in the eigenbases of the two Grams; for HeadShift with K stages Δ = (dW - Σ_k dW_k) / (K + 1). Several groups
share tensors; their sum is taken out by turns until nothing more comes (alternating projections). A LayerNorm
with gain γ and bias β gives y with ⟨u, y⟩ = ⟨u, β⟩ for u = γ⁻¹ / ‖γ⁻¹‖, whatever it reads
(`monitors/layernorm.py`): hence KernelShift, with a = (dW u - s db) / (1 + s²), s = ⟨u, β⟩.

Symbols and shapes. P (n d, i) in n blocks of d rows, a bias as one more column; C (o, g n d) in columns, or
in rows for queries; g the heads of a group; W, W_k (classes, d). A direction is a tensor for some parameters,
by name.
Cost: O(n d² (i + g o) + n d³) for each projection.
Source: "Dead Directions: Geometric Singular Learning" §10.1 (the quotient), Definition 82; "Stage-Partitioned
Learning" remark 5.3 (a head with one stage's own); the groups beside rescalings are derived here.
`optim/gauges` has the ones that an optimizer can divide by.
Limits. Not covered: rotations of the whole residual stream, permutations (they are discrete), convolutions,
queries, keys and values in one matrix.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from topograd.geometry.host_copy import squared_norm
from topograd.geometry.monitors.layernorm import inverse_gain

Parameters = Mapping[str, Tensor]
Form = Literal["full", "half", "pairs", "scalar"]
"""X of a block: any matrix, what commutes with a rotation of (i, i + d/2) or of (2i, 2i + 1), or a number."""
SIZE = 0.3
"""Of the random X that a symmetry is tested with."""
SWEEPS = 200
LEFT = 1e-10
"""Turns end when one takes out less than this part of the direction."""


class Symmetry(ABC):
    """A group that moves some parameters; subclasses are frozen dataclasses of names."""

    @property
    def up_to_softmax(self) -> bool:
        """Whether only the probabilities are left alone, not the logits."""
        return False

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The parameters that it moves; the layer of the first one is where it is listed."""

    @property
    @abstractmethod
    def group(self) -> str:
        """A name for tables."""

    @abstractmethod
    def dimensions(self, parameters: Parameters) -> int:
        """Of the tangent."""

    @abstractmethod
    def act(self, parameters: Parameters, generator: torch.Generator) -> dict[str, Tensor]:
        """g·θ for a random g near one."""

    @abstractmethod
    def tangent_part(self, parameters: Parameters, direction: Parameters) -> dict[str, Tensor]:
        """The orthogonal projection of a direction on the tangent."""


@dataclass(frozen=True)
class Mixing(Symmetry):
    """An invertible matrix for each block of `size` units between two maps."""

    producer: str
    consumer: str
    size: int = 1
    form: Form = "full"
    by_rows: bool = False
    """Whether the consumer's rows meet the units (queries with keys), and not its columns."""
    bias: str | None = None
    consumer_bias: str | None = None
    """Of queries: the bias of their rows."""
    degree: int = 1
    """p of the activation between the two."""
    turned: bool = False
    """Whether the matrices are (inputs, outputs), as those of GPT-2's Conv1D."""

    @property
    def names(self) -> tuple[str, ...]:
        given = (self.producer, self.consumer, self.bias, self.consumer_bias)
        return tuple(name for name in given if name is not None)

    @property
    def group(self) -> str:
        if self.size == 1 or self.form == "scalar":
            return "a factor for each unit" if self.size == 1 else f"a factor for each block of {self.size}"
        kind = "GL" if self.form == "full" else "commuting with the rotation, in GL"
        return f"{kind}({self.size}) for each block"

    def units(self, parameters: Parameters) -> int:
        """The outputs of the producer."""
        return parameters[self.producer].shape[1 if self.turned else 0]

    def dimensions(self, parameters: Parameters) -> int:
        P, C = self._blocks(parameters, parameters)
        if self.form != "full":
            return len(P) * (1 if self.form == "scalar" else self.size)
        idle = (self.size - torch.linalg.matrix_rank(P)) * (self.size - torch.linalg.matrix_rank(C))
        return len(P) * self.size**2 - int(idle.sum())  # X that P does not feed and C does not read

    def act(self, parameters: Parameters, generator: torch.Generator) -> dict[str, Tensor]:
        P, C = self._blocks(parameters, parameters)
        one = torch.eye(self.size, dtype=P.dtype, device=P.device)
        X = torch.randn(len(P), self.size, self.size, generator=generator).to(P)
        if self.form == "scalar":
            X = X[:, :1, :1] * one
        elif self.form != "full":
            first, second = self._partners(X.device)
            X = self._numbers(X[:, first, first], X[:, second, first])
        sizes = SIZE * (1 + torch.rand(len(P), generator=generator).to(P) / 2)  # no two blocks alike
        X = X * (sizes / torch.linalg.matrix_norm(X, 2).clamp_min(1e-30))[:, None, None]
        for _ in range(self.degree):
            C = torch.linalg.solve(one + X, C, left=False)
        return self._tensors(parameters, (one + X) @ P, C)

    def tangent_part(self, parameters: Parameters, direction: Parameters) -> dict[str, Tensor]:
        P, C = self._blocks(parameters, parameters)
        dP, dC = self._blocks(parameters, direction)
        p = self.degree
        R, S, T = dP @ P.mT - p * C.mT @ dC, P @ P.mT, p**2 * C.mT @ C
        X = _sylvester(S, T, R) if self.form == "full" else self._commuting(S, T, R)
        return self._tensors(parameters, X @ P, -p * C @ X)

    def _commuting(self, S: Tensor, T: Tensor, R: Tensor) -> Tensor:
        """X within the form: its real and imaginary units have orthogonal tangents, each with one number."""
        one = torch.eye(self.size, dtype=R.dtype, device=R.device)
        if self.form == "scalar":
            numbers = (R * one).sum((-2, -1)) / ((S + T) * one).sum((-2, -1)).clamp_min(1e-300)
            return numbers[:, None, None] * one
        first, second = self._partners(R.device)
        turn = torch.zeros_like(one)
        turn[first, second], turn[second, first] = -1.0, 1.0
        lengths = S.diagonal(dim1=-2, dim2=-1) + T.diagonal(dim1=-2, dim2=-1)
        pair = (lengths[:, first] + lengths[:, second]).clamp_min(1e-300)
        real = (R * one).sum(-1)
        a = (real[:, first] + real[:, second]) / pair
        b = (R[:, second, first] - R[:, first, second]) / pair
        return self._numbers(a, b)

    def _numbers(self, a: Tensor, b: Tensor) -> Tensor:
        """(n, d, d) from (n, d/2) complex numbers a + ib."""
        first, second = self._partners(a.device)
        X = a.new_zeros(len(a), self.size, self.size)
        X[:, first, first], X[:, second, second] = a, a
        X[:, first, second], X[:, second, first] = -b, b
        return X

    def _partners(self, device: torch.device) -> tuple[Tensor, Tensor]:
        half = torch.arange(self.size // 2, device=device)
        return (half, half + self.size // 2) if self.form == "half" else (2 * half, 2 * half + 1)

    def _blocks(self, like: Parameters, source: Parameters) -> tuple[Tensor, Tensor]:
        """P (n, d, i) and C (n, o g, d) of the source, zero where it has none."""

        def find(name: str) -> Tensor:
            tensor = source.get(name, torch.zeros_like(like[name]))
            return tensor.mT if self.turned and tensor.dim() == 2 else tensor

        P, C = find(self.producer), find(self.consumer)
        P = P if self.bias is None else torch.cat((P, find(self.bias)[:, None]), dim=1)
        if self.consumer_bias is not None:
            C = torch.cat((C, find(self.consumer_bias)[:, None]), dim=1)
        C = C.mT if self.by_rows else C
        n, d = P.shape[0] // self.size, self.size
        C = C.reshape(C.shape[0], n, -1, d).permute(1, 0, 2, 3)  # blocks outside, heads of a group inside
        return P.reshape(n, d, -1), C.reshape(n, -1, d)

    def _tensors(self, like: Parameters, P: Tensor, C: Tensor) -> dict[str, Tensor]:
        """The blocks as tensors of the parameters' shapes."""
        P = P.reshape(-1, P.shape[-1])
        n, _, d = C.shape
        inputs, outputs = (0, 1) if self.turned else (1, 0)
        rows = like[self.consumer].shape[inputs if self.by_rows else outputs]
        rows += self.consumer_bias is not None
        C = C.reshape(n, rows, -1, d).permute(1, 0, 2, 3).reshape(rows, -1)
        C = C.mT if self.by_rows else C
        tensors = {}
        for whole, name, bias in ((P, self.producer, self.bias), (C, self.consumer, self.consumer_bias)):
            matrix = whole[:, : like[name].shape[inputs]]
            tensors[name] = matrix.mT if self.turned else matrix
            if bias is not None:
                tensors[bias] = whole[:, -1]
        return tensors


@dataclass(frozen=True)
class ChannelScale(Symmetry):
    """A factor for each channel of a norm's gain (and bias), undone in the columns of the maps behind it."""

    gain: str
    readers: tuple[str, ...]
    bias: str | None = None
    dim: int = 1
    """The dimension of the readers that counts channels: 0 for GPT-2's Conv1D."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.gain, *self.readers, *(() if self.bias is None else (self.bias,)))

    @property
    def group(self) -> str:
        return "a factor for each channel"

    def dimensions(self, parameters: Parameters) -> int:
        return len(parameters[self.gain])

    def act(self, parameters: Parameters, generator: torch.Generator) -> dict[str, Tensor]:
        gain = parameters[self.gain]
        factor = 1 + SIZE * torch.rand(len(gain), generator=generator).to(gain)
        moved = {name: parameters[name] * factor for name in self._in_front()}
        return moved | {name: parameters[name] / self._beside(factor) for name in self.readers}

    def tangent_part(self, parameters: Parameters, direction: Parameters) -> dict[str, Tensor]:
        signs = {**dict.fromkeys(self._in_front(), 1.0), **dict.fromkeys(self.readers, -1.0)}
        top = bottom = torch.zeros_like(parameters[self.gain])
        for name, sign in signs.items():
            weight = self._by_channel(parameters[name])
            bottom = bottom + weight.square().sum(0)
            if name in direction:
                top = top + sign * (weight * self._by_channel(direction[name])).sum(0)
        c = top / bottom.clamp_min(1e-300)
        before = {name: c * parameters[name] for name in self._in_front()}
        return before | {name: -self._beside(c) * parameters[name] for name in self.readers}

    def _by_channel(self, tensor: Tensor) -> Tensor:
        """(rows, channels)."""
        tensor = tensor.mT if self.dim == 0 and tensor.dim() == 2 else tensor
        return tensor.reshape(-1, tensor.shape[-1])

    def _beside(self, factor: Tensor) -> Tensor:
        """In a shape that multiplies a reader."""
        return factor[:, None] if self.dim == 0 else factor

    def _in_front(self) -> tuple[str, ...]:
        return (self.gain,) if self.bias is None else (self.gain, self.bias)


@dataclass(frozen=True)
class Shift(Symmetry):
    """One row (or number) added to every output: of a softmax's head, or of a map before a LayerNorm."""

    weight: str
    softmax: bool = True
    dim: int = 0
    """The dimension of the outputs: 1 for GPT-2's Conv1D."""
    stream: bool = False
    """Whether the map writes into a stream that LayerNorms read, and not the network's outputs."""

    @property
    def up_to_softmax(self) -> bool:
        return self.softmax

    @property
    def names(self) -> tuple[str, ...]:
        return (self.weight,)

    @property
    def group(self) -> str:
        return "the same shift of every output"

    def dimensions(self, parameters: Parameters) -> int:
        return parameters[self.weight].select(self.dim, 0).numel()

    def act(self, parameters: Parameters, generator: torch.Generator) -> dict[str, Tensor]:
        weight = parameters[self.weight]
        row = torch.randn(weight.select(self.dim, 0).shape, generator=generator).to(weight)
        return {self.weight: weight + weight.square().mean().sqrt() * row.unsqueeze(self.dim)}

    def tangent_part(self, parameters: Parameters, direction: Parameters) -> dict[str, Tensor]:
        part = direction.get(self.weight, torch.zeros_like(parameters[self.weight]))
        return {self.weight: part.mean(self.dim, keepdim=True).expand_as(part)}


@dataclass(frozen=True)
class KernelShift(Symmetry):
    """Any multiple of a LayerNorm's kernel in the rows of a map that reads it, undone in the map's bias."""

    weight: str
    bias: str | None
    gain: str | None
    """Of the norm; None: all ones."""
    norm_bias: str | None
    turned: bool = False
    """Whether the matrix is (inputs, outputs), as GPT-2's Conv1D."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def group(self) -> str:
        return "multiples of the LayerNorm's kernel"

    def dimensions(self, parameters: Parameters) -> int:
        rows, kernel, _ = self._kernel(parameters)
        return rows.shape[0] * kernel.shape[1]

    def act(self, parameters: Parameters, generator: torch.Generator) -> dict[str, Tensor]:
        rows, kernel, shift = self._kernel(parameters)
        a = torch.randn(len(rows), kernel.shape[1], generator=generator).to(rows)
        moves = self._moves(rows.square().mean().sqrt() * a, kernel, shift)
        return {name: parameters[name] + move for name, move in moves.items()}

    def tangent_part(self, parameters: Parameters, direction: Parameters) -> dict[str, Tensor]:
        rows, kernel, shift = self._kernel(parameters)
        dW = direction.get(self.weight)
        a = (
            torch.zeros_like(rows[:, :1] @ kernel[:1])
            if dW is None
            else (dW.mT if self.turned else dW) @ kernel
        )
        if self.bias is not None:
            if self.bias in direction:
                a = a - torch.outer(direction[self.bias], shift)
            a = torch.linalg.solve(torch.eye(len(shift)).to(a) + torch.outer(shift, shift), a, left=False)
        return self._moves(a, kernel, shift)

    def _kernel(self, parameters: Parameters) -> tuple[Tensor, Tensor, Tensor]:
        """W (outputs, inputs), u (inputs, m) and ⟨u, β⟩ (m,)."""
        weight = parameters[self.weight]
        rows = weight.mT if self.turned else weight
        gain = torch.ones_like(rows[0]) if self.gain is None else parameters[self.gain]
        kernel = inverse_gain(gain).to(rows).reshape(len(gain), -1)
        beta = torch.zeros_like(gain) if self.norm_bias is None else parameters[self.norm_bias]
        return rows, kernel, kernel.mT @ beta

    def _moves(self, a: Tensor, kernel: Tensor, shift: Tensor) -> dict[str, Tensor]:
        dW = a @ kernel.mT
        moves = {self.weight: dW.mT if self.turned else dW}
        return moves if self.bias is None else moves | {self.bias: -a @ shift}


@dataclass(frozen=True)
class HeadShift(Symmetry):
    """A matrix moved from a head that stages share into the heads that each of them has beside it."""

    shared: str
    stages: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return (self.shared, *self.stages)

    @property
    def group(self) -> str:
        return "a matrix between the shared head and the stages'"

    def dimensions(self, parameters: Parameters) -> int:
        return parameters[self.shared].numel()

    def act(self, parameters: Parameters, generator: torch.Generator) -> dict[str, Tensor]:
        head = parameters[self.shared]
        move = head.square().mean().sqrt() * torch.randn(head.shape, generator=generator).to(head)
        return {name: parameters[name] + move * sign for name, sign in self._signs.items()}

    def tangent_part(self, parameters: Parameters, direction: Parameters) -> dict[str, Tensor]:
        move = torch.zeros_like(parameters[self.shared])
        for name, sign in self._signs.items():
            move = move + sign * direction[name] / len(self._signs) if name in direction else move
        return {name: sign * move for name, sign in self._signs.items()}

    @property
    def _signs(self) -> dict[str, int]:
        return {self.shared: 1, **dict.fromkeys(self.stages, -1)}


def length(direction: Parameters) -> float:
    """The Euclidean length over all its tensors."""
    return squared_norm(direction.values()) ** 0.5


def without_symmetries(
    direction: Parameters, symmetries: Sequence[Symmetry], parameters: Parameters
) -> tuple[dict[str, Tensor], float]:
    """The direction without its part along any orbit, and the share of its square that this part has."""
    left = {name: part.clone() for name, part in direction.items()}
    whole = length(direction)
    near: list[Symmetry] = []  # those that share a tensor with the direction, directly or through others
    names, rest = set(direction), list(symmetries)
    while touched := [one for one in rest if names & set(one.names)]:
        near += touched
        names = names.union(*(one.names for one in touched))
        rest = [one for one in rest if one not in touched]
    for _ in range(SWEEPS if whole else 0):
        before = length(left)
        for symmetry in near:
            if any(name in left for name in symmetry.names):
                for name, part in symmetry.tangent_part(parameters, left).items():
                    left[name] = left[name] - part if name in left else -part
        if len(near) < 2 or before - length(left) <= LEFT * whole:
            break
    return left, 1 - (length(left) / whole) ** 2 if whole else 0.0


def _sylvester(S: Tensor, T: Tensor, R: Tensor) -> Tensor:
    """X with X S + T X = R for symmetric S and T of at least 0; where both are zero, X is."""
    s, U = torch.linalg.eigh(S)
    t, V = torch.linalg.eigh(T)
    total = t.clamp_min(0)[..., :, None] + s.clamp_min(0)[..., None, :]
    floor = torch.finfo(R.dtype).eps * total.amax((-2, -1), keepdim=True)
    turned = V.mT @ R @ U
    return V @ torch.where(total > floor, turned / total.clamp_min(1e-300), 0.0) @ U.mT
