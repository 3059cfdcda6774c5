"""The suffix scan: the adjoint at every interface, from the interface Jacobians and the last adjoint.

Statement. With J_k = ∂m_{k+1}/∂m_k and ḡ_K = g,

    ḡ_k = J_kᵀ ḡ_{k+1} = P_k g,     P_k = J_kᵀ J_{k+1}ᵀ ⋯ J_{K-1}ᵀ,     P_K = I.

The code carries an adjoint as a row, where the same recursion is ḡ_kᵀ = ḡ_{k+1}ᵀ J_k: nothing is transposed,
and a product of neighbours is J_{k+1} J_k, the Jacobian of the later map on the left.

Symbols and shapes. K maps, B samples, n the width of the interface. Jacobians J (K, B, n, n), the terminal
adjoint g (B, n), adjoints (K + 1, B, n), suffix products P (K + 1, B, n, n). K = 0 is a chain without maps.

Cost for each sample, in multiply-adds, and the number of calls that wait for one another:

    method     work                         calls in sequence
    matvec     K n²                         K
    chunked    (K − c) n³ + (K + K/c) n²    2 c + K/c        c maps to a chunk, about √K
    tree       K n³ + K n²                  2 log₂ K to 4 log₂ K

`chunked` multiplies the maps of each chunk together, all chunks at once, carries the adjoint from chunk to
chunk by these products, and then fills every chunk at once. `tree` multiplies neighbours, solves the chain of
half the length, and fills in between: the work-efficient scan of Blelloch, whose way down needs only
matrix-vector products here because one adjoint is carried and not a matrix.

Source: "LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces" §2.2: Theorem 2.7, eq. 3 and
Proposition 2.8.

Limits. Every width is the same n. The arithmetic is float32, or float64 where an input is: one product in
bfloat16 is already wrong by 4e-3. A chain whose maps contract attenuates the adjoint geometrically, in any
precision. On a CPU `matvec` wins for the chains that models have, and `tree` for long chains of narrow maps
(`python benchmarks/scan.py`, docs/results); `chunked` is for workers that each hold a chunk.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from topograd.errors import ConfigError, StackError

Method = Literal["matvec", "chunked", "tree"]


def suffix_adjoints(
    jacobians: Tensor, terminal: Tensor, method: Method = "matvec", chunk: int | None = None
) -> Tensor:
    """ḡ_0 ... ḡ_K, shape (K + 1, B, n), in float32 or better; differentiable in both arguments.

    `chunk` is the number of maps in a chunk, for `method="chunked"` only; without it, about √K.

    >>> J = torch.tensor([[[[1.0, 2.0], [0.0, 1.0]]], [[[1.0, 0.0], [3.0, 1.0]]]])
    >>> suffix_adjoints(J, torch.tensor([[1.0, 10.0]])).tolist()
    [[[31.0, 72.0]], [[31.0, 10.0]], [[1.0, 10.0]]]
    """
    _check_jacobians(jacobians)
    maps, batch, width, _ = jacobians.shape
    if terminal.shape != (batch, width):
        raise StackError(
            setting="terminal",
            given=tuple(terminal.shape),
            allowed=f"of shape {(batch, width)}, with Jacobians of shape {tuple(jacobians.shape)}",
        )
    if chunk is not None and (method != "chunked" or chunk < 1):
        raise ConfigError(setting="chunk", given=chunk, allowed="at least 1, with method 'chunked' only")
    dtype = torch.promote_types(_scan_dtype(jacobians), terminal.dtype)
    with torch.autocast(jacobians.device.type, enabled=False):
        J, row = jacobians.to(dtype), terminal.to(dtype).unsqueeze(-2)
        if method == "matvec":
            rows = _matvec(J, row)
        elif method == "chunked":
            rows = _chunked(J, row, max(1, math.isqrt(maps)) if chunk is None else chunk)
        elif method == "tree":
            rows = _tree(J, row)
        else:
            raise ConfigError(setting="method", given=method, allowed="'matvec', 'chunked' or 'tree'")
    return rows.squeeze(-2)


def suffix_products(jacobians: Tensor) -> Tensor:
    """P_0 ... P_K, shape (K + 1, B, n, n), in float32 or better: ḡ_k = P_k g for whatever g. Work K n³.

    For analysis (the spectra of the composed chain); the adjoints themselves never need these matrices.
    """
    _check_jacobians(jacobians)
    _, batch, width, _ = jacobians.shape
    with torch.autocast(jacobians.device.type, enabled=False):
        J = jacobians.to(_scan_dtype(jacobians))
        identity = torch.eye(width, dtype=J.dtype, device=J.device)
        return _matvec(J, identity.expand(batch, width, width)).mT


def _matvec(J: Tensor, row: Tensor) -> Tensor:
    """(K + 1, B, m, n) from rows (B, m, n) behind the last map: one map after the other."""
    rows = [row]
    for J_k in reversed(J.unbind(0)):
        rows.append(rows[-1] @ J_k)
    return torch.stack(rows[::-1])


def _chunked(J: Tensor, row: Tensor, size: int) -> Tensor:
    """The same in two levels. Identities before the first map fill up the first chunk, and drop out again."""
    maps, batch, width, _ = J.shape
    count = max(1, math.ceil(maps / size))
    missing = count * size - maps
    identity = torch.eye(width, dtype=J.dtype, device=J.device)
    filled = torch.cat([identity.expand(missing, batch, width, width), J])
    chunks = filled.unflatten(0, (count, size))  # (C, c, B, n, n)

    behind = _matvec(_chunk_products(chunks[1:]), row)  # (C, B, m, n): the adjoint behind each chunk
    inside = [behind]  # then all chunks at once
    for i in reversed(range(size)):
        inside.append(inside[-1] @ chunks[:, i])
    starts = torch.stack(inside[:0:-1], dim=1).flatten(0, 1)  # ḡ at the start of every map
    return torch.cat([starts[missing:], row.unsqueeze(0)])


def _chunk_products(chunks: Tensor) -> Tensor:
    """(C, B, n, n): the Jacobian of each chunk as one map, the last of its maps on the left."""
    product = chunks[:, 0]
    for i in range(1, chunks.shape[1]):
        product = chunks[:, i] @ product
    return product


def _tree(J: Tensor, row: Tensor) -> Tensor:
    """The same by halving: the chain of pairs gives every second adjoint, one more map gives the others."""
    maps = J.shape[0]
    if maps == 0:
        return row.unsqueeze(0)
    if maps % 2:
        rest = _tree(J[1:], row)
        return torch.cat([rest[:1] @ J[:1], rest])
    first, second = J[0::2], J[1::2]
    even = _tree(second @ first, row)  # ḡ_0, ḡ_2, ..., ḡ_K
    odd = even[1:] @ second  # ḡ_1, ḡ_3, ..., ḡ_{K-1}
    return torch.cat([torch.stack([even[:-1], odd], dim=1).flatten(0, 1), even[-1:]])


def _scan_dtype(jacobians: Tensor) -> torch.dtype:
    return torch.promote_types(jacobians.dtype, torch.float32)


def _check_jacobians(jacobians: Tensor) -> None:
    shape = tuple(jacobians.shape)
    if len(shape) != 4 or shape[2] != shape[3]:
        raise StackError(
            setting="jacobians", given=shape, allowed="of shape (maps, batch, n, n), all of one width n"
        )
