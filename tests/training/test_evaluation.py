"""The readings against brute force: all logits at once, in float64."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raising import refused
from topograd.data.windows import Text
from topograd.errors import ConfigError
from topograd.exec.forward import stage_outputs
from topograd.nn.config import SegmentInterface
from topograd.nn.gpt import GPT
from topograd.nn.interface import add_interfaces
from topograd.nn.pooling import pool
from topograd.nn.stack import LayerContext, Stack
from topograd.topology.configuration import Configuration
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan
from topograd.training import evaluation
from topograd.training.evaluation import BINS, Evaluation, activation_rank, calibration_error, evaluate

TOPOLOGY = Topology.chain(Configuration.parse("1,1,2", heads="per-stage"))
NBYTES = 91
ROUNDING = 1e-6  # evaluate computes its logits' softmax in float32


@pytest.fixture
def text(tiny: Any) -> Text:
    generator = torch.Generator().manual_seed(3)
    inputs, targets = torch.randint(0, tiny.vocab, (2, 7, 12), generator=generator)
    targets[0, 3:5] = targets[4] = targets[6, 11] = -100  # one row has no target at all
    return Text(inputs, targets, NBYTES)


@pytest.fixture
def stack(tiny: Any) -> GPT:
    made: GPT = tiny.gpt(TOPOLOGY)
    return made


def brute_force(stack: GPT, text: Text) -> tuple[list[Tensor], Tensor]:
    """Each stage's logits (tokens, vocab) in float64, and the targets that count."""
    plan = Plan.of(TOPOLOGY, 4)
    hidden = stage_outputs(stack, plan, text.inputs, [0, 1, 2])
    counted = text.targets != -100
    logits = [stack.readout(hidden[k], k).detach()[counted] for k in range(3)]
    return logits, text.targets[counted]


def bpb(logits: Tensor, targets: Tensor) -> float:
    nats = -logits.log_softmax(-1)[torch.arange(len(targets)), targets].sum().item()
    return nats / math.log(2) / NBYTES


def test_bits_per_byte_of_every_prefix_and_every_pooling(stack: GPT, text: Text) -> None:
    logits, targets = brute_force(stack, text)
    readings = evaluate(stack, Plan.of(TOPOLOGY, 4), text, batch=3)
    expected = [bpb(z, targets) for z in logits]
    assert readings.bpb.prefix == pytest.approx(expected, rel=ROUNDING)
    assert len({round(value, 3) for value in expected}) == 3, "equal stages would show nothing"
    for how in ("last", "sum", "mean", "shrinkage"):
        assert getattr(readings.bpb, how) == pytest.approx(bpb(pool(logits, how), targets), rel=ROUNDING)
    assert readings.bpb.last == pytest.approx(readings.bpb.prefix[-1], rel=1e-12)
    assert readings.tokens == len(targets) == (text.targets != -100).sum()
    assert readings.bytes == NBYTES


def test_the_result_comes_before_its_details(stack: GPT, text: Text) -> None:
    names = list(evaluate(stack, Plan.of(TOPOLOGY, 4), text).as_dict())
    assert names[:3] == ["bpb", "tokens", "bytes"]
    assert set(names[3:]) == {"ece", "reliability", "effective_rank", "usefulness"}


def test_usefulness_is_what_each_stage_takes_off_the_running_sum(stack: GPT, text: Text) -> None:
    logits, targets = brute_force(stack, text)
    running = [F.cross_entropy(torch.stack(logits[: k + 1]).sum(0), targets).item() for k in range(3)]
    useful = evaluate(stack, Plan.of(TOPOLOGY, 4), text).usefulness
    assert useful[0] is None, "the first stage has nothing to correct"
    expected = [running[0] - running[1], running[1] - running[2]]
    assert useful[1:] == pytest.approx(expected, abs=10 * ROUNDING)


def test_calibration_and_rank_of_each_stage(stack: GPT, text: Text) -> None:
    logits, targets = brute_force(stack, text)
    readings = evaluate(stack, Plan.of(TOPOLOGY, 4), text)
    for k, z in enumerate(logits):
        confidence, guess = z.softmax(-1).max(-1)
        gap = 0.0
        for b in range(BINS):
            inside = (confidence >= b / BINS) & (confidence < (b + 1) / BINS)
            gap += abs((confidence[inside] - (guess == targets)[inside].double()).sum().item())
            assert readings.reliability[k]["count"][b] == inside.sum()
        assert readings.ece[k] == pytest.approx(gap / len(targets), abs=10 * ROUNDING)
    hidden = stage_outputs(stack, Plan.of(TOPOLOGY, 4), text.inputs, [1])[1][text.targets != -100]
    assert readings.effective_rank[1] == pytest.approx(activation_rank(hidden), rel=1e-12)


def test_the_readings_do_not_depend_on_how_the_text_is_cut(
    stack: GPT, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan.of(TOPOLOGY, 4)
    whole = evaluate(stack, plan, text)
    monkeypatch.setattr(evaluation, "chunk_tokens", lambda vocab: 5)
    cut = evaluate(stack, plan, text, batch=2)
    assert cut.bpb.prefix == pytest.approx(whole.bpb.prefix, rel=ROUNDING)
    assert cut.ece == pytest.approx(whole.ece, abs=ROUNDING)
    assert [row["count"] for row in cut.reliability] == [row["count"] for row in whole.reliability]


def test_the_model_is_left_as_it_was(stack: GPT, text: Text) -> None:
    stack.train()
    evaluate(stack, Plan.of(TOPOLOGY, 4), text)
    assert stack.training
    assert all(parameter.grad is None for parameter in stack.parameters())


class Table(Stack):
    """One layer that does nothing; the logits of token i are row i of a table."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = nn.Parameter(rows)
        self.layers = nn.ModuleList([Same()])

    def embed(self, inputs: Tensor, previous: Tensor | None = None) -> Tensor:
        return F.one_hot(inputs, len(self.rows)).to(self.rows)

    def readout(self, h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
        return h @ self.rows


class Same(nn.Module):
    def forward(self, h: Tensor, ctx: LayerContext) -> Tensor:
        return h


def read(probabilities: list[list[float]], pairs: list[tuple[int, int]], nbytes: int = 1) -> Evaluation:
    """The readings of a table on pairs (input, target)."""
    stack = Table(torch.tensor(probabilities, dtype=torch.float64).log())
    inputs, targets = torch.tensor(pairs).T.reshape(2, 1, -1)
    return evaluate(stack, Plan.of(Topology.chain("1"), 1), Text(inputs, targets, nbytes))


def test_bits_per_byte_by_hand() -> None:
    """Bits 1, 1 and 3 on six bytes; the target -100 is not looked at."""
    table = [[0.5, 0.25, 0.125, 0.125], [0.25, 0.25, 0.25, 0.25]]
    readings = read([*table, *table], [(0, 0), (0, 0), (0, 3), (1, -100)], nbytes=6)
    assert readings.bpb.last == pytest.approx(5 / 6, rel=ROUNDING)
    assert readings.tokens == 3


def test_a_perfectly_calibrated_model_has_no_calibration_error() -> None:
    """Where it says 3/4 it is right three times of four, where it says 1/2 once of two."""
    table = [[0.75, 0.25, 0.0], [0.25, 0.25, 0.5], [1.0, 0.0, 0.0]]
    pairs = [(0, 0), (0, 0), (0, 0), (0, 1), (1, 2), (1, 0), (2, 0)]
    readings = read([[max(p, 1e-12) for p in row] for row in table], pairs)
    assert readings.ece[0] == pytest.approx(0.0, abs=ROUNDING)
    table_of_bins = readings.reliability[0]
    assert [count for count in table_of_bins["count"] if count] == [2, 4, 1]
    assert table_of_bins["accuracy"][7] == 0.5
    assert table_of_bins["confidence"][0] is None


def test_calibration_error_by_hand() -> None:
    """Two bins: 10 tokens at 0.9 of which 6 are right, 30 at 0.4 of which 15 are: 0.25·0.3 + 0.75·0.1."""
    bins = torch.zeros(BINS, 3, dtype=torch.float64)
    bins[13] = torch.tensor([10, 9.0, 6])
    bins[6] = torch.tensor([30, 12.0, 15])
    assert calibration_error(bins) == pytest.approx(0.15, abs=1e-15)
    assert calibration_error(torch.zeros(BINS, 3)) == 0.0


def rank_one() -> Tensor:
    return torch.outer(torch.arange(1.0, 9.0), torch.tensor([3.0, -1.0, 2.0]))


def two_to_one() -> Tensor:
    return torch.diag(torch.tensor([2.0, 1.0, 0.0]))


@pytest.mark.parametrize(
    ("matrix", "rank"),
    [
        (lambda: 7 * torch.eye(6), 6.0),
        (rank_one, 1.0),
        (two_to_one, math.exp(-(2 / 3) * math.log(2 / 3) - (1 / 3) * math.log(1 / 3))),
        (lambda: torch.zeros(4, 3), 0.0),
        (lambda: torch.zeros(0, 3), 0.0),
    ],
)
def test_effective_rank_of_known_matrices(matrix: Callable[[], Tensor], rank: float) -> None:
    assert activation_rank(matrix()) == pytest.approx(rank, abs=1e-12)


def test_stages_without_a_loss_are_not_read(tiny: Any) -> None:
    soft = Topology.soft([1.0, 0.3, 1.0])  # boundaries that let everything through have no loss
    stack = tiny.gpt(soft)
    inputs, targets = tiny.batch()
    readings = evaluate(stack, Plan.of(soft, 4), Text(inputs, targets, 20))
    assert len(readings.bpb.prefix) == 2
    assert len(readings.ece) == len(readings.effective_rank) == len(readings.usefulness) == 2


def test_a_model_that_sees_the_future_is_not_read() -> None:
    stack = GPT(layers=2, width=8, heads=2, vocab=11, context=6)
    settings = SegmentInterface(segments=1, rank=4, pool="mean", causal=False)
    add_interfaces(stack, settings, 2, 8, 6)
    rows = torch.zeros(1, 6, dtype=torch.long)
    with refused(ConfigError, setting="interface", given=settings):
        evaluate(stack, Topology.regions("1,1"), Text(rows, rows, 6))
