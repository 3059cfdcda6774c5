"""Layer dropout: in training, each sequence of a batch skips some layers, later ones more often.

    h ← h + m (layer(h) - h),  m = 0 with probability p_l, else 1, drawn for each sequence
    p_l = p (e^{l ln 2 / (L - 1)} - 1),  l = 0 .. L - 1:  0 for the first layer, p for the last

"LayerSkip" (Elhoushi et al. 2024) §4.1, eqs. 1 to 3, with its time schedule constant. Nothing is rescaled, as
there. The draws come from torch's generator, so that a resumed run draws the same. Cost: a left-out layer is
computed all the same and its result dropped. Limits: layers that keep the shape of their state.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from topograd.errors import StackError


def dropout_rates(layers: int, last: float) -> list[float]:
    """p_l of each layer.

    >>> [round(rate, 3) for rate in dropout_rates(3, 0.2)]
    [0.0, 0.083, 0.2]
    """
    if layers == 1:
        return [0.0]
    return [last * (math.exp(i * math.log(2) / (layers - 1)) - 1) for i in range(layers)]


@contextmanager
def dropped_layers(layers: Iterable[nn.Module], rates: Sequence[float]) -> Iterator[None]:
    """Within it, layer l is skipped with probability rates[l], for each sequence; no rates skip none.

    The draws are made when a layer first runs, and reused if it runs again.
    """
    with ExitStack() as hooks:
        for layer, rate in zip(layers, rates, strict=bool(rates)):
            if rate > 0:
                hooks.enter_context(layer.register_forward_hook(LayerDropout(rate), with_kwargs=True))
        yield


def drops_layers(layer: nn.Module) -> bool:
    """Whether dropout is active on a layer."""
    return any(isinstance(hook, LayerDropout) for hook in layer._forward_hooks.values())


class LayerDropout:
    """The hook of one layer."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._retained: Tensor | None = None

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor:
        h: Tensor = args[0] if kwargs.get("rows") is None else args[0][:, kwargs["rows"]]
        if h.shape != output.shape:
            problem = f"a {type(module).__name__} makes {tuple(output.shape)} of {tuple(h.shape)}"
            remedy = "layer dropout needs layers that keep the shape"
            raise StackError(problem, setting="layer_dropout", given=self.rate, remedy=remedy)
        if self._retained is None:
            self._retained = torch.rand(len(h), device=h.device) >= self.rate
        return torch.where(self._retained.view(-1, *[1] * (h.dim() - 1)), output, h)
