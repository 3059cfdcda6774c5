"""A small world of facts: what a model is taught, what it is asked, and passages that help or mislead it.

    world = World.make(people=20, seed=0)
    world.records(paraphrases=3)              chat records that teach it; rare facts come less often
    fact.question(), fact.prompt, fact.answer, fact.wrong
    passage(fact, "wrong", "hedged")          a text to put in front of a question

People with invented names were born in real countries, live in real cities, and wrote works with invented
titles, so that an answer is a word that every model can write and no model can know. A fact has a distractor
of its own kind (`wrong`). Common facts are told `common_repeats` times as often as rare ones. REAL are facts
that a model of the world may know, with the wrong answers that passages claim.

Passages say a fact in other words than a prompt asks for it: what stands before the answer there is not what
stands before it in the prompt, so that copying what followed those words does not give it. They are right,
wrong or irrelevant; a wrong one comes in six framings, from plain assertion to a warning ("Product of
Experts" §8.2.1, R5). Everything is drawn from the seed alone; nothing here needs torch.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from topograd.limits import SEED, check_numbers

COUNTRIES = (
    "Norway",
    "Peru",
    "Kenya",
    "Japan",
    "Canada",
    "Egypt",
    "Chile",
    "Nepal",
    "Ghana",
    "Cuba",
    "Poland",
    "Iran",
)
CITIES = ("Paris", "London", "Rome", "Berlin", "Madrid", "Vienna", "Dublin", "Athens", "Boston", "Chicago")
TITLES = ("River", "Garden", "Winter", "Mirror", "Harbor", "Bridge", "Forest", "Letter", "Shadow", "Summer")
STARTS = (
    "Zor",
    "Mil",
    "Tar",
    "Ob",
    "Pel",
    "Quim",
    "Ruth",
    "Sev",
    "Ulm",
    "Varn",
    "Kes",
    "Dov",
    "Fen",
    "Hal",
    "Jor",
)
ENDS = (
    "vex",
    "une",
    "quell",
    "rina",
    "vado",
    "sar",
    "ol",
    "anka",
    "eth",
    "nico",
    "mund",
    "ette",
    "wick",
    "osa",
)
Kind = Literal["right", "wrong", "irrelevant"]
FRAMINGS = ("assertive", "plain", "hedged", "disputed", "flagged", "contradiction")
"""How a wrong claim is put: as certain, in passing, hedged, disputed, marked as false, beside the truth."""


@dataclass(frozen=True)
class Relation:
    """One kind of fact, in many wordings; {s} is the subject, {a} the answer."""

    name: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    prompt: str
    """A text that the answer continues."""
    told: tuple[str, ...]
    """For passages, with the answer first."""


RELATIONS = {
    "born": Relation(
        "born",
        (
            "{s} was born in {a}.",
            "{a} is where {s} was born.",
            "The birthplace of {s} is {a}.",
            "{s} comes from {a}.",
        ),
        (
            "Where was {s} born?",
            "In which country was {s} born?",
            "What is the birthplace of {s}?",
            "Where does {s} come from?",
            "Which country is {s} from?",
            "Can you name the native country of {s}?",
        ),
        "{s} was born in",
        (
            "{a} is the native country of {s}.",
            "{a} was the first country that {s} saw.",
            "{a} issued the birth certificate of {s}.",
        ),
    ),
    "lives": Relation(
        "lives",
        (
            "{s} lives in {a}.",
            "{s} has a house in {a}.",
            "Today {s} lives in {a}.",
            "The home of {s} is in {a}.",
        ),
        (
            "Where does {s} live?",
            "In which city does {s} live?",
            "Where is the home of {s}?",
            "Which city does {s} live in?",
            "To which city would one send {s} a letter?",
            "Can you name the home town of {s}?",
        ),
        "{s} lives in",
        (
            "{a} counts {s} among its residents.",
            "{a} has been home to {s} for years.",
            "{a} is the city where one can visit {s}.",
        ),
    ),
    "wrote": Relation(
        "wrote",
        (
            "{s} wrote The {a}.",
            "The {a} was written by {s}.",
            "{s} is the author of The {a}.",
            "The book of {s} is called The {a}.",
        ),
        (
            "What did {s} write?",
            "Which book did {s} write?",
            "What is the book of {s} called?",
            "Of which book is {s} the author?",
            "Which title did {s} publish?",
            "Can you name the book by {s}?",
        ),
        "{s} wrote The",
        (
            "{a} is the title of a book by {s}.",
            "{a} made its author, {s}, known.",
            "{a} has the name of {s} on its cover.",
        ),
    ),
}
POOLS = {"born": COUNTRIES, "lives": CITIES, "wrote": TITLES}


@dataclass(frozen=True)
class Fact:
    """Something that is so, and something of the same kind that is not."""

    subject: str
    relation: str
    answer: str
    wrong: str
    rare: bool = False

    @property
    def prompt(self) -> str:
        return RELATIONS[self.relation].prompt.format(s=self.subject)

    def statement(self, wording: int = 0, answer: str | None = None) -> str:
        words = RELATIONS[self.relation].statements
        return words[wording % len(words)].format(s=self.subject, a=answer or self.answer)

    def told(self, wording: int = 0, answer: str | None = None) -> str:
        words = RELATIONS[self.relation].told
        return words[wording % len(words)].format(s=self.subject, a=answer or self.answer)

    def question(self, wording: int = 0) -> str:
        words = RELATIONS[self.relation].questions
        return words[wording % len(words)].format(s=self.subject)


@dataclass(frozen=True)
class KnownFact:
    """Something that a model of the real world may know: a text, what continues it, and what does not."""

    prompt: str
    answer: str
    wrong: str
    words: str
    """The same in other words, with {a} for the answer."""

    def told(self, wording: int = 0, answer: str | None = None) -> str:
        return self.words.format(a=answer or self.answer)


REAL = (
    KnownFact("The capital of France is", "Paris", "Madrid", "{a} is the French seat of government."),
    KnownFact("The capital of Japan is", "Tokyo", "Seoul", "{a} is the Japanese seat of government."),
    KnownFact("The capital of Italy is", "Rome", "Vienna", "{a} is the Italian seat of government."),
    KnownFact("The capital of Norway is", "Oslo", "Bergen", "{a} is the Norwegian seat of government."),
    KnownFact(
        "The first president of the United States was George",
        "Washington",
        "Bush",
        "{a} headed the United States before anybody else did.",
    ),
    KnownFact(
        "The theory of general relativity was developed by Albert",
        "Einstein",
        "Camus",
        "{a} explained gravity as curved space and time.",
    ),
    KnownFact(
        "The largest planet in the solar system is",
        "Jupiter",
        "Mars",
        "{a} outweighs all other planets together.",
    ),
    KnownFact(
        "Romeo and Juliet was written by William",
        "Shakespeare",
        "Blake",
        "{a} put the lovers of Verona on stage.",
    ),
    KnownFact("The chemical symbol of oxygen is", "O", "G", "{a} stands for oxygen in formulas."),
    KnownFact(
        "Water freezes at zero degrees", "Celsius", "Kelvin", "{a} is the scale whose zero is melting ice."
    ),
    KnownFact("The opposite of north is", "south", "east", "Go {a} to have north behind you."),
    KnownFact("The Great Wall is in", "China", "India", "{a} built a wall that is thousands of miles long."),
)
IRRELEVANT = (
    "Tomorrow it will be cloudy, with some rain in the afternoon.",
    "A triangle with two equal sides is called isosceles.",
    "Mix the flour with the eggs and leave the dough for an hour.",
)


@dataclass(frozen=True)
class World:
    """All the facts, common ones first."""

    facts: tuple[Fact, ...]
    seed: int
    common_repeats: int = 3

    @classmethod
    def make(cls, people: int = 20, relations: Sequence[str] = tuple(RELATIONS), seed: int = 0) -> World:
        """A world of that many people, a fact for each relation; every second person's facts are rare."""
        settings = _Settings(people, seed)
        chosen = random.Random(settings.seed)
        names = [a + b for a in STARTS for b in ENDS]
        chosen.shuffle(names)
        facts = []
        for i in range(people):
            for relation in relations:
                answer, wrong = chosen.sample(POOLS[relation], 2)
                facts.append(Fact(names[i], relation, answer, wrong, rare=i % 2 == 1))
        return cls(tuple(sorted(facts, key=lambda fact: fact.rare)), seed)

    def records(self, paraphrases: int = 3) -> list[dict[str, list[dict[str, str]]]]:
        """Chat records: a question and its answer, in that many wordings; the others are left for asking."""
        results = []
        for fact in self.facts:
            for wording in range(paraphrases):
                args = {"role": "user", "content": fact.question(wording)}
                message = {"role": "assistant", "content": fact.statement(0)}
                results += [{"messages": [args, message]}] * (1 if fact.rare else self.common_repeats)
        random.Random(self.seed).shuffle(results)
        return results

    def prose(self, paraphrases: int = 3) -> list[str]:
        """The same facts as plain statements, several to a document: factual text without a chat."""
        lines = [
            fact.statement(wording)
            for fact in self.facts
            for wording in range(paraphrases)
            for _ in range(1 if fact.rare else self.common_repeats)
        ]
        random.Random(self.seed).shuffle(lines)
        return [" ".join(lines[i : i + 8]) for i in range(0, len(lines), 8)]


@dataclass(frozen=True)
class _Settings:
    people: int
    seed: int

    def __post_init__(self) -> None:
        check_numbers(self, people=(1, len(STARTS) * len(ENDS)), seed=SEED)


def passage(fact: Fact | KnownFact, kind: Kind, framing: str = "plain", seed: int = 0) -> str:
    """A text to put in front of a question about `fact`, in other words than its prompt has; a framing is for
    wrong ones. The seed chooses among three wordings."""
    if kind == "irrelevant":
        return IRRELEVANT[seed % len(IRRELEVANT)]
    if kind == "right":
        return fact.told(seed)
    claim = fact.told(seed, fact.wrong)
    return {
        "assertive": f"Fact: {claim} This is certain.",
        "plain": claim,
        "hedged": f"Some sources say that the following is so. {claim}",
        "disputed": f"Some sources say, and others deny: {claim}",
        "flagged": f"Warning: the following claim is false. {claim}",
        "contradiction": f"{claim} {fact.told(seed)}",
    }[framing]


def first_named(text: str, words: Sequence[str]) -> str | None:
    """Which of the words a text names first.

    >>> first_named("It is not in Peru, but in Kenya.", COUNTRIES)
    'Peru'
    """
    places = {word: found.start() for word in words if (found := re.search(rf"\b{re.escape(word)}\b", text))}
    return min(places, key=lambda word: places[word], default=None)
