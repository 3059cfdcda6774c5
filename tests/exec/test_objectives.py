"""Objectives: their values, the generic path against the fast one, and its memory."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from raising import refused
from topograd.errors import ConfigError, TopologyError
from topograd.exec import linear_cross_entropy
from topograd.exec.forward import Predictor
from topograd.exec.objectives import (
    OBJECTIVES,
    CrossEntropy,
    Distillation,
    Objective,
    Residual,
    objective_named,
    objectives_of,
    stage_loss,
    teacher_logits,
)
from topograd.exec.train_step import train_step
from topograd.nn.gpt import GPT
from topograd.nn.stack import Projection
from topograd.registry import Registry
from topograd.topology.configuration import Configuration
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan

if TYPE_CHECKING:
    from tests.exec.conftest import LogitsWatch, Tiny

PER_STAGE = Topology.chain(Configuration.parse("2,2", heads="per-stage"))
CHUNK = 20
"""Tokens of a chunk in these tests; not the width, which is 16."""


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch, tiny: type[Tiny]) -> None:
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_ELEMENTS", CHUNK * tiny.vocab)
    monkeypatch.setattr(linear_cross_entropy, "MIN_TOKENS", 1)


def hidden(tokens: int = 48, seed: int = 5) -> Tensor:
    """A hidden state (2, tokens / 2, width), a leaf."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, tokens // 2, 16, generator=generator, dtype=torch.float64).requires_grad_()


def targets_for(h: Tensor) -> Tensor:
    """Targets, of which the first row's last ten and one more are ignored."""
    generator = torch.Generator().manual_seed(6)
    targets = torch.randint(0, 50, h.shape[:2], generator=generator)
    targets[0, -10:] = targets[1, 2] = -100
    return targets


def random_logits(seed: int, rows: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(rows, 50, generator=generator, dtype=torch.float64)


class WithoutProjection(GPT):
    """A GPT that hides the matrix of its readout, so that only the generic path is left."""

    def projection(self, stage: int) -> Projection | None:
        return None


def test_cross_entropy_ignores_what_came_before() -> None:
    z, y = random_logits(1), torch.tensor([1, 2, -100, 4, 5, -100, 7])
    loss = CrossEntropy()(z, random_logits(2), None, y)
    log_p = F.log_softmax(z, dim=-1)
    torch.testing.assert_close(loss, -sum(log_p[i, y[i]] for i in (0, 1, 3, 4, 6)), rtol=1e-14, atol=0)


def test_residual_corrects_the_sum_of_the_stages_before() -> None:
    """CE(A + z, y) by its definition, and with A = 0 plain cross-entropy (eq. 42)."""
    z, prior, y = random_logits(1), random_logits(2), torch.tensor([1, 2, -100, 4, 5, 6, 7])
    log_p = F.log_softmax(z + prior, dim=-1)
    expected = -sum(log_p[i, y[i]] for i in (0, 1, 3, 4, 5, 6))
    torch.testing.assert_close(Residual()(z, prior, None, y), expected, rtol=1e-14, atol=0)
    assert torch.equal(Residual()(z, None, None, y), CrossEntropy()(z, None, None, y))


def test_the_z_loss_by_its_definition(tiny: type[Tiny], small_chunks: None) -> None:
    """CE + c mean (log Z)² of the counted targets, with its gradients, by the fast path and by autograd."""
    objective = CrossEntropy(z_weight=0.3)
    z, y = random_logits(1), torch.tensor([1, 2, -100, 4, 5, -100, 7])
    log_z = z[y != -100].exp().sum(-1).log()
    expected = CrossEntropy()(z, None, None, y) + 0.3 * log_z.square().sum()
    torch.testing.assert_close(objective(z, None, None, y), expected, rtol=1e-14, atol=0)

    result = []
    for fast in (True, False):
        stack, h = tiny.gpt(PER_STAGE), hidden()
        targets = targets_for(h)
        if fast:
            loss = stage_loss(stack, h, 1, objective, targets)
        else:
            logits = stack.readout(h, 1)[targets != -100]
            loss = F.cross_entropy(logits, targets[targets != -100])
            loss = loss + 0.3 * logits.logsumexp(-1).square().mean()
        loss.backward()
        assert h.grad is not None
        result.append({"loss": loss.detach(), "h": h.grad, **tiny.gradients(stack)})
    tiny.assert_same(result[0], result[1])


def test_the_named_z_loss_is_small_and_counts() -> None:
    z, y = random_logits(1), torch.arange(7)
    plain = OBJECTIVES["cross-entropy"](z, None, None, y)
    assert OBJECTIVES["z-loss"](z, None, None, y) == plain + 1e-4 * z.logsumexp(-1).square().sum()


@pytest.mark.parametrize("weight", [-0.1, float("nan"), float("inf")])
def test_a_z_loss_that_cannot_be_is_refused(weight: float) -> None:
    with refused(ConfigError, setting="z_weight"):
        CrossEntropy(z_weight=weight)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("mix", [0.0, 0.3, 1.0])
def test_distillation_by_its_definition(mix: float, temperature: float) -> None:
    z, teacher, y = random_logits(1), random_logits(2), torch.tensor([1, 2, -100, 4, 5, 6, 7])
    counted = y != -100
    p, q = ((t[counted] / temperature).softmax(-1) for t in (teacher, z))
    divergence = (p * (p / q).log()).sum()
    expected = (1 - mix) * CrossEntropy()(z, None, None, y) + mix * temperature**2 * divergence
    actual = Distillation(temperature, mix)(z, None, teacher, y)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)


def test_distillation_at_its_extremes() -> None:
    """With mix 0 the teacher does not matter; with mix 1 the targets do not, and a student that says what
    the teacher says has no loss and no gradient."""
    z, teacher, y = random_logits(1), random_logits(2), torch.arange(7)
    assert torch.equal(Distillation(mix=0.0)(z, None, teacher, y), CrossEntropy()(z, None, None, y))
    follow = Distillation(mix=1.0)
    assert torch.equal(follow(z, None, teacher, y), follow(z, None, teacher, y.flip(0)))
    student = teacher.clone().requires_grad_()
    loss = follow(student, None, teacher, y)
    (gradient,) = torch.autograd.grad(loss, student)
    assert float(loss.detach().abs()) < 1e-12
    assert float(gradient.abs().max()) < 1e-12


@pytest.mark.parametrize("objective", [CrossEntropy(), CrossEntropy(z_weight=0.3)], ids=["plain", "z-loss"])
@pytest.mark.parametrize("settings", [{}, {"softcap": 5.0}, {"tied": True}, {"head_rank": 3}])
def test_generic_path_equals_the_fast_path(
    settings: dict[str, Any], objective: Objective, tiny: type[Tiny], small_chunks: None
) -> None:
    """Cross-entropy through checkpointed chunks of `readout` and through the matrix give the same."""
    result = []
    for hide in (False, True):
        stack = tiny.gpt(PER_STAGE, **settings)
        stack.__class__ = WithoutProjection if hide else GPT
        h = hidden()
        loss = stage_loss(stack, h, 1, objective, targets_for(h))
        loss.backward()
        assert h.grad is not None
        result.append({"loss": loss.detach(), "h": h.grad, **tiny.gradients(stack)})
    tiny.assert_same(result[1], result[0])


@pytest.mark.parametrize(
    "objective",
    [CrossEntropy(), Residual(), Distillation(temperature=3.0, mix=0.7)],
    ids=lambda o: type(o).__name__,
)
def test_chunks_do_not_matter(
    objective: Objective, tiny: type[Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss in three chunks equals the loss in one, with every gradient, ignored targets included."""
    prior = [(0, hidden(seed=8).detach(), 1.0), (1, hidden(seed=9).detach(), 1.0)]
    taught = random_logits(4, rows=48)
    result = []
    for chunk in (CHUNK, 1000):
        monkeypatch.setattr(linear_cross_entropy, "CHUNK_ELEMENTS", chunk * tiny.vocab)
        monkeypatch.setattr(linear_cross_entropy, "MIN_TOKENS", 1)
        stack, h = tiny.gpt(PER_STAGE), hidden()
        loss = stage_loss(stack, h, 1, objective, targets_for(h), prior, lambda rows: taught[rows])
        loss.backward()
        assert h.grad is not None
        result.append({"loss": loss.detach(), "h": h.grad, **tiny.gradients(stack)})
    tiny.assert_same(result[0], result[1])


def test_residual_stage_hears_earlier_stages_and_sends_them_nothing(
    tiny: type[Tiny], small_chunks: None
) -> None:
    """The loss is CE(z_0 + z_1, y) through each stage's own head; only stage 1's head is trained by it."""
    stack, h, before = tiny.gpt(PER_STAGE), hidden(), hidden(seed=8)
    y = targets_for(h)
    loss = stage_loss(stack, h, 1, OBJECTIVES["residual"], y, [(0, before, 1.0)])
    z = stack.readout(before, 0) + stack.readout(h, 1)
    torch.testing.assert_close(loss, F.cross_entropy(z.flatten(0, 1), y.flatten()), rtol=1e-13, atol=0)
    loss.backward()
    assert before.grad is None
    gradients = tiny.gradients(stack)
    assert not gradients["head.deltas.0.weight"].any()
    assert gradients["head.deltas.1.weight"].any()


@pytest.mark.parametrize("name", ["cross-entropy", "residual", "distillation", "z-loss"])
def test_all_targets_ignored_is_zero_and_finite(name: str, tiny: type[Tiny], small_chunks: None) -> None:
    stack, h = tiny.gpt(PER_STAGE), hidden()
    taught = random_logits(4, rows=48)
    ignored = torch.full_like(targets_for(h), -100)
    loss = stage_loss(stack, h, 0, OBJECTIVES[name], ignored, [], lambda rows: taught[rows])
    loss.backward()
    assert loss.item() == 0
    assert h.grad is not None
    assert not h.grad.any()
    assert not any(g.any() for g in tiny.gradients(stack).values())


@pytest.mark.parametrize("name", ["cross-entropy", "residual", "distillation", "z-loss"])
def test_logits_are_never_whole_in_the_generic_path(
    name: str, tiny: type[Tiny], small_chunks: None, logits_watch: type[LogitsWatch]
) -> None:
    """Forward and backward, with logits of two earlier stages and of a teacher; nothing grows with N."""
    peaks = []
    for tokens in (80, 240):
        stack, h = tiny.gpt(PER_STAGE), hidden(tokens)
        stack.__class__ = WithoutProjection
        teacher = tiny.teacher(torch.zeros(2, tokens // 2, dtype=torch.int64), seed=2)
        prior = [(k, hidden(tokens, seed=k).detach(), 1.0) for k in (0, 1)]
        with logits_watch(tiny.vocab, tiny.width) as watch:
            stage_loss(stack, h, 1, OBJECTIVES[name], targets_for(h), prior, teacher).backward()
        assert watch.rows == CHUNK
        peaks.append(watch.peak)
    assert peaks[0] == peaks[1]
    assert peaks[0] <= 8 * CHUNK * tiny.vocab


def test_teacher_makes_its_logits_by_the_chunk(tiny: type[Tiny], logits_watch: type[LogitsWatch]) -> None:
    inputs, _ = tiny.batch()
    teacher = tiny.gpt(PER_STAGE, seed=2)
    expected = teacher(inputs).detach().flatten(0, 1)
    with logits_watch(tiny.vocab, tiny.width) as watch:
        logits = teacher_logits(Predictor(teacher, PER_STAGE), inputs)
        assert watch.rows == 0, "nothing is read out before it is asked for"
        parts = [logits(slice(start, start + 5)).detach() for start in range(0, inputs.numel(), 5)]
        assert watch.rows == 5
    torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=1e-13)


def test_unknown_objective_lists_the_known() -> None:
    with refused(ConfigError, setting="objective", given="hinge") as caught:
        objective_named("hinge")
    assert all(name in caught.value.remedy for name in OBJECTIVES)
    assert objective_named("residual") is OBJECTIVES["residual"]


class Hinge:
    """An objective of another package, without `uses_prior`."""

    def __call__(
        self, logits: Tensor, prior: Tensor | None, teacher: Tensor | None, targets: Tensor
    ) -> Tensor:
        return F.multi_margin_loss(logits, targets, reduction="sum")


def test_an_objective_by_its_address_is_made_where_it_is_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("other_objectives")
    module.Hinge, module.hinge = Hinge, (ready := Hinge())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert isinstance(objective_named("other_objectives:Hinge"), Hinge)
    assert objective_named("other_objectives:hinge") is ready
    with refused(ConfigError, setting="objective", given="other_objectives:other"):
        objective_named("other_objectives:other")
    given = {"cross-entropy": ready}
    assert objective_named("cross-entropy", given) is ready, "what is passed is looked through first"
    assert objective_named("residual", given) is OBJECTIVES["residual"]


def focal(logits: Tensor, prior: Tensor | None, teacher: Tensor | None, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(logits, targets, reduction="none")
    return ((1 - (-losses).exp()) * losses).sum()


@pytest.mark.parametrize("by_address", [False, True])
def test_a_plain_function_is_an_objective(
    by_address: bool, tiny: type[Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("my_objectives")
    module.focal = focal  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(OBJECTIVES, "_entries", dict(OBJECTIVES._entries))
    name = "my_objectives:focal" if by_address else "focal"
    if not by_address:
        OBJECTIVES.register(name, focal)
    topology = Topology.chain("2,2", objective=name)
    (inputs, targets), stack = tiny.batch(), tiny.gpt(topology)
    losses = train_step(stack, topology, inputs, targets)
    expected = focal(stack(inputs).flatten(0, 1), None, None, targets.flatten()) / (targets != -100).sum()
    torch.testing.assert_close(losses[1], expected.detach())


def test_a_registered_name_is_known_and_taken() -> None:
    registry: Registry[Objective] = Registry("made-up objective", {"old": Hinge()})
    registry.register("new", ready := Hinge())
    assert registry["new"] is ready
    assert list(registry) == ["old", "new"]
    for name in ("old", "a:b", " "):
        with refused(ConfigError, setting="name", given=name):
            registry.register(name, ready)


@pytest.mark.parametrize(
    ("prediction", "raises"), [("last", True), ("path:1,2", False), ("sum", False), ("mean", False)]
)
def test_a_correction_needs_a_sum_to_predict_by(prediction: str, raises: bool) -> None:
    chain = Topology.chain("1,1", objective="residual")
    plan = Plan.of(replace(chain, prediction=prediction), 2)
    if raises:
        with refused(TopologyError, setting="prediction", given=prediction):
            objectives_of(plan)
    else:
        assert objectives_of(plan) == [OBJECTIVES["residual"]] * 2
    first = replace(chain, stages=(chain.stages[0], replace(chain.stages[1], objective="z-loss")))
    objectives_of(Plan.of(first, 2))  # nothing comes before it, so it corrects nothing


def test_distillation_needs_a_teacher(tiny: type[Tiny]) -> None:
    h = hidden()
    with refused(ConfigError, setting="teacher"):
        stage_loss(tiny.gpt(PER_STAGE), h, 0, OBJECTIVES["distillation"], targets_for(h))


@pytest.mark.parametrize(
    ("temperature", "mix"), [(0.0, 0.5), (-1.0, 0.5), (float("nan"), 0.5), (2.0, -0.1), (2.0, 1.5)]
)
def test_distillation_refuses_impossible_settings(temperature: float, mix: float) -> None:
    with refused(ConfigError, setting="mix" if temperature == 2.0 else "temperature"):
        Distillation(temperature, mix)


def test_a_halted_trunk_that_never_predicted_asks_nothing_of_residual_stages_behind_it() -> None:
    plan = Plan.of(Topology.chain("2,2", objective="residual").with_decoders(1), 6)
    assert objectives_of(plan.halted([0, 1]))
