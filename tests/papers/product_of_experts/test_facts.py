"""The small world: drawn from its seed, answers apart from distractors, passages as they are framed."""

from __future__ import annotations

import itertools

import pytest

from papers.product_of_experts.facts import (
    COUNTRIES,
    FRAMINGS,
    REAL,
    RELATIONS,
    Fact,
    Kind,
    KnownFact,
    World,
    first_named,
    passage,
)
from raising import refused
from topograd.errors import ConfigError


def test_a_world_follows_from_its_seed() -> None:
    world = World.make(6, seed=3)
    assert world == World.make(6, seed=3)
    assert world != World.make(6, seed=4)
    assert len(world.facts) == 18
    assert len({fact.subject for fact in world.facts}) == 6
    assert all(fact.answer != fact.wrong for fact in world.facts)
    assert [fact.rare for fact in world.facts] == [False] * 9 + [True] * 9


def test_common_facts_are_told_more_often() -> None:
    world = World.make(4)
    said = [record["messages"][1]["content"] for record in world.records(paraphrases=2)]
    counts = {fact: said.count(fact.statement(0)) for fact in world.facts}
    assert {fact.rare: count for fact, count in counts.items()} == {False: 6, True: 2}
    text = " ".join(world.prose(2))
    assert all(fact.statement(1) in text for fact in world.facts)


def test_wordings_differ() -> None:
    fact = World.make(1).facts[0]
    assert len({fact.question(i) for i in range(4)}) == 4
    assert len({fact.statement(i) for i in range(4)}) == 4
    assert fact.statement(0).startswith(fact.prompt)
    assert len({fact.question(i) for i in range(6)}) == 6
    assert all(len(relation.questions) == 6 for relation in RELATIONS.values())


@pytest.mark.parametrize("fact", [*REAL, *World.make(3).facts], ids=lambda fact: f"{fact.prompt}")
def test_no_passage_can_be_copied_from(fact: Fact | KnownFact) -> None:
    """What the prompt ends with is nowhere before an answer, so an induction head has nothing to copy."""
    end = fact.prompt.split()[-1].lower()
    kinds: list[tuple[Kind, str]] = [("right", "plain"), *(("wrong", framing) for framing in FRAMINGS)]
    for (kind, framing), wording in itertools.product(kinds, range(3)):
        text = passage(fact, kind, framing, wording)
        assert fact.prompt not in text
        answer = fact.answer if kind == "right" else fact.wrong
        before, found, _ = text.partition(answer)
        assert found
        assert not before.lower().rstrip().endswith(end), text


def test_the_first_name_counts() -> None:
    assert first_named("not Peru but Kenya", COUNTRIES) == "Peru"
    assert first_named("in Kenya, not Peru", COUNTRIES) == "Kenya"
    assert first_named("the Peruvian coast", COUNTRIES) is None, "a whole word"


def test_passages() -> None:
    fact = REAL[0]
    assert passage(fact, "right").startswith("Paris")
    assert len({passage(World.make(1).facts[0], "right", seed=i) for i in range(6)}) == 3
    texts = {framing: passage(fact, "wrong", framing) for framing in FRAMINGS}
    assert len(set(texts.values())) == 6
    assert all("Madrid" in text for text in texts.values())
    assert [name for name, text in texts.items() if "Paris" in text] == ["contradiction"]
    assert "Paris" not in passage(fact, "irrelevant")


def test_too_many_people_are_refused() -> None:
    with refused(ConfigError, setting="people", given=0):
        World.make(0)
    with refused(ConfigError, setting="people", given=1000):
        World.make(1000)
