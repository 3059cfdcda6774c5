"""Shampoo and SOAP: preconditioners of a matrix from both sides, in their plain form, as peers.

Statement. For a matrix W (m, n) with gradient g, and M, V the averages of g and g² as Adam has them,

    L ← β₂ L + (1 - β₂) g gᵀ,      R ← β₂ R + (1 - β₂) gᵀ g                           both
    Shampoo   S = L̂^{-1/4} M̂ R̂^{-1/4},      W ← W - η S ‖D‖ / ‖S‖,   D = M̂ / (√V̂ + ε)
    SOAP      L = Q_L Λ Q_Lᵀ, R alike;   g' = Q_Lᵀ g Q_R,   V' ← β₂ V' + (1 - β₂) g'²
              W ← W - η Q_L ((Q_Lᵀ M̂ Q_R) / (√V̂' + ε)) Q_Rᵀ

Shampoo's length is Adam's ("grafting"), so that learning rates of both mean the same; SOAP is Adam in
Shampoo's eigenbasis. Whatever is no matrix, or wider than `WIDEST`, gets Adam's D. Weight decay is decoupled.

What a rescaling W → cW, g → g/c does: S, D and the rotated Adam step stay as they are, and an equivariant
step would grow by c. So neither commutes with rescalings, as Adam does not. A shift of all rows leaves g
alone, with columns that sum to 0; L then has the vector of ones in its kernel, and a step of either has
columns that sum to 0 too: on matrices they do not walk along shifts, which Adam does.

Symbols and shapes. L (m, m), R (n, n); hats are corrections of the first steps' bias. Roots and bases are
made every `every` steps; SOAP's by one power iteration and QR after the first, so that V' keeps its axes.
Cost: m³ + n³ for each refresh, m n (m + n) for each step. Slow on purpose: plain eigh, one tensor at a time.
Source: "Shampoo: Preconditioned Stochastic Tensor Optimization" (V. Gupta et al.) algorithm 1; grafting as in
"Scalable Second Order Optimization for Deep Learning" (R. Anil et al.); "SOAP: Improving and Stabilizing
Shampoo using Adam" (N. Vyas et al.) algorithm 3.
Limits. No blocking of wide matrices, no sharing over devices.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from topograd.errors import OptimError

WIDEST = 1024
FLOOR = 1e-10
"""Eigenvalues below this part of the largest count as this part."""

Group = dict[str, Any]
State = dict[str, Any]


class _TwoSided(Optimizer):
    """What both share: moments, L and R, decoupled decay."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        every: int = 10,
    ) -> None:
        for name, number in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not number >= 0:
                raise OptimError(setting=name, given=number, allowed="at least 0")
        if not all(0 <= beta < 1 for beta in betas):
            raise OptimError(setting="betas", given=betas, allowed="in [0, 1)")
        if every < 1:
            raise OptimError(setting="every", given=every, allowed="at least 1 step")
        names = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "every": every}
        super().__init__(params, names)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step from the gradients that are there."""
        if closure is not None:
            raise OptimError(
                f"{type(self).__name__} takes no closure",
                setting="closure",
                remedy="call backward() first, then step()",
            )
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    move = self._direction(parameter.grad, self.state[parameter], group)
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(move, alpha=group["lr"])

    def _direction(self, g: Tensor, state: State, group: Group) -> Tensor:
        """The step for η = 1, with its sign turned."""
        beta1, beta2 = group["betas"]
        if not state:
            state["step"], state["M"], state["V"] = 0, torch.zeros_like(g), torch.zeros_like(g)
        state["step"] += 1
        state["M"].lerp_(g, 1 - beta1)
        first, second = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        mean = state["M"] / first
        if g.dim() != 2 or max(g.shape) > WIDEST:
            return _adam(state["V"], g, mean, second, group)
        if "L" not in state:
            state["L"], state["R"] = g.new_zeros(len(g), len(g)), g.new_zeros(g.shape[1], g.shape[1])
        state["L"].lerp_(g @ g.T, 1 - beta2)
        state["R"].lerp_(g.T @ g, 1 - beta2)
        refresh = state["step"] % group["every"] == 1 or group["every"] == 1
        return self._matrix(g, mean, second, state, group, refresh)

    @abstractmethod
    def _matrix(
        self, g: Tensor, mean: Tensor, second: float, state: State, group: Group, refresh: bool
    ) -> Tensor:
        """The step of a matrix for η = 1, with its sign turned."""


class Shampoo(_TwoSided):
    """L^{-1/4} M R^{-1/4}, as long as Adam's step."""

    def _matrix(
        self, g: Tensor, mean: Tensor, second: float, state: State, group: Group, refresh: bool
    ) -> Tensor:
        if refresh:
            state["roots"] = [inverse_root(state[side] / second, 4) for side in ("L", "R")]
        left, right = state["roots"]
        result = left @ mean @ right
        length = _adam(state["V"], g, mean, second, group).norm()
        return result * (length / result.norm().clamp_min(torch.finfo(g.dtype).tiny))


class SOAP(_TwoSided):
    """Adam in the eigenbasis of L and R."""

    def _matrix(
        self, g: Tensor, mean: Tensor, second: float, state: State, group: Group, refresh: bool
    ) -> Tensor:
        if "bases" not in state:
            # The largest first: QR takes columns in order, and one of the kernel would spoil all behind it.
            state["bases"] = [torch.linalg.eigh(state[side]).eigenvectors.flip(1) for side in ("L", "R")]
        elif refresh:
            pairs = zip(("L", "R"), state["bases"], strict=True)
            state["bases"] = [torch.linalg.qr(state[side] @ Q).Q for side, Q in pairs]
        left, right = state["bases"]
        turned = _adam(state["V"], left.T @ g @ right, left.T @ mean @ right, second, group)
        return left @ turned @ right.T


def inverse_root(matrix: Tensor, root: int) -> Tensor:
    """matrix^{-1/root} of a symmetric matrix without negative eigenvalues.

    >>> inverse_root(torch.diag(torch.tensor([16.0, 81.0])), 4).diagonal()
    tensor([0.5000, 0.3333])
    """
    values, vectors = torch.linalg.eigh(matrix)
    floor = (FLOOR * values[-1]).clamp_min(torch.finfo(matrix.dtype).tiny)
    return (vectors * values.clamp_min(floor).pow(-1 / root)) @ vectors.T


def _adam(V: Tensor, g: Tensor, mean: Tensor, second: float, group: Group) -> Tensor:
    """Take g² into V; Adam's step for η = 1."""
    V.lerp_(g * g, 1 - group["betas"][1])
    return mean / ((V / second).sqrt() + group["eps"])
