"""A run as a model: what it writes, how it says that it came about, what it predicts, what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import topograd as tg
from raising import refused
from topograd.decode import model as module
from topograd.decode.depths import engine_of
from topograd.decode.engine import Emitted
from topograd.decode.model import Generated, Model, Piece, generate, load
from topograd.decode.strategies import FixedDepth, generate_batch
from topograd.errors import CheckpointError, ConfigError, RunError
from topograd.runs.session import LoadedTextRun, heldout_text

CONTEXT = 16


@pytest.fixture(scope="module")
def session(make_session: Callable[..., LoadedTextRun]) -> LoadedTextRun:
    """A run of two stages on bytes that disagree."""
    return make_session(2)


@pytest.fixture(scope="module")
def model(session: LoadedTextRun) -> Model:
    return load(session.run.folder)


def test_a_text_is_a_string_that_knows_how_it_came_about(session: LoadedTextRun, model: Model) -> None:
    [written] = generate_batch(FixedDepth(engine_of(session)), [list(b"loss")], 9)
    made = model.generate("loss", 9)
    assert isinstance(made, str)
    assert made == bytes(e.token for e in written if e.token < 256).decode(errors="replace")
    assert (made.prompt, made.depth, made.deepest) == ("loss", "full", 2)
    assert "".join(piece.text for piece in made.pieces) == made
    assert [piece.exit for piece in made.pieces] == [1] * 9
    assert made.exits(2) == [0, 9]
    assert (made.drafted, made.accepted) == (None, None)
    assert made.seconds > 0
    assert made == model.generate("loss", 9, depth="prefix:2") == generate(session.run.folder, "loss", 9)


def test_each_depth_says_how_deep_it_went(model: Model) -> None:
    first = model.generate("loss", 9, depth="prefix:1")
    assert (first.deepest, first.exits(2)) == (1, [9, 0])
    pooled = model.generate("loss", 9, depth="branches:1*2+1-2")
    assert isinstance(pooled, Generated)
    assert (pooled.deepest, pooled.exits(2)) == (2, [0, 9])
    drafted = model.generate("loss", 9, depth="speculate:3")
    assert drafted == model.generate("loss", 9)
    assert drafted.drafted is not None
    assert drafted.accepted is not None
    assert 0 <= drafted.accepted <= drafted.drafted
    assert sum(drafted.exits(2)) == 9
    with refused(RunError, setting="calibration"):
        model.generate("loss", 9, depth="wand")


def test_sampled_text_follows_its_seed(model: Model) -> None:
    def text(seed: int, **more: float) -> str:
        return model.generate("loss", 20, temperature=1.0, seed=seed, **more)  # type: ignore[arg-type]

    assert text(1) == text(1) != text(2)
    assert text(1, top_k=1) == text(2, top_p=1e-9) == model.generate("loss", 20)


def test_pieces_are_shown_as_they_come_and_a_piece_is_a_token(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is held back at the end comes with the last token: it is no token of its own."""
    written = iter([0x61, 0xC3, 0xA9, 0x78, 0xC3])

    def next_token(self: FixedDepth, *_: object) -> list[list[Emitted]]:
        return [[Emitted(next(written), 1)]]

    monkeypatch.setattr(FixedDepth, "step", next_token)
    shown: list[Piece] = []
    made = model.generate("", 5, on_piece=shown.append)
    assert made == "aéx�"
    assert [piece[:2] for piece in made.pieces] == [("a", 1), ("", 1), ("é", 1), ("x", 1), ("�", 1)]
    assert made.exits(2) == [0, 5]
    assert "".join(piece.text for piece in shown) == made
    assert shown[:4] == made.pieces[:4]


def test_a_stop_string_that_is_only_begun_adds_no_token(model: Model) -> None:
    whole = model.generate("loss", 12)
    cut = model.generate("loss", 12, stop=[whole[-1] + "\0never"])
    assert cut == whole
    assert cut.exits(2) == [0, 12]
    stopped = model.generate("loss", 12, stop=[whole[4:7]])
    assert stopped == whole[: whole.find(whole[4:7])]
    assert sum(stopped.exits(2)) <= 12


def test_nothing_is_written_where_nothing_is_asked_for(model: Model) -> None:
    made = model.generate("loss", 0)
    assert (made, made.pieces, made.exits(2)) == ("", [], [0, 0])


def test_without_a_prompt_a_document_begins(model: Model) -> None:
    assert model.encode("") == [model.session.tokenizer.separator]
    assert model.encode("ab") == [97, 98]
    assert len(model.generate(tokens=3).pieces) == 3


def test_logits_are_what_the_model_predicts_behind_each_token(session: LoadedTextRun, model: Model) -> None:
    tokens = list(b"stage loss")
    z = model.logits(tokens)
    assert z.shape == (10, 257)
    assert not z.requires_grad
    engine = engine_of(session)
    with torch.inference_mode():
        cache = engine.start([tokens])
        engine.run(cache, engine.exits[-1])
        torch.testing.assert_close(z, engine.logits(cache, engine.exits[-1], [10]))
    rows = model.logits(torch.tensor([tokens, tokens[::-1]]))
    assert rows.shape == (2, 10, 257)
    torch.testing.assert_close(rows[0], z)


@pytest.mark.parametrize(
    "tokens",
    ["abc", None, [[1], [1, 2]], ["a"], [], [0.5], [[[1]]], [257], [-1, 3], [1] * (CONTEXT + 1)],
    ids=str,
)
def test_tokens_that_the_model_cannot_read_are_refused(model: Model, tokens: Any) -> None:
    with refused(ConfigError, setting="tokens", given=tokens):
        model.logits(tokens)


def test_evaluation_is_of_the_models_prediction(session: LoadedTextRun, model: Model, tmp_path: Path) -> None:
    reading = model.evaluate()
    text = heldout_text(session)
    nats = torch.nn.functional.cross_entropy(
        model.logits(text.inputs).flatten(0, 1).double(), text.targets.flatten(), reduction="sum"
    )
    assert reading.bpb.prediction == pytest.approx(nats.item() / math.log(2) / text.nbytes, rel=1e-6)
    assert isinstance(reading, tg.Evaluation)
    other = tmp_path / "other.txt"
    other.write_text("a text that it never saw before " * 9)
    assert model.evaluate(other).bytes == other.stat().st_size
    assert model.evaluate(str(other), 100).bytes <= 100


def test_a_checkpoint_is_found_by_name(session: LoadedTextRun) -> None:
    assert load(session.run.folder, "step-00000000").session.step == 0
    with pytest.raises(CheckpointError, match="has no checkpoint 'step-1'; it has step-00000000"):
        load(session.run.folder, "step-1")
    with pytest.raises(RunError, match="it does not exist"):
        load("nowhere")


@pytest.mark.parametrize(
    ("settings", "name", "given"),
    [
        ({"tokens": -1}, "tokens", -1),
        ({"tokens": 100_001}, "tokens", 100_001),
        ({"prompt": "x" * 1_000_001}, "prompt", 1_000_001),
        ({"temperature": -1.0}, "temperature", -1.0),
        ({"top_k": 0}, "top_k", 0),
        ({"depth": "deep"}, "depth", "deep"),
        ({"depth": "prefix:3"}, "exit", 3),
        ({"stop": ("",)}, "stop", ""),
    ],
)
def test_bad_settings_are_refused(model: Model, settings: dict[str, Any], name: str, given: object) -> None:
    shown: list[Piece] = []
    with refused(ConfigError, setting=name, given=given):
        generate(model, **settings, on_piece=shown.append)
    assert not shown


def test_the_engine_is_made_when_it_is_first_used(session: LoadedTextRun) -> None:
    opened = load(session.run.folder)
    opened.logits([1, 2])
    assert "engine" not in vars(opened)
    opened.generate("", 1)
    assert vars(opened)["engine"] is opened.engine


def test_one_stop_string_is_not_its_letters(model: Model) -> None:
    whole = model.generate("loss", 12)
    stop = whole[4:7]
    assert model.generate("loss", 12, stop=stop) == model.generate("loss", 12, stop=[stop])
    assert len(model.generate("loss", 12, stop=stop)) == whole.find(stop) > 0
    for bad in (5, [5], [""], ["a"] * 17):
        with refused(ConfigError, setting="stop"):
            model.generate("loss", 1, stop=bad)  # type: ignore[arg-type]


def test_arguments_of_other_types(model: Model) -> None:
    anything: Any = model
    for tokens in ("3", 3.0, None, True):
        with refused(ConfigError, setting="tokens", given=tokens):
            anything.generate("loss", tokens)
    for prompt in (5, None, 1.5, [1.5], ["a"]):
        with refused(ConfigError, setting="prompt", given=prompt):
            anything.generate(prompt, 1)
    for folder in (42, None, [model.session.run.folder]):
        with refused(ConfigError, setting="model", given=folder):
            tg.load(folder)  # type: ignore[arg-type]


def test_unknown_weights_are_refused_before_the_run_is_read(tmp_path: Path) -> None:
    with refused(ConfigError, setting="weights", given="int3"):
        tg.load(tmp_path / "nowhere", weights="int3")


def test_logits_are_of_the_weights_that_were_asked_for(session: LoadedTextRun, model: Model) -> None:
    pytest.importorskip("onnxruntime")
    tokens = [list(b"stage loss"), list(b"loss stage")]
    whole = model.logits(tokens)
    for weights in ("int8", "int4"):
        other = load(session.run.folder, weights=weights)
        logits = other.logits(tokens)
        assert logits.shape == whole.shape
        error = (logits - whole).norm() / whole.norm()
        assert 1e-4 < error < (0.1 if weights == "int8" else 0.5)
        [written] = generate_batch(FixedDepth(other.engine), [tokens[0]], 1)
        assert written[0].token == int(logits[0, -1].argmax())
        assert torch.allclose(other.logits(tokens[0]), logits[0], atol=1e-4)
        with refused(ConfigError, setting="weights", given=weights):
            other.evaluate()


@pytest.mark.parametrize("depth", ["full", "prefix:1", "speculate:2"])
def test_making_sessions_is_not_of_a_texts_time(
    session: LoadedTextRun, monkeypatch: pytest.MonkeyPatch, depth: str
) -> None:
    onnx_runtime = pytest.importorskip("topograd.runtime.onnx_runtime")
    now, made = [0.0], []

    def slow(name: str) -> None:
        real = getattr(onnx_runtime.OnnxRuntime, name)

        def graph(self: object, *given: object) -> object:
            now[0] += 5
            made.append(name)
            return real(self, *given)

        monkeypatch.setattr(onnx_runtime.OnnxRuntime, name, graph)

    slow("graph")
    slow("head_graph")
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    model = load(session.run.folder, runtime="onnx")
    assert model.generate("loss", 3, depth=depth).seconds == 0
    assert set(made) == {"graph", "head_graph"}
    count = len(made)
    assert model.generate("loss", 3, depth=depth).seconds == 0
    assert len(made) == count


@pytest.mark.parametrize("depth", ["speculate:lookup", "speculate:2"])
def test_a_second_text_makes_no_strategy_and_a_seed_writes_the_same(
    session: LoadedTextRun, monkeypatch: pytest.MonkeyPatch, depth: str
) -> None:
    """Drafters keep nothing of a text that is done, so what they guess does not depend on texts before."""
    model, made = load(session.run.folder), []
    real = module.strategy_of

    def noted(*given: Any) -> object:
        made.append(given)
        return real(*given)

    monkeypatch.setattr(module, "strategy_of", noted)
    first = model.generate("loss loss loss", 30, depth=depth, temperature=1.5, seed=3)
    for other in range(3):
        model.generate("stage stage", 30, depth=depth, temperature=1.5, seed=other)
    again = model.generate("loss loss loss", 30, depth=depth, temperature=1.5, seed=3)
    assert (again, again.drafted, again.pieces) == (first, first.drafted, first.pieces)
    assert first.drafted
    assert len(made) == 1
