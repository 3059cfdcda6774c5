"""Linear layers packed for small batches, as in decoding.

With one row a matrix is read once and used once, so its layout decides the speed; with 2 to 64 rows a kernel
has to use what it read for every row. On a CPU in float32 there are two layouts here:

    plain    (in, out), its long side contiguous: for one row, and for small matrices
    oneDNN   prepacked blocks, for 2 to 64 rows of matrices with at least 2^18 elements (2^19 if out > in)

The bounds were measured (docs/results): a oneDNN call costs about 20 µs before it computes. Elsewhere (other
devices, float64, a torch without these private operators) only the plain layout is used.

Limits. A packed layer is for inference. It may share memory with its weight or hold a copy, so pack again
when the weight has changed. Results differ by rounding between one row and several.
"""

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

MAX_ROWS = 64
MIN_ELEMENTS = 2**18

M = TypeVar("M", bound=nn.Module)


class MklLinear(nn.Module):
    """y = x Wᵀ + b on x (rows, in), for inference."""

    matrix: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        weight = weight.detach()
        wide = weight.shape[0] > weight.shape[1]
        self.matrix = weight.t().contiguous() if wide else weight.contiguous().t()
        self.bias = None if bias is None else bias.detach()
        worth = weight.numel() >= MIN_ELEMENTS * (2 if wide else 1)
        self.blocks = _blocks(weight) if worth else None

    def forward(self, x: Tensor) -> Tensor:
        if self.blocks is not None and 1 < len(x) <= MAX_ROWS:
            return torch.ops.mkldnn._linear_pointwise.default(x, self.blocks, self.bias, "none", [], "")
        return torch.mm(x, self.matrix) if self.bias is None else torch.addmm(self.bias, x, self.matrix)

    def onto(self, h: Tensor, x: Tensor) -> Tensor:
        """h + x Wᵀ + b."""
        if self.bias is not None or (self.blocks is not None and 1 < len(x) <= MAX_ROWS):
            return self(x).add_(h)
        return torch.addmm(h, x, self.matrix)


class _AnyShape(MklLinear):
    """A packed layer in the place of an nn.Linear, whose input may have any leading shape."""

    @property
    def weight(self) -> Tensor:
        """W (out, in), for layers that look at their matrix's shape, device or dtype."""
        return self.matrix.t()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, x.shape[-1])).unflatten(0, x.shape[:-1])


def _blocks(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's own layout, or None where that does not exist."""
    if (
        weight.device.type != "cpu"
        or weight.dtype != torch.float32
        or not torch.backends.mkldnn.is_available()
    ):
        return None
    try:
        blocks = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        torch.ops.mkldnn._linear_pointwise.default(weight[:2], blocks, None, "none", [], "")
    except (AttributeError, NotImplementedError, RuntimeError):  # private operators: they may go away
        return None
    return blocks


def packed(module: M) -> M:
    """A copy of `module` for inference whose nn.Linear are packed; the other parameters are shared."""
    shared = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in module.parameters()}
    twin = copy.deepcopy(module, dict(shared))
    for parent in list(twin.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, _AnyShape(child.weight, child.bias))
    return twin.eval()
