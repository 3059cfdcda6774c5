"""Norms, linear maps and activations of transformer blocks, as each family has them.

The logits of a whole sequence in float32 on a CPU are those of transformers bit for bit: the same operations
in the same order on the same memory (a single row's last bits depend on whether a matrix starts at a multiple
of 16 bytes, there as here). In float64 norms are too, where transformers has float32.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.nn.transformer.config import BlockConfig

INIT_STD = 0.02
EPSILON = float(torch.finfo(torch.float32).eps)
"""What F.rms_norm adds by default to float32."""


def gelu_new(x: Tensor) -> Tensor:
    """GELU by tanh, written out as GPT-2 has it; the fused one rounds otherwise."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def relu2(x: Tensor) -> Tensor:
    """relu(x)²."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": gelu_new,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": relu2,
}


def activation_name(function: Callable[[Tensor], Tensor]) -> str:
    """The published name of an activation."""
    return next(name for name, each in ACTIVATIONS.items() if each is function)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + ε) ⊙ gain, the gain being the weight or 1 + the weight; in float32 or better."""

    def __init__(self, width: int, epsilon: float, around_one: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if around_one else torch.ones(width))
        self.epsilon, self.around_one = epsilon, around_one

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        if self.around_one:
            return (unit * (1.0 + self.weight.to(wide.dtype))).to(x.dtype)
        return self.weight * unit.to(x.dtype)


class UnitNorm(nn.Module):
    """RMSNorm over the last dimension, without a gain."""

    def forward(self, x: Tensor) -> Tensor:
        return norm(x)


Norm = RMSNorm | nn.LayerNorm | UnitNorm


def norm(x: Tensor) -> Tensor:
    """RMSNorm over the last dimension, without a gain."""
    return F.rms_norm(x, (x.shape[-1],))


def norm_of(config: BlockConfig, width: int) -> Norm:
    """The family's norm."""
    kind = config.traits.norm
    if kind == "unit":
        return UnitNorm()
    if kind == "layer":
        return nn.LayerNorm(width, eps=config.norm_eps)
    return RMSNorm(width, config.norm_eps, kind == "rms-around-one")


class TransposedLinear(nn.Module):
    """y = x W + b with W (in, out), as GPT-2 keeps it: the last bits of a product depend on the layout."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = rows @ self.weight if self.bias is None else torch.addmm(self.bias, rows, self.weight)
        return y.view(*x.shape[:-1], -1)


Linear = nn.Linear | TransposedLinear


def linear_of(config: BlockConfig, inputs: int, outputs: int, bias: bool, scale: float = 1.0) -> Linear:
    """A linear map in the family's layout.

    From scratch it is uniform in ±sqrt(3) scale / sqrt(inputs), so that scale 0 gives zeros; else
    `initialize` fills it.
    """
    if config.traits.transposed:
        return TransposedLinear(inputs, outputs, bias)
    layer = nn.Linear(inputs, outputs, bias=bias)
    if config.traits.scratch:
        bound = 3**0.5 * scale / inputs**0.5
        nn.init.uniform_(layer.weight, -bound, bound)
    return layer


def initialize(module: nn.Module) -> None:
    """Small normal weights and no bias, where a model is not trained from scratch."""
    if isinstance(module, nn.Linear | TransposedLinear) and not module.weight.is_meta:
        nn.init.normal_(module.weight, std=INIT_STD)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def matrix_of(linear: Linear) -> Tensor:
    """W (out, in)."""
    weight = linear.weight.detach()
    return weight if isinstance(linear, nn.Linear) else weight.t()


def gain_of(module: Norm) -> tuple[Tensor | None, Tensor | None]:
    """The gain and the bias of a norm; None where it has none."""
    if isinstance(module, UnitNorm):
        return None, None
    weight = module.weight.detach()
    if isinstance(module, nn.LayerNorm):
        return weight, module.bias.detach()
    return (1 + weight if module.around_one else weight), None


def epsilon_of(module: Norm) -> float:
    """ε of a norm; one without a gain has torch's own."""
    if isinstance(module, nn.LayerNorm):
        return module.eps
    return module.epsilon if isinstance(module, RMSNorm) else EPSILON
