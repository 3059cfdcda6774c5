"""Measurements for calibration: exit readings on held-out text, thresholds, and costs of positions.

Readings, token by token, of teacher-forced text:

    z_k                (n, vocab) logits of predicting stage k = 0..K-1
    top_k              argmax_j z_{k,j}
    margin_k           z_{k,top_k} - max_{j ≠ top_k} z_{k,j}
    shift_k            max_j |z_{k+1,j} - z_{k,j}|                  "Product of Experts" §5.3
    gain_k             max_j D_j - D_{top_k},  D = z_{K-1} - z_k    the rival gain

The rival gain decides: for j ≠ top_k,

    z_{K-1,top_k} - z_{K-1,j} = (z_{k,top_k} - z_{k,j}) + D_{top_k} - D_j >= margin_k - gain_k,

so margin_k > gain_k means that the last stage has the same argmax. This is a fact about a token whose last
logits are known. A rule that must decide before has only a bound on the gain (`policy.thresholds`).

A calibration keeps, of the even windows of the text (the odd ones are left to measure agreement on):

    per transition k -> k+1     p99 and max of shift_k, rate of top_{k+1} ≠ top_k   "Product of Experts" §5.3
    per exit stage k = 0..K-2   p99 and max of the rival gain, agreement with the last stage
    τ_k(ε)                      flip-rate thresholds, for ε in `EPS`

The p99 is the smallest reading that at least 99 % of the tokens do not exceed. Flip-rate thresholds are ours,
not the paper's. ε is the share of *all* n tokens that may come out different from full depth. Each of the K-1
exits gets an equal part of it, and a token leaves where margin_k > τ_k:

    τ_k = min { τ >= 0 : #{ tokens that reach stage k, margin_k > τ, top_k ≠ top_{K-1} } <= ε n / (K-1) }

or infinity where no calibration token that reaches stage k has a margin above it. A part that an exit does
not use is not passed on. So on the calibration text at most ε n tokens differ. On other text the rate is an
empirical one and no guarantee.

Cost: O(K n vocab), with two tensors of (n, vocab) at a time; the caller chunks. Arithmetic is that of the
logits' dtype. Stored numbers are float32, on the CPU; rounding keeps order, so margin > gain stays sound.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from topograd.data.windows import Text
from topograd.decode.cache import Cache
from topograd.decode.drafters import AutoregressiveDrafter, Draft
from topograd.decode.engine import Engine
from topograd.decode.retrofitted import open_exits
from topograd.errors import ConfigError, DataError, RunError
from topograd.exec.forward import predict, stage_outputs
from topograd.limits import check_numbers, check_rules
from topograd.nn.stack import Stack
from topograd.nn.translator import TranslatedReader, Translator
from topograd.runs.session import LoadedTextRun
from topograd.runtime.protocol import Runtime, single_threaded_torch
from topograd.topology.plan import Plan

EPS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
"""Positions for which full depth is timed."""
ROUNDS = 7
TIMED_LENGTH = 256
"""Positions before the timed ones, where the context has them."""
TIMED_STEPS = 4
"""Computed guesses in a timed draft."""

_COLUMNS = ("top", "margin", "shift", "gain", "sequence")


@dataclass(frozen=True, eq=False)
class Readings:
    """Per-token CPU tensors of n tokens and K predicting stages."""

    top: Tensor
    """(K, n) long: each stage's most likely token."""
    margin: Tensor
    """(K, n): largest logit minus the second largest."""
    shift: Tensor
    """(K-1, n): the largest change of a logit from stage k to k+1."""
    gain: Tensor
    """(K-1, n): by how much the last stage moves some rival closer to stage k's top token; never negative."""
    sequence: Tensor
    """(n,) long: the sequence that a token came from, tokens in order."""

    def __len__(self) -> int:
        return len(self.sequence)

    @property
    def stages(self) -> int:
        """K, the number of predicting stages."""
        return len(self.top)

    def split(self) -> tuple[Readings, Readings]:
        """The even and the odd sequences: to calibrate on one half and to measure on the other."""
        even = self.sequence % 2 == 0
        return self.take(even), self.take(~even)

    def take(self, tokens: Tensor) -> Readings:
        """Some tokens, chosen by a mask (n,) or by indices."""
        return Readings(*(getattr(self, name)[..., tokens] for name in _COLUMNS))


@torch.no_grad()
def read(logits: Sequence[Tensor], sequence: Tensor) -> Readings:
    """The readings of K logits (n, vocab); `sequence` (n,) says which sequence each token is of."""
    last = logits[-1]
    if last.shape[-1] < 2:
        raise ConfigError(setting="vocab", given=last.shape[-1], allowed="at least 2: a margin needs a rival")
    tops = [z.argmax(-1) for z in logits]
    margins = [(best := z.topk(2).values)[:, 0] - best[:, 1] for z in logits]
    shifts, gains = [], []
    for k, z in enumerate(logits[:-1]):
        shifts.append((logits[k + 1] - z).abs().amax(-1))
        change = last - z
        gains.append(change.amax(-1) - change.gather(-1, tops[k][:, None]).squeeze(-1))
    none = [torch.empty(0, len(last))]  # one stage has no transitions
    shift, gain = (torch.cat([each[None].float().cpu() for each in row] or none) for row in (shifts, gains))
    margin = torch.stack(margins).float().cpu()
    return Readings(torch.stack(tops).cpu(), margin, shift, gain, sequence.long().cpu())


def join(parts: Sequence[Readings]) -> Readings:
    """The readings of all chunks as one, in the order given."""
    stages = sorted({part.stages for part in parts})
    if len(stages) != 1:
        raise ConfigError(setting="parts", given=stages, allowed="readings of one model, at least one")
    return Readings(*(torch.cat([getattr(part, name) for part in parts], dim=-1) for name in _COLUMNS))


def heldout_readings(
    session: LoadedTextRun,
    text: Text,
    batch: int = 4,
    on_batch: Callable[[int, int], None] | None = None,
    engine: Engine | None = None,
) -> Readings:
    """The readings of every exit on held-out text, a window a sequence; of an engine's quantised weights.

    Exits that a retrofit gave the run are read as it reads them.
    """
    quantised = engine is not None and engine.runtime.precision != "float32"
    runtime = engine.runtime if engine is not None and quantised else None
    exits = open_exits(session) if engine is None else engine.translators()
    return exit_readings(session.stack, session.plan, text, batch, on_batch, runtime, exits)


@torch.no_grad()
def exit_readings(
    stack: Stack,
    plan: Plan,
    text: Text,
    batch: int = 4,
    on_batch: Callable[[int, int], None] | None = None,
    runtime: Runtime | None = None,
    translators: Mapping[int, Translator] | None = None,
) -> Readings:
    """The readings of what each exit of a plan predicts, a window a sequence; in a runtime, or torch."""
    stages = plan.predicting()
    reader = TranslatedReader(
        stack if runtime is None else runtime, lambda: translators or {}, plan.stages[plan.last].head
    )
    device = next(stack.parameters()).device
    parts = []
    for start in range(0, len(text.inputs), batch):
        inputs = text.inputs[start : start + batch].to(device)
        counted = (text.targets[start : start + batch] != -100).to(device)
        if runtime is None:
            outputs = stage_outputs(stack, plan, inputs, stages)
        else:
            outputs = cached_outputs(runtime, plan, inputs, stages)
        sequence = torch.arange(start, start + len(inputs), device=device)[:, None].expand_as(inputs)
        flat = {k: h[counted] for k, h in outputs.items()}
        logits = [predict(reader, plan, flat, plan.prediction.after(k)) for k in stages]
        parts.append(read(logits, sequence[counted]))
        if on_batch is not None:
            on_batch(min(start + batch, len(text.inputs)), len(text.inputs))
    return join(parts)


@torch.inference_mode()
def cached_outputs(runtime: Runtime, plan: Plan, inputs: Tensor, stages: list[int]) -> dict[int, Tensor]:
    """The last hidden state of each of `stages` at every position, as a runtime decodes them."""
    cache = Cache(runtime, plan, inputs.shape[1])
    batch = [cache.new() for _ in inputs]
    cache.push(batch, inputs.tolist())
    counts = [inputs.shape[1]] * len(batch)
    outputs = {}
    for stage in stages:
        cache.run(batch, stage)
        outputs[stage] = cache.hidden(batch, stage, counts).unflatten(0, tuple(inputs.shape))
    return outputs


@torch.inference_mode()
def precision_cost(
    session: LoadedTextRun, engine: Engine, text: Text, on_batch: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """The engine's quantised weights against the session's: bits per byte and top-1 agreement of every exit.

    Both read the same windows whole; the quantised one in its own runtime, activations included. Limits:
    windows are read at once, so sums of 8-bit products round in another order than token by token.
    """
    stack, plan, runtime = session.stack, session.plan, engine.runtime
    stages = plan.predicting()
    nats = torch.zeros(2, len(stages), dtype=torch.float64)
    agree, tokens = torch.zeros(len(stages), dtype=torch.float64), 0
    for row in range(len(text.inputs)):
        inputs, targets = text.inputs[row : row + 1], text.targets[row]
        counted = targets != -100
        own = stage_outputs(stack, plan, inputs, stages)
        other = cached_outputs(runtime, plan, inputs, stages)
        for k, stage in enumerate(stages):
            terms = plan.prediction.after(stage)
            z = [
                predict(reader, plan, {j: h[0][counted] for j, h in outputs.items()}, terms)
                for reader, outputs in ((stack, own), (runtime, other))
            ]
            for which, logits in enumerate(z):
                nats[which, k] += F.cross_entropy(logits, targets[counted], reduction="sum").double()
            agree[k] += (z[0].argmax(-1) == z[1].argmax(-1)).sum()
        tokens += int(counted.sum())
        if on_batch is not None:
            on_batch(row + 1, len(text.inputs))
    bpb = (nats / (math.log(2) * max(text.nbytes, 1))).tolist()
    return {
        "runtime": runtime.name,
        "weights": runtime.precision,
        "bpb": bpb[1],
        "float32_bpb": bpb[0],
        "agreement": (agree / max(tokens, 1)).tolist(),
        "tokens": tokens,
    }


# The numbers that are kept


@dataclass(frozen=True)
class Bounds:
    """p99 and max of one reading, a number per stage or transition 0..K-2."""

    p99: tuple[float, ...]
    max: tuple[float, ...]

    @classmethod
    def of(cls, readings: Tensor) -> Bounds:
        rank = -(-99 * readings.shape[1] // 100)
        p99, most = readings.kthvalue(rank, dim=1).values, readings.amax(1)
        return cls(tuple(p99.tolist()), tuple(most.tolist()))


@dataclass(frozen=True)
class Calibration:
    """The numbers of the module's head. Make it with `Calibration.of`."""

    step: int
    """The training step of the weights that were read."""
    stages: int
    tokens: int
    shift: Bounds
    gain: Bounds
    change_rate: tuple[float, ...]
    """Rate of top_{k+1} ≠ top_k, for each transition."""
    agreement: tuple[float, ...]
    """Rate of top_k = top_{K-1}, for all K stages; the last is 1."""
    flip_thresholds: tuple[tuple[float, ...], ...]
    """τ_k(ε): for each ε of `EPS` a number for each exit stage."""

    def __post_init__(self) -> None:
        def rule(rows: Sequence[Sequence[float]], count: int, most: float) -> tuple[bool, str]:
            fits = all(len(row) == count and all(0 <= value <= most for value in row) for row in rows)
            return fits, f"{count} numbers of 0..{most:g}"

        check_numbers(self, step=(0, math.inf), stages=(2, math.inf), tokens=(1, math.inf))
        exits, finite = self.stages - 1, sys.float_info.max
        check_rules(
            self,
            shift=rule((self.shift.p99, self.shift.max), exits, finite),
            gain=rule((self.gain.p99, self.gain.max), exits, finite),
            change_rate=rule([self.change_rate], exits, 1),
            agreement=rule([self.agreement], self.stages, 1),
            flip_thresholds=rule(self.flip_thresholds, exits, math.inf),
        )

    @classmethod
    def of(cls, readings: Readings, step: int) -> Calibration:
        """Calibrate on readings of the weights of training step `step`."""
        if readings.stages < 2:
            problem = "a model with 1 predicting stage has no early exit"
            remedy = "train one with at least 2 stages"
            raise RunError(problem, setting="stages", given=readings.stages, remedy=remedy)
        if not len(readings):
            problem = "there are no tokens to calibrate on"
            raise DataError(problem, setting="tokens", given=0, remedy="give more text")
        numbers = torch.cat((readings.margin, readings.shift, readings.gain))
        strange = int((~numbers.isfinite()).any(0).sum())
        if strange:
            problem = f"the logits of {strange} of {len(readings)} tokens are not finite"
            remedy = "calibrate weights from before the run diverged"
            raise RunError(problem, setting="logits", given=strange, remedy=remedy)
        top = readings.top
        changes, agreement = (
            hits.double().mean(1).tolist() for hits in (top[1:] != top[:-1], top == top[-1])
        )
        return cls(
            step=step,
            stages=readings.stages,
            tokens=len(readings),
            shift=Bounds.of(readings.shift),
            gain=Bounds.of(readings.gain),
            change_rate=tuple(changes),
            agreement=tuple(agreement),
            flip_thresholds=tuple(flip_thresholds(readings, eps) for eps in EPS),
        )


def flip_thresholds(readings: Readings, eps: float) -> tuple[float, ...]:
    """τ_k(ε) for each exit stage, in order: which tokens reach a stage depends on those before it."""
    # The grid's ε are decimals: 0.29 · 100 is 28.999... in binary, and one flip would be lost.
    allowed = math.floor(eps * len(readings) / (readings.stages - 1) + 1e-9)
    here = torch.ones(len(readings), dtype=torch.bool)
    thresholds = []
    for margin, top in zip(readings.margin[:-1], readings.top[:-1], strict=True):
        wrong = margin[here & (top != readings.top[-1])]
        excess = len(wrong) - allowed
        tau = wrong.kthvalue(excess).values.item() if excess > 0 else 0.0
        leaves = here & (margin > tau)
        thresholds.append(tau if leaves.any() else math.inf)
        here &= ~leaves
    return tuple(thresholds)


# Costs of positions


@dataclass(frozen=True)
class PositionCosts:
    """Seconds on one host. A round with d drafted tokens, of which t were computed and k of those kept, takes

    verify(d + 1) + t draft + k keep, and start where t > 0.
    """

    verify: Mapping[int, float]
    """Full depth with its readout, for some numbers of positions at once; at least two sizes."""
    draft: float = 0.0
    """A computed guess, kept or not."""
    keep: float = 0.0
    """What a computed guess costs more where it is kept: a prefix runs its stages one position at a time,
    which the verification then need not, so that a guess that is not kept costs little more than its readout.
    """
    uneven: float = 0.0
    """What a pass over several sequences costs more where some of them have drafts."""
    start: float = 0.0
    """What the first computed guess of a round costs more: a block has all of its guesses in one pass."""

    def __post_init__(self) -> None:
        if len(self.verify) < 2 or min(self.verify) < 1:
            allowed = "seconds of at least two sizes from 1 up"
            raise ConfigError(setting="verify", given=sorted(self.verify), allowed=allowed)
        for name, seconds, least in (
            *(("verify", value, math.ulp(0)) for value in self.verify.values()),
            *((name, getattr(self, name), 0.0) for name in ("draft", "keep", "uneven", "start")),
        ):
            if not least <= seconds < math.inf:
                raise ConfigError(setting=name, given=seconds, allowed="a finite number of seconds")

    def computed(self, start: float = 0.0, draft: float = 0.0, keep: float = 0.0) -> PositionCosts:
        """With the seconds of a computed drafter."""
        return replace(self, start=start, draft=draft, keep=keep)

    @property
    def full(self) -> float:
        """One token at full depth."""
        return self.seconds(1)

    def seconds(self, positions: int) -> float:
        """Full depth on some positions at once: linear between the sizes measured, and beyond them."""
        sizes = sorted(self.verify)
        right = min(max(bisect_left(sizes, positions), 1), len(sizes) - 1)
        low, high = sizes[right - 1], sizes[right]
        return self.verify[low] + (self.verify[high] - self.verify[low]) * (positions - low) / (high - low)

    def as_dict(self) -> dict[str, Any]:
        """The seconds as JSON holds them."""
        return {**vars(self), "verify": {str(size): seconds for size, seconds in self.verify.items()}}


def lower_quartile(seconds: Sequence[float]) -> float:
    """On a busy machine the slow moments are not the model's."""
    return sorted(seconds)[len(seconds) // 4]


@torch.inference_mode()
def measure_positions(engine: Engine, rounds: int | None = None) -> PositionCosts:
    """Seconds of full depth on some positions at once, on this host."""
    length = max(1, min(engine.context // 2, TIMED_LENGTH))
    sizes = [size for size in SIZES if size <= engine.context - length] or [1]
    batch = engine.start([[0] * length])
    engine.run(batch, engine.exits[-1])
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for _, size in itertools.product(range(2), sizes):
        seconds[size] += _settled(rounds or ROUNDS, partial(_round_seconds, engine, batch, size))
    verify, least = {}, 0.0
    for size in sizes:  # more positions never cost less
        verify[size] = least = max(least, lower_quartile(seconds[size]))
    if len(verify) < 2:
        verify[2] = 2 * verify[1]
    return PositionCosts(verify)


@torch.inference_mode()
def measure_draft(engine: Engine, drafter: AutoregressiveDrafter) -> dict[str, float]:
    """What computed guesses cost, as `PositionCosts` has it (start, draft, keep), by whole rounds.

    Of rounds with one guess that is not kept, with one that is, and with several.
    """
    length = max(1, min(engine.context // 2, TIMED_LENGTH))
    steps = min(TIMED_STEPS, drafter.most, engine.context - length - 1)
    if steps < 1:
        allowed = "at least 3, to have room for drafts"
        raise ConfigError(setting="context", given=engine.context, allowed=allowed)
    batch = engine.start([[0] * length])
    engine.run(batch, engine.exits[-1])
    seconds: dict[tuple[int, bool], list[float]] = {}  # by the guesses kept, and whether they are computed
    for _, kept, computed in itertools.product(range(2), sorted({0, 1, steps}), (False, True)):
        work = partial(_round_seconds, engine, batch, kept + 1, drafter if computed else None)
        seconds.setdefault((kept, computed), []).extend(_settled(ROUNDS, work))
    low = {key: lower_quartile(each) for key, each in seconds.items()}
    none, one, all_ = (low[kept, True] - low[kept, False] for kept in (0, 1, steps))
    keep = max(0.0, one - none)
    draft = max(0.0, (all_ - one) / (steps - 1) - keep) if steps > 1 else max(0.0, none)
    return {"start": max(0.0, none - draft), "draft": draft, "keep": keep}


def _settled(rounds: int, seconds: Callable[[], float]) -> list[float]:
    """The later half of rounds of one kind: a small model's weights are in the caches then, as in a text."""
    return [seconds() for _ in range(rounds)][rounds // 2 :]


def _round_seconds(
    engine: Engine, batch: list[Any], positions: int, drafter: AutoregressiveDrafter | None = None
) -> float:
    """Seconds to run and read some positions behind a batch of one, the guesses among them computed first."""
    cache, full, length, draft = batch[0].cache, engine.exits[-1], len(batch[0]), Draft()
    with single_threaded_torch(engine.runtime):
        began = time.perf_counter()
        cache.push(batch, [[0]])
        if drafter is None:
            draft.tokens = [0] * (positions - 1)
        else:
            drafter.begin(batch)
            for step in range(max(positions - 1, 1)):
                drafter.scores(drafter.step(batch, [draft])).tolist()
                if step < positions - 1:
                    draft.add(0, drafter.name, 1.0)
        cache.push(batch, [draft.tokens[draft.pushed :]])
        engine.run(batch, full)
        engine.logits(batch, full, [positions]).max(-1).indices.tolist()
        seconds = time.perf_counter() - began
    cache.truncate(batch, [length])
    return seconds


@torch.inference_mode()
def measure_uneven(engine: Engine) -> float:
    """Seconds that a pass over several sequences takes more where one of them has two positions."""
    length, sequences, rounds = max(1, min(engine.context // 2, TIMED_LENGTH)), 8, 5
    batch, full = engine.start([[0] * length] * sequences), engine.exits[-1]
    engine.run(batch, full)
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for _, first in itertools.product(range(rounds), seconds):
        with single_threaded_torch(engine.runtime):
            began = time.perf_counter()
            batch[0].cache.push(batch, [[0] * first, *[[0]] * (sequences - 1)])
            engine.run(batch, full)
            seconds[first].append(time.perf_counter() - began)
            batch[0].cache.truncate(batch, [length] * sequences)
    return max(0.0, lower_quartile(seconds[2]) - lower_quartile(seconds[1]))
