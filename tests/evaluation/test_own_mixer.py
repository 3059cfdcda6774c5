"""A run whose mixer is the one of `examples/own_parts.py`: its state is all that decoding asks for."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

import topograd as tg
from topograd.cli.main import main
from topograd.decode.model import Model
from topograd.decode.strategies import FixedDepth, generate_batch
from topograd.evaluation.scoring import Scorer, TokenRow
from topograd.nn.layer_state import LayerState

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        folder = tmp_path_factory.mktemp("own") / "run"
        import_module("own_parts").main(folder, steps=6)
        yield tg.load(folder, runtime="torch")
        sys.modules.pop("own_parts")


def exact(model: Model, tokens: list[int], start: int) -> float:
    """Σ log p of the tokens from `start` on, from the whole sequence at once."""
    logprobs = model.logits(tokens[:-1]).log_softmax(-1)
    return float(sum(logprobs[t - 1, tokens[t]] for t in range(start, len(tokens))))


def test_its_state_is_a_layer_state(model: Model) -> None:
    state: LayerState = model.session.stack.layers[0].new_state(2, 8)  # type: ignore[operator]
    assert {name for name in vars(LayerState) if not name.startswith("_")} <= set(dir(state))


def test_several_continuations_of_one_context(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["self", " other, more", "\n"]
    found = tg.score(model, "def read(", texts)
    before = model.encode("def read(")
    for each in found:
        alone = exact(model, [*before, *each.tokens], len(before))
        assert each.score.total[-1] == pytest.approx(alone, abs=1e-3)
    words = [word for text in texts for word in ("--continuation", text)]
    assert main(["score", str(model.session.run.folder), "--context", "def read(", *words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["continuations"]
    totals = [each["stages"][-1]["logprob"] for each in said]
    assert totals == pytest.approx([each.score.total[-1] for each in found])


def test_rows_of_unlike_lengths_are_what_each_is_alone(model: Model) -> None:
    """Two questions whose common beginnings differ in length go on in one batch."""
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int) -> list[int]:
        return torch.randint(0, 257, (count,), generator=generator).tolist()

    bundles = []
    for shared in (9, 4):
        context = drawn(shared)
        bundles.append([TokenRow([*context, *drawn(more)], shared) for more in (1, 5, 3)])
    scores = Scorer(model.engine).score(bundles)
    for bundle, each in zip(bundles, scores, strict=True):
        for row, score in zip(bundle, each, strict=True):
            assert score.total[-1] == pytest.approx(exact(model, list(row.tokens), row.start), abs=1e-3)
    prompts = [drawn(7), drawn(2)]
    together = generate_batch(FixedDepth(model.engine), prompts, 6)
    alone = [generate_batch(FixedDepth(model.engine), [prompt], 6)[0] for prompt in prompts]
    assert [[e.token for e in row] for row in together] == [[e.token for e in row] for row in alone]


def test_eval_core(model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    items = [{"query": "stage " * i, "choices": ["loss", "a relay", "x"], "gold": i % 3} for i in range(1, 5)]
    (tmp_path / "copa.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    folder = str(model.session.run.folder)
    assert main(["eval", "core", folder, "--tasks", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["tasks"]["copa"]["accuracy"]
    right = 0
    for item in items:
        rows = [
            [model.session.tokenizer.separator, *model.encode(f"{item['query']} {choice}")]
            for choice in item["choices"]  # type: ignore[attr-defined]
        ]
        start = next(i for i, tokens in enumerate(zip(*rows, strict=False)) if len(set(tokens)) > 1)
        means = [exact(model, row, start) / (len(row) - start) for row in rows]
        right += means.index(max(means)) == item["gold"]
    assert found[-1] == right / len(items)
