"""Reach of safe directions in miniature: a place changes one thing; items are asked of the tuned model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from papers.beyond import adapter_reach as study
from papers.beyond.safe_adapters import Size
from papers.kept import Kept
from papers.outcome import asked
from papers.run import run_study
from topograd.decode.engine import Engine
from topograd.evaluation.core import judged
from topograd.evaluation.prompts import bundle_of
from topograd.evaluation.scoring import Scorer
from topograd.evaluation.tasks import TASKS, read_items
from topograd.runs.folder import Run
from topograd.runs.session import open_session

SMALL = Size(length=8, old=6, judged=2, prose=1, new=4, tested=2, rank=2)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    (folder / "core").mkdir()
    copa = [{"query": f"It rained, so {i}", "choices": ["wet", "dry again"], "gold": i % 2} for i in range(4)]
    story = [{"context": f"One and two and {i}", "continuation": "three"} for i in range(3)]
    for name, items in (("copa", copa), ("lambada_openai", story)):
        text = "".join(json.dumps(item) + "\n" for item in items)
        (folder / "core" / f"{name}.jsonl").write_text(text)
    return folder


@pytest.fixture
def small(straight: Run, tasks: Path) -> study.ReachStudy:
    made = asked("adapter-reach", "tiny", steps=2)
    return study.ReachStudy("reference", open_session(straight.folder), SMALL, made, tasks / "core")


def test_the_study_in_miniature(straight: Run, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "folders", lambda asked: {"reference": straight.folder})
    monkeypatch.setattr(study, "TINY", SMALL)
    found = run_study(asked("adapter-reach", "tiny", steps=2, kept=Kept(tasks / "kept.jsonl")))
    places = {(row["arm"], row["windows"], row["rank"], row["layers"]) for row in found["rows"]}
    assert len(places) == len(found["rows"]) == 3 + 4 + 4 + 4
    assert len(found["tables"]) == 4
    assert [claim["name"] for claim in found["claims"]] == ["old text", "CORE"]


def test_items_are_answered_as_the_engine_does(small: study.ReachStudy, tasks: Path) -> None:
    """Of the untuned model, whose engine is another way to the same numbers."""
    scorer = Scorer(Engine(small.session.stack, small.session.plan, 64))
    for label, table in small.core().items():
        task = TASKS[label]
        items = read_items(task, tasks / "core" / task.file)
        for i, (right, nats) in enumerate(table):
            bundle, _ = bundle_of(task, items[i], [], small.session.tokenizer, 64)
            [scores] = scorer.score([bundle])
            expected = judged(task, items[i], bundle, scores)
            assert right == expected["correct"][-1]
            gold = scores[items[i].get("gold", 0)]
            assert nats == pytest.approx(gold.mean_loss[-1], rel=1e-4)


def test_items_are_asked_of_the_tuned_model(small: study.ReachStudy) -> None:
    before = small.core()
    row = small.row("lora", study.MIDDLE, 0)
    assert row["core"].keys() == before.keys()
    assert all(a[1] != b[1] for t in before for a, b in zip(row["core"][t], before[t], strict=True))
    assert small.core() == before


def test_a_place_changes_what_it_says(small: study.ReachStudy) -> None:
    whole = len(small.whole)
    lower, upper = (small.row("lora", study.Place(layers=part), 0) for part in ("lower", "upper"))
    both = small.row("lora", study.MIDDLE, 0)
    assert lower["parameters"] + upper["parameters"] == both["parameters"]
    assert len(small.maps) == whole
    two = small.row("lora", study.Place(rank=2), 0)
    assert 2 * two["parameters"] == both["parameters"]


def test_directions_read_as_much_old_text_as_asked(small: study.ReachStudy) -> None:
    small.row("safe", study.Place(2), 0)
    few, _ = small.moments("facts", 0)
    seen: list[torch.Tensor] = []
    name = next(iter(small.maps))
    handle = small.maps[name].register_forward_pre_hook(lambda m, args: seen.append(args[0].flatten(0, 1)))
    small.model(small.old[0].inputs[:2])
    handle.remove()
    torch.testing.assert_close(few[name], (seen[0].T @ seen[0]).double() / len(seen[0]), rtol=1e-4, atol=1e-6)
