"""Passes of a model that begin where it moves: layers before that return what they did.

A pass is recorded once, at the model's own weights. While the context of `behind` is open, every layer before
the first that has one of these parameters returns its recorded output, so that only what is behind is
computed. Where a parameter is in no layer, or a layer is called not once, or not in order, all are computed.

Limits. Layers must not store state between calls, and the inputs must be those of the recorded pass.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from torch import nn

from topograd.errors import GeometryError
from topograd.geometry.monitors.stream import find_layers


class Replay:
    """The layers of a model by path, and their outputs in one pass."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module] | str | None = None) -> None:
        self._layers: dict[str, nn.Module] = {}
        self._outputs: list[tuple[str, Any]] = []
        with suppress(GeometryError):
            paths, listed = dict(model.named_modules()), find_layers(model, layers)
            if all(paths.get(name) is layer for name, layer in listed.items()):
                self._layers = listed

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Store the output of every layer."""

        def store(path: str) -> Any:
            return lambda layer, args, output: self._outputs.append((path, output))

        with ExitStack() as hooks:
            for path, layer in self._layers.items():
                hooks.enter_context(layer.register_forward_hook(store(path)))
            yield
        if [path for path, _ in self._outputs] != list(self._layers):  # not each once, in this order
            self._layers = {}

    @contextmanager
    def behind(self, names: set[str]) -> Iterator[None]:
        """Layers before the first with one of these parameters return their stored outputs."""
        inside = {name for name in names for path in self._layers if name.startswith(f"{path}.")}
        replaced: list[tuple[nn.Module, Any]] = []
        if names and inside == names:
            for (path, layer), (_, output) in zip(self._layers.items(), self._outputs, strict=True):
                if any(name.startswith(f"{path}.") for name in names):
                    break
                replaced.append((layer, vars(layer).get("forward")))  # one that was patched by others
                layer.forward = lambda *args, output=output, **kwargs: output
        try:
            yield
        finally:
            for layer, own in replaced:
                del layer.forward
                if own is not None:
                    layer.forward = own
