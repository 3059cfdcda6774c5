"""Residual stream by depth: the weakest active direction of the input at every layer.

Statement. With H_0 the input of the first layer, H_l the output of layer l and r the rank of H_0, the
reading is

    ρ_l = σ_r(H_l) / σ_r(H_0),      l = 1..L.

On residual graphs with exact-identity skips σ_r(H_l) ~ t^{D_f(l)}, D_f(l) the number of weights on the
shortest path from the input; a skip around every layer makes D_f = 0, so ρ_l does not vanish with depth. A
chain without skips has D_f = l and collapses. What would refute it is a dip: a branch that cancels the
skip.

    trend     least-squares slope of log ρ_l on l, per layer; below `FALLING` the stream is falling
    dip       layer l with ρ_l < `DIP` times both the largest ρ before it (ρ_0 = 1) and the largest after it

Symbols and shapes. H_l (n, d): n rows, one for each position of each sample, not centred; r ≤ min(n, d).
Cost: forward pass only; 2 n d² per layer in float64, and O(d³) when it is read.
Source: "Dead Directions: Geometric Singular Learning", Corollary 58 and Remark 59; §5.1 puts it in the
real-time tier. The remark expects a trained stream not to decrease. Our measurement disagrees: random tanh
residual nets (width 16, 12 layers, three seeds) go .96 → .82 with branches of scale .1 and .82 → .50 with
.3; without skips .14 → .001. So the verdict is on the trend, and its thresholds are ours.
Limits. Gated skips, Peri-LN and post-norm blocks are outside the corollary: their profile is a description,
not a test, and the verdict says so. They are known by a norm that runs after the last map of a layer: its
output is the layer's (post-norm) or is added to the skip (Peri-LN). A norm that is no module, and a gate, are
not seen. Massive rows (`massive_activations.py`) are separated over all layers at once, so one pass is held
in memory.
The weakest direction is that of the sample: a fresh MiniLM ends at 2.5 on 2048 tokens and at
1.0 on 4096. Directions below the resolution of the numbers are not active (see `moments.py`): in bfloat16
that is most of them. Hooks on layers compiled by torch break their graphs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from topograd.effective_rank import effective_rank
from topograd.errors import GeometryError
from topograd.geometry.monitors.hooks import ModelHooks
from topograd.geometry.monitors.layernorm import normalises
from topograd.geometry.monitors.massive_activations import MassiveLayer, massive_layer, massive_rows, together
from topograd.geometry.monitors.moments import Moments, hidden_of
from topograd.geometry.rates import fit_line

FALLING = -0.2
"""Log ratio per layer. Those residual nets gave -0.01 to -0.05, those without skips -0.42 to -0.46."""
DIP = 0.5


@dataclass(frozen=True)
class StreamProfile:
    """σ_r by depth. Index 0 of `sigma` and `effective_ranks` is the input; `ratios` begin with layer 1."""

    names: tuple[str, ...]
    rank: int
    width: int
    samples: int
    sigma: tuple[float, ...]
    """σ_r(H_l) / √n, l = 0..L."""
    effective_ranks: tuple[float, ...]
    outside: str | None = None
    """Why the corollary does not cover these layers."""
    massive: tuple[MassiveLayer, ...] = ()
    """The layers with massive rows, which this profile holds or leaves out."""

    @property
    def ratios(self) -> tuple[float, ...]:
        """ρ_l, l = 1..L."""
        return tuple(value / self.sigma[0] for value in self.sigma[1:])

    @property
    def trend(self) -> float:
        """The slope of log ρ_l on l; -inf where some ρ_l is below resolution, 0 for one layer."""
        if min(self.ratios) <= 0:
            return float("-inf")
        y = torch.tensor(self.ratios, dtype=torch.float64).log()
        return fit_line(torch.stack((torch.arange(len(y)).to(y), y)))[0] if len(y) > 1 else 0.0

    @property
    def dips(self) -> tuple[str, ...]:
        """The layers where the profile dips."""
        rho = (1.0, *self.ratios)
        places = range(1, len(rho) - 1)
        return tuple(self.names[i - 1] for i in places if rho[i] < DIP * min(max(rho[:i]), max(rho[i + 1 :])))

    @property
    def verdict(self) -> str:
        """Preserved, falling, dipping or gone; and whether the corollary covers these layers."""
        gone = [name for name, ratio in zip(self.names, self.ratios, strict=True) if ratio <= 0]
        if gone:
            shape = f"below resolution after {', '.join(gone)}"
        elif self.dips:
            shape = f"dips at {', '.join(self.dips)}"
        else:
            shape = "falling with depth" if self.trend < FALLING else "preserved"
        return shape if self.outside is None else f"{shape} ({self.outside}: described, not tested)"


class StreamMonitor(ModelHooks):
    """Reads a model's layers for as long as it is entered.

    >>> model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    >>> with StreamMonitor(model, list(model)) as monitor:
    ...     _ = model(torch.randn(10, 3, dtype=torch.float64))
    >>> len(monitor.profile().ratios)
    2
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module] | str | None = None,
        *,
        rank: int | None = None,
    ) -> None:
        super().__init__()
        if rank is not None and rank < 1:
            raise GeometryError(
                setting="rank", given=rank, allowed="at least 1, or None for the rank of the input"
            )
        self._layers = find_layers(model, layers)
        self._rank = rank
        self.reset()

    def reset(self) -> None:
        """Drop the samples so far."""
        names = ("the input", *self._layers)
        self._rest = [Moments(name) for name in names]
        self._apart = [Moments(name) for name in names]
        self._massive: dict[str, MassiveLayer | None] = {}
        self._pass: list[tuple[int, Tensor]] = []
        self._outside: str | None = None

    def _attach(self) -> list[RemovableHandle]:
        first, *_ = self._layers.values()
        handles = [first.register_forward_pre_hook(self._see_input, with_kwargs=True)]
        outputs = enumerate(self._layers.items(), 1)
        handles += [layer.register_forward_hook(self._see_output(i, name)) for i, (name, layer) in outputs]
        return handles + [module.register_forward_hook(self._see_part) for module in parts_of(first)]

    def profile(self, rank: int | None = None, *, massive: bool = True) -> StreamProfile:
        """The reading of all samples since the last `reset`, at `rank`, or at the one of the monitor.

        Layers that did not run, as the private decoders of other exits, are left out.
        Without `massive`, rows that are massive at some layer are left out at all of them.
        """
        self._end_pass()
        all_moments = self._rest
        if massive:
            all_moments = [rest.joined(apart) for rest, apart in zip(self._rest, self._apart, strict=True)]
        names = tuple(n for n, moments in zip(self._layers, all_moments[1:], strict=True) if moments.count)
        all_moments = [all_moments[0], *(moments for moments in all_moments[1:] if moments.count)]
        widths = {len(moments.mean) for moments in all_moments if moments.count}
        if len(widths) > 1:
            raise GeometryError(
                f"the layers have widths {sorted(widths)}: that is no residual stream",
                setting="layers",
                given=sorted(widths),
                remedy="give layers of one width",
            )
        spectra = torch.stack([moments.singular_values() for moments in all_moments])
        active = int((spectra[0] > 0).sum())
        rank = rank or self._rank or active
        if not 1 <= rank <= active:
            raise GeometryError(setting="rank", given=rank, allowed=f"from 1 to the input's {active}")
        return StreamProfile(
            names=names,
            rank=rank,
            width=spectra.shape[1],
            samples=all_moments[0].count,
            sigma=tuple(spectra[:, rank - 1].tolist()),
            effective_ranks=tuple(effective_rank(spectra).tolist()),
            outside=self._outside,
            massive=tuple(one for one in self._massive.values() if one is not None),
        )

    def second_moment(self) -> Tensor:
        """HᵀH / n after the last layer that ran, of all samples since the last `reset`."""
        self._end_pass()
        both = [rest.joined(apart) for rest, apart in zip(self._rest, self._apart, strict=True)]
        return next((moments for moments in reversed(both) if moments.count), both[0]).second_moment

    def _see_input(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._end_pass()
        self._last_part: tuple[nn.Module, Any] | None = None
        hidden = hidden_of(args or tuple(kwargs.values()), "the input of the first layer")
        self._pass.append((0, hidden.detach().clone()))  # the model may overwrite its own

    def _see_part(self, part: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._last_part = (part, output)

    def _see_output(self, place: int, name: str) -> Any:
        def see(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            hidden = hidden_of(output, name)
            if place == 1 and self._last_part is not None:
                part, last = self._last_part
                if normalises(part):
                    same = isinstance(last, Tensor) and last.data_ptr() == hidden.data_ptr()
                    self._outside = "post-norm layers" if same else "layers with a norm after their last map"
            self._pass.append((place, hidden.detach().clone()))

        return see

    def _end_pass(self) -> None:
        """Take the rows of the last pass, those that are massive at some layer by themselves."""
        masks = [massive_rows(hidden) for _, hidden in self._pass]
        if len({len(mask) for mask in masks}) == 1:
            apart = torch.stack([mask.to(masks[0].device) for mask in masks]).any(0)
        else:
            apart = None  # layers of different lengths: rows cannot be followed
        shared = None if apart is None else bool(apart.any())
        names = ("the input", *self._layers)
        for (place, hidden), own in zip(self._pass, masks, strict=True):
            rows = hidden.reshape(-1, hidden.shape[-1])
            mask = own if apart is None else apart.to(own.device)
            some = bool(mask.any()) if shared is None else shared
            self._rest[place].add(rows[~mask] if some else rows)
            if some:
                self._apart[place].add(rows[mask])
            here = massive_layer(names[place], hidden, own)
            self._massive[names[place]] = together(self._massive.get(names[place]), here)
        self._pass.clear()


def find_layers(model: nn.Module, layers: Sequence[nn.Module] | str | None = None) -> dict[str, nn.Module]:
    """The layers by name: those given, those below a dotted name, or the model's main list.

    The main list is the model's own `layers`, or else the `nn.ModuleList` that holds the most parameters.
    """
    names = {module: name for name, module in model.named_modules()}
    if isinstance(layers, str):
        if layers not in names.values():
            lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
            raise GeometryError(
                f"the model has no {layers!r}",
                setting="layers",
                given=layers,
                allowed=f"one of its lists {lists or '(there is none)'}",
            )
        listed: list[nn.Module] = list(model.get_submodule(layers).children())
    else:
        listed = list(_main_list(model) if layers is None else layers)
    if not listed:
        raise GeometryError(
            "there are no layers", setting="layers", given=layers, allowed="a list of modules, or its name"
        )
    if len(set(listed)) < len(listed):
        raise GeometryError(
            "a layer is listed twice",
            setting="layers",
            remedy="its outputs at different depths cannot be told apart",
        )
    return {names.get(module) or f"layer {i}": module for i, module in enumerate(listed, 1)}


def parts_of(layer: nn.Module) -> list[nn.Module]:
    """The norms and the maps below a layer."""
    return [
        module
        for module in layer.modules()
        if module is not layer
        and (normalises(module) or any(p.dim() > 1 for p in module.parameters(recurse=False)))
    ]


def _main_list(model: nn.Module) -> nn.ModuleList:
    own = getattr(model, "layers", None)
    if isinstance(own, nn.ModuleList) and len(own):
        return own
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise GeometryError(
            f"{type(model).__name__} has no list of layers",
            setting="layers",
            remedy="give layers=[...] or a dotted name",
        )
    return max(lists, key=lambda module: sum(p.numel() for p in module.parameters()))
