"""The properties of a trained configuration, P1-P11 and the six terms of J, each a function of `Trained`.

Statement. For stages k = 0..K-1 that predict, with logits z_k, on held-out text:

    P1   bpb, information_bits     I(h_L; y) >= H(y) - CE(z, y), in bits per token
    P2   gradient_depth            P4  activation_layers, peak_bytes      P5  pipeline_granularity
    P3   target_alignment          P7  update                             P8  update's forgetting
    P6   coordination              coupling cost over that of backprop; `coupling`, C_global of J
    P9   wand                      share of layers that early exits skip, when at most ε of the tokens change
         prefix                    top-1 accuracy at each exit, and the best within a budget of layers
    P10  composition_gain          min_k BPB(z_k) - min(BPB(Σ z_k), BPB(mean z_k))
    P11  specialist_capacity       with its price and its reference (`property_probes.py`)
    J    bpb, coupling, head, capability, bandwidth, calibration (`utility.py` has their formulas and the
         reference points of the capability)
    and  head_parameters, effective_rank and edge_ranks (§8.9, eq. 23), ece (§7.6)

The closed forms come from the plan (`topology/closed_forms.py`), the readings from one evaluation and
one pass over the logits, the rest from short probes on copies (`search/property_probes.py`). What the model
predicts, and each exit, is what the plan says (`Plan.prediction`).

Symbols and shapes. A `Text` has inputs and targets (rows, time). Everything returned is plain JSON.
Cost: all together about 8 evaluations and 50 training steps of 4 rows; each alone, what it needs.
Source: "Stage-Partitioned Learning" §7.1-7.3, §8.9, §10.1 (eq. 30), §10.6; the exits are those of "Product of
Experts" §5.3 by flip rates. The paper gives P1, P3, P6-P8 and P11 in words; the formulas are ours.
Limits. H(y) is the entropy of the targets' frequencies, which is too small on little text. WAND thresholds
are read on the even rows and judged on the odd ones. Exits in the order of the stages: where branches are
parallel, an exit pays for every stage before it. r_eff of a boundary is that of all that the stage behind it
receives, its input bus included, from the first `RANK_TOKENS` tokens.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from topograd.data.windows import Text
from topograd.decode.calibration.measure import Calibration, Readings
from topograd.decode.calibration.policy import agreement, exits, thresholds
from topograd.errors import ConfigError
from topograd.exec.forward import on_canvas, run_stage
from topograd.exec.late import LateQueue
from topograd.exec.train_step import train_step
from topograd.memory import peak_step_bytes
from topograd.nn.stack import Stack
from topograd.search import property_probes as probes
from topograd.search import utility
from topograd.search.measured import Trained
from topograd.topology import closed_forms as closed
from topograd.topology.composition import Composition
from topograd.topology.dag import EMBEDDING
from topograd.topology.plan import EdgeOutput, Plan, PlannedStage
from topograd.training.evaluation import RANK_TOKENS, ByPrediction, activation_rank

ROWS = 4
"""Rows of text in the step whose memory and gradient are measured."""
MIN_DEPTH = 2
"""d_min of the structural capability."""


def _of_plan(form: Callable[[Plan], Any]) -> Callable[[Trained], Any]:
    """A closed form as a property."""

    def read(trained: Trained) -> Any:
        return form(trained.plan)

    return read


gradient_depth = _of_plan(closed.gradient_depth)
activation_layers = _of_plan(closed.activation_layers)
pipeline_granularity = _of_plan(closed.pipeline_granularity)
coupling_cost = _of_plan(closed.coupling_cost)
coupling = coordination = _of_plan(closed.coordination)  # C_global of J
head_matrices = _of_plan(closed.head_matrices)
exit_layers = _of_plan(closed.exit_layers)
gradient_bits = _of_plan(closed.gradient_bits)
staleness = _of_plan(closed.staleness)
stashed_layers = _of_plan(closed.stashed_layers)
waiting_stages = _of_plan(closed.waiting_stages)
projections = _of_plan(lambda plan: len(plan.predicting()))
bpb = attrgetter("evaluation.bpb.prediction")
effective_rank = attrgetter("evaluation.effective_rank")  # of the last hidden states of each predicting stage
ece = attrgetter("evaluation.ece")  # the calibration error of each exit
# Bits per byte of new text that the last stage learns while the others stand still, and that the whole model
# learns as quickly; and of the old text, what the first costs at the best exit that is left.
specialist_capacity = attrgetter("specialist.gain")
specialist_reference = attrgetter("specialist.reference")
specialist_price = attrgetter("specialist.price")

# The six terms of J


def head(trained: Trained) -> float:
    """C_head: what the stages' own heads and private decoders hold, in matrices (vocab, width)."""
    shared = trained.stack.projection(0)
    if shared is None:
        raise ConfigError(
            "the model's head is no matrix, so heads cannot be counted in matrices", remedy="leave head out"
        )
    own = head_parameters(trained) - shared.weight.numel()
    private = list(trained.stack.layers)[trained.layers :] if trained.layers is not None else []
    own += sum(p.numel() for layer in private for p in layer.parameters())
    return own / shared.weight.numel()


def capability(trained: Trained) -> float:
    """U_cap, from 0 to 1."""
    right, exits = trained.accuracy, prefix(trained)
    reached = exits["within_budget"] / right[-1] if right[-1] else 0.0
    stages = min(trained.evaluation.bpb.stages)
    return utility.capability(
        prefix_exit=min(reached, 1.0),
        wand=min(max(wand(trained)["gain"], 0.0), 1.0),
        specialist=trained.specialist.share,
        composition=min(max(composition_gain(trained) / stages, 0.0), 1.0) if stages else 0.0,
    )


def bandwidth(trained: Trained) -> float:
    """C_bw: by how much boundaries fall below `floor`, as shares of the width."""
    open_, ranks = [], []
    for planned, received in _received(trained.stack, trained.plan, trained.text.inputs):
        between = [lam for (port, lam) in planned.inputs if port.source != EMBEDDING]
        if between:
            h = torch.stack([got for _, _, got in received]).sum(0)
            open_.append(between[0])
            ranks.append(activation_rank(h.flatten(0, -2)) / h.shape[-1])
    return utility.bandwidth_cost(open_, ranks, trained.floor)


def calibration(trained: Trained) -> float:
    """C_cal: the mean calibration error of the exits."""
    return utility.calibration_cost(trained.evaluation.ece)


# The others


def prefix_bpb(trained: Trained) -> float:
    """Bits per byte of the first exit."""
    return trained.evaluation.bpb.prefix[0]


def structural_capability(trained: Trained) -> float:
    """U_cap read off the depths of the stages that predict, without training."""
    plan = trained.plan
    units = [probes.unit_of(plan, k) for k in plan.predicting()]
    parts = [sum(len(plan.stages[j].layers) for j in unit) for unit in units]
    return utility.structural_capability(Composition.of(parts), MIN_DEPTH)


def information_bits(trained: Trained) -> float:
    """What the prediction knows of a token beyond frequencies, in bits."""
    return information(bpb(trained), trained.text)


def target_alignment(trained: Trained) -> float | None:
    """Cosine of the training gradient and that of the last loss alone."""
    return probes.target_alignment(trained.stack, trained.plan, *_first_rows(trained))


def peak_bytes(trained: Trained) -> int:
    """Peak memory of a training step beyond parameters and gradients."""
    return step_bytes(trained.stack, trained.plan, *_first_rows(trained))


def head_parameters(trained: Trained) -> int:
    """Numbers in the heads: the shared matrix, where there is one to see, and what each stage has alone."""
    shared = trained.stack.projection(0)
    own = sum(p.numel() for k in range(len(trained.plan.stages)) for p in trained.stack.head_parameters(k))
    return own + (0 if shared is None else shared.weight.numel())


def update(trained: Trained) -> dict[str, Any]:
    """What training the last stage on new text moves, and what it makes the model forget."""
    return asdict(probes.update_discipline(trained.stack, trained.plan, trained.text, trained.new))


def wand(trained: Trained) -> dict[str, float]:
    """The share of layers that early exits skip, and how often they agree with full depth."""
    return skipped(trained.readings, union_layers(trained.plan), trained.eps)


def prefix(trained: Trained) -> dict[str, Any]:
    """Top-1 accuracy at each exit, and the best that the budget of layers can buy; 0 if no exit fits."""
    budget, total = trained.budget, trained.plan.topology.layers
    return within_budget(trained.accuracy, closed.exit_layers(trained.plan), total, budget)


def composition_gain(trained: Trained) -> float:
    """By how many bits per byte pooling the stages beats the best of them."""
    return pooling_gain(trained.evaluation.bpb)


def relay_ranks(trained: Trained) -> list[dict[str, Any]]:
    """r_eff before and after the relay of every edge between stages."""
    return [asdict(rank) for rank in edge_ranks(trained.stack, trained.plan, trained.text.inputs)]


# How they are read


def information(bpb: float, text: Text) -> float:
    """H(y) - CE in bits per token, at least 0: what the prediction knows of the target (P1)."""
    counts = text.targets[text.targets != -100].unique(return_counts=True)[1].double()
    tokens = counts.sum().item()
    entropy = torch.special.entr(counts / tokens).sum().item() / math.log(2)
    return max(0.0, entropy - bpb * text.nbytes / tokens)


def step_bytes(stack: Stack, plan: Plan, inputs: Tensor, targets: Tensor) -> int:
    """Peak memory of a training step beyond parameters and gradients (P4); no gradient is left behind.

    Where stages are late, of the first step that has all that is kept for them.
    """
    topology = probes.to_probe(plan.topology)
    learning = [p for p in stack.parameters() if p.requires_grad]
    queue = LateQueue()

    def steps() -> None:
        for step in range(1 + closed.staleness(plan)):
            queue.begin(step)
            train_step(stack, topology, inputs, targets, late=queue)
            queue.commit()

    peak = peak_step_bytes(steps, learning)
    stack.zero_grad(set_to_none=True)
    return peak


def skipped(readings: Readings, layers: Sequence[int], eps: float) -> dict[str, float]:
    """The share of layers that early exits skip on the odd rows, and how often they agree with full depth."""
    if readings.stages == 1:  # there is no exit but the last, so nothing is skipped
        return {"gain": 0.0, "agreement": 1.0}
    even, odd = readings.split()
    if not len(even) or not len(odd):
        raise ConfigError(
            setting="text", given=1, allowed="at least 2 sequences: WAND calibrates and measures"
        )
    left = exits(odd, thresholds(Calibration.of(even, step=0), "flip-rate", eps=eps))
    ran = torch.tensor(layers, dtype=torch.float64)[left].mean().item()
    return {"gain": 1 - ran / layers[-1], "agreement": agreement(odd, left)}


def union_layers(plan: Plan) -> list[int]:
    """For each predicting stage, the layers that have run when every exit up to it has been tried."""
    ran: set[int] = set()
    counts = []
    for k in plan.predicting():
        ran |= {needed.index for needed in plan.needed(k)}
        counts.append(sum(len(plan.stages[i].layers) for i in ran))
    return counts


def within_budget(
    accuracy: Sequence[float], layers: Sequence[int], total: int, budget: float
) -> dict[str, Any]:
    """Top-1 accuracy at each exit, and the best that `budget` of the layers can buy; 0 if no exit fits."""
    within = [right for right, count in zip(accuracy, layers, strict=True) if count <= budget * total]
    return {"accuracy": list(accuracy), "budget": budget, "within_budget": max(within, default=0.0)}


def pooling_gain(bpb: ByPrediction) -> float:
    """By how many bits per byte pooling all the stages beats the best single one; below 0 where it loses."""
    return min(bpb.stages) - min(bpb.sum, bpb.mean)


@dataclass(frozen=True)
class EdgeRank:
    """The effective rank of what one stage sends and of what another makes of it."""

    stage: int
    source: int
    relay: str
    before: float
    after: float


def edge_ranks(stack: Stack, plan: Plan, inputs: Tensor) -> list[EdgeRank]:
    """r_eff before and after the relay of every edge between stages, on the first `RANK_TOKENS` tokens."""
    ranks = []
    for planned, received in _received(stack, plan, inputs):
        for port, message, got in received:
            if port.source != EMBEDDING:
                both = (activation_rank(h.flatten(0, -2)) for h in (message, got))
                ranks.append(EdgeRank(planned.index, port.source, port.relay, *both))
    return ranks


@torch.no_grad()
def _received(
    stack: Stack, plan: Plan, inputs: Tensor
) -> list[tuple[PlannedStage, list[tuple[EdgeOutput, Tensor, Tensor]]]]:
    """Every stage with its ports, each with the message and what the stage's relay makes of it."""
    rows = max(RANK_TOKENS // inputs.shape[1], 1)
    inputs = inputs[:rows].to(next(stack.parameters()).device)
    x0 = stack.embed(inputs)
    ctx = stack.layer_context(x0, inputs)
    sent: dict[EdgeOutput, Tensor] = {}
    readings = []
    for planned in plan.stages:
        ports = [port for port, _ in planned.inputs]
        messages = [x0 if port.source == EMBEDDING else sent[port] for port in ports]
        heard = on_canvas(planned, messages, ctx)
        got = [stack.relay(port.relay).receive(m, heard) for port, m in zip(ports, messages, strict=True)]
        readings.append((planned, list(zip(ports, messages, got, strict=True))))
        sent.update(run_stage(stack, planned, messages, ctx)[1])
    return readings


def _first_rows(trained: Trained) -> tuple[Tensor, Tensor]:
    text, device = trained.text, trained.device
    return text.inputs[:ROWS].to(device), text.targets[:ROWS].to(device)
