"""K-FAC: the natural gradient by Kronecker factors of every linear layer, in its plain form, as a peer.

Statement. A layer z = W h + b with backward signals δ = ∂L/∂z has a Fisher block of about G ⊗ A, and

    A ← β A + (1 - β) mean h hᵀ,      G ← β G + (1 - β) mean δ δᵀ,     δ of a row's own term of the loss
    d_W = (G + ρ_G)⁻¹ ∇W (A + ρ_A)⁻¹,      d_b = (G + ρ_G)⁻¹ ∇b,     ρ_X = ρ max tr X / dim X
    B ← μ B + d / max(1, √Σ ⟨d, ∇⟩),     θ ← (1 - η λ) θ - η B           Σ over all layers with factors

with the largest trace of all steps so far. ⟨d, ∇⟩ is about the squared Fisher length of d, so that a step is
no longer than η in that length. As a training comes to fit its data, G vanishes and the damping stays, so
that steps become those of the gradient. Parameters without factors get Adam with `REST` η.

Under a rescaling (c W_1, c b_1, W_2 / c) signals δ_1 shrink by c and activations h_2 grow by it; G_1, A_2 and
their damping, which is relative, go with their squares: d_W1 grows by c as W_1 does, d_W2 shrinks by c, and
Σ ⟨d, ∇⟩ stays. So K-FAC commutes with these rescalings; with a constant damping it would not. A factor for
each hidden unit it does not respect, because the damping is the same for all of them.

Symbols and shapes. A (d_in, d_in), G (d_out, d_out), η lr, μ momentum, λ weight_decay (decoupled).
Cost: factors of every batch, and d³ for each every `every` steps. Slow on purpose: one layer after another.
Source: "Optimizing neural networks with Kronecker-factored approximate curvature" (J. Martens, R. Grosse).
One Fisher length for all layers, and damping that is relative, for the sake of gauges, are our choice.
The sums of h hᵀ and δ δᵀ are geometry's (`geometry/factors.py`).
Limits. The loss is a mean over N rows: a row's own δ is N times what arrives. G is an empirical Fisher.
Layers are `nn.Linear` that run once in each call of the model, which is called once before each backward
pass; `close` removes the hooks.
The default damping is large: on digits with batches of 64 trainings with ρ ≤ 0.1 diverged in our trials.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

from topograd.errors import OptimError
from topograd.geometry.gram_sums import GramSums
from topograd.geometry.layers import Call, CallTracer

REST = 0.1
"""The rate of parameters without factors, over lr."""
BETA = 0.95
BETAS, EPS = (0.9, 0.999), 1e-8


class KFAC(Optimizer):
    """K-FAC on the linear layers of `model`, Adam for everything else in `params`."""

    def __init__(
        self,
        model: nn.Module,
        params: ParamsT | None = None,
        lr: float = 0.003,
        momentum: float = 0.9,
        damping: float = 1.0,
        weight_decay: float = 0.0,
        *,
        every: int = 10,
    ) -> None:
        for name, number, fits, allowed in (
            ("lr", lr, lr >= 0, "at least 0"),
            ("weight_decay", weight_decay, weight_decay >= 0, "at least 0"),
            ("damping", damping, damping > 0, "above 0"),
            ("momentum", momentum, 0 <= momentum < 1, "in [0, 1)"),
            ("every", every, every >= 1, "at least 1"),
        ):
            if not fits:
                raise OptimError(setting=name, given=number, allowed=allowed)
        names = {"lr": lr, "momentum": momentum, "damping": damping, "weight_decay": weight_decay}
        super().__init__(model.parameters() if params is None else params, {**names, "every": every})
        self._layers = {
            f"{path}.weight".lstrip(".").removesuffix(".weight"): module
            for path, module in model.named_modules()
            if isinstance(module, nn.Linear)
        }
        self._sums = GramSums()
        """Of the last call of the model."""
        self._seen: dict[str, GramSums] = {}
        """Of the call that a layer's gradient came from, since the last step."""
        self._factors: dict[str, dict[str, Tensor]] = {}
        self._steps = 0
        self._watch = CallTracer(model, self)
        self._hooks = [
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def close(self) -> None:
        """Stop watching the model."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        self._watch.leaves.clear()
        if torch.is_grad_enabled():
            self._sums = GramSums()
        self._watch.__enter__()

    def _end(self, model: nn.Module, inputs: Any, output: Any) -> None:
        self._watch.__exit__(None, None, None)

    def refuses(self, layer: str, sides: tuple[int, int]) -> str | None:
        return None if layer in self._layers else "no nn.Linear"

    def see_inputs(self, layer: str, call: Call) -> None:
        self._sums.see_inputs(layer, call)

    def see_gradients(self, layer: str, rows: Tensor) -> None:
        self._sums.see_gradients(layer, rows)
        self._seen[layer] = self._sums

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step from the gradients that are there."""
        if closure is not None:
            raise OptimError(
                "KFAC takes no closure", setting="closure", remedy="call backward() first, then step()"
            )
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        preconditioned: dict[int, tuple[Tensor, Tensor]] = {}
        for name, sums in self._seen.items():
            weight = self._layers[name].weight
            if weight.grad is not None and id(weight) in groups:
                self._update(name, sums, groups[id(weight)])
                preconditioned |= self._directions(name)
        self._seen.clear()
        self._steps += 1
        length = sum((d * p.grad).sum() for p, d in preconditioned.values() if p.grad is not None)
        scale = torch.as_tensor(length).clamp_min(1.0).rsqrt()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                if id(parameter) in preconditioned:
                    buffer = self.state[parameter].setdefault("buffer", torch.zeros_like(parameter))
                    buffer.mul_(group["momentum"]).add_(preconditioned[id(parameter)][1] * scale)
                    parameter.sub_(buffer, alpha=group["lr"])
                else:
                    parameter.sub_(self._adam(parameter), alpha=REST * group["lr"])

    def _update(self, name: str, sums: GramSums, group: dict[str, Any]) -> None:
        """Take a batch into the factors; their inverses now and then."""
        known, N = self._factors.setdefault(name, {}), sums.rows[name]
        for side, scale in (("A", 1), ("G", N**2)):
            mean = sums.mean(name, side, N)
            assert mean is not None, "a gradient reached this layer"
            result = (scale * mean).to(self._layers[name].weight)
            known[side] = known[side].lerp(result, 1 - BETA) if side in known else result
        if self._steps % group["every"] == 0 or "A_inverse" not in known:
            for side in ("A", "G"):
                X, size = known[side], known[side].trace() / len(known[side])
                size = known[f"{side}_size"] = torch.maximum(known.get(f"{side}_size", size), size)
                damped = X + group["damping"] * size * torch.eye(len(X)).to(X)
                known[f"{side}_inverse"] = torch.cholesky_inverse(torch.linalg.cholesky(damped))

    def _directions(self, name: str) -> dict[int, tuple[Tensor, Tensor]]:
        """d of a layer's weight and bias, by the identity of the parameter."""
        layer = self._layers[name]
        A, G = (self._factors[name][f"{side}_inverse"] for side in ("A", "G"))
        assert layer.weight.grad is not None, "a layer without a gradient is not asked"
        result: dict[int, tuple[Tensor, Tensor]] = {
            id(layer.weight): (layer.weight, G @ layer.weight.grad @ A)
        }
        if layer.bias is not None and layer.bias.grad is not None:
            result[id(layer.bias)] = (layer.bias, G @ layer.bias.grad)
        return result

    def _adam(self, parameter: Tensor) -> Tensor:
        """Adam's step for η = 1."""
        state, g = self.state[parameter], parameter.grad
        assert g is not None, "a parameter without a gradient is not asked"
        if "M" not in state:
            state["step"], state["M"], state["V"] = 0, torch.zeros_like(g), torch.zeros_like(g)
        state["step"] += 1
        state["M"].lerp_(g, 1 - BETAS[0])
        state["V"].lerp_(g * g, 1 - BETAS[1])
        first, second = (1 - beta ** state["step"] for beta in BETAS)
        return (state["M"] / first) / ((state["V"] / second).sqrt() + EPS)
