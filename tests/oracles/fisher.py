"""The Fisher matrix and its Kronecker factors written out: a loop over samples, positions and classes.

    F = (1/N) Σ_n J_nᵀ Σ_n J_n,      J_n = ∂f_n/∂w  (C, parameters),      n over the N loss terms
    A = (1/M) Σ_m h_m h_mᵀ,          G = (1/N) Σ_δ Σ_s δ_s δ_sᵀ,          δ_s = ∂(Σ_n f_n · g_n)/∂z_s

Σ_n is the expected covariance of the loss's gradient at the outputs f_n (C): σ² I for squared error ½‖f -
y‖², diag(p) - p pᵀ for cross-entropy. s runs over the positions of a layer. Expected: g is zero but at one
term n, where it is one column of a square root of Σ_n, and the sum goes over all terms and columns.
Empirical: g_n = ∂ℓ_n/∂f_n at all terms of a sample together. Each sample runs through the model by itself.

Layers are the modules nn.Linear, nn.Conv1d and nn.Conv2d; a convolution's rows are slices of its padded
input. Nothing may write over a layer's output in place. Memory and cost are those of the definition. The
fast version is `topograd.geometry.factors`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d)
IGNORED = -100


def output_covariance(f: Tensor, loss: str, variance: float = 1.0) -> Tensor:
    """Σ (C, C) of one prediction f (C)."""
    if loss == "squared-error":
        return variance * torch.eye(len(f), dtype=f.dtype)
    p = f.softmax(0)
    return torch.diag(p) - torch.outer(p, p)


def exact_fisher(
    model: nn.Module, parameters: list[Tensor], inputs: Tensor, loss: str, variance: float = 1.0
) -> Tensor:
    """F of these parameters, one after the other and each flattened, from outputs (batch, ..., C)."""
    size = sum(p.numel() for p in parameters)
    F, terms = torch.zeros(size, size, dtype=inputs.dtype), 0
    for x in inputs:
        for f in model(x[None]).flatten(0, -2):
            rows = []
            for number in f:
                gradients = torch.autograd.grad(number, parameters, retain_graph=True, materialize_grads=True)
                rows.append(torch.cat([g.flatten() for g in gradients]))
            J = torch.stack(rows)
            F += J.T @ output_covariance(f.detach(), loss, variance) @ J
            terms += 1
    return F / terms


def explicit_factors(
    model: nn.Module, inputs: Tensor, targets: Tensor, loss: str, fisher: str, variance: float = 1.0
) -> dict[str, tuple[Tensor, Tensor]]:
    """A and G of each layer that is called; `fisher` is "empirical" or "expected"."""
    A: dict[str, list[Tensor]] = {}
    G: dict[str, list[Tensor]] = {}
    terms = 0
    for x, y in zip(inputs, targets, strict=True):
        outputs, calls = _run(model, x[None])
        f = outputs.flatten(0, -2)
        y = y.reshape(len(f)) if loss == "cross-entropy" else y.reshape(f.shape)
        terms += len(f) if loss == "squared-error" else int((y != IGNORED).sum())
        vectors = list(_vectors(f.detach(), y, loss, fisher, variance))
        for name, module, h, z in calls:
            A.setdefault(name, []).extend(torch.outer(row, row) for row in _input_rows(module, h.detach()))
            for vector in vectors:
                (delta,) = torch.autograd.grad(f, z, vector, retain_graph=True)
                G.setdefault(name, []).extend(torch.outer(row, row) for row in _output_rows(module, delta))
    return {name: (torch.stack(A[name]).mean(0), torch.stack(G[name]).sum(0) / terms) for name in A}


def _run(model: nn.Module, x: Tensor) -> tuple[Tensor, list[tuple[str, nn.Module, Tensor, Tensor]]]:
    """The outputs, and (name, module, input, output) of every call of a layer."""
    calls = []
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, LAYERS):

            def keep(module: nn.Module, args: tuple[Any, ...], z: Tensor, name: str = name) -> None:
                calls.append((name, module, args[0], z))

            handles.append(module.register_forward_hook(keep))
    try:
        outputs: Tensor = model(x)
    finally:
        for handle in handles:
            handle.remove()
    return outputs, calls


def _vectors(f: Tensor, y: Tensor, loss: str, fisher: str, variance: float) -> Iterator[Tensor]:
    """The vectors (terms, C) to back-propagate from the predictions f (terms, C) of one sample."""
    if fisher == "empirical" and loss == "squared-error":
        yield f - y
    elif fisher == "empirical":
        leaf = f.clone().requires_grad_()
        total = nn.functional.cross_entropy(leaf, y, reduction="sum", ignore_index=IGNORED)
        yield from torch.autograd.grad(total, leaf)
    else:
        for n in range(len(f)):
            if loss == "cross-entropy" and y[n] == IGNORED:
                continue
            values, Q = torch.linalg.eigh(output_covariance(f[n], loss, variance))
            for value, q in zip(values.clamp(min=0), Q.T, strict=True):
                vector = torch.zeros_like(f)
                vector[n] = value.sqrt() * q
                yield vector


def _input_rows(module: nn.Module, h: Tensor) -> list[Tensor]:
    """What the weight multiplies, at each position."""
    if isinstance(module, nn.Linear):
        return list(h.flatten(0, -2))
    assert isinstance(module, nn.Conv1d | nn.Conv2d)
    line = isinstance(module, nn.Conv1d)
    one = (1,) if line else ()
    (kh, kw), (sh, sw), (dh, dw) = ((*one, *x) for x in (module.kernel_size, module.stride, module.dilation))
    assert not isinstance(module.padding, str), "the padding is given in numbers"
    ph, pw = (*(0 for _ in one), *module.padding)
    image = nn.functional.pad(h[0][:, None] if line else h[0], (pw, pw, ph, ph))
    height, width = dh * (kh - 1) + 1, dw * (kw - 1) + 1
    rows = []
    for i in range(0, image.shape[1] - height + 1, sh):
        for j in range(0, image.shape[2] - width + 1, sw):
            rows.append(image[:, i : i + height : dh, j : j + width : dw].flatten())
    return rows


def _output_rows(module: nn.Module, delta: Tensor) -> list[Tensor]:
    if isinstance(module, nn.Linear):
        return list(delta.flatten(0, -2))
    return list(delta[0].flatten(1).T)
