"""Items become the texts and tokens that nanochat scores."""

from __future__ import annotations

from topograd.data.bpe import BPETokenizer
from topograd.evaluation.prompts import bundle_of, prompts, shared
from topograd.evaluation.tasks import TASKS

BYTES = BPETokenizer.bytes()
CHOICE = {"query": "Q: 1+1?", "choices": ["two", "twelve"], "gold": 0}
SCHEMA = {"context_options": ["Ann and Bo; Ann", "Ann and Bo; Bo"], "continuation": "ran.", "gold": 1}
LANGUAGE = {"context": "The sky is ", "continuation": "blue"}


def test_texts_of_each_kind() -> None:
    assert prompts(TASKS["arc_easy"], CHOICE, [CHOICE]) == [
        "Q: 1+1?\nAnswer: two\n\nQ: 1+1?\nAnswer: two",
        "Q: 1+1?\nAnswer: two\n\nQ: 1+1?\nAnswer: twelve",
    ]
    assert prompts(TASKS["winograd"], SCHEMA, [SCHEMA])[0] == "Ann and Bo; Bo ran.\n\nAnn and Bo; Ann ran."
    assert prompts(TASKS["squad"], LANGUAGE, [LANGUAGE]) == [
        "The sky is blue\n\nThe sky is",
        "The sky is blue\n\nThe sky is blue",
    ]
    assert prompts(TASKS["jeopardy"], LANGUAGE, []) == ["The sky is\nAnswer:", "The sky is\nAnswer: blue"]


def test_scored_is_what_differs() -> None:
    rows, cut = bundle_of(TASKS["copa"], CHOICE, [], BYTES, 100)
    assert cut == 0
    assert [bytes(row.tokens[row.start :]).decode() for row in rows] == ["o", "elve"], "both begin with tw"
    assert [row.tokens[0] for row in rows] == [BYTES.separator] * 2
    rows, _ = bundle_of(TASKS["winograd"], SCHEMA, [], BYTES, 100)
    assert [bytes(row.tokens[row.start :]).decode() for row in rows] == [" ran."] * 2
    [row], _ = bundle_of(TASKS["lambada_openai"], LANGUAGE, [], BYTES, 100)
    assert bytes(row.tokens[row.start :]).decode() == " blue"


def test_what_does_not_differ_is_scored_all_the_same() -> None:
    rows, _ = bundle_of(TASKS["copa"], CHOICE | {"choices": ["yes", "yes"]}, [], BYTES, 100)
    assert [bytes(row.tokens[row.start :]).decode() for row in rows] == ["s", "s"]
    rows, _ = bundle_of(TASKS["copa"], CHOICE | {"choices": ["a", "ab"]}, [], BYTES, 100)
    assert [bytes(row.tokens[row.start :]).decode() for row in rows] == ["a", "ab"]
    schema = {"context_options": ["a", "b"], "continuation": "c", "gold": 0}
    rows, _ = bundle_of(TASKS["winograd"], schema, [], BYTES, 100)
    assert [bytes(row.tokens[row.start :]).decode() for row in rows] == [" c"] * 2


def test_long_prompts_lose_their_beginning() -> None:
    rows, cut = bundle_of(TASKS["copa"], CHOICE, [], BYTES, 12)
    assert [len(row.tokens) for row in rows] == [12, 12]
    assert cut == 1 + (len(rows[0].tokens) == 12 and len("Q: 1+1? two") + 1 > 12)
    assert [bytes(row.tokens[row.start :]).decode() for row in rows] == ["o", "elve"]


def test_shared_counts_leading_tokens() -> None:
    assert shared([[1, 2, 3], [1, 2, 4]]) == 2
    assert shared([[1, 2], [1, 2, 4]]) == 2
    assert shared([[1], [2]]) == 0
