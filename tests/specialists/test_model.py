"""Specialists at work: text as the composed plan predicts it, mixed batches, per-request switching."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raising import refused
from topograd.decode.model import Model
from topograd.decode.sequence import Sequence
from topograd.errors import ConfigError, RunError
from topograd.exec.forward import Predictor
from topograd.runs.adapter import update_adapter
from topograd.runs.session import LoadedTextRun
from topograd.runtime.choice import installed
from topograd.runtime.native.library import missing_reason
from topograd.specialists.attach import attach, new_specialist
from topograd.specialists.model import Mixed, SpecialistPool, open_composed

Bases = dict[str, LoadedTextRun]
PROMPTS = ["relay", "stage loss", "los", "stage relay loss"]
ROWS: list[dict[str, float]] = [{}, {"a": 1.0}, {"b": 1.0}, {"a": 0.6, "b": 0.7}]


def folders(base: LoadedTextRun, place: Path) -> dict[str, Path]:
    """Two specialists that have learned something, each its own."""
    generator = torch.Generator().manual_seed(1)
    for name, rank in (("a", 4), ("b", None)):
        adapter = new_specialist(place / name, base, layers=1, head_rank=rank, seed=ord(name))
        noisy = {n: t + 0.3 * torch.randn(t.shape, generator=generator) for n, t in adapter.tensors.items()}
        update_adapter(adapter, noisy, adapter.settings)
    return {name: place / name for name in ("a", "b")}


def by_hand(pool: SpecialistPool, prompt: list[int], weights: dict[str, float], tokens: int) -> list[int]:
    """Greedy text up to its end, the whole sequence computed again for each token."""
    predictor = Predictor(pool.attached.stack, pool.model(weights).session.plan)
    ends = pool.attached.base.tokenizer.stop_tokens
    text: list[int] = []
    with torch.no_grad():
        while len(text) < tokens and not (text and text[-1] in ends):
            text.append(int(predictor(torch.tensor([[*prompt, *text]]))[0, -1].argmax()))
    return text


@pytest.mark.covers("gpt", "decode", "runtime", feature="specialists")
@pytest.mark.covers("imported", "decode", "runtime", feature="specialists")
@pytest.mark.parametrize("runtime", ["torch", "onnx", "native"])
@pytest.mark.parametrize("which", ["gpt", "imported"])
def test_a_mixed_batch_is_what_each_row_is_alone(
    bases: Bases, which: str, runtime: str, tmp_path: Path
) -> None:
    if runtime == "onnx" and not installed():
        pytest.skip("onnxruntime is not installed")
    if runtime == "native" and (reason := missing_reason()):
        pytest.skip(reason)
    pool = SpecialistPool.open(bases[which], folders(bases[which], tmp_path), runtime=runtime)
    assert pool.engine.runtime.name == runtime
    prompts = [pool.model().encode(prompt)[:8] for prompt in PROMPTS]
    expected = [by_hand(pool, p, w, 5) for p, w in zip(prompts, ROWS, strict=True)]
    written = pool.generate(prompts, ROWS, tokens=5)
    assert written == expected
    assert len({tuple(row) for row in expected}) > 1
    for prompt, weights, text in zip(prompts, ROWS, expected, strict=True):
        (made,) = pool.generate([prompt], [weights], tokens=5)
        assert made == text


def test_the_base_runs_once_for_all_rows(
    gpt: LoadedTextRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = SpecialistPool.open(gpt, folders(gpt, tmp_path))
    batch = pool.engine.start([[1, 2], [3, 4], [5, 6]])
    ran: list[tuple[int, int]] = []
    original = batch[0].cache._run

    def watched(some: list[Sequence], stage: int, behind: list[int]) -> None:
        ran.extend((each, len(some)) for each in (stage, *behind))
        original(some, stage, behind)

    monkeypatch.setattr(batch[0].cache, "_run", watched)
    pool.strategy([{}, {"b": 1.0}, {}]).step(batch)
    assert ran == [(0, 3), (1, 3), (2, 3), (4, 1)], "the base for all, then a specialist for who wants it"
    with refused(ConfigError, setting="specialists", given=2):
        pool.strategy([{}, {}]).step(batch)


def test_models_of_a_pool_share_their_weights(gpt: LoadedTextRun, tmp_path: Path) -> None:
    pool = SpecialistPool.open(gpt, folders(gpt, tmp_path))
    base, a = pool.model(), pool.model({"a": 1.0})
    assert base.engine.stack is a.engine.stack
    assert base.generate("relay", tokens=6) == Model(gpt).generate("relay", tokens=6, depth="full")
    text = a.generate("relay", tokens=6)
    assert a.generate("relay", tokens=6, depth="speculate:2") == text
    with refused(ConfigError, setting="depth", given="wand"):
        a.generate("relay", depth="wand")


def test_specialists_of_different_bases_are_refused(bases: Bases, tmp_path: Path) -> None:
    mine = folders(bases["gpt"], tmp_path)
    new_specialist(tmp_path / "other", bases["imported"])
    with refused(RunError, setting="base"):
        open_composed(bases["gpt"].run.folder, f"{mine['a']},{tmp_path / 'other'}")
    with refused(RunError, setting="base"):
        open_composed(bases["imported"].run.folder, str(mine["a"]))
    with refused(ConfigError, setting="specialists", given=1):
        SpecialistPool(attach(bases["gpt"], [])).generate(["a", "b"], [{}])


def test_a_sequence_that_ended_is_left_alone_and_the_others_keep_their_specialists(
    gpt: LoadedTextRun, tmp_path: Path
) -> None:
    pool, prompts = SpecialistPool.open(gpt, folders(gpt, tmp_path)), [[1, 2], [3]]
    mixed = pool.strategy([{}, {"a": 1.0}])
    assert isinstance(mixed, Mixed)
    batch = pool.engine.start(prompts)
    written = [mixed.step(batch[1:])[0][0] for _ in range(4)]
    assert [e.token for e in written] == pool.generate(prompts[1:], [{"a": 1.0}], tokens=4)[0]
    assert {e.exit for e in written} == {mixed.exits[1]}
    assert batch[0].tokens == prompts[0]
    assert batch[0].marks == [0] * len(batch[0].marks)
