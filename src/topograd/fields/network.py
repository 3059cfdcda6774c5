"""Networks that the theory of fields covers: weights, and checks of them.

Statement. L layers without biases, a ReLU after each, the last included, and a fixed readout:

    v_l = W_l u_{l-1},   u_l = max(v_l, 0),   l = 1..L,        Y = mean(u_L)

Symbols and shapes. W_l (N_l, N_{l-1}); widths may differ. Inputs u_0 (M, N_0), targets y (M,). N is N_L, the
width under the readout, in every formula of this package.

A network is a sequence of weights, or a module whose parts are `Linear(bias=False)` and `ReLU`. A
`Sequential` is read part by part; of any other module the linear parts are taken in the order in which they
are registered. Either must then answer u_L, or its mean, on a few random inputs as those weights do.

Source: "Learning Dynamics Reveal a Hierarchy of Weight-Induced Layerwise Gram Metrics" (C. Nordio),
section 2. Limits. Weights are detached: fields are read, not differentiated. One linear part used twice
raises FieldError: its gradient would be a sum over its uses, which the layer-wise form does not have.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from topograd.errors import FieldError

Network = Sequence[Tensor] | nn.Module
COVERED = "the theory covers Linear(bias=False) and ReLU in turn, a ReLU last, and the mean as readout"


def weights_of(network: Network) -> tuple[Tensor, ...]:
    """W_1, ..., W_L of a network, checked and detached.

    >>> [tuple(W.shape) for W in weights_of(nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU()))]
    [(3, 2)]
    """
    if isinstance(network, nn.Sequential):
        weights = _of_sequence(list(_parts(network)))
    elif isinstance(network, nn.Module):
        weights = _of_module(network)
    else:
        weights = list(network)
    _check_weights(weights)
    detached = tuple(W.detach() for W in weights)
    if isinstance(network, nn.Module):
        _probe(network, detached)
    return detached


def check_inputs(weights: Sequence[Tensor], inputs: Tensor, setting: str = "inputs") -> None:
    """Raise FieldError for inputs that do not fit these weights."""
    width, shape = weights[0].shape[1], tuple(inputs.shape)
    if inputs.dim() != 2 or inputs.shape[1] != width or not inputs.shape[0]:
        raise FieldError(setting=setting, given=shape, allowed=f"(M, {width}), as W_1 reads them, M above 0")
    check_same_kind(setting, inputs, weights[0])


def _parts(module: nn.Sequential) -> Iterator[nn.Module]:
    """The parts of nested sequences, in order."""
    for part in module:
        if isinstance(part, nn.Sequential):
            yield from _parts(part)
        else:
            yield part


def _of_sequence(parts: list[nn.Module]) -> list[Tensor]:
    for i, part in enumerate(parts):
        wanted = nn.ReLU if i % 2 else nn.Linear
        if not isinstance(part, wanted):
            name = f"part {i} is {type(part).__name__}, where {wanted.__name__} is due"
            raise _outside(name, type(part).__name__)
    if len(parts) % 2:
        raise _outside("the last part is Linear, and no ReLU follows", "Linear")
    return _distinct([_linear_weight(part) for part in parts[::2]])


def _of_module(module: nn.Module) -> list[Tensor]:
    leaves = [part for part in module.modules() if not list(part.children())]
    for part in leaves:
        if not isinstance(part, nn.Linear | nn.ReLU):
            raise _outside(f"the module has a part {type(part).__name__}", type(part).__name__)
    weights = _distinct([_linear_weight(part) for part in leaves if isinstance(part, nn.Linear)])
    known = {id(W) for W in weights}
    if any(id(parameter) not in known for parameter in module.parameters()):
        raise _outside("the module has parameters outside its Linear parts", "parameters")
    return weights


def _outside(problem: str, given: str) -> FieldError:
    return FieldError(problem, setting="network", given=given, remedy=COVERED)


def _linear_weight(part: nn.Module) -> Tensor:
    assert isinstance(part, nn.Linear)
    if part.bias is not None:
        raise _outside(f"Linear({part.in_features}, {part.out_features}) has a bias", "bias")
    return part.weight


def _distinct(weights: list[Tensor]) -> list[Tensor]:
    if len({id(W) for W in weights}) < len(weights):
        raise FieldError(
            "one weight is used by two layers", setting="network", remedy="each layer must have its own"
        )
    return weights


def _check_weights(weights: list[Tensor]) -> None:
    if not weights:
        raise FieldError("the network has no layers", setting="network", allowed="one or more matrices")
    for layer, W in enumerate(weights, start=1):
        if not isinstance(W, Tensor) or W.dim() != 2 or not W.numel():
            given = tuple(W.shape) if isinstance(W, Tensor) else type(W).__name__
            raise FieldError(setting=f"W_{layer}", given=given, allowed="a matrix (N_l, N_(l-1))")
        if not W.is_floating_point():
            raise FieldError(setting=f"W_{layer}", given=W.dtype, allowed="float64 or float32")
        check_same_kind(f"W_{layer}", W, weights[0])
    for layer, (below, above) in enumerate(pairwise(weights), start=1):
        if above.shape[1] != below.shape[0]:
            raise FieldError(
                f"widths do not chain: W_{layer} gives {below.shape[0]} numbers and W_{layer + 1} "
                f"reads {above.shape[1]}",
                setting=f"W_{layer + 1}",
                given=above.shape[1],
                remedy="these must be equal",
            )


def check_same_kind(name: str, tensor: Tensor, like: Tensor) -> None:
    """Raise FieldError for tensors of two dtypes or devices."""
    if (tensor.dtype, tensor.device) != (like.dtype, like.device):
        raise FieldError(
            f"{name}: {tensor.dtype} on {tensor.device}, beside {like.dtype} on {like.device}",
            setting=name,
            given=tensor.dtype,
            remedy="give everything one dtype and device",
        )


def _probe(module: nn.Module, weights: tuple[Tensor, ...]) -> None:
    """Refuse a module whose forward is not the chain of its linear parts."""
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(8, weights[0].shape[1], generator=generator, dtype=weights[0].dtype).to(weights[0].device)
    with torch.no_grad():
        answer = module(u)
        for W in weights:
            u = torch.relu(u @ W.T)
    expected = u if answer.shape == u.shape else u.mean(-1)
    answer = answer if answer.shape == u.shape else answer.reshape(-1)
    if answer.shape != expected.shape or not torch.allclose(answer, expected, rtol=1e-4, atol=1e-6):
        raise _outside("the module's output is not that of its Linear parts with ReLU between", "output")
