"""Readings of facts: recall, trust and votes as they follow from the logits."""

from __future__ import annotations

import pytest
import torch

from papers.product_of_experts import fact_readings
from papers.product_of_experts.fact_readings import Reader, by_stage, hits, trust, weighting
from papers.product_of_experts.facts import REAL, KnownFact, World
from topograd.exec.forward import Predictor
from topograd.runs.session import LoadedTextRun
from topograd.specialists.attach import Attached, attach, new_specialist
from topograd.specialists.composition import composed
from topograd.specialists.model import SpecialistPool
from topograd.specialists.records import spelled

PATHS: dict[str, dict[str, float]] = {"base": {}, "s": {"s": 1.0}}


@pytest.fixture(scope="module")
def attached(imported: LoadedTextRun, tmp_path_factory: pytest.TempPathFactory) -> Attached:
    made = attach(imported, [new_specialist(tmp_path_factory.mktemp("s") / "s", imported)])
    with torch.no_grad():
        for parameter in made.part("s").parameters():
            parameter.add_(0.1)
    return made


def test_recall_is_of_free_answers(attached: Attached, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all answers of its kind the right one has to come first; the question is all that is given."""
    facts = World.make(1).facts
    first, second, third = facts
    asked: list[str] = []

    def written(pool: SpecialistPool, prompts: list[str], weights: object) -> list[str]:
        asked.extend(prompts)
        return [f"I think {first.answer}.", f"{second.wrong} or {second.answer}", "I do not know."]

    pool = SpecialistPool(attached)
    assert hits(pool, {"s": 1.0}, facts, 4) == [False] * 3, "an untrained model names none"
    monkeypatch.setattr(fact_readings, "answers", written)
    assert hits(pool, {"s": 1.0}, facts, 4) == [True, False, False]
    assert asked == [fact.question(4) for fact in facts]
    assert not any(fact.answer in text for fact, text in zip(facts, asked, strict=True))
    assert third.prompt not in asked[2]


def test_answers_are_what_the_model_writes(attached: Attached) -> None:
    pool = SpecialistPool(attached)
    vocabulary = attached.vocabulary
    (text,) = spelled(vocabulary, ["Where?"])
    (ids,) = pool.generate([vocabulary.encode_chat(text)], [{"s": 1.0}], fact_readings.ANSWER_TOKENS)
    assert fact_readings.answers(pool, ["Where?"], {"s": 1.0}) == [vocabulary.tokenizer.decode(ids)]


@torch.no_grad()
def test_probabilities_are_those_of_the_model(attached: Attached) -> None:
    reader = Reader(attached, PATHS)
    found, other = reader.log_probability([("def", "read"), ("for i in range", "x")])
    (alone,) = reader.log_probability([("for i in range", "x")])
    assert other == pytest.approx(alone, rel=1e-4), "its company changes nothing"
    target = attached.vocabulary.tokenizer.encode(" read")
    begun = reader.ids("def")
    for name, weights in PATHS.items():
        logits = Predictor(attached.stack, composed(attached, weights))(torch.tensor([[*begun, *target]]))[0]
        logs = logits.log_softmax(-1)[len(begun) - 1 : -1]
        expected = float(logs[range(len(target)), target].sum())
        assert found[name] == pytest.approx(expected, rel=1e-4)
    (first,) = reader.first([("def", "read")])
    ((logits, _),) = reader.logits([("def", "read")])
    for name, (hit, value, margin) in first.items():
        z = logits[name][0]
        assert hit == (margin > 0) == (int(z.argmax()) == target[0])
        assert value == pytest.approx(float(z[target[0]]))
        assert margin == pytest.approx(value - float(torch.cat([z[: target[0]], z[target[0] + 1 :]]).max()))


def test_tables_have_every_case(attached: Attached) -> None:
    short = [KnownFact("a is", "b", "c", "{a} it is")]
    rows = trust(Reader(attached, PATHS), short)
    assert len(rows) == 2 * (3 + 6)
    for row in rows:
        assert row["ratio"] == pytest.approx(row["correct"] / row["wrong"])
        assert row["gullible"] in (0, 1)
    votes = {row["votes"]: row["logit"] for row in weighting(attached, "s", short)}
    assert votes["1:1"] == pytest.approx((votes["1:0"] + votes["0:1"]) / 2, rel=1e-3)
    assert votes["3:1"] == pytest.approx((3 * votes["1:0"] + votes["0:1"]) / 4, rel=1e-3)
    stages = by_stage(attach(attached.base, []), short)
    assert [row["stage"] for row in stages] == [1, 2]
    assert len(REAL) == 12
