"""New tokens: begun from related ones, in every table, while the base's own rows stay as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raising import refused
from topograd.data.hf_tokenizer import HFTokenizer
from topograd.errors import ConfigError
from topograd.exec.forward import Predictor
from topograd.runs.session import LoadedTextRun
from topograd.specialists.attach import attach, new_specialist, open_specialist
from topograd.specialists.composition import composed
from topograd.specialists.tokens import NewToken, Vocabulary

Bases = dict[str, LoadedTextRun]


@pytest.mark.parametrize("which", ["gpt", "imported"])
@torch.no_grad()
def test_a_new_token_begins_as_the_word_it_comes_from(bases: Bases, which: str, tmp_path: Path) -> None:
    base = bases[which]
    rows = len(base.stack.get_parameter("head.weight"))
    (source,) = base.tokenizer.encode("x")
    tokens = [NewToken("<|one|>", "x"), NewToken("<|two|>", "xz")]
    new_specialist(tmp_path / "s", base, tokens=tokens, head_rank=3)
    attached = attach(base, [open_specialist(tmp_path / "s")])
    ids = torch.tensor([[*base.tokenizer.encode("ab"), source]])
    new = ids.clone()
    new[0, -1] = rows
    predictor = Predictor(attached.stack, composed(attached, {"s": 1.0}))
    logits = {"old": predictor(ids), "new": predictor(new)}
    assert logits["new"].shape[-1] == rows + 2
    assert torch.equal(logits["new"], logits["old"]), "it is read as the word that it comes from"
    torch.testing.assert_close(logits["new"][..., rows], logits["new"][..., source])
    before = Predictor(base.stack, base.plan)(ids)
    torch.testing.assert_close(logits["old"][..., :rows], before)
    assert torch.equal(Predictor(base.stack, base.plan)(ids), before), "the base has its own tables"
    table = attached.stack.get_parameter("embedding.weight")
    torch.testing.assert_close(table[rows + 1], table[base.tokenizer.encode("xz")].mean(0))


def test_what_users_write(gpt: LoadedTextRun) -> None:
    assert NewToken.parse("<|a=b|>=User") == NewToken("<|a=b|>", "User")
    for words in ("<|a|>", "=x", "<|a|>="):
        with refused(ConfigError, setting="tokens"):
            NewToken.parse(words)
    with refused(ConfigError, setting="tokens", given=2):
        Vocabulary(gpt.tokenizer, 257, [NewToken("a", "b"), NewToken("a", "c")])


def test_a_prompt_keeps_what_the_base_puts_around_it(imported: LoadedTextRun) -> None:
    bos = {"bos_token": "<|endoftext|>", "add_bos_token": True}
    tokenizer = HFTokenizer(imported.tokenizer.files()["tokenizer.json"], bos)
    vocabulary = Vocabulary(tokenizer, 400, [NewToken("<|a|>", "x")])
    assert vocabulary.encode("def x") == tokenizer.encode("def x", "prompt")
    assert vocabulary.encode("<|a|>") == [tokenizer.special_ids["bos"], 400]
    assert vocabulary.encode("") == [tokenizer.special_ids["bos"]]
    assert Vocabulary(imported.tokenizer, 400).encode("") == [imported.tokenizer.separator]


def test_tokens_that_the_base_does_not_know_are_refused(gpt: LoadedTextRun) -> None:
    with refused(ConfigError, setting="tokens", given=300):
        Vocabulary(gpt.tokenizer, 257).check([3, 300])


def test_specialists_with_other_tokens_do_not_go_together(gpt: LoadedTextRun, tmp_path: Path) -> None:
    new_specialist(tmp_path / "a", gpt, tokens=[NewToken("<|a|>", "x")])
    new_specialist(tmp_path / "b", gpt, tokens=[NewToken("<|b|>", "x")])
    new_specialist(tmp_path / "c", gpt)
    for pair in ("ab", "ac", "ca"):
        with refused(ConfigError, setting="specialists"):
            attach(gpt, [open_specialist(tmp_path / name) for name in pair])
