"""Chat records: only what the assistant said is learned, everything is packed once, bad lines are named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raising import refused
from topograd.data import Prepared
from topograd.errors import DataError
from topograd.runs.config import TrainConfig
from topograd.runs.folder import Run
from topograd.runs.session import LoadedTextRun, heldout_text, open_session
from topograd.runs.tune_config import TuneConfig
from topograd.specialists.attach import attach
from topograd.specialists.records import (
    Record,
    chat_records,
    packed_records,
    read_records,
    rows_of,
    spelled,
)
from topograd.specialists.tokens import NewToken, Vocabulary
from topograd.training.runs import resume, start

CHAT = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "First."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Second."},
]


def vocabulary(session: LoadedTextRun, *new: NewToken) -> Vocabulary:
    return Vocabulary(session.tokenizer, 320 if "imported" in str(session.run.folder) else 257, new)


def parts(record: Record, learned: bool, words: Vocabulary) -> str:
    chosen = [t for t, on in zip(record.tokens, record.learned, strict=True) if on is learned]
    return words.tokenizer.decode(chosen)


def test_the_bases_own_template_and_what_is_learned(imported: LoadedTextRun) -> None:
    words = vocabulary(imported)
    one = chat_records([CHAT[:2]], words)[0]
    assert parts(one, True, words).startswith("First.")
    assert "First" not in parts(one, False, words)
    assert spelled(words, ["One?"]) == ["<|user|>One?\n<|assistant|>"]


def test_a_base_without_a_template_gets_the_plain_one(gpt: LoadedTextRun) -> None:
    words = vocabulary(gpt)
    (record,) = chat_records([CHAT], words)
    assert parts(record, True, words) == " First.\n Second.\n"
    assert parts(record, False, words) == "User: One?\nAssistant:User: Two?\nAssistant:"


def test_new_tokens_are_one_token_each(gpt: LoadedTextRun) -> None:
    words = vocabulary(gpt, NewToken("<|u|>", "User"), NewToken("<|e|>", "end"))
    template = "{% for m in messages %}<|u|>{{ m.content }}<|e|>{% endfor %}"
    (record,) = chat_records([CHAT[:2]], words, template + "{% if add_generation_prompt %}<|u|>{% endif %}")
    assert [t for t in record.tokens if t >= 257] == [257, 258, 257, 258]
    assert record.learned[-1]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is not JSON"),
        ("[1]", "is no JSON object"),
        ({"messages": []}, "has no messages"),
        ({"messages": [{"role": "user"}]}, "message 1 must have a role and a content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "the role of message 1 is 'robot'; it must be"),
        ({"messages": [{"role": "user", "content": "x"}]}, "has no message of the assistant"),
        ({"prompt": "x"}, "prompt and completion must be text"),
    ],
)
def test_bad_lines_are_named(gpt: LoadedTextRun, tmp_path: Path, line: Any, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    good = json.dumps({"messages": CHAT})
    path.write_text(f"{good}\n\n{line if isinstance(line, str) else json.dumps(line)}\n")
    with pytest.raises(DataError, match=rf"bad\.jsonl, line 3:? .*{words}|line 3: {words}") as caught:
        read_records(path, vocabulary(gpt))
    assert "\n" not in str(caught.value)


def test_an_empty_file_is_refused(gpt: LoadedTextRun, tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(DataError):
        read_records(tmp_path / "none.jsonl", vocabulary(gpt))


def test_any_text_is_learned_whole(gpt: LoadedTextRun, corpus: Path) -> None:
    records = read_records(corpus, vocabulary(gpt))
    assert all(all(record.learned) for record in records)
    inputs, targets = rows_of(corpus, attach(gpt, []), context=16)
    assert inputs.shape == targets.shape
    assert inputs.shape[1] == 16
    assert int((targets != -100).sum()) == sum(len(r.tokens) + 1 for r in records)


def test_packed_rows_have_every_learned_token_once() -> None:
    records = [Record([10 * i + j for j in range(5)], [j > 2 for j in range(5)]) for i in range(1, 7)]
    inputs, targets = packed_records(records, separator=0, context=13)
    learned = sorted(t for t in targets.flatten().tolist() if t not in (-100, 0))
    assert learned == sorted(10 * i + j for i in range(1, 7) for j in (3, 4))
    assert len(inputs) == 3, "two records of six targets in a row of thirteen"
    for row, target in zip(inputs.tolist(), targets.tolist(), strict=True):
        for place, token in enumerate(target[:-1]):
            if token not in (-100, 0):
                assert row[place + 1] == token, "the target is the next input"
    with refused(DataError, setting="data"):
        packed_records([Record([1, 2], [False, False])], 0, 4)


def test_a_run_learns_the_assistants_tokens_of_the_same_file(
    straight: Run, chats: Path, tmp_path: Path
) -> None:
    """A LoRA on conversations: the targets of its batches are the tokens that `finetune` would learn."""
    base = open_session(straight.folder)
    tune = TuneConfig(lora_rank=2, seq_len=base.config.model.context)
    config = replace(base.config, init=str(straight.folder), data=str(chats), tune=tune, steps=3)
    config = replace(config, batch=20)  # all conversations in a step
    trainer = start(config, tmp_path / "run")
    results = trainer.train(stop_after=2)
    batches = trainer.task.states
    assert batches is not None
    rows = batches.store.rows(range(len(batches.store)))
    records = read_records(chats, vocabulary(base))
    assert isinstance(trainer.task.data, Prepared)
    heldout = [document.tolist() for document in trainer.task.data.heldout]
    assert len(heldout) == 1, "some conversations are held out, as of any text"
    learned = [
        token
        for record in records
        if record.tokens not in heldout
        for token, on in zip([*record.tokens, base.tokenizer.separator], [*record.learned, True], strict=True)
        if on
    ]
    assert sorted(rows.targets[rows.mask].tolist()) == sorted(learned)
    assert results["bpb"]["prediction"] > 0
    straight_on = start(config, tmp_path / "other").train()
    resumed = resume(tmp_path / "run").train()
    assert resumed["weights"] == straight_on["weights"], "bit for bit"
    assert open_session(tmp_path / "run").step == 3
    assert heldout_text(open_session(tmp_path / "run")).nbytes > 0


def test_conversations_for_random_weights_are_refused(
    config: TrainConfig, chats: Path, tmp_path: Path
) -> None:
    with refused(DataError, setting="data", given=str(chats)):
        start(replace(config, data=str(chats)), tmp_path / "run")
