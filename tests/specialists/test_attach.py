"""A specialist: the identity when it is inserted, nothing of the base inside, the same wherever it stands."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raising import refused
from topograd.errors import ConfigError, RunError
from topograd.exec.forward import Predictor, stage_outputs
from topograd.nn.gpt import GPT
from topograd.runs.adapter import TENSORS
from topograd.runs.session import Held, LoadedTextRun, open_session
from topograd.specialists.attach import Shape, SpecialistPart, attach, new_specialist, open_specialist
from topograd.specialists.composition import composed
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan

Bases = dict[str, LoadedTextRun]
TOKENS = torch.randint(200, (2, 12), generator=torch.Generator().manual_seed(0))


def noisy(part: SpecialistPart) -> None:
    """As if it had learned something."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("settings", [{"layers": 1}, {"layers": 2, "head_rank": 3}], ids=["whole", "rank"])
@pytest.mark.parametrize("which", ["gpt", "imported"])
@torch.no_grad()
def test_insertion_changes_no_bit(bases: Bases, which: str, settings: dict[str, Any], tmp_path: Path) -> None:
    base = bases[which]
    before = Predictor(base.stack, base.plan)(TOKENS)
    adapter = new_specialist(tmp_path / "s", base, **settings)
    attached = attach(base, [adapter])
    for weights in ({}, {"s": 1.0}):
        assert torch.equal(Predictor(attached.stack, composed(attached, weights))(TOKENS), before)
    noisy(attached.part("s"))
    assert torch.equal(Predictor(attached.stack, composed(attached, {}))(TOKENS), before)
    assert not torch.equal(Predictor(attached.stack, composed(attached, {"s": 1.0}))(TOKENS), before)
    assert torch.equal(Predictor(base.stack, base.plan)(TOKENS), before)
    assert len(base.stack.layers) == base.plan.topology.layers


def test_the_folder_has_nothing_of_the_base(bases: Bases, tmp_path: Path) -> None:
    base = bases["imported"]
    adapter = new_specialist(tmp_path / "s", base, layers=1, head_rank=2)
    own = sum(t.numel() for t in adapter.tensors.values())
    one_layer = sum(p.numel() for p in base.stack.layers[0].parameters())
    assert own == one_layer + 2 * (320 + 32)
    assert (tmp_path / "s" / TENSORS).stat().st_size < 4 * own + 10_000
    base_values = {p.flatten()[0].item() for p in base.stack.parameters() if p.dim() == 2}
    assert not base_values & {t.flatten()[0].item() for t in adapter.tensors.values() if t.dim() == 2}
    assert Shape.of(open_specialist(tmp_path / "s")).first_layer == 4
    card = (tmp_path / "s" / "README.md").read_text()
    assert base.weights in card


@torch.no_grad()
def test_specialists_side_by_side_are_what_they_are_alone(bases: Bases, tmp_path: Path) -> None:
    """Absolute layer indices: what alternates by layer does not depend on who stands beside it."""
    base = bases["gpt"]
    alone = {}
    for name in ("a", "b"):
        adapter = new_specialist(tmp_path / name, base, layers=1, seed=ord(name))
        attached = attach(base, [adapter])
        noisy(attached.part(name))
        outputs = stage_outputs(attached.stack, attached.plan, TOKENS, [3])
        alone[name] = attached.stack.readout(outputs[3], 3)
    both = attach(base, [open_specialist(tmp_path / name) for name in ("a", "b")])
    for part in ("a", "b"):
        noisy(both.part(part))
    outputs = stage_outputs(both.stack, both.plan, TOKENS, [3, 4])
    for name, stage in both.stages.items():
        assert torch.equal(both.stack.readout(outputs[stage], stage), alone[name])


def test_an_odd_specialist_keeps_its_kind_of_layer() -> None:
    """Value embeddings alternate: the first layer behind 3 has none, wherever it is put."""
    stack = GPT(layers=3, width=16, heads=2, vocab=23, context=9)
    stack.append_layers(1)
    stack.append_layers(1, index=3)
    kinds = [layer.attention.value_embedding is not None for layer in stack.layers]  # type: ignore[union-attr]
    assert kinds[3] == kinds[4]


def test_stages_beside_one_another_hear_the_base() -> None:
    topology = Topology.chain("1,2").with_specialists((1, 2))
    plan = Plan.of(topology, 6)
    assert [[port.source for port, _ in stage.inputs] for stage in plan.stages[2:]] == [[1], [1]]
    assert [stage.stage.frozen for stage in plan.stages] == [True, True, False, False]
    forest = Topology.forest(["1", "1"]).with_specialists((1, 1), source=1)
    assert [[e.source for e in stage.sources] for stage in forest.stages[2:]] == [[1], [1]]


def test_the_wrong_base_is_refused_by_name(bases: Bases, tmp_path: Path) -> None:
    adapter = new_specialist(tmp_path / "s", bases["gpt"])
    with refused(RunError, setting="base"):
        attach(bases["imported"], [adapter])


def test_a_base_that_changed_by_one_bit_is_refused(bases: Bases, tmp_path: Path) -> None:
    base = bases["gpt"]
    new_specialist(tmp_path / "s", base)
    moved = Path(shutil.copytree(base.run.folder, tmp_path / "base"))
    (weights,) = moved.glob("checkpoints/*/model.safetensors")
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    adapter = open_specialist(tmp_path / "s")
    with pytest.raises(RunError, match="SHA-256"):
        adapter.open_base(moved)
    state = next(moved.glob("checkpoints/*/state.json"))
    assert json.loads(state.read_text())["files"], "nothing was touched"
    assert open_session(base.run.folder).weights == adapter.base.weights


def test_what_cannot_be_attached_is_refused(bases: Bases, tmp_path: Path) -> None:
    base = bases["gpt"]
    with refused(ConfigError, setting="layers", given=-1):
        new_specialist(tmp_path / "s", base, layers=-1)
    assert not (tmp_path / "s").exists()
    adapter = new_specialist(tmp_path / "s", base)
    with refused(ConfigError, setting="specialists", given="s"):
        attach(base, [adapter, adapter])
    with refused(RunError, setting="folder"):
        new_specialist(tmp_path / "s", base)


@pytest.mark.covers("mamba", "decode", feature="specialists")
@pytest.mark.parametrize("architecture", ["mamba2", "hybrid"])
@torch.no_grad()
def test_other_mixers_take_specialists_too(architecture: str, bases: Bases, tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert isinstance(bases["gpt"].stack, GPT)
    config = replace(bases["gpt"].stack.config, architecture=architecture, ssm_state=4)
    stack = GPT(config).eval()
    base = replace(bases["gpt"], read_stack=Held(stack))
    attached = attach(base, [new_specialist(tmp_path / "s", base, layers=1)])
    before = Predictor(stack, base.plan)(TOKENS)
    assert torch.equal(Predictor(attached.stack, composed(attached, {"s": 1.0}))(TOKENS), before)
