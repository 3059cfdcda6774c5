"""Muon: momentum whose step is made orthogonal, batched over matrices of one shape.

Statement. A parameter θ of shape (rows, cols) with gradient g has the momentum B. One step is

    B ← μ B + (1 − μ) g                     momentum
    U ← μ B + (1 − μ) g   (nesterov),  or B
    O ← NS_K(U / max(‖U‖_F, ε))             Newton-Schulz, K steps: singular values → about 1
    θ ← (1 − η w) θ − η s O                 η: learning rate, w: weight decay (decoupled)

with s = √max(1, rows/cols) ("original") or s = 0.2 √max(rows, cols) ("match_rms_adamw"). A step of
Newton-Schulz on X of shape (m, n), m ≤ n (for a tall matrix read Xᵀ), is

    A = X Xᵀ,   X ← a X + (b A + c A²) X.

With the usual (a, b, c) the singular values end in a band around 1, not at 1: a is chosen large so that
small singular values rise fast. This is the algorithm, and these are the names, of `torch.optim.Muon`.

What differs from torch's version: matrices of one shape go through batched products; Newton-Schulz runs in
float32 where bfloat16 is slow (`newton_schulz_dtype`) and in float64 for float64 parameters.

Cost. The products are nearly all of it: the direct step costs 4 m² n + 2 m³ flops. Where n > 1.5 m the same
polynomial is taken in Gram form: every X_k is Q_k X_0 with Q_k a polynomial in A_0 = X_0 X_0ᵀ, so that

    P = a I + b A + c A²,   A ← P (P A),   Q ← P Q,   and at the end X = Q X_0

costs 4 m² n + (8 K − 6) m³ in all: for n = 4 m and K = 5, 50 m³ instead of 90 m³. Rounding in A_0 hides
eigenvalues below the machine epsilon, and each step multiplies that error by about a²; so a run of Gram
steps ends before a^(2k) passes 2¹⁸ (five steps for the usual a), and X is formed anew. The worst error that
this leaves in O, for gradients of low rank, is near 1e-3 in float32 (bfloat16 itself: 1e-1) and 1e-12 in
float64; for other gradients it is that of the direct step. Lower precisions take the direct step.

Sources. "Muon: An optimizer for hidden layers in neural networks" (K. Jordan et al.), the algorithm and the
coefficients; "Muon is Scalable for LLM Training" (J. Liu et al.), section 2.2, for "match_rms_adamw".

Limits. Real, dense, non-empty matrices only; biases, gains and embeddings belong to AdamW. The momentum has
the dtype of the gradient. Sharded tensors and CUDA graph capture are not supported.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from topograd.errors import ConfigError

Coefficients = tuple[float, float, float]

COEFFICIENTS: Coefficients = (3.4445, -4.7750, 2.0315)
ADJUSTMENTS = ("original", "match_rms_adamw")
MAX_NS_STEPS = 99  # as in torch
BATCH_ELEMENTS = 2**24  # a batch's workspace stays below a few hundred megabytes however large the model
_GRAM_GAIN = 18.0  # log2 of what a run may make of a rounding error: 2^18 times float32's epsilon is 2^-5
_GRAM_DTYPES = (torch.float32, torch.float64)


@functools.cache
def newton_schulz_dtype(device: torch.device) -> torch.dtype:
    """The fastest dtype in which Newton-Schulz works on a device: bfloat16, or float32 where that is slow.

    CUDA: bfloat16 where the hardware has it. CPU: bfloat16 only with a matrix unit (AMX). Without one it is
    emulated, or at best twice as fast per product, which the Gram form (float32 only) all but makes up for,
    with sixteen more bits. Other devices: float32. The answer depends on the hardware alone, never on a
    timing, so that a resumed run repeats the same arithmetic.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = device.type == "cpu" and torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


def orthogonalise(batch: Tensor, coefficients: Coefficients, steps: int, eps: float) -> Tensor:
    """Newton-Schulz on each matrix of a batch of shape (batch, rows, cols), in the dtype of the batch.

    Returns a new tensor of the same shape; the batch itself is overwritten by its normalised matrices.
    """
    X = batch.div_(torch.linalg.vector_norm(batch, dim=(-2, -1), keepdim=True).clamp_(min=eps))
    m, n = sorted(X.shape[-2:])
    run = _gram_run(coefficients[0], steps) if 2 * n > 3 * m else 1
    if run <= 1 or X.dtype not in _GRAM_DTYPES:
        return _direct_steps(X, coefficients, steps)
    for start in range(0, steps, run):
        X = _gram_steps(X, coefficients, min(run, steps - start))
    return X


def _gram_run(a: float, steps: int) -> int:
    """How many Gram steps may follow one another: the largest k ≤ steps with a^(2k) ≤ 2^18."""
    growth = 2 * math.log2(max(abs(a), 1.0))
    return steps if growth * steps <= _GRAM_GAIN else int(_GRAM_GAIN / growth)


def _gram_matrix(X: Tensor, out: Tensor) -> Tensor:
    """A = X Xᵀ, or Xᵀ X of a tall X: the smaller of the two."""
    return torch.bmm(*((X.mT, X) if X.shape[-2] > X.shape[-1] else (X, X.mT)), out=out)


def _sides(P: Tensor, X: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of P X, or of X P for a tall X: P is symmetric, so no matrix need be transposed."""
    return (X, P) if X.shape[-2] > X.shape[-1] else (P, X)


def _direct_steps(X: Tensor, coefficients: Coefficients, steps: int) -> Tensor:
    """X ← a X + (b A + c A²) X, `steps` times; X of shape (batch, rows, cols) is not changed."""
    a, b, c = coefficients
    A, B = _squares(X, 2)
    turns = (torch.empty_like(X), torch.empty_like(X))
    for k in range(steps):
        _gram_matrix(X, out=A)
        torch.baddbmm(A, A, A, beta=b, alpha=c, out=B)
        X = torch.baddbmm(X, *_sides(B, X), beta=a, out=turns[k % 2])
    return X


def _gram_steps(X: Tensor, coefficients: Coefficients, steps: int) -> Tensor:
    """The same as `_direct_steps` by polynomials of the Gram matrix: Q X with Q = P_{K-1} ... P_1 P_0."""
    a, b, c = coefficients
    A, P, Q, spare = _squares(X, 4)
    _gram_matrix(X, out=A)
    for k in range(steps):
        torch.baddbmm(A, A, A, beta=b, alpha=c, out=P)
        P.diagonal(dim1=-2, dim2=-1).add_(a)
        if k < steps - 1:
            torch.bmm(P, A, out=spare)
            torch.bmm(P, spare, out=A)
        if k == 0:
            P, Q = Q, P
        else:
            torch.bmm(P, Q, out=spare)
            Q, spare = spare, Q
    return torch.bmm(*_sides(Q, X))


def _squares(X: Tensor, count: int) -> list[Tensor]:
    """Workspaces for square matrices of X's smaller side; reusing them is worth some 5% of the step."""
    m = min(X.shape[-2:])
    return [X.new_empty(len(X), m, m) for _ in range(count)]


def adjustment(adjust_lr_fn: str, rows: int, cols: int) -> float:
    """The factor s of the learning rate for a matrix of this shape."""
    if adjust_lr_fn == "original":
        return math.sqrt(max(1.0, rows / cols))
    return 0.2 * math.sqrt(max(rows, cols))


class Muon(Optimizer):
    """Muon for matrices, in batches; see the module for the algorithm. All settings may differ by group."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str = "original",
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices; a refused group leaves the optimizer as it was."""
        _check_settings({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            for parameter in self.param_groups[-1]["params"]:
                _check_parameter(parameter)
        except ConfigError:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of every parameter that has a gradient; returns the closure's loss, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [(group, batch) for group in self.param_groups for batch in _batches(group["params"])]
        for group, batch in work:
            self._update(group, batch)
        return loss

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """The step of parameters of one shape, dtype and device."""
        grads = [p.grad for p in params if p.grad is not None]
        states = [self.state[p] for p in params]
        for state, grad in zip(states, grads, strict=True):
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(grad)
        buffers = [state["momentum_buffer"] for state in states]
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        updates = torch._foreach_lerp(grads, buffers, group["momentum"]) if group["nesterov"] else buffers

        double = params[0].dtype == torch.float64
        dtype = torch.float64 if double else newton_schulz_dtype(params[0].device)
        rows, cols = params[0].shape
        stacked = torch.stack(tuple(updates)).to(dtype)
        orthogonal = orthogonalise(stacked, group["ns_coefficients"], group["ns_steps"], group["eps"])

        lr = float(group["lr"])
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        steps = orthogonal.unbind(0)
        torch._foreach_add_(params, steps, alpha=-lr * adjustment(group["adjust_lr_fn"], rows, cols))


def _batches(params: Iterable[Tensor]) -> list[list[Tensor]]:
    """The parameters that have a gradient, in lists of one shape, dtype and device, in a fixed order."""
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[Tensor]] = {}
    for p in params:
        if p.grad is None:
            continue
        if p.grad.layout != torch.strided:
            raise ConfigError(
                f"Muon was given a gradient of layout {p.grad.layout} for a parameter of shape "
                f"{tuple(p.shape)}",
                remedy="gradients must be dense: use sparse=False, or another optimizer",
            )
        alike.setdefault((p.shape, p.dtype, p.device), []).append(p)
    batches = []
    for group in alike.values():
        size = max(1, BATCH_ELEMENTS // group[0].numel())
        batches += [group[start : start + size] for start in range(0, len(group), size)]
    return batches


def _check_settings(group: dict[str, Any]) -> None:
    """Refuse settings outside their ranges."""
    coefficients = group["ns_coefficients"]
    three = isinstance(coefficients, (tuple, list)) and len(coefficients) == 3
    steps = group["ns_steps"]
    whole = isinstance(steps, int) and not isinstance(steps, bool)
    rules = (
        ("lr", _is_number(group["lr"]) and group["lr"] >= 0, "a number >= 0"),
        ("weight_decay", _is_number(group["weight_decay"]) and group["weight_decay"] >= 0, "a number >= 0"),
        ("momentum", _is_number(group["momentum"]) and 0 <= group["momentum"] < 1, "a number in [0, 1)"),
        ("nesterov", isinstance(group["nesterov"], bool), "True or False"),
        ("eps", _is_number(group["eps"]) and group["eps"] > 0, "a number > 0"),
        ("ns_steps", whole and 0 <= steps <= MAX_NS_STEPS, f"an integer in [0, {MAX_NS_STEPS}]"),
        ("adjust_lr_fn", group["adjust_lr_fn"] in ADJUSTMENTS, " or ".join(map(repr, ADJUSTMENTS))),
        ("ns_coefficients", three and all(map(_is_number, coefficients)), "three numbers"),
    )
    for name, holds, allowed in rules:
        if not holds:
            raise ConfigError(setting=name, given=group[name], allowed=allowed)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_parameter(parameter: Tensor) -> None:
    """Refuse what is not a real matrix."""
    shape = tuple(parameter.shape)
    if len(shape) != 2 or not parameter.is_floating_point() or 0 in shape:
        raise ConfigError(
            setting="params", given=shape, allowed="non-empty real matrices: give this one to AdamW"
        )
