"""The common part of equivariant optimizers: a base optimizer on invariant components.

Statement. Parameters that a gauge covers are split into invariant components (`split.py`); the base makes a
step of each component, as if it were a gradient; the split carries the steps back. All other parameters get
the base's own step. Since the components do not see where on its orbit the network is, neither does the
optimizer: with G the group and Φ the update, Φ(g·θ) = g·Φ(θ), and its state is the same for θ and g·θ.

A subclass has two methods: `_advance`, the base's step of a list of components, and `_plain`, its step of the
parameters that no gauge covers.

Symbols. A `Slot` is where a component keeps its state: a parameter and a prefix, because the radial numbers
of a gauge are kept with its first tensor. All state is in `state`, so that state_dict and load_state_dict are
those of torch; param groups hold the gauges as text, and a state of other gauges raises OptimError.

Cost: see `split.py`. Gauges are split in batches of at most `BATCH_ELEMENTS` numbers, which bounds the
temporaries, and on a CPU keeps them in its caches.

Source: "Dead Directions: Geometric Singular Learning" section 11, the family of dead-direction conditioners.

Limits. A gauge whose tensors all lack gradients rests; if only some lack them, these count as zero. No
closures, sparse gradients or complex parameters; covered parameters are float32 or float64.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from topograd.errors import OptimError
from topograd.optim.assignment import check_decay, check_gauges, check_parameters
from topograd.optim.gauges.base import Gauge, Parameters
from topograd.optim.gauges.rescaling import Rescaling
from topograd.optim.gauges.translation import Translation
from topograd.optim.split import RescalingSplit, Slot, TranslationSplit, Vertical, Ways

BATCH_ELEMENTS = {"cpu": 2**20}
"""Numbers in the tensors that are split together, by device; a larger gauge is a batch of its own."""
LARGE_BATCH = 2**26
"""The same on devices without large caches."""

Group = dict[str, Any]


class LiftedOptimizer(Optimizer, ABC):
    """The base class of DDCAdam, DDCMomentum and DDCMuon."""

    base: ClassVar[str]
    """The base's name, as a way of the vertical step; empty where that is not offered."""

    def __init__(self, params: ParamsT, gauges: Iterable[Gauge], defaults: Group) -> None:
        self._gauges = tuple(gauges)
        ways = ("frozen", "sgd", *filter(None, [self.base]))
        if defaults["vertical"] not in ways:
            raise OptimError(
                setting="vertical", given=defaults["vertical"], allowed=f"one of {', '.join(ways)}"
            )
        for gauge in self._gauges:
            if not isinstance(gauge, (Translation, Rescaling)):
                raise OptimError(
                    f"{gauge!r} is no gauge",
                    setting="gauges",
                    given=gauge,
                    allowed="from topograd.optim.gauges",
                )
        for name in ("lr", "weight_decay"):
            if isinstance(defaults[name], Tensor) or not defaults[name] >= 0:
                raise OptimError(setting=name, given=defaults[name], allowed="a number of at least 0")
        if isinstance(params, Tensor):
            raise OptimError(
                "params is one tensor", setting="params", allowed="model.named_parameters(), or a list"
            )
        listed = list(params)
        grouped: list[Any] = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
        groups = [
            {**group, "params": [one] if isinstance(one := group["params"], Tensor) else list(one)}
            for group in grouped
        ]
        check_parameters(groups)
        super().__init__(groups, {**defaults, "gauges": [repr(gauge) for gauge in self._gauges]})
        check_gauges(self._gauges, self.param_groups)

    @abstractmethod
    def _advance(self, slots: Sequence[Slot], components: list[Tensor], group: Group) -> list[Tensor]:
        """The base's step of each component; its state is in the slots."""

    @abstractmethod
    def _plain(self, parameters: list[Tensor], group: Group) -> None:
        """The base's own step of parameters that have gradients."""

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
            moving = [tensor for tensor in group["params"] if tensor.grad is not None]
            for tensor in moving:
                if tensor.grad.is_sparse:
                    shape = tuple(tensor.shape)
                    raise OptimError(
                        f"a parameter of shape {shape} has a sparse gradient",
                        setting="params",
                        given=shape,
                        remedy="make it dense",
                    )
            named = dict(zip(group.get("param_names", ()), group["params"], strict=False))
            learning = {name for name, tensor in named.items() if tensor.grad is not None}
            active = [gauge for gauge in self._gauges if learning & set(gauge.names)]
            covered = {id(named[name]) for gauge in active for name in gauge.names}
            self._plain([tensor for tensor in moving if id(tensor) not in covered], group)
            for split in self._splits(active, named, group):
                split.apply(self._advance(split.slots, split.components, group), group["lr"])

    def _splits(
        self, gauges: Sequence[Gauge], named: Parameters, group: Group
    ) -> Iterator[TranslationSplit | RescalingSplit]:
        """The gauges of a group, split one batch after another."""
        vertical: Vertical = "base" if group["vertical"] == self.base else group["vertical"]
        ways = Ways(vertical, group["reproject"], group["retract"], group["rms"])
        keep = 1 - group["lr"] * group["weight_decay"]
        for gauge in gauges:
            check_decay(gauge, group["weight_decay"])
            if isinstance(gauge, Translation):
                yield TranslationSplit(gauge, named, ways)
        for batch in batches([gauge for gauge in gauges if isinstance(gauge, Rescaling)], named):
            yield RescalingSplit(batch, named, keep, ways)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a saved state; the gauges must be those that it was saved with."""
        own = self.param_groups[0]["gauges"]
        for group in state_dict["param_groups"]:
            if (saved := group.get("gauges")) != own:
                raise OptimError(
                    f"the state belongs to gauges {saved}, not to {own}",
                    setting="gauges",
                    given=saved,
                    remedy="build the optimizer with those",
                )
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_gauges": self._gauges}


def batches(gauges: Sequence[Rescaling], parameters: Parameters) -> Iterator[tuple[Rescaling, ...]]:
    """Gauges of one covector, dtype and device, in batches of bounded size."""
    kinds: dict[Any, list[Rescaling]] = {}
    for gauge in gauges:
        first = parameters[gauge.names[0]]
        kinds.setdefault((gauge.covector, first.dtype, first.device), []).append(gauge)
    for kind in kinds.values():
        batch: list[Rescaling] = []
        most = BATCH_ELEMENTS.get(parameters[kind[0].names[0]].device.type, LARGE_BATCH)
        room = most
        for gauge in kind:
            size = sum(parameters[name].numel() for name in gauge.names)
            if batch and size > room:
                yield tuple(batch)
                batch, room = [], most
            batch.append(gauge)
            room -= size
        yield tuple(batch)
