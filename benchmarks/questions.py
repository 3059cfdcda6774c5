"""What each prefix of a model knows: eight prompts with one right answer, asked at every exit.

    text      what the exit writes behind the prompt, greedily, ANSWER_TOKENS tokens
    right     whether the answer is in it, in any case of letters
    logprob   Σ log p of the answer behind the prompt; rank is that of its first token (`texts.py`)

Two sets of eight: `world` asks what "Product of Experts" §5.2 asks (its wording is not published, so the
prompts are ours), `python` what a model of program text may know. A word that is found counts even in a
wrong sentence, and eight prompts tell no two models apart: log-probabilities and ranks say more, `eval core`
says most. Cost: for each prompt and exit ANSWER_TOKENS steps, and one pass for all exits' scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from topograd.decode.model import Model
from topograd.evaluation.texts import score_texts

ANSWER_TOKENS = 12
Question = tuple[str, str]
"""A prompt and its answer, with the space that stands before it."""

QUESTIONS: dict[str, tuple[Question, ...]] = {
    "world": (
        ("The chemical symbol for gold is", " Au"),
        ("Romeo and Juliet was written by William", " Shakespeare"),
        ("The official language of Brazil is", " Portuguese"),
        ("In degrees Celsius, the boiling point of water is", " 100"),
        ("The largest planet in the solar system is", " Jupiter"),
        ("The first president of the United States was George", " Washington"),
        ("The theory of relativity was developed by Albert", " Einstein"),
        ("The planets of the solar system are Mercury, Venus, Earth,", " Mars"),
    ),
    "python": (
        ("class Stack:\n    def __init__(", "self"),
        ("for i in range(10):\n    ", "print"),
        ("if __name__ == ", '"__main__"'),
        ("with open(filename) as", " f"),
        ("try:\n    import foo\nexcept", " ImportError"),
        ("def is_empty(self):\n    return len(", "self"),
        ("    if not isinstance(value, int):\n        raise", " TypeError"),
        ("Return True if the object is callable,", " False"),
    ),
}


def prefix_table(model: Model) -> dict[str, list[dict[str, Any]]]:
    """For each set, each prompt with what every exit makes of it."""
    return {name: _asked(model, questions) for name, questions in QUESTIONS.items()}


def right_counts(rows: Sequence[dict[str, Any]]) -> list[int]:
    """How many prompts of a set each exit answers."""
    return [sum(row["exits"][k]["right"] for row in rows) for k in range(len(rows[0]["exits"]))]


def _asked(model: Model, questions: Sequence[Question]) -> list[dict[str, Any]]:
    scored = score_texts(model, [(prompt, [answer]) for prompt, answer in questions])
    rows = []
    for (prompt, answer), [each] in zip(questions, scored, strict=True):
        exits = []
        for k, stage in enumerate(each.stages()):
            text = str(model.generate(prompt, ANSWER_TOKENS, depth=f"prefix:{k + 1}"))
            right = answer.strip().lower() in text.lower()
            first = stage["tokens"][0]
            exits.append({"text": text, "right": right, "logprob": stage["logprob"], "rank": first["rank"]})
        rows.append({"prompt": prompt, "answer": answer, "exits": exits})
    return rows
