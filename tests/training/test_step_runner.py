"""The one loop: what is done group by group where no gradient crosses, and for all at once where it does."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import SGD

from raising import refused
from topograd.errors import ConfigError, DivergenceError, StackError
from topograd.exec.forward import Predictor
from topograd.exec.gradient import BACKWARDS, Autograd, GradientEngine
from topograd.exec.objectives import OBJECTIVES, CrossEntropy
from topograd.interfaces.engines import Scan
from topograd.nn.config import SegmentInterface
from topograd.nn.gpt import GPT
from topograd.nn.interface import add_interfaces
from topograd.runs.config import OptimizerConfig, TrainConfig
from topograd.runs.folder import Run
from topograd.runs.session import open_session
from topograd.topology.configuration import Configuration
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan
from topograd.training.optimizers import OptimizerSet, stage_parameters
from topograd.training.runs import resume, start
from topograd.training.step_runner import Step, StepRunner
from topograd.training.trainer import OnStep, Trainer

if TYPE_CHECKING:
    from tests.exec.conftest import Tiny

CLIP = 0.01


def weighted(second: float, grad_scale: float = 0.0) -> Topology:
    """Two stages with heads of their own; the second's loss weighs `second` times the first's."""
    configuration = Configuration.parse("2,2", heads="per-stage")
    chain = Topology.chain(configuration, grad_scale=grad_scale, reduction="sum")
    first, last = chain.stages
    return replace(chain, stages=(first, replace(last, weight=second)))


def one_step(
    tiny: type[Tiny], topology: Topology, clip: float | None, watch: Callable[[GPT], None] | None = None
) -> tuple[GPT, Step]:
    stack = tiny.gpt(topology)
    optimizer = SGD(stack.parameters(), lr=1.0)
    if watch is not None:
        optimizer.register_step_pre_hook(lambda *_: watch(stack))
    loop = StepRunner(stack, OptimizerSet.of(optimizer), clip=clip)
    return stack, loop.step(Plan.of(topology, 4), [tiny.batch()])


def updates(stack: GPT, tiny: type[Tiny], topology: Topology, stage: int) -> list[Tensor]:
    """What a step changed in what only this stage uses."""
    plan = Plan.of(topology, 4)
    after = stage_parameters(stack, plan, [stage])
    before = stage_parameters(tiny.gpt(topology), plan, [stage])
    return [a.detach() - b.detach() for a, b in zip(after, before, strict=True)]


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_clipping_couples_no_stages_between_which_no_gradient_passes(tiny: type[Tiny]) -> None:
    """One norm for all would make the first stage's step smaller the louder the second is (D10)."""
    quiet, loud = weighted(1.0), weighted(1000.0)
    found = [updates(one_step(tiny, t, CLIP)[0], tiny, t, 0) for t in (quiet, loud)]
    assert any(delta.any() for delta in found[0])
    assert same(*found)
    free = updates(one_step(tiny, quiet, None)[0], tiny, quiet, 0)
    assert not same(found[0], free), "nothing was clipped, so nothing was shown"


def test_clipping_is_global_where_gradient_crosses(tiny: type[Tiny]) -> None:
    def norm(stack: GPT) -> None:
        gradients = [p.grad.flatten() for p in stack.parameters() if p.grad is not None]
        seen.append(float(torch.cat(gradients).norm()))

    seen: list[float] = []
    for second in (1.0, 1000.0):
        _, done = one_step(tiny, weighted(second, grad_scale=0.5), CLIP, norm)
        assert len(done.norms) == 1
    assert seen == pytest.approx([CLIP, CLIP], rel=1e-4)
    quiet, loud = (
        updates(one_step(tiny, t, CLIP)[0], tiny, t, 0) for t in (weighted(1.0, 0.5), weighted(1000.0, 0.5))
    )
    assert not same(quiet, loud)


def test_every_group_and_what_they_share_is_bounded_by_itself(tiny: type[Tiny]) -> None:
    topology = weighted(1.0)
    plan = Plan.of(topology, 4)
    bounded: list[list[float]] = []

    def norms(stack: GPT) -> None:
        own = [{id(p) for p in stage_parameters(stack, plan, [k])} for k in range(2)]
        parts = [[p for p in stack.parameters() if id(p) in ids] for ids in own]
        parts.append([p for p in stack.parameters() if id(p) not in own[0] | own[1]])
        bounded.append(
            [
                float(torch.cat([p.grad.flatten() for p in part if p.grad is not None]).norm())
                for part in parts
            ]
        )

    _, done = one_step(tiny, topology, CLIP, norms)
    assert bounded[0] == pytest.approx([CLIP] * 3, rel=1e-4)
    _, free = one_step(tiny, topology, None, norms)
    assert bounded[1] == pytest.approx(free.norms)
    assert done.norms == free.norms, "the norms are those before clipping"
    assert free.norm == pytest.approx(math.hypot(*bounded[1]))


def test_the_loop_learns_from_the_mean_of_its_batches(tiny: type[Tiny]) -> None:
    topology = Topology.chain("1,3")
    plan = Plan.of(topology, 4)
    stacks = [tiny.gpt(topology) for _ in range(2)]
    first, second = (StepRunner(s, OptimizerSet.of(SGD(s.parameters(), lr=0.1))) for s in stacks)
    one = first.step(plan, [tiny.batch(1)])
    both = second.step(plan, [tiny.batch(1), tiny.batch(1)])
    torch.testing.assert_close(both.losses, one.losses)
    for a, b in zip(stacks[0].parameters(), stacks[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert all(p.grad is None for s in stacks for p in s.parameters())


# A stage that breaks


class Breaking:
    """Cross-entropy that is nan while `broken`."""

    uses_prior = False
    broken = False

    def __call__(
        self, logits: Tensor, prior: Tensor | None, teacher: Tensor | None, targets: Tensor
    ) -> Tensor:
        loss = F.cross_entropy(logits, targets, reduction="sum")
        return loss * math.nan if Breaking.broken else loss


@pytest.fixture(autouse=True)
def _whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Breaking, "broken", False)
    monkeypatch.setitem(OBJECTIVES._entries, "breaking", Breaking())


def breaking_after(step: int) -> OnStep:
    def on_step(now: int, *_: object) -> None:
        if now == step:
            Breaking.broken = True

    return on_step


@pytest.fixture
def breakable(config: TrainConfig) -> TrainConfig:
    """The second of two stages may break; they share embedding and head."""
    changed = config.changed(objectives=("cross-entropy", "breaking"), steps=8, save_every=2, eval_every=0)
    return replace(changed, optimizer=OptimizerConfig(clip=0.5))


def state(trainer: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.task.stack.named_parameters()}


def halted_from(config: TrainConfig, folder: Path, stage: int, step: int) -> Trainer:
    """The run in which the stage was halted by hand after `step`."""
    trainer = start(config, folder)
    trainer.train(stop_after=step)
    trainer.task.loop.halted.add(stage)
    trainer.train()
    return trainer


@pytest.mark.parametrize("stage", [0, 1])
def test_a_broken_stage_is_halted_and_the_others_go_on_as_if_it_had_been_before(
    stage: int, breakable: TrainConfig, tmp_path: Path
) -> None:
    names = ["cross-entropy", "cross-entropy"]
    names[stage] = "breaking"
    config = breakable.changed(objectives=tuple(names))
    trainer = start(config, tmp_path / "run")
    kept: dict[str, Tensor] = {}

    def on_step(now: int, *_: object) -> None:
        if now == 3:
            kept.update(state(trainer))
            Breaking.broken = True

    result = trainer.train(on_step=on_step)
    assert result["halted"] == [stage + 1]
    assert (result["steps"], result["finished"]) == (8, True)
    assert json.loads(trainer.task.run.results_file.read_text())["halted"] == [stage + 1]
    records = [record for record in trainer.task.run.metrics() if record["kind"] == "halted"]
    assert records == [{"kind": "halted", "step": 4, "stages": [stage + 1]}]
    losses = {r["step"]: r["loss"] for r in trainer.task.run.metrics() if r["kind"] == "train"}
    assert not any(map(math.isnan, losses[3]))
    assert [math.isnan(loss) for loss in losses[4]] == [k == stage for k in range(2)]

    after = state(trainer)
    own = f"layers.{stage}."
    assert all(torch.equal(after[n], kept[n]) for n in after if n.startswith(own)), "it learns no more"
    assert any(not torch.equal(after[n], kept[n]) for n in after if n.startswith(f"layers.{1 - stage}."))
    Breaking.broken = False
    expected = state(halted_from(config, tmp_path / "halted", stage, 3))
    assert all(torch.equal(after[name], expected[name]) for name in after), "bit for bit, what is shared too"


def test_halted_stages_stay_halted_when_the_run_is_resumed(breakable: TrainConfig, tmp_path: Path) -> None:
    whole = start(breakable, tmp_path / "whole")
    whole.train(on_step=breaking_after(3))
    Breaking.broken = False
    start(breakable, tmp_path / "parts").train(stop_after=6, on_step=breaking_after(3))
    Breaking.broken = False
    trainer = resume(tmp_path / "parts")
    assert trainer.task.loop.halted == {1}
    result = trainer.train()
    assert result["halted"] == [2]
    ends = [Run.open(tmp_path / name).store.weights("step-00000008") for name in ("whole", "parts")]
    assert ends[0] == ends[1]
    open_session(tmp_path / "parts")


def test_before_it_broke_nothing_was_halted(breakable: TrainConfig, tmp_path: Path) -> None:
    config = replace(breakable, keep=9)
    start(config, tmp_path / "run").train(on_step=breaking_after(3))
    Breaking.broken = False
    trainer = resume(tmp_path / "run", "step-00000002")
    assert trainer.task.loop.halted == set()
    assert "halted" not in trainer.train()


@pytest.mark.parametrize(
    ("change", "stage"),
    [
        ({"grad_scale": 0.5}, 2),
        ({"objectives": ("breaking", "cross-entropy"), "grad_scale": 0.5}, 1),
        ({"partition": "L", "objectives": ("breaking",)}, 1),
        ({"objectives": ("breaking", "breaking")}, 1),
    ],
    ids=["joined-second", "joined-first", "backprop", "every-stage"],
)
def test_where_nothing_is_left_to_learn_it_stops_and_names_the_stage(
    change: dict[str, object], stage: int, breakable: TrainConfig, tmp_path: Path
) -> None:
    trainer = start(breakable.changed(**change), tmp_path / "run")
    with pytest.raises(DivergenceError, match=f"the loss of stage {stage} is nan at step 4; nothing was ch"):
        trainer.train(on_step=breaking_after(3))
    assert trainer.task.loop.halted == set()
    assert [r["step"] for r in trainer.task.run.metrics() if r["kind"] == "train"] == [1, 2, 3]
    Breaking.broken = False
    assert resume(trainer.task.run.folder).step == 2


def test_a_gradient_that_is_not_finite_halts_its_stage_alone(config: TrainConfig, tmp_path: Path) -> None:
    """Its loss is finite, so only the gradient could tell."""
    trainer = start(replace(config, steps=4, eval_every=0), tmp_path / "run")
    parameter = trainer.task.stack.get_parameter("layers.1.mlp.up.weight")
    parameter.register_hook(lambda gradient: gradient * math.inf)
    result = trainer.train()
    assert result["halted"] == [2]
    assert [r["step"] for r in trainer.task.run.metrics() if r["kind"] == "halted"] == [1]
    expected = start(replace(config, steps=4, eval_every=0), tmp_path / "halted")
    expected.task.loop.halted.add(1)
    expected.train()
    found, other = state(trainer), state(expected)
    assert all(torch.equal(found[name], other[name]) for name in found)


def test_a_branch_of_nan_weights_does_not_take_the_others_with_it(
    config: TrainConfig, tmp_path: Path
) -> None:
    """Nobody hears it, so everything but what it predicts itself is measured and saved."""
    trainer = start(config.changed(partition="L", graph="forest", branches=("1", "1")), tmp_path / "run")
    trainer.train(stop_after=2)
    with torch.no_grad():
        trainer.task.stack.get_parameter("layers.0.mlp.up.weight")[0, 0] = math.nan
    result = trainer.train()
    assert result["halted"] == [1]
    assert math.isnan(result["bpb"]["stages"][0])
    assert math.isnan(result["effective_rank"][0])
    assert math.isnan(result["ece"][0])
    assert math.isfinite(result["bpb"]["stages"][1])
    assert math.isfinite(result["effective_rank"][1])
    assert math.isnan(result["bpb"]["prediction"]), "the mean of both is not a number, and says so"
    losses = [r["loss"][1] for r in trainer.task.run.metrics() if r["kind"] == "train"]
    assert losses[-1] < losses[0] - 0.5, "the other branch learns on"


def test_a_stage_without_a_loss_keeps_no_training_alive(tiny: type[Tiny]) -> None:
    """With weights 0 and 1 and λ = 0, only the second stage ever learns."""
    chain = Topology.chain("2,2")
    first, last = chain.stages
    topology = replace(chain, stages=(replace(first, weight=0.0), replace(last, objective="breaking")))
    stack = tiny.gpt(topology)
    loop = StepRunner(stack, OptimizerSet.of(SGD(stack.parameters(), lr=0.1)))
    loop.step(Plan.of(topology, 4), [tiny.batch()])
    Breaking.broken = True
    with pytest.raises(DivergenceError, match="the loss of stage 2 is nan at step 7"):
        loop.step(Plan.of(topology, 4), [tiny.batch()], 7)


# Steps whose gradients cross interfaces by a scan


def scanned(tiny: type[Tiny], engine: GradientEngine) -> tuple[StepRunner, Plan]:
    """A runner of regions; the last one's objective is named distillation."""
    regions = Topology.regions("1,1,2")
    last = replace(regions.stages[-1], objective="distillation")
    topology = replace(regions, stages=(*regions.stages[:-1], last))
    stack = tiny.gpt(topology)
    torch.manual_seed(0)
    add_interfaces(stack, SegmentInterface(segments=4, rank=4), 3, tiny.width, 16)
    runner = StepRunner(stack.double(), OptimizerSet.of(SGD(stack.parameters(), lr=0.1)), gradient=engine)
    runner.objectives = {"distillation": CrossEntropy()}
    return runner, Plan.of(topology, 4)


@pytest.mark.parametrize("name", ["scan", "hybrid"])
@pytest.mark.parametrize("given", ["teacher", "own_teacher", "objectives", "dropout_rates", "recompute"])
def test_a_scan_takes_what_autograd_takes(tiny: type[Tiny], name: str, given: str) -> None:
    values: dict[str, Any] = {
        "teacher": Predictor(tiny.gpt(seed=7), "4"),
        "own_teacher": True,
        "objectives": {"distillation": CrossEntropy(z_weight=0.1)},
        "dropout_rates": [0.0, 0.5, 0.5, 0.5],
        "recompute": True,
    }
    trained, plain = [], []
    for engine in (Autograd(), BACKWARDS[name]()):
        runner, plan = scanned(tiny, engine)
        if given in ("teacher", "own_teacher"):
            runner.objectives = None
        setattr(runner, given, values[given])
        torch.manual_seed(5)
        losses = [runner.step(plan, [tiny.batch(seed), tiny.batch(seed + 1)]).losses for seed in range(2)]
        trained.append(torch.cat([p.detach().flatten() for p in runner.stack.parameters()]))
        plain.append(torch.stack(losses)[:, -1])
    torch.testing.assert_close(plain[1], plain[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-11, atol=1e-13)


def test_states_are_refused_with_a_batch(tiny: type[Tiny]) -> None:
    runner, plan = scanned(tiny, Scan())
    with refused(ConfigError, setting="states"):
        runner.gradients(plan, *tiny.batch(), 1.0, {1: torch.zeros(2, 12, tiny.width)})
    assert all(p.grad is None for p in runner.stack.parameters())


def test_a_run_that_its_engine_does_not_take_is_refused_before_it_is_one(
    config: TrainConfig, tmp_path: Path
) -> None:
    regions = config.changed(model=config.gpt.changed(layers=3, architecture="mamba2"), partition="1,1,1")
    chosen = regions.changed(interface="S=4,r=4", backward="scan", jacobian="pullback")
    with refused(StackError, setting="jacobian", given="pullback"):
        start(chosen, tmp_path / "run")
    assert not (tmp_path / "run").exists()


LATE = {"partition": "1,1", "grad_scale": 1.0, "grad_delay": 1}


def test_clipping_is_by_stage_where_gradient_is_late(tiny: type[Tiny]) -> None:
    """The first stage's gradient is of another batch than the second's."""
    topology = weighted(1.0, grad_scale=1.0).with_gradient(delay=1)
    stack = tiny.gpt(topology)
    loop = StepRunner(stack, OptimizerSet.of(SGD(stack.parameters(), lr=0.1)), clip=CLIP)
    plan = Plan.of(topology, 4)
    first, second = (loop.step(plan, [tiny.batch(n)], n) for n in (1, 2))
    assert len(first.norms) == len(second.norms) == 3
    assert first.norms[0] == 0, "nothing has come yet"
    assert second.norms[0] > 0


def test_a_late_gradient_that_is_not_finite_halts_its_stage_when_it_comes(
    config: TrainConfig, tmp_path: Path
) -> None:
    late = replace(config, steps=5, eval_every=0).changed(**LATE)
    trainer = start(late, tmp_path / "run")
    parameter = trainer.task.stack.get_parameter("layers.0.mlp.up.weight")
    parameter.register_hook(lambda gradient: gradient * math.inf)
    result = trainer.train()
    assert result["halted"] == [1]
    assert [r["step"] for r in trainer.task.run.metrics() if r["kind"] == "halted"] == [2]
    found = state(trainer)
    assert all(tensor.isfinite().all() for tensor in found.values())
    fresh = state(start(late, tmp_path / "fresh"))
    assert torch.equal(found["layers.0.mlp.up.weight"], fresh["layers.0.mlp.up.weight"]), "it never learned"
    assert not torch.equal(found["layers.1.mlp.up.weight"], fresh["layers.1.mlp.up.weight"])


def test_when_the_last_stage_breaks_a_late_one_learns_on_from_its_own_loss(
    config: TrainConfig, tmp_path: Path
) -> None:
    late = replace(config, steps=5, eval_every=0).changed(**LATE)
    trainer = start(late, tmp_path / "run")
    parameter = trainer.task.stack.get_parameter("layers.1.mlp.up.weight")
    parameter.register_hook(lambda gradient: gradient * math.inf)
    assert trainer.train()["halted"] == [2]
    expected = start(late, tmp_path / "halted")
    expected.task.loop.halted.add(1)
    expected.train()
    found, other = state(trainer), state(expected)
    assert all(torch.equal(found[name], other[name]) for name in found)


@pytest.mark.parametrize(
    "change", [{"objective": "residual"}, {"objective": "distillation", "teacher": "self"}]
)
def test_what_a_late_gradient_does_not_take_is_refused_before_it_is_a_run(
    change: dict[str, Any], config: TrainConfig, tmp_path: Path
) -> None:
    with refused(ConfigError, setting="delay"):
        start(config.changed(**LATE, **change), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_kept_states_and_late_edges_are_refused_before_it_is_a_run(
    config: TrainConfig, tmp_path: Path
) -> None:
    edges = LATE | {"partition": "1,1,2"}
    four = config.changed(model=config.gpt.changed(layers=4), steps=3, eval_every=0, **edges)
    start(four, tmp_path / "base").train()
    tune = replace(config.tune, lora_rank=2, first_layer=1)
    late = replace(four, init=str(tmp_path / "base"), tune=tune)
    with refused(ConfigError, setting="delay") as problem:
        start(late, tmp_path / "run")
    assert "--states none" in str(problem.value)
    assert not (tmp_path / "run").exists()
    start(replace(late, tune=replace(tune, states="none")), tmp_path / "run").train()
