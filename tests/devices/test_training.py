"""Training on the second device: nothing is mixed, a step reads once, and the numbers are the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import topograd as tg
from devices import assert_same, on_both, second_device
from tests.devices.pinned import check, pinned
from tests.exec.test_local_objectives import RULES, made
from tests.nn.conftest import GPT2, LLAMA, VOCAB, gpt2, llama, transformer
from tests.test_every_topology import KINDS
from topograd.data.images import ImageSet
from topograd.exec.gradient import BACKWARDS
from topograd.exec.objectives import teacher_logits
from topograd.nn.images.config import ImageConfig
from topograd.nn.stack import Stack
from topograd.runs.topology_config import TopologyConfig
from topograd.training.image_evaluation import evaluate_images

Begin = Callable[[], None]
CLOSE = 1e-11  # in float64; silu's gradient is written out for a device without kernels
EVERY_KIND = {name: (dict(kind.topology), dict(kind.model)) for name, kind in KINDS.items()} | {
    "mamba2": ({"partition": "2,2"}, {"architecture": "mamba2", "ssm_state": 8}),
    "hierarchical": ({"partition": "2,2", "grad_scale": 1.0}, {}),
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"qk_norm": True},
    "gpt2": {"kv_heads": 4, "activation": "gelu_new", "tied": True},
    "gemma": {"tied": True},
    "gemma2": {"attention_softcap": 5.0, "softcap": 3.0, "windows": (3, 0)},
    "gemma3_text": {"windows": (3, 0), "local_rope_base": 100.0, "qk_norm": True},
}
IMAGES = [(rule, model) for rule in RULES for model in ("mlp", "vgg", "resnet8") if rule != "forward-forward"]


def tokens(device: torch.device | str, seed: int = 0, rows: int = 2) -> Tensor:
    return torch.randint(VOCAB, (rows, 9), generator=torch.Generator().manual_seed(seed)).to(device)


def of_kind(name: str) -> tuple[Stack, tg.Plan]:
    """A small GPT of a kind, every parameter normal, so that no gradient is zero because a weight is."""
    torch.manual_seed(0)
    settings, model = EVERY_KIND[name]
    topology = TopologyConfig(**settings).build(4)
    stack = tg.GPTConfig(layers=4, width=16, heads=2, vocab=VOCAB, context=16, **model).build(topology)
    plan = tg.prepare(stack.double(), topology)
    for parameter in stack.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return stack, plan


def gradients(stack: Stack, losses: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    return losses, {name: p.grad for name, p in stack.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_step_of_every_topology(kind: str) -> None:
    def run(device: torch.device, begin: Begin) -> Any:
        stack, plan = of_kind(kind)
        stack.to(device)
        inputs, targets = tokens(device), tokens(device, 1)
        targets[0, 2] = -100
        teacher = teacher_logits(tg.Predictor(stack, plan), inputs, targets)
        begin()
        return gradients(stack, tg.train_step(stack, plan, inputs, targets, teacher=teacher))

    expected, result, transfers = on_both(run)
    check(transfers, "`train_step`")
    assert_same(result, expected, CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_every_family(family: Any) -> None:
    def run(device: torch.device, begin: Begin) -> Any:
        torch.manual_seed(0)
        stack = transformer(family, **FAMILIES[family]).double().to(device)
        plan = tg.prepare(stack, "2,2")
        inputs = tokens(device)
        begin()
        return gradients(stack, tg.train_step(stack, plan, inputs, inputs.roll(-1, 1)))

    expected, result, transfers = on_both(run)
    check(transfers, "`train_step`")
    assert_same(result, expected, CLOSE)


@pytest.mark.parametrize(("make", "paths"), [(llama, LLAMA), (gpt2, GPT2)], ids=["llama", "gpt2"])
def test_a_step_of_an_adapted_module(make: Callable[..., Any], paths: dict[str, Any]) -> None:
    def run(device: torch.device, begin: Begin) -> Any:
        torch.manual_seed(0)
        stack = tg.adapt(make().eval().double().to(device), **paths)
        plan = tg.prepare(stack, "2,2")
        inputs = tokens(device)
        begin()
        return gradients(stack, tg.train_step(stack, plan, inputs, inputs.roll(-1, 1)))

    expected, result, transfers = on_both(run)
    own = [one for one in transfers.seen if not one.place.startswith("nn/adapted/adapt.py:_trace")]
    assert own == [], "what is left is read by the module itself"
    assert_same(result, expected, CLOSE)


@pytest.mark.parametrize(("rule", "model"), [*IMAGES, ("forward-forward", "forward-forward")])
def test_a_step_of_every_local_rule_on_images(rule: str, model: str) -> None:
    def run(device: torch.device, begin: Begin) -> Any:
        stack, plan, images, labels = made(rule, model)
        stack.to(device)
        images, labels = images.to(device), labels.to(device)
        begin()
        losses = tg.train_step(stack, plan, images, labels)
        stack.after_step()
        return gradients(stack, losses), dict(stack.named_buffers())

    expected, result, transfers = on_both(run)
    check(transfers, "`train_step`")
    assert_same(result, expected, CLOSE)


def test_a_step_of_a_vision_transformer() -> None:
    def run(device: torch.device, begin: Begin) -> Any:
        torch.manual_seed(0)
        spec = ImageConfig(network="vit", shape=(1, 8, 8), classes=3, widths=(16,), heads=2, depth=2)
        topology = tg.Topology.chain("1,1")
        stack = spec.build(topology).double().to(device)
        plan = tg.prepare(stack, topology)
        images = torch.randint(0, 256, (8, 1, 8, 8), dtype=torch.uint8).to(device)
        labels = torch.randint(0, 3, (8,)).to(device)
        begin()
        return gradients(stack, tg.train_step(stack, plan, images, labels))

    expected, result, transfers = on_both(run)
    check(transfers, "`train_step`")
    assert_same(result, expected, CLOSE)


@pytest.mark.parametrize("objective", ["cross-entropy", "z-loss", "distillation", "residual", "diversity"])
@pytest.mark.parametrize("counted", [1, 9])
def test_targets_that_do_not_count(objective: str, counted: int) -> None:
    """The CPU leaves their rows out and the device does not: the numbers are the same up to rounding."""

    def run(device: torch.device, begin: Begin) -> Any:
        torch.manual_seed(0)
        settings = TopologyConfig(partition="2,2", objective=objective, prediction="sum")
        topology = settings.build(4)
        stack = tg.GPTConfig(layers=4, width=16, heads=2, vocab=VOCAB, context=16).build(topology).double()
        plan = tg.prepare(stack, topology)
        stack.to(device)
        inputs, targets = tokens(device), tokens(device, 1)
        targets[:, counted:] = -100
        targets[0, 0] = -100
        teacher = teacher_logits(tg.Predictor(stack, plan), inputs, targets)
        begin()
        return gradients(stack, tg.train_step(stack, plan, inputs, targets, teacher=teacher))

    expected, result, transfers = on_both(run)
    check(transfers, "`train_step`")
    assert_same(result, expected, CLOSE)


@pytest.mark.parametrize("optimizer", ["muon+adamw", "adamw", "sgd", "ddc-adam", "ddc-muon"])
@pytest.mark.parametrize("batches", [1, 3])
def test_a_step_of_the_loop_reads_once(optimizer: str, batches: int) -> None:
    def run(device: torch.device, begin: Begin) -> Any:
        torch.manual_seed(0)
        stack = tg.GPTConfig(layers=4, width=16, heads=2, vocab=VOCAB, context=16).build(
            tg.Topology.chain("4")
        )
        plan = tg.prepare(stack, "2,2")
        stack.to(device)
        loop = tg.StepRunner(stack, tg.make_optimizers(stack, tg.OptimizerConfig(name=optimizer)), clip=0.5)
        for number in range(3):
            begin()
            done = loop.step(
                plan, [(tokens("cpu", number + i), tokens("cpu", 9 + i)) for i in range(batches)]
            )
        return done, dict(stack.named_parameters())

    expected, result, transfers = on_both(run)
    check(transfers, "`StepRunner.step`")
    assert transfers.async_writes == 3 * batches  # inputs, targets, rotary frequencies
    assert_same(result, expected)  # in float32: bit for bit


def test_a_group_that_breaks_is_halted_on_a_device_too() -> None:
    def run(device: torch.device, begin: Begin) -> Any:
        stack, plan = of_kind("chain")
        stack.to(device)
        loop = tg.StepRunner(stack, tg.make_optimizers(stack, tg.OptimizerConfig(name="adamw")))
        with torch.no_grad():
            next(stack.layers[3].parameters()).fill_(torch.inf)
        done = loop.step(plan, [(tokens("cpu"), tokens("cpu", 1))])
        return done.halted, done.losses[:1], sorted(loop.halted)

    expected, result, _ = on_both(run)
    assert expected[0] == (1,)
    assert_same(result, expected, CLOSE)


@pytest.mark.parametrize("backward", ["scan", "hybrid"])
def test_a_scan_checks_its_jacobians_once(backward: str) -> None:
    def run(device: torch.device, begin: Begin, steps: int = 2) -> Any:
        torch.manual_seed(0)
        topology = TopologyConfig(partition="1,1,1,1", interface="S=3,r=3,pool=mean").build(4)
        stack = tg.GPTConfig(layers=4, width=16, heads=2, vocab=VOCAB, context=9).build(topology).double()
        plan = tg.prepare(stack, topology)
        stack.to(device)
        optimizers = tg.make_optimizers(stack, tg.OptimizerConfig(name="sgd"))
        loop = tg.StepRunner(stack, optimizers, gradient=BACKWARDS[backward]())
        for _ in range(steps):
            begin()
            stack.zero_grad()
            losses = loop.gradients(plan, tokens(device), tokens(device, 1), 1.0)
        return gradients(stack, losses)

    expected, result, transfers = on_both(run)
    uploads = 2  # of this test's own tokens
    assert (transfers.reads, transfers.writes - uploads) == pinned("backward by a scan: a step behind")
    assert_same(result, expected, CLOSE)
    _, _, first = on_both(lambda device, begin: run(device, begin, steps=1))
    regions = 2 if backward == "scan" else 1
    counts = tuple(regions * count for count in pinned("backward by a scan: each region"))
    assert (first.reads, first.writes - uploads) == counts


def test_evaluation_reads_once_for_each_batch() -> None:
    def run(device: torch.device, begin: Begin, rows: int = 24) -> Any:
        stack, plan = of_kind("residual")
        stack.to(device)
        inputs, targets = tokens("cpu", rows=rows), tokens("cpu", 1, rows)
        targets[:, :2] = -100
        begin()
        return tg.evaluate(stack, plan, tg.Text(inputs, targets, 500), batch=8)

    expected, result, three = on_both(run)
    assert_same(result, expected, 1e-9)
    _, _, one = on_both(lambda device, begin: run(device, begin, rows=8))
    more = (three.reads - one.reads) // 2, (three.writes - one.writes) // 2
    assert more == pinned("`evaluate`")
    assert one.reads <= 6 + 4 * 2, "the sums, and four for the rank of each stage"


def test_images_are_evaluated() -> None:
    def run(device: torch.device, begin: Begin) -> Any:
        stack, plan, images, labels = made("byol")
        return evaluate_images(stack.to(device), plan, ImageSet(images, labels))

    expected, result, _ = on_both(run)
    assert_same(result, expected, 1e-9)


def test_a_run_on_a_device(config: tg.TrainConfig, tmp_path: Path) -> None:
    """Training, evaluation, checkpoints and resumption, by the one way that a user has."""
    here = replace(config, steps=6, save_every=2, eval_every=3, geometry_every=3)

    def run(device: torch.device, begin: Begin) -> Any:
        folder = tmp_path / device.type
        trainer = tg.start(replace(here, device=device.type), folder)
        begin()
        trainer.train(stop_after=4)
        return tg.resume(folder).train(), [
            r["loss"] for r in trainer.task.run.metrics() if r["kind"] == "train"
        ]

    expected, found, transfers = on_both(run)
    steps = [place for place in transfers.places("read") if place.startswith("training/step_runner.py")]
    assert sum(transfers.places("read")[place] for place in steps) == 6 * pinned("`StepRunner.step`")[0]
    uploads = [place for place in transfers.places("write") if place.startswith("training/")]
    assert [place for place in uploads if not place.startswith("training/monitors.py")] == []
    for result in (expected[0], found[0]):
        for key in ("run", "seconds", "weights"):
            del result[key]
    assert_same(found, expected, 1e-6)  # of rounding in float32
    assert found[1] == expected[1]


@pytest.mark.parametrize("kind", ["low-rank heads", "relays and a bus", "decoder", "interface", "mamba3"])
@pytest.mark.parametrize("optimizer", ["muon+adamw", "ddc-adam"])
def test_a_run_begins_with_the_same_weights_on_every_device(
    config: tg.TrainConfig, tmp_path: Path, kind: str, optimizer: str
) -> None:
    settings, model = EVERY_KIND[kind]
    spec = tg.GPTConfig(layers=4, width=16, heads=2, context=16, **model)
    here = config.changed(model=spec, optimizer=tg.OptimizerConfig(name=optimizer), **settings)

    def run(device: torch.device, begin: Begin) -> Any:
        return tg.start(replace(here, device=device.type), tmp_path / device.type).task.stack.state_dict()

    expected, result, _ = on_both(run, own_stream=True)
    assert_same(result, expected)


def test_resuming_draws_what_would_have_been_drawn(config: tg.TrainConfig, tmp_path: Path) -> None:
    """Layer dropout draws on the device, from its own generator, which the checkpoint has to keep."""
    tune = replace(config.tune, layer_dropout=0.5)
    settings = replace(config, steps=6, save_every=3, eval_every=0, device="cuda", tune=tune)
    with second_device(own_stream=True):
        straight = tg.start(settings, tmp_path / "straight")
        straight.train()
    with second_device(own_stream=True):
        tg.start(settings, tmp_path / "stopped").train(stop_after=3)
    with second_device(own_stream=True):
        torch.rand(7, device="cuda")  # whatever happened in between
        resumed = tg.resume(tmp_path / "stopped")
        resumed.train()
    losses = [
        [record["loss"] for record in trainer.task.run.metrics() if record["kind"] == "train"]
        for trainer in (straight, resumed)
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6
