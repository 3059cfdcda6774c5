"""What one training does: its folder, its steps, and where it stops by itself."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raising import refused
from topograd.errors import ConfigError, DataError, DivergenceError, RunError, StackError, TopologyError
from topograd.runs.config import OptimizerConfig, TrainConfig
from topograd.runs.folder import Run
from topograd.training.runs import resume, start

STEPS = 20


def losses(run: Run) -> list[tuple[int, list[float]]]:
    return [(r["step"], r["loss"]) for r in run.metrics() if r["kind"] == "train"]


def weights(run: Run, step: int = STEPS) -> str:
    file = run.checkpoints / f"step-{step:08d}" / "model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_run_leaves_everything_in_its_folder(straight: Run, config: TrainConfig) -> None:
    assert {path.name for path in straight.folder.iterdir()} == {
        *("config.toml", "metrics.jsonl", "checkpoints", "figures", "tokenizer.json", "results.json", "lock"),
        "manifest.json",
    }
    saved = TrainConfig.from_dict(straight.read_config())
    assert saved == replace(config, model=config.model.changed(vocab=257)), "the vocabulary is the true one"
    assert sorted(path.name for path in straight.checkpoints.iterdir()) == ["step-00000016", "step-00000020"]
    first, last = losses(straight)[0][1], losses(straight)[-1][1]
    assert len(first) == 2
    assert all(after < before - 0.5 for before, after in zip(first, last, strict=True)), "it learns"
    evaluated = [record for record in straight.metrics() if record["kind"] == "eval"]
    assert [record["step"] for record in evaluated] == [8, 16, 20]
    results = json.loads(straight.results_file.read_text())
    assert (results["steps"], results["finished"]) == (STEPS, True)
    assert results["bpb"] == evaluated[-1]["bpb"]
    assert results["seconds"] == straight.metrics()[-1]["seconds"] > 0


@pytest.mark.parametrize(("grad_scale", "layer", "stage"), [(0.0, 0, 1), (1.0, 0, 1), (1.0, 1, 2)])
def test_a_loss_that_is_not_finite_stops_with_step_and_stage(
    grad_scale: float, layer: int, stage: int, config: TrainConfig, tmp_path: Path
) -> None:
    """Where gradient crosses, or where every stage hears the broken one, nothing is left to train."""
    trainer = start(config.changed(grad_scale=grad_scale), tmp_path / "run")
    trainer.train(stop_after=5)
    saved = weights(trainer.task.run, 5)
    with torch.no_grad():
        trainer.task.stack.layers[layer].get_parameter("mlp.up.weight")[0, 0] = float("nan")
    before = {name: p.detach().clone() for name, p in trainer.task.stack.named_parameters()}
    with pytest.raises(
        DivergenceError, match=f"the loss of stage {stage} is nan at step 6; nothing was changed"
    ):
        trainer.train()
    for name, parameter in trainer.task.stack.named_parameters():
        assert torch.equal(parameter.nan_to_num(), before[name].nan_to_num()), f"{name} was changed"
    assert [step for step, _ in losses(trainer.task.run)][-1] == 5
    assert weights(trainer.task.run, 5) == saved
    assert trainer.task.loop.halted == set()
    resume(trainer.task.run.folder).train(stop_after=7)


@pytest.mark.parametrize(
    ("grad_scale", "name", "where"),
    [
        (1.0, "layers.1.mlp.up.weight", "stage 2"),
        (1.0, "head.weight", "the embedding or the head"),
        (0.0, "head.weight", "the embedding or the head"),
    ],
)
def test_a_gradient_that_is_not_finite_stops_before_it_is_used(
    grad_scale: float, name: str, where: str, config: TrainConfig, tmp_path: Path
) -> None:
    trainer = start(config.changed(grad_scale=grad_scale), tmp_path / "run")
    trainer.train(stop_after=1)
    before = {n: p.detach().clone() for n, p in trainer.task.stack.named_parameters()}
    trainer.task.stack.get_parameter(name).register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(DivergenceError, match=f"the gradient of {where} is not finite at step 2"):
        trainer.train()
    assert all(torch.equal(p, before[n]) for n, p in trainer.task.stack.named_parameters())


def test_clipping_bounds_the_gradient_and_logs_its_norm(config: TrainConfig, tmp_path: Path) -> None:
    joined = config.changed(grad_scale=1.0)

    def norms(clip: float) -> list[float]:
        trainer = start(replace(joined, optimizer=OptimizerConfig(clip=clip)), tmp_path / str(clip))
        seen: list[float] = []

        def record(*_: object) -> None:
            gradients = [p.grad for p in trainer.task.stack.parameters() if p.grad is not None]
            seen.append(float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients]))))

        for optimizer in trainer.task.loop.optimizers.optimizers.values():
            optimizer.register_step_pre_hook(record)
        trainer.train(stop_after=1)
        assert trainer.task.run.metrics()[0]["grad_norm"] == pytest.approx(first_norm, rel=1e-4)
        return seen

    free = start(joined, tmp_path / "free")
    free.task.loop._gradients(free.task.plan, [next(free.task.loader)], 1)
    squares = [p.grad.square().sum() for p in free.task.stack.parameters() if p.grad is not None]
    first_norm = float(torch.stack(squares).sum().sqrt())
    assert norms(1e6)[0] == pytest.approx(first_norm, rel=1e-4)
    assert norms(0.01)[0] == pytest.approx(0.01, rel=1e-4)


def test_accumulated_batches_give_the_gradient_of_the_large_one(config: TrainConfig, tmp_path: Path) -> None:
    """Equal up to float32 sums in another order, because every row is full: halves have as many targets."""
    large = start(replace(config, batch=8), tmp_path / "large")
    halves = start(replace(config, batch=4, accumulate=2), tmp_path / "halves")
    for trainer in (large, halves):
        torch.manual_seed(0)
        for parameter in trainer.task.stack.parameters():  # behind the zeros of a new model no gradient flows
            parameter.data.add_(0.1 * torch.randn_like(parameter))
        batches = [next(trainer.task.loader) for _ in range(trainer.task.config.accumulate)]
        trainer.task.loop._gradients(trainer.task.plan, batches, len(batches))
    for (name, one), two in zip(
        large.task.stack.named_parameters(), halves.task.stack.parameters(), strict=True
    ):
        assert one.grad is not None, name
        assert one.grad.any(), name
        torch.testing.assert_close(two.grad, one.grad, rtol=1e-3, atol=1e-4 * float(one.grad.abs().max()))
    for trainer in (large, halves):
        trainer.task.stack.zero_grad()
        trainer.task.loader.seek({"epoch": 0, "row": 0})
        trainer.train(stop_after=1)
    assert losses(large.task.run)[0][1] == pytest.approx(losses(halves.task.run)[0][1], rel=1e-5)


def test_bf16_computes_nearly_the_same(config: TrainConfig, straight: Run, tmp_path: Path) -> None:
    trainer = start(replace(config, bf16=True), tmp_path / "run")
    result = trainer.train(stop_after=2)
    rough = losses(trainer.task.run)
    assert rough != losses(straight)[:2], "it was not computed in bfloat16"
    for (_, ours), (_, exact) in zip(rough, losses(straight), strict=False):
        assert ours == pytest.approx(exact, rel=0.02)  # bfloat16 has 8 bits
    assert all(p.dtype == torch.float32 for p in trainer.task.stack.parameters())
    assert result["steps"] == 2


def test_the_seed_decides(config: TrainConfig, straight: Run, tmp_path: Path) -> None:
    for seed, same in ((1, True), (2, False)):
        trainer = start(replace(config, seed=seed), tmp_path / str(seed))
        trainer.train(stop_after=2)
        assert (losses(trainer.task.run) == losses(straight)[:2]) is same


def test_a_folder_in_use_is_refused(config: TrainConfig, straight: Run, tmp_path: Path) -> None:
    trainer = start(config, tmp_path / "run")
    with trainer.task.run.lock(), pytest.raises(RunError, match="in use by another process"):
        resume(trainer.task.run.folder).train()
    with refused(RunError, setting="folder"):
        start(config, straight.folder)


def test_what_cannot_be_trained_is_refused_before_it_is_a_run(config: TrainConfig, tmp_path: Path) -> None:
    small = tmp_path / "small.txt"
    small.write_text("x" * 300)
    long = config.model.changed(context=500)
    for bad, error in (
        (replace(config, data=str(small), model=long), DataError),
        (replace(config, data=str(tmp_path / "nowhere")), DataError),
        (replace(config, device="abacus"), ConfigError),
        (replace(config, eval_bytes=3), DataError),
        (config.changed(objective="hinge"), ConfigError),
        (config.changed(objective="math:no_such_objective"), ConfigError),
        (config.changed(objective="residual", prediction="last"), TopologyError),
        (config.changed(heads="low-rank", head_rank=99), StackError),
        (replace(config, model=config.model.changed(architecture="nowhere:mixer")), ConfigError),
    ):
        with pytest.raises(error):
            start(bad, tmp_path / "run")
        assert not (tmp_path / "run").exists()
    start(config, tmp_path / "run").train(stop_after=1)


def test_the_learning_rates_follow_the_schedule(config: TrainConfig, tmp_path: Path) -> None:
    rates = OptimizerConfig(lr_matrix=0.1, lr_head=0.01, warmup=0.25, warmdown=0.5, floor=0.1)
    trainer = start(replace(config, steps=8, optimizer=rates), tmp_path / "run")
    made = trainer.task.loop.optimizers.optimizers
    seen: list[tuple[float, float]] = []

    def record(*_: object) -> None:
        head = made["adamw"].param_groups[1]["lr"]
        seen.append((made["muon"].param_groups[0]["lr"], head))

    made["muon"].register_step_pre_hook(record)
    trainer.train()
    multipliers = [0.5, 1.0, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1]
    assert [muon for muon, _ in seen] == pytest.approx([0.1 * m for m in multipliers])
    assert [head for _, head in seen] == pytest.approx([0.01 * m for m in multipliers])
