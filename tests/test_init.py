"""`import topograd as tg`: what it gives, and that it waits for nothing."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import topograd as tg
from raising import refused

NAMES = {
    *("Head", "HeadedStack", "History", "ModelSpec"),
    *("Composition", "Configuration", "Topology", "Edge", "Stage", "Plan", "TopologyConfig"),
    *("Stack", "LayerContext", "GPT", "GPTConfig", "adapt", "prepare", "pool"),
    *("train_step", "StepRunner", "make_optimizers", "linear_cross_entropy"),
    *("TrainConfig", "OptimizerConfig", "preset", "Trainer", "start", "resume", "score"),
    *("Text", "evaluate", "Evaluation", "Predictor", "stage_outputs"),
    *("Model", "load", "generate", "Engine", "FixedDepth", "PathEnsemble", "Wand", "Speculate", "DraftRule"),
    *("Sampling", "generate_tokens", "TopogradError", "held_peft_model"),
}
VALUES = {"MODELS", "MIXERS", "OBJECTIVES", "OPTIMIZERS", "PROPERTIES", "REFERENCE", "__version__"}
FOLDERS = {"geometry", "interfaces", "optim", "specialists"}


def test_the_names_are_these_and_all_of_them_are_there() -> None:
    assert set(tg.__all__) == set(dir(tg)) == NAMES | VALUES | FOLDERS
    for name in NAMES:
        assert getattr(tg, name).__name__ == name
    for name in FOLDERS:
        assert getattr(tg, name).__name__ == f"topograd.{name}"
    for name in VALUES:
        assert getattr(tg, name) is getattr(tg, name)
    assert not hasattr(tg, "nonsense")
    with pytest.raises(AttributeError, match="module 'topograd' has no attribute 'nonsense'"):
        tg.nonsense  # type: ignore[attr-defined]  # noqa: B018


def test_type_checkers_see_the_same_names() -> None:
    """What is imported under TYPE_CHECKING is what `__getattr__` gives, from the same modules."""
    source = Path(tg.__file__).read_text(encoding="utf-8")
    seen = {
        alias.asname or alias.name: node.module
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(seen) - {"TYPE_CHECKING", "registry_entries"} == set(tg.__all__) - {"__version__"}
    for name, module in tg._HOME.items():  # type: ignore[attr-defined]
        assert seen[name] == f"topograd.{module}"


def test_the_registries_are_open_by_name() -> None:
    assert {"attention", "mamba2", "mamba3"} <= set(tg.MIXERS)
    assert {"gpt", "llama", "mamba2", "resnet", "hf"} <= set(tg.MODELS)
    assert {"cross-entropy", "residual", "distillation", "z-loss"} <= set(tg.OBJECTIVES)
    assert {"muon+adamw", "adamw", "sgd", "ddc-adam", "ddc-muon"} <= set(tg.OPTIMIZERS)
    assert len(set(tg.PROPERTIES)) >= 6


@pytest.mark.parametrize("used", ["", "topograd.Composition; topograd.Topology", "dir(topograd)"])
def test_the_import_itself_is_light(used: str) -> None:
    script = f"import sys, topograd; {used}\nassert not {{'torch', 'numpy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.fixture
def stack() -> tg.GPT:
    torch.manual_seed(0)
    return tg.GPT(layers=4, width=16, heads=2, vocab=30, context=16)


@pytest.fixture
def text() -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = torch.randint(30, (2, 3, 8), generator=torch.Generator().manual_seed(1))
    return inputs, targets


@pytest.mark.parametrize("heads", ["shared", "per-stage"])
def test_the_contract_in_python(stack: tg.GPT, text: tuple[torch.Tensor, torch.Tensor], heads: str) -> None:
    assert tg.Composition.parse("1,2,1").layers == 4
    topology = tg.Topology.chain(tg.Configuration.parse("1,2,1", heads=heads))
    plan = tg.prepare(stack, topology)
    assert tg.train_step(stack, plan, *text).shape == (3,)
    assert stack.head.weight.grad is not None
    assert stack(text[0]).shape == (3, 8, 30)
    assert issubclass(tg.TopogradError, Exception)


def test_a_partition_is_enough(stack: tg.GPT, text: tuple[torch.Tensor, torch.Tensor]) -> None:
    """D17: strings, topologies and plans are the same everywhere."""
    losses = tg.train_step(stack, "2,2", *text)
    gradients = [p.grad.clone() for p in stack.parameters() if p.grad is not None]
    stack.zero_grad()
    for given in (tg.Topology.chain("2,2"), tg.Plan.of("2,2", 4)):
        stack.zero_grad()
        assert torch.equal(tg.train_step(stack, given, *text), losses)
        again = [p.grad for p in stack.parameters() if p.grad is not None]
        assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))
    engine = tg.Engine(stack, "2,2", 16)
    assert [e.token for _, e in tg.generate_tokens(tg.FixedDepth(engine), [[1, 2]], 3)] == [
        e.token
        for _, e in tg.generate_tokens(tg.FixedDepth(tg.Engine(stack, tg.Plan.of("2,2", 4))), [[1, 2]], 3)
    ]
    reading = tg.evaluate(stack, "2,2", tg.Text(*text, 24))
    assert dataclasses.is_dataclass(reading)
    assert isinstance(reading, tg.Evaluation)
    assert reading.bpb.prediction == reading.bpb.prefix[-1] == reading.bpb.last
    assert tg.Predictor(stack, "2,2")(text[0]).shape == (3, 8, 30)


def test_heads_that_were_not_prepared_are_an_error(
    stack: tg.GPT, text: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """D16: an optimizer that was built before would never train them."""
    topology = tg.Topology.chain(tg.Configuration.parse("2,2", heads="per-stage"))
    before = {name for name, _ in stack.named_parameters()}
    with refused(tg.TopogradError, setting="heads", given="per-stage"):
        tg.train_step(stack, topology, *text)
    assert {name for name, _ in stack.named_parameters()} == before
    tg.prepare(stack, topology)
    tg.train_step(stack, topology, *text)


def test_the_model_that_comes_with_the_package_writes() -> None:
    made = tg.generate(tg.REFERENCE, "def ", tokens=4)
    assert made == tg.load(tg.REFERENCE).generate("def ", tokens=4)
    assert len(made.pieces) == 4
