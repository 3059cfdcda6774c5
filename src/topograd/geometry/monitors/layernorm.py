"""LayerNorm kernels: the direction in which a norm's outputs never vary, from its gain alone.

Statement. LayerNorm is y = γ ⊙ Πx / s + β with Π = I - 11ᵀ/d. Since Π1 = 0, for every distribution of x,

    all γ_i ≠ 0        Cov(y) v = 0  for  v = γ⁻¹ / ‖γ⁻¹‖            (1/√d for a LayerNorm without gain)
    some γ_i = 0       the kernel is span{e_i : γ_i = 0}: as many dimensions as zeros
                       (zero means |γ_i| ≤ `DEAD` max |γ|: its variance is beyond what a covariance can hold)

RMSNorm does not subtract the mean and has no such direction: the same v, compared with data, fails. The
comparison is the cosine of the largest principal angle between the kernel V (d, m) and the m bottom
eigenvectors U of Cov(y), with the share of the variance inside the kernel:

    cosine = σ_min(VᵀU)   (|cos(v, u)| for m = 1),        share = tr(Vᵀ Cov(y) V) / tr Cov(y).

Symbols and shapes. d channels, γ (d,), v (d,), y (n, d). Cost: O(d) for the kernel; 2 n d² + O(d³) for the
cosine.
Source: "Dead Directions: Geometric Singular Learning", Proposition 63 and Remark 65.
Limits. The kernel holds for any weights, trained or not, and after a LayerNorm σ_min is no rate. It is
computed in float64; the share is read by projecting each sample, so it goes down to the rounding of y itself
(about 1e-16 for float32 outputs). If Cov(y) has other directions as flat as that, which eigenvector is the
bottom one is chance, and the cosine is low with a share of zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.hooks import RemovableHandle

from topograd.errors import GeometryError
from topograd.geometry.monitors.hooks import ModelHooks
from topograd.geometry.monitors.massive_activations import massive_rows
from topograd.geometry.monitors.moments import Moments, hidden_of

DEAD = 1e-7
"""Training leaves gains like 1e-33 and 1e-9 behind: several of them are several flat directions."""
_OTHER = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.LocalResponseNorm, _NormBase)
PASS = 0.999
"""The cosine from which a kernel counts as found on data."""


@dataclass(frozen=True)
class KernelReading:
    """The γ-direction of one normalisation against its outputs."""

    dimensions: int
    cosine: float
    share: float
    samples: int
    exact: bool
    """Whether the kernel is a theorem for this module (LayerNorm) or only compared (RMSNorm)."""
    without_massive: KernelReading | None = None
    """The same without rows whose inputs are massive (`massive_activations.py`), where there are any."""

    @property
    def found(self) -> bool:
        """Whether the data show the kernel."""
        return self.cosine >= PASS


def layernorm_kernel(module: nn.Module) -> Tensor:
    """The unit direction v (d,) that a LayerNorm removes; (d, m) where m > 1 of its gains are dead.

    >>> norm = nn.LayerNorm(4)
    >>> layernorm_kernel(norm).tolist()
    [0.5, 0.5, 0.5, 0.5]
    """
    if not isinstance(module, nn.LayerNorm):
        raise GeometryError(
            f"{type(module).__name__} has no kernel that its gain alone fixes",
            setting="module",
            given=type(module).__name__,
            allowed="an nn.LayerNorm, which subtracts the mean",
        )
    if len(module.normalized_shape) != 1:
        raise GeometryError(
            setting="normalized_shape", given=tuple(module.normalized_shape), allowed="one dimension"
        )
    if module.weight is None:
        return inverse_gain(torch.ones(module.normalized_shape[0], dtype=torch.float64))
    return inverse_gain(module.weight)


def inverse_gain(gain: Tensor) -> Tensor:
    """γ⁻¹ / ‖γ⁻¹‖ (d,), or e_i for each dead gain γ_i: (d,) for one, (d, m) for m of them."""
    gain = gain.detach().double()
    if gain.dim() != 1 or not len(gain):
        raise GeometryError(setting="gain", given=tuple(gain.shape), allowed="one number for each channel")
    if not gain.isfinite().all():
        where = int((~gain.isfinite()).nonzero()[0])
        value = gain[where].item()
        raise GeometryError(
            f"gain {where} of {len(gain)} is {value}", setting="gain", given=value, allowed="finite"
        )
    zeros = gain.abs() <= DEAD * gain.abs().max()
    if zeros.any():
        basis = torch.eye(len(gain), dtype=gain.dtype, device=gain.device)[:, zeros]
        return basis[:, 0] if basis.shape[1] == 1 else basis
    direction = gain.abs().min() / gain  # a gain of 1e-310 does not overflow
    return direction / direction.norm()


def kernel_cosine(module: nn.Module | Tensor, outputs: Tensor) -> KernelReading:
    """How well γ's direction is the bottom of Cov(y) on these outputs (..., d) of `module`.

    The module may be an RMSNorm, or a gain alone, for comparison; then nothing promises a kernel.
    """
    statistics = _NormStatistics("the outputs", module)
    statistics.add(outputs)
    return statistics.reading()


class KernelMonitor(ModelHooks):
    """Reads the outputs of every normalisation of a model for as long as it is entered."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._norms = find_norms(model)
        self._statistics = {name: _NormStatistics(name, norm) for name, norm in self._norms.items()}
        self.unread: dict[str, str] = {}
        """Normalisations that ran and have no reading, and why."""

    def _attach(self) -> list[RemovableHandle]:
        return [norm.register_forward_hook(self._hook(name)) for name, norm in self._norms.items()]

    def readings(self) -> dict[str, KernelReading]:
        """A reading for each normalisation that ran, by name."""
        found = {}
        for name, one in self._statistics.items():
            if one.count and name not in self.unread:
                try:
                    found[name] = one.reading()
                except GeometryError as problem:
                    self.unread[name] = str(problem)
        return found

    def unused(self) -> tuple[str, ...]:
        """The normalisations that never ran."""
        return tuple(n for n, one in self._statistics.items() if not one.count and n not in self.unread)

    def _hook(self, name: str) -> Any:
        def see(norm: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            hidden = hidden_of(output, name)
            inputs = args[0] if args and isinstance(args[0], Tensor) else hidden
            apart = massive_rows(inputs) if inputs.shape == hidden.shape else None
            try:
                self._statistics[name].add(hidden, apart)
            except GeometryError as problem:  # one whose channels are not last
                self.unread[name] = str(problem)

        return see


def normalises(module: nn.Module) -> bool:
    """Whether a module is a normalisation, of any kind that is known here."""
    return isinstance(module, _OTHER) or _like_rmsnorm(module)


def find_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Every LayerNorm, and every module named or made like an RMSNorm, by name.

    Normalisations over several dimensions or over the batch are left out: see `other_norms`.
    """
    norms: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.LayerNorm):
            if len(module.normalized_shape) == 1:
                norms[name] = module
        elif _like_rmsnorm(module):
            norms[name] = module
    return norms


def other_norms(model: nn.Module) -> dict[str, str]:
    """The normalisations that `find_norms` leaves out, and their classes."""
    covered = find_norms(model)
    return {
        name: type(module).__name__
        for name, module in model.named_modules()
        if name not in covered and isinstance(module, _OTHER)
    }


def _like_rmsnorm(module: nn.Module) -> bool:
    """Torch's RMSNorm, or a class called ...RMSNorm or ...LayerNorm that is not torch's LayerNorm."""
    if isinstance(module, nn.RMSNorm):
        return len(module.normalized_shape) == 1
    named = type(module).__name__.lower().endswith(("rmsnorm", "layernorm"))
    weight = getattr(module, "weight", None)
    return named and isinstance(weight, Tensor) and weight.dim() == 1


class _NormStatistics:
    """One normalisation: its direction, and the moments of its outputs and of their projections."""

    def __init__(self, name: str, module: nn.Module | Tensor) -> None:
        self.name = name
        self.exact = isinstance(module, nn.LayerNorm)
        self._rest, self._apart = _Rows(name), _Rows(name)
        try:
            if isinstance(module, nn.LayerNorm):
                self._kernel: Tensor | None = layernorm_kernel(module)
            else:
                gain = module if isinstance(module, Tensor) else getattr(module, "weight", None)
                self._kernel = inverse_gain(gain) if isinstance(gain, Tensor) else None
        except GeometryError as problem:
            fields = {"setting": problem.setting, "given": problem.given}
            raise GeometryError(f"{name}: {problem}", **fields) from None

    @property
    def count(self) -> int:
        return self._rest.outputs.count + self._apart.outputs.count

    def add(self, outputs: Tensor, apart: Tensor | None = None) -> None:
        """Take outputs (..., d); the rows marked `apart` are also left out of a second reading."""
        if self._kernel is None:  # no gain at all
            self._kernel = inverse_gain(torch.ones(outputs.shape[-1], device=outputs.device))
        kernel = self._kernel.to(outputs.device).reshape(len(self._kernel), -1)
        if outputs.shape[-1] != len(kernel):
            raise GeometryError(
                f"{self.name} has {len(kernel)} gains and outputs of width {outputs.shape[-1]}",
                setting="outputs",
                given=outputs.shape[-1],
                remedy="give the outputs of that module",
            )
        rows = outputs.detach().reshape(-1, len(kernel))
        if apart is not None and apart.any():
            self._apart.add(rows[apart], kernel)
            rows = rows[~apart]
        self._rest.add(rows, kernel)

    def reading(self) -> KernelReading:
        if not self._apart.outputs.count:
            return self._read(self._rest)
        whole = self._read(self._rest.joined(self._apart))
        return replace(whole, without_massive=self._read(self._rest))

    def _read(self, rows: _Rows) -> KernelReading:
        covariance = rows.outputs.covariance
        assert self._kernel is not None, "it was set by the first outputs"
        kernel = self._kernel.to(covariance.device).reshape(len(covariance), -1)
        total = float(covariance.trace())
        if total == 0:
            raise GeometryError(
                f"the outputs of {self.name} do not vary", setting="outputs", remedy="give different samples"
            )
        bottom = torch.linalg.eigh(covariance).eigenvectors[:, : kernel.shape[1]]
        cosine = float(torch.linalg.svdvals(kernel.T @ bottom)[-1])
        share = float(rows.inside.covariance.trace()) / total
        return KernelReading(kernel.shape[1], min(cosine, 1.0), share, rows.outputs.count, self.exact)


class _Rows:
    """Moments of outputs, and of their projections on the kernel."""

    def __init__(self, name: str) -> None:
        self.outputs, self.inside = Moments(name), Moments(name)

    def add(self, rows: Tensor, kernel: Tensor) -> None:
        self.outputs.add(rows)
        self.inside.add(rows.double() @ kernel)

    def joined(self, other: _Rows) -> _Rows:
        both = _Rows(self.outputs.name)
        both.outputs, both.inside = self.outputs.joined(other.outputs), self.inside.joined(other.inside)
        return both
