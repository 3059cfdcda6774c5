"""`import topograd as tg`: what it gives, and that it waits for nothing."""

import subprocess
import sys

import pytest
import torch

import topograd as tg

NAMES = {
    *(
        "Composition",
        "Configuration",
        "Topology",
        "Edge",
        "Stage",
        "Plan",
        "Stack",
        "Bus",
        "GPT",
        "GPTConfig",
    ),
    *("adapt", "train_step", "prepare", "linear_cross_entropy", "evaluate", "pool", "TopogradError"),
    *("Engine", "Prefix", "Composed", "Wand", "Speculate", "DraftRule", "Sampling", "generate_tokens"),
    "__version__",
}
FOLDERS = {"fields", "geometry", "interfaces", "optim"}


def test_the_names_are_these_and_all_of_them_are_there() -> None:
    assert set(tg.__all__) == NAMES | FOLDERS
    assert set(dir(tg)) == NAMES | FOLDERS
    for name in NAMES:
        value = getattr(tg, name)
        assert name == "__version__" or value.__name__ == name
    for name in FOLDERS:
        assert getattr(tg, name).__name__ == f"topograd.{name}"
    assert not hasattr(tg, "nonsense")
    with pytest.raises(AttributeError, match="module 'topograd' has no attribute 'nonsense'"):
        tg.nonsense  # type: ignore[attr-defined]  # noqa: B018


def test_the_import_itself_is_light() -> None:
    script = "import sys, topograd; topograd.Composition; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("heads", ["shared", "per-stage"])
def test_the_contract_in_python(heads: str) -> None:
    assert tg.Composition.parse("1,2,1").layers == 4
    topology = tg.Topology.chain(tg.Configuration.parse("1,2,1", heads=heads))
    stack = tg.GPT(layers=4, width=16, heads=2, vocab=30, context=8)
    inputs, targets = torch.randint(30, (2, 3, 8))
    losses = tg.train_step(stack, topology, inputs, targets)
    assert losses.shape == (3,)
    assert stack.head.weight.grad is not None
    assert stack(inputs).shape == (3, 8, 30)
    assert issubclass(tg.TopogradError, Exception)
