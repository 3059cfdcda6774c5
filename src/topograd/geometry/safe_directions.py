"""Safe adapter directions: dead on one text and live on another, so that a change affects the new one alone.

Statement. A map z = W x reads inputs with second moments A_old and A_new on two texts. A change ΔW = b aᵀ
acts only through ⟨a, x⟩, so that with Fisher factors G it costs, to second order,

    ½ (aᵀ A_old a) (bᵀ G_old b)     on the old text, and gains a gradient of (aᵀ A_new a) on the new one

    dead    the r eigenvectors of A_old with the least eigenvalues: what the old text does not use
    safe    the r leading solutions of A_new a = μ (A_old + ρ) a: most of the new for each part of the old
    named   how much a map's gradient is of the new text: tr A_new tr G_new / (tr A_old tr G_old)

Symbols and shapes. A (d, d), float64; rows a (r, d), each scaled so that aᵀ A_new a is what a random row has,
one whose numbers have the variance 1 / (3 d) as LoRA's have: steps are then alike on the new text. Rows that
the new text hardly uses grow by 100 at most. ρ is `RIDGE` times the mean of A_old's diagonal.
Cost. A forward pass over each text (`input_moments`; `read_maps` has a backward pass too, for the energies);
d³ for each input, which maps that read one tensor share.
Source: "Dead Directions: Geometric Singular Learning" §2, §5.1; the use for adapters is ours. Related:
"LoRA-Null" (Tang et al.), "EVA" (Paischer et al.), "CorDA" (Yang et al.).
Limits. Second moments of few tokens: where a text has fewer rows than d, its dead directions are those of the
sample. Says nothing of the layers that follow.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from topograd.errors import GeometryError
from topograd.geometry.factors import Batch, reduce_batches
from topograd.geometry.gram_sums import GramSums
from topograd.geometry.losses import Fisher, loss_named

Kind = Literal["dead", "safe"]
RIDGE = 1e-3
"""ρ over the mean second moment of a map's inputs on the old text."""


@dataclass(frozen=True)
class MapReading:
    """The readings of a map on one text."""

    A: Tensor
    """(d, d), float64; shared by maps that read one tensor."""
    gradient: float
    """tr G: the mean square of ∂loss/∂z."""

    @property
    def energy(self) -> float:
        """tr A tr G."""
        return float(self.A.trace()) * self.gradient


def read_maps(
    model: nn.Module,
    maps: Iterable[str],
    batches: Batch | Iterable[Batch],
    fisher: Fisher = "empirical",
    generator: torch.Generator | None = None,
) -> dict[str, MapReading]:
    """The inputs and gradients of the maps of these names, under cross-entropy."""
    if fisher == "expected":
        raise GeometryError(setting="fisher", given=fisher, allowed="'empirical' or 'monte-carlo'")
    sums = _MapSums(set(maps))
    _, samples = reduce_batches(
        model, batches, sums, loss_named("cross-entropy"), fisher, generator=generator
    )
    return sums.readings(samples)


class _MapSums(GramSums):
    """A reducer: x xᵀ of the tensors that are read, and |δ|² of each map."""

    def __init__(self, wanted: set[str]) -> None:
        super().__init__()
        self._wanted = wanted
        self._squares: dict[str, float] = {}

    def refuses(self, layer: str, sides: tuple[int, int]) -> str | None:
        return None if layer in self._wanted else "not among the given maps"

    def see_gradients(self, layer: str, rows: Tensor) -> None:
        self._squares[layer] = self._squares.get(layer, 0.0) + float(rows.double().square().sum())

    def readings(self, samples: int) -> dict[str, MapReading]:
        if missing := sorted(self._wanted - self._squares.keys()):
            raise GeometryError(
                f"{missing[0]} is no linear map that the outputs depend on",
                setting="maps",
                given=missing[0],
                remedy="leave it out",
            )
        return {
            name: MapReading(self.mean(name, "A", samples), self._squares[name] / samples)
            for name in self.rows
        }


@torch.no_grad()
def input_moments(
    model: nn.Module, maps: Iterable[str], batches: Iterable[Tensor], limit_bytes: int = 2**30
) -> dict[str, Tensor]:
    """A of the inputs of the maps of these names, (d, d) float64: shared by maps that read one tensor.

    `batches` are inputs of the model; none of its gradients are needed. Several passes are made where the
    matrices of one would take more than `limit_bytes`. Maps that no batch reaches are left out.
    """
    batches, result = list(batches), dict[str, Tensor]()
    for group in _groups(model, list(maps), limit_bytes):
        sums = GramSums()

        def see(name: str, module: nn.Module, args: tuple[Tensor, ...], sums: GramSums = sums) -> None:
            sums.read(name, args[0], _rows)

        with ExitStack() as hooks:
            for name in group:
                hooks.enter_context(model.get_submodule(name).register_forward_pre_hook(partial(see, name)))
            for inputs in batches:
                model(inputs)
        result |= {name: sums.mean(name, "A", 1) for name in sums.rows}
    return result


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2)


def _groups(model: nn.Module, maps: list[str], limit_bytes: int) -> Iterator[list[str]]:
    """The maps in order, some at a time."""
    group: list[str] = []
    size = 0
    for name in maps:
        weight = model.get_submodule(name).get_parameter("weight")
        size += 8 * min(weight.shape) ** 2  # maps that share an input are counted each by itself
        if group and size > limit_bytes:
            yield group
            group, size = [], 8 * min(weight.shape) ** 2
        group.append(name)
    if group:
        yield group


def adapter_directions(kind: Kind, old: Tensor, new: Tensor, count: int) -> Tensor:
    """Rows (count, d) of this kind, from A_old and A_new; as large on the new text as random ones.

    >>> old, new = (torch.diag(torch.tensor(x).double()) for x in ([4.0, 1.0, 0.1], [9.0, 9.0, 0.1]))
    >>> [adapter_directions(kind, old, new, 1).abs().argmax().item() for kind in ("dead", "safe")]
    [2, 1]
    """
    d = len(old)
    if not 1 <= count <= d:
        raise GeometryError(setting="count", given=count, allowed=f"from 1 to {d}, the inputs of the map")
    if kind == "dead":
        rows = torch.linalg.eigh(old).eigenvectors[:, :count].T
    else:
        ridge = RIDGE * old.diagonal().mean().clamp_min(1e-30)
        L = torch.linalg.cholesky(old + ridge * torch.eye(d, dtype=old.dtype, device=old.device))
        half = torch.linalg.solve_triangular(L, new, upper=False)
        relative = torch.linalg.solve_triangular(L, half.T, upper=False)
        leading = torch.linalg.eigh((relative + relative.T) / 2).eigenvectors[:, -count:]
        rows = torch.linalg.solve_triangular(L.T, leading, upper=True).T
    energy = ((rows @ new) * rows).sum(1, keepdim=True).clamp_min(1e-4 * new.trace() / d)
    return rows * (new.trace() / (3 * d) / energy).sqrt()
