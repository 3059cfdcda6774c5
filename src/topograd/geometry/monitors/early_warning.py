"""Early warning in a training loop: a few cheap signals at every step, and alarms on outliers.

    monitor = EarlyWarning(model, head="lm_head")
    with monitor:
        for step, batch in enumerate(batches):
            loss = ...; loss.backward()
            for alarm in monitor.read(step, loss):   # before gradients are clipped
                print(alarm)
            optimizer.step()

Signals, one number each at every `every`-th step, those of `SLOW` at every `slow_every`-th:

    loss             itself, for comparison
    gradient_norm    of all gradients
    update_size      root mean square of g / √v over the optimizer's second moments v, where it has them
    logit_size       the largest |output| of the head
    dead_units       1 + the share of outputs of maps whose weights have no gradient at all, in percent
    rank             effective rank of the last layer's activations, `ROWS` rows in `CHANNELS` channels
    stream_sigma     σ_r(H_L) / σ_r(H_0): the last layer's activations over the first one's inputs, r the rank
                     of the inputs (Corollary 58), on the same rows and channels
    turning_rank     how far that singular value of H_L which fell most is below its own usual value: a rank
                     that did not change and begins to fall turns from tangential to transversal (Remark 6)
    anisotropy       λ_max / λ_min of the head's gradient factor without the softmax direction (Algorithm 1,
                     `head_factor.py`): up when classes are added to a head, down when idle ones appear
    head_bottom      λ_min of the same factor
    norm_ratio_drift the largest |log ‖W_a‖ / ‖W_b‖| that pairs of neighbouring maps have moved from the start
    layer_update     how far the relative update of that tensor which grew most is above its own usual one
    critical_sharpness  of the last update (`updates.py`), where `again` is given

The usual value of one of many is the median of its last `MEMORY` readings. The last two are of the step after
a slow reading, and come with the next call of `read`.

An alarm: the logarithm of a signal is `DEVIATIONS` robust standard deviations (1.4826 MAD, at least `SLACK`)
from the median of the last `MEMORY` readings, on its bad side; after one, `REST` readings of that signal are
quiet.

Symbols. m rows, d channels, C classes. Cost: a norm of every gradient; a few small products; a copy of the
weights during the step after a slow reading. No second backward pass; hooks are there only while the monitor
is entered.
Source: "Dead Directions: Geometric Singular Learning" §5.1, Corollary 58, Remark 6 and Algorithm 1 (streams,
ranks, factors; norm ratios as in Remark 80); gradient norm and update size after Wortsman et al., "Stable and
low-precision training for large-scale vision-language models"; logits after Wortsman et al., "Small-scale
proxies for large-scale Transformer training instabilities". `python benchmarks/monitors.py` measures what
each of them detects.
Limits. A signal that drifts steadily faster than its noise alarms too. On sharded models each rank reads its
own part.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from topograd.effective_rank import effective_rank
from topograd.errors import GeometryError
from topograd.geometry.host_copy import to_host
from topograd.geometry.monitors.head_factor import head_spectrum
from topograd.geometry.monitors.hooks import ModelHooks
from topograd.geometry.monitors.moments import RESOLUTION, hidden_of
from topograd.geometry.monitors.outliers import DEVIATIONS, MEMORY, Furthest, Side, deviation
from topograd.geometry.monitors.stream import find_layers
from topograd.geometry.monitors.updates import Again, UpdateReader

SIGNALS: Mapping[str, Side] = {
    "loss": "up",
    "gradient_norm": "up",
    "update_size": "up",
    "logit_size": "up",
    "dead_units": "up",
    "rank": "down",
    "stream_sigma": "down",
    "turning_rank": "up",
    "anisotropy": "both",
    "head_bottom": "down",
    "norm_ratio_drift": "up",
    "layer_update": "up",
    "critical_sharpness": "up",
}
FAST = ("loss", "gradient_norm", "logit_size")
UPDATES = ("layer_update", "critical_sharpness")
"""Of the step after a slow reading."""
SLOW = tuple(name for name in SIGNALS if name not in (*FAST, *UPDATES))
"""Those that cost more than a norm."""
REST = 10
ACTIVE = 1e-5
"""Of the largest singular value, in float32: a direction of the inputs below it is none."""
ROWS, CHANNELS = 512, 32
Writer = Callable[[int, Mapping[str, float]], None]
"""Takes a step and its signals."""


@dataclass(frozen=True)
class Alarm:
    """An outlier of one signal."""

    signal: str
    step: int
    value: float
    usual: float

    def __str__(self) -> str:
        return f"step {self.step}: {self.signal} is {self.value:.4g}, usually {self.usual:.4g}"


class EarlyWarning(ModelHooks):
    """Reads the signals of one model while it trains."""

    def __init__(
        self,
        model: nn.Module,
        *,
        head: str | nn.Module | None = None,
        layers: Sequence[nn.Module] | str | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        every: int = 1,
        slow_every: int = 10,
        signals: Sequence[str] | None = None,
        again: Again | None = None,
        writer: Writer | None = None,
    ) -> None:
        """`head` gives the logits (by default the last map that the model registers), `layers` the stream.

        Signals of `SLOW` are read at every `slow_every`-th step only.
        `optimizer` is read for its second moments and updates; `again` gives the loss of this step's batch
        anew, for the critical sharpness. A signal that cannot be had here is in `missing`.
        """
        super().__init__()
        if min(every, slow_every) < 1:
            name, value = ("every", every) if every < 1 else ("slow_every", slow_every)
            raise GeometryError(setting=name, given=value, allowed="at least 1 step")
        wanted = list(SIGNALS) if signals is None else list(signals)
        if unknown := [name for name in wanted if name not in SIGNALS]:
            raise GeometryError(setting="signals", given=unknown[0], allowed=f"from {', '.join(SIGNALS)}")
        self._model, self._optimizer, self._writer = model, optimizer, writer
        self._every, self._slow_every = every, slow_every
        self._wanted = wanted
        self._head = _find_head(model, head)
        self._layers: list[nn.Module] = []
        try:
            self._layers = list(find_layers(model, layers).values())
        except GeometryError:
            if layers is not None:
                raise
        self._pairs = _neighbours(model)
        self._maps = _maps(model)
        self._start = self._log_ratios()
        self._seen: dict[str, Tensor] = {}
        self._again = again
        self._updates: UpdateReader | None = None
        self._furthest = {"turning_rank": Furthest(-1), "layer_update": Furthest(1)}
        self._past: dict[str, deque[float]] = {name: deque(maxlen=MEMORY) for name in wanted}
        self._quiet: dict[str, int] = dict.fromkeys(wanted, 0)
        self._slow_now = True
        self._next = self._next_slow = 0
        self.last_step = -1
        """The step that was read last."""
        self.rest = REST
        """Readings of a signal after its alarm that raise none."""
        self.alarms: list[Alarm] = []
        self.norm: Callable[[], float] | None = None
        """The norm of all gradients, if they are clipped before `read` (`adapters.UnclippedNorms`)."""
        no_head = None if self._head is not None else "no head was found; give head="
        no_layers = None if self._layers else "no list of layers was found; give layers="
        no_optimizer = None if optimizer is not None else "no optimizer was given"
        reasons = {
            "update_size": no_optimizer,
            "layer_update": no_optimizer,
            "critical_sharpness": no_optimizer if again is not None else "again= was not given",
            "logit_size": no_head,
            "anisotropy": no_head,
            "head_bottom": no_head,
            **dict.fromkeys(("rank", "stream_sigma", "turning_rank"), no_layers),
            "norm_ratio_drift": None if self._pairs else "no two maps in a row were found",
        }
        self.missing = {name: why for name, why in reasons.items() if why and name in wanted}

    def watch_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Read the second moments and updates of this one from now on."""
        self._optimizer = optimizer
        for name in ("update_size", "layer_update"):
            self.missing.pop(name, None)
        if self._handles:  # the hooks are on
            self._handles += self._watch_updates()

    def _attach(self) -> list[RemovableHandle]:
        handles = self._watch_updates()
        if self._layers:
            first, last = self._layers[0], self._layers[-1]
            handles.append(first.register_forward_pre_hook(self._see_input, with_kwargs=True))
            handles.append(last.register_forward_hook(self._see_layer))
        if self._head is not None:
            handles.append(self._head.register_forward_hook(self._see_head))
        return handles

    def _watch_updates(self) -> list[RemovableHandle]:
        if self._optimizer is None or not any(name in self._wanted for name in UPDATES):
            return []
        again = self._again if "critical_sharpness" in self._wanted else None
        self._updates = UpdateReader(self._optimizer, again)
        return self._updates.handles

    def read(self, step: int, loss: Tensor | float | None) -> list[Alarm]:
        """The alarms of this step; call it after backward and before gradients are clipped.

        Where there is no loss, None, the other signals are read.
        """
        signals = self._update_signals()
        if step < self._next:
            return self._raise(step, _numbers(signals)) if signals else []
        self.last_step = step
        self._next = step + self._every
        self._slow_now = step >= self._next_slow
        if self._slow_now:
            self._next_slow = step + self._slow_every
        if self._slow_now and self._updates is not None:
            self._updates.follow()
        found = _numbers(signals | self._signals(loss))
        values = {name: value for name, value in found.items() if math.isfinite(value) or name == "loss"}
        self._seen.clear()
        return self._raise(step, values)

    def _raise(self, step: int, values: Mapping[str, float]) -> list[Alarm]:
        """Judge the values of a step, and write them."""
        raised = [alarm for name, value in values.items() if (alarm := self._judge(name, step, value))]
        self.alarms += raised
        if self._writer is not None:
            self._writer(step, {**values, **{f"alarm/{alarm.signal}": 1.0 for alarm in raised}})
        return raised

    def state(self) -> dict[str, Any]:
        """What alarms of later steps depend on, as JSON."""
        past = {name: list(values) for name, values in self._past.items()}
        due = [self.last_step, self._next, self._next_slow]
        each = {name: one.state() for name, one in self._furthest.items()}
        return {"past": past, "quiet": dict(self._quiet), "due": due, "start": self._start, "each": each}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on as the monitor that gave this state."""
        for name, values in state["past"].items():
            self._past[name] = deque(values, maxlen=MEMORY)
        self._quiet = dict(state["quiet"])
        self.last_step, self._next, self._next_slow = state["due"]
        self._start = list(state["start"])
        for name, rows in state["each"].items():
            self._furthest[name].load_state(rows)

    def _judge(self, name: str, step: int, value: float) -> Alarm | None:
        past = self._past[name]
        here = math.log(value) if 0 < value < math.inf else (math.inf if not math.isfinite(value) else -50.0)
        alarm = None
        if self._quiet[name] <= 0 and deviation(past, here, SIGNALS[name]) > DEVIATIONS:
            alarm = Alarm(name, step, value, math.exp(statistics.median(past)))
            self._quiet[name] = self.rest
        self._quiet[name] -= 1
        if math.isfinite(here):
            past.append(here)
        return alarm

    @torch.no_grad()
    def _signals(self, loss: Tensor | float | None) -> dict[str, Tensor | float]:
        readers: dict[str, Callable[[], Tensor | float | None]] = {
            "loss": lambda: loss.detach() if isinstance(loss, Tensor) else loss,
            "gradient_norm": self._gradient_norm,
            "update_size": self._update_size,
            "logit_size": lambda: self._seen.get("logits"),
            "dead_units": self._dead_units,
            "rank": self._rank,
            "stream_sigma": self._stream_sigma,
            "turning_rank": self._turning_rank,
            "anisotropy": lambda: self._of_head(lambda s: s[-1] / s[0].clamp_min(RESOLUTION * s[-1])),
            "head_bottom": lambda: self._of_head(lambda s: s[0]),
            "norm_ratio_drift": self._drift,
        }
        signals: dict[str, Tensor | float] = {}
        for name in self._wanted:
            if name in (*self.missing, *UPDATES) or (name in SLOW and not self._slow_now):
                continue
            if (value := readers[name]()) is not None:
                signals[name] = value
        return signals

    def _gradient_norm(self) -> Tensor | float | None:
        if self.norm is not None:
            return self.norm()
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        norms = torch._foreach_norm(gradients) if gradients else ()
        return torch.stack([norm.float() for norm in norms]).norm() if norms else None

    def _update_size(self) -> float | None:
        """√ mean of g² / v, over tensors of a million numbers at most."""
        assert self._optimizer is not None
        sums: list[Tensor] = []
        count = 0
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                state = self._optimizer.state.get(p, {})
                v = state.get("exp_avg_sq")
                if v is None or p.grad is None or p.numel() > 1_000_000:
                    continue
                sums.append((p.grad.square() / v.clamp_min(1e-16)).clamp_max(1e6).sum())
                count += p.numel()
        return math.sqrt(sum(to_host(sums)) / count) if count else None

    def _dead_units(self) -> float | None:
        sizes = [p.grad.abs().amax(1) for p in self._maps if p.grad is not None]
        rows = sum(len(size) for size in sizes)
        return 1 + 100 * sum(to_host([(size == 0).sum() for size in sizes])) / rows if rows else None

    def _update_signals(self) -> dict[str, Tensor | float]:
        """What the last step that was followed showed, once."""
        reader = self._updates
        if reader is None or reader.sizes is None:
            return {}
        grown = self._furthest["layer_update"].read(reader.sizes)
        found = {"layer_update": grown, "critical_sharpness": reader.sharpness}
        reader.sizes = reader.sharpness = None
        return {name: one for name, one in found.items() if one is not None and name in self._wanted}

    def _singular_values(self, where: str) -> Tensor | None:
        """Of sampled rows of a place of the stream, largest first; made once a reading."""
        if where in self._seen and f"{where} values" not in self._seen:
            self._seen[f"{where} values"] = torch.linalg.svdvals(self._seen[where].float()).cpu()
        return self._seen.get(f"{where} values")

    def _rank(self) -> float | None:
        values = self._singular_values("rows")
        return None if values is None else float(effective_rank(values))

    def _stream_sigma(self) -> float | None:
        first, last = self._singular_values("inputs"), self._singular_values("rows")
        if first is None or last is None or not first[0] > 0:
            return None
        r = min(int((first > ACTIVE * first[0]).sum()), len(last))
        return float(last[r - 1] / first[r - 1])

    def _turning_rank(self) -> float | None:
        values = self._singular_values("rows")
        turned = None if values is None else self._furthest["turning_rank"].read(values)
        return None if turned is None else float(turned)

    def _of_head(self, number: Callable[[Tensor], Tensor]) -> float | None:
        """Of the eigenvalues of the head's gradient factor, which are made once a reading."""
        if "gradients" in self._seen and "spectrum" not in self._seen:
            found = head_spectrum(self._seen["gradients"])
            if found is not None:
                self._seen["spectrum"] = found
        return float(number(self._seen["spectrum"])) if "spectrum" in self._seen else None

    def _drift(self) -> float | None:
        now = self._log_ratios()
        return 1 + max(abs(now[i] - self._start[i]) for i in range(len(now))) if now else None

    def _log_ratios(self) -> list[float]:
        if not self._pairs:
            return []
        named = dict(self._model.named_parameters())
        flat = [named[name].detach() for pair in self._pairs for name in pair]
        norms = (
            torch.stack([norm.float() for norm in torch._foreach_norm(flat)]).clamp_min(1e-30).log().tolist()
        )
        return [norms[i] - norms[i + 1] for i in range(0, len(norms), 2)]

    def _slow_next(self) -> bool:
        """Whether the next reading has the slow signals."""
        return self._next >= self._next_slow

    def _ignored(self) -> bool:
        """Whether a forward pass is not one of the training."""
        return self._updates is not None and self._updates.passing

    def _see_input(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        self._see_rows("inputs", args or tuple(kwargs.values()))

    def _see_layer(self, layer: nn.Module, args: Any, output: Any) -> None:
        self._see_rows("rows", output)

    def _see_rows(self, where: str, hidden: Any) -> None:
        if not self._slow_next() or self._ignored():
            return
        rows = _sampled_rows(hidden_of(hidden, where))
        width = rows.shape[1]
        if width > CHANNELS:
            rows = rows[:, :: width // CHANNELS][:, :CHANNELS]
        self._seen[where] = rows.clone()  # the model may overwrite its own

    def _see_head(self, head: nn.Module, args: Any, output: Any) -> None:
        if not isinstance(output, Tensor) or self._ignored():
            return
        self._seen["logits"] = output.detach().abs().max()
        factor = "anisotropy" in self._wanted or "head_bottom" in self._wanted
        if output.requires_grad and factor and self._slow_next():
            output.register_hook(lambda gradient: self._seen.update(gradients=_sampled_rows(gradient)))


def _sampled_rows(hidden: Tensor) -> Tensor:
    """At most ROWS rows of (..., d), evenly spaced."""
    rows = hidden.detach().reshape(-1, hidden.shape[-1])
    return rows[:: max(1, len(rows) // ROWS)][:ROWS]


def _find_head(model: nn.Module, head: str | nn.Module | None) -> nn.Module | None:
    if isinstance(head, nn.Module):
        return head
    modules = dict(model.named_modules())
    if isinstance(head, str):
        if head not in modules:
            raise GeometryError(
                f"the model has no {head!r}",
                setting="head",
                given=head,
                remedy=f"its last modules are {', '.join(list(modules)[-3:])}",
            )
        return modules[head]
    for name in ("lm_head", "head", "classifier"):
        if name in modules:
            return modules[name]
    maps = [module for module in modules.values() if isinstance(module, nn.Linear)]
    return maps[-1] if maps else None


def _maps(model: nn.Module) -> list[nn.Parameter]:
    """Matrices other than tables of embeddings, whose rows often have no gradient, and than large heads."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return [p for p in model.parameters() if p.dim() == 2 and id(p) not in tables and p.shape[0] <= 16384]


def _neighbours(model: nn.Module) -> list[tuple[str, str]]:
    """Maps in a row: outputs of the first are as many as the inputs of the next, below one module."""
    pairs = []
    for path, module in model.named_modules():
        own = [
            (f"{path}.{name}.weight".lstrip("."), child.weight.shape)
            for name, child in module.named_children()
            if isinstance(getattr(child, "weight", None), Tensor)
            and child.weight.dim() == 2
            and not isinstance(child, nn.Embedding)
        ]
        for (one, first), (other, second) in pairwise(own):
            if first[0] == second[1]:
                pairs.append((one, other))
    named = dict(model.named_parameters())
    return [pair for pair in pairs if pair[0] in named and pair[1] in named]


def _numbers(signals: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Signals as numbers, those that are on a device in one copy."""
    waiting = {name: value for name, value in signals.items() if isinstance(value, Tensor)}
    numbers = dict(zip(waiting, to_host([value.reshape(()) for value in waiting.values()]), strict=True))
    return {name: numbers.get(name, value) for name, value in signals.items()}
