"""Evaluation on text: bits per byte, calibration, effective rank and usefulness of each stage.

    BPB       total nats of the targets / (ln 2 · bytes that they decode to): of what the model predicts
              (`Plan.prediction`), of each exit, of each stage alone, and of three ways of pooling
    ECE       Σ_b (n_b / N) |accuracy_b - confidence_b| over 15 equal bins of the largest probability
    r_eff     exp(-Σ σ̂ log σ̂), σ̂ the normalised singular values of a stage's last hidden states
              (tokens × width)                            "Stage-Partitioned Learning" eq. 23
    U_k       CE(A_{k-1}, y) - CE(A_{k-1} + z_k, y), A the running sum of logits         eq. 35

One pass; logits are made by the chunk, for all stages side by side. Cost: one forward, K readouts.
Limits: the effective rank comes from the first `RANK_TOKENS` tokens.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from topograd.data.windows import Text
from topograd.effective_rank import effective_rank
from topograd.errors import ConfigError
from topograd.exec.forward import Predictor, evaluating, predict, stage_outputs
from topograd.exec.linear_cross_entropy import chunk_tokens
from topograd.nn.host_numbers import to_device
from topograd.nn.interface_config import InterfaceSettings
from topograd.nn.pooling import pool
from topograd.nn.relays import BoundedRelay
from topograd.nn.stack import Stack
from topograd.topology.plan import AnyPlan, Plan
from topograd.topology.prediction import Terms

BINS = 15
RANK_TOKENS = 2048


@dataclass(frozen=True)
class ByPrediction:
    """One number, such as bits per byte or accuracy, for each way to predict."""

    prediction: float
    """Of the plan's prediction."""
    prefix: list[float]
    """What each exit predicts."""
    stages: list[float]
    """Each predicting stage's logits alone."""
    last: float
    """The last stage alone."""
    sum: float
    """The sum of all stages' logits: the product of experts."""
    mean: float
    """Their mean: the geometric mean of the distributions."""
    shrinkage: float
    """Their sum, each weighted by its confidence."""


@dataclass(frozen=True)
class ExitReadings:
    """What every evaluation reads. Lists have an entry for each exit, that is, for each predicting stage."""

    ece: list[float]
    """Calibration error of each exit."""
    reliability: list[dict[str, list[float | None]]]
    """Mean confidence, accuracy and count by bin of confidence, for each exit."""
    effective_rank: list[float]
    """Of the last hidden states of each predicting stage."""
    usefulness: list[float | None]
    """U_k: what adding a stage to the sum of the earlier ones gains, in nats a token; the first has none."""

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, as `--json` prints them and a run keeps them."""
        values = asdict(self)
        details = [field.name for field in fields(ExitReadings)]  # the result comes first
        return {name: values[name] for name in sorted(values, key=details.__contains__)}


@dataclass(frozen=True)
class Evaluation(ExitReadings):
    """What `evaluate` reads."""

    bpb: ByPrediction
    tokens: int
    bytes: int

    @property
    def logged(self) -> dict[str, Any]:
        """What the run's log keeps."""
        return {"bpb": asdict(self.bpb)}

    @property
    def words(self) -> str:
        return f"BPB {self.bpb.prediction:.3f}"


class _Tally:
    """Sums over tokens, in float64."""

    def __init__(self, exits: int, device: torch.device) -> None:
        self.stages = torch.zeros(exits, dtype=torch.float64, device=device)
        self.exits, self.running = torch.zeros_like(self.stages), torch.zeros_like(self.stages)
        self.pooled = dict.fromkeys(("mean", "shrinkage"), self.stages.new_zeros(()))
        self.bins = self.stages.new_zeros(exits, BINS, 3)  # count, confidence, accuracy
        self.full = self.stages.new_zeros(())
        self.tokens = 0

    def add(self, alone: list[Tensor], exits: list[Tensor], full: Tensor, targets: Tensor) -> None:
        """Logits of a chunk: of each stage alone, of each exit (maybe the same tensor), of the model."""
        total = torch.zeros_like(alone[0])
        for k, (z, exit_) in enumerate(zip(alone, exits, strict=True)):
            total = total + z
            self.stages[k] += (nats := _nats(z, targets))
            self.exits[k] += nats if exit_ is z else _nats(exit_, targets)
            self.running[k] += _nats(total, targets)
            self.bins[k] += confidence_bins(exit_, targets)
        for how in self.pooled:
            self.pooled[how] = self.pooled[how] + _nats(pool(alone, how), targets)
        self.full += _nats(full, targets)
        self.tokens += len(targets)


def check_causal(settings: InterfaceSettings) -> None:
    """Raise ConfigError for an interface through which a position reads its own answer."""
    if not settings.causal:
        raise ConfigError(
            "this interface reads all positions, so next-token losses and bits per byte would be of a model "
            "that sees the future",
            setting="interface",
            given=settings,
            remedy="use a causal form, as S=8,r=8 or residual:r=8; others are for encoders (--task masked)",
        )


@torch.no_grad()
def evaluate(
    stack: Stack,
    topology: AnyPlan,
    text: Text,
    batch: int = 16,
    on_batch: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Every reading of this module. `on_batch` is called with the rows that are done, and of how many."""
    plan = Plan.of(topology, len(stack.layers))
    for relay in stack.learned_relays().values():
        if isinstance(relay, BoundedRelay):
            check_causal(relay.settings)
    stages = plan.predicting()
    device = next(stack.parameters()).device
    tally = _Tally(len(stages), device)
    hidden: list[list[Tensor]] = [[] for _ in stages]
    path = Predictor(stack, plan) if plan.prediction.path is not None else None
    with evaluating(stack):
        for start in range(0, len(text.inputs), batch):
            inputs = to_device(text.inputs[start : start + batch], device)
            targets = to_device(text.targets[start : start + batch], device).flatten()
            counted = (targets != -100).nonzero()[:, 0]
            outputs = stage_outputs(stack, plan, inputs, stages)
            flat = {k: h.flatten(0, 1)[counted] for k, h in outputs.items()}
            for states, k in zip(hidden, stages, strict=True):
                if sum(map(len, states)) < RANK_TOKENS:
                    states.append(flat[k])
            along = None if path is None else path.outputs(inputs)
            side = None if along is None else {k: h.flatten(0, 1)[counted] for k, h in along.items()}
            _tally_chunks(stack, plan, flat, path, side, targets[counted], tally)
            if on_batch is not None:
                on_batch(min(start + batch, len(text.inputs)), len(text.inputs))
    return _evaluation(tally, hidden, text.nbytes)


def _tally_chunks(
    stack: Stack,
    plan: Plan,
    hidden: dict[int, Tensor],
    path: Predictor | None,
    side: dict[int, Tensor] | None,
    targets: Tensor,
    tally: _Tally,
) -> None:
    if not len(targets):
        return
    stages = plan.predicting()
    vocab = stack.readout(hidden[stages[0]][:1], plan.stages[stages[0]].head).shape[-1]
    size = max(chunk_tokens(vocab) // len(stages), 1)
    for start in range(0, len(targets), size):
        rows = slice(start, start + size)
        z = {k: stack.readout(hidden[k][rows], plan.stages[k].head).float() for k in stages}
        exits = [pooled_logits(z, plan.prediction.after(k)) for k in stages]
        if path is None or side is None:
            full = pooled_logits(z, plan.prediction.full)
        else:
            some = {k: h[rows] for k, h in side.items()}
            full = predict(stack, path.plan, some, path.plan.prediction.full).float()
        tally.add(list(z.values()), exits, full, targets[rows])


def pooled_logits(logits: dict[int, Tensor], terms: Terms) -> Tensor:
    """Σ w z of a prediction; a single term of weight 1 is that stage's tensor itself."""
    if len(terms) == 1 and terms[0][1] == 1:
        return logits[terms[0][0]]
    return torch.stack([weight * logits[k] for k, weight in terms]).sum(0)


def _evaluation(tally: _Tally, hidden: list[list[Tensor]], nbytes: int) -> Evaluation:
    alone, exits, running, bins = (x.cpu() for x in (tally.stages, tally.exits, tally.running, tally.bins))
    full, mean, shrinkage = torch.stack((tally.full, *tally.pooled.values())).tolist()
    to_bpb = 1 / (math.log(2) * max(nbytes, 1))
    tokens = max(tally.tokens, 1)
    stages = (alone * to_bpb).tolist()
    bpb = ByPrediction(
        prediction=full * to_bpb,
        prefix=(exits * to_bpb).tolist(),
        stages=stages,
        last=stages[-1],
        sum=running[-1].item() * to_bpb,
        mean=mean * to_bpb,
        shrinkage=shrinkage * to_bpb,
    )
    return Evaluation(
        bpb=bpb,
        ece=[calibration_error(table) for table in bins],
        reliability=[reliability(table) for table in bins],
        effective_rank=[activation_rank(torch.cat(states)[:RANK_TOKENS]) for states in hidden],
        usefulness=[None, *((running[:-1] - running[1:]) / tokens).tolist()],
        tokens=tally.tokens,
        bytes=nbytes,
    )


def _nats(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="sum").double()


def confidence_bins(logits: Tensor, targets: Tensor) -> Tensor:
    """(BINS, 3): tokens, summed confidence and summed hits in each bin of the largest probability."""
    confidence, guess = logits.softmax(-1).max(-1)
    where = (confidence.nan_to_num() * BINS).long().clamp(max=BINS - 1)  # nan, of a broken stage, is kept
    rows = torch.stack((torch.ones_like(confidence), confidence, (guess == targets).to(confidence)), dim=1)
    sums = torch.zeros(BINS, 3, dtype=torch.float64, device=logits.device)
    return sums.index_add_(0, where, rows.double())


def calibration_error(bins: Tensor) -> float:
    """ECE of a (bins, 3) table of counts, summed confidences and summed hits."""
    return ((bins[:, 1] - bins[:, 2]).abs().sum() / bins[:, 0].sum().clamp(min=1)).item()


def reliability(bins: Tensor) -> dict[str, list[float | None]]:
    """Mean confidence and accuracy of each bin; None where a bin is empty."""
    table: dict[str, list[float | None]] = {"confidence": [], "accuracy": [], "count": []}
    for count, confidence, hits in bins.tolist():
        table["confidence"].append(confidence / count if count else None)
        table["accuracy"].append(hits / count if count else None)
        table["count"].append(int(count))
    return table


def activation_rank(activations: Tensor) -> float:
    """The effective rank of activations (tokens, width); nan if one of them is not finite."""
    if not activations.isfinite().all():
        return math.nan
    return effective_rank(torch.linalg.svdvals(activations.double())).item()
