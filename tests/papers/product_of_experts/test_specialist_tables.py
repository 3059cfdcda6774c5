"""Verdicts about facts: by the interval over facts, and by the checkpoints."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from papers.outcome import Row
from papers.product_of_experts.specialist_tables import claims, findings, tables


def rows(moved: float, prose: float) -> list[Row]:
    """What a study of one base may have measured."""

    def kept(model: str, step: int, delta: float, bpb: float) -> Row:
        reading: dict[str, Any] = {"base_max_abs_logit_delta": delta, "base_bpb": bpb, "base_choices": 1.0}
        reading |= {"bpb": bpb, "choices": 1.0, "base_tasks": {"copa": 0.6}, "tasks": {"copa": 0.5}}
        return {"what": "preservation", "model": model, "step": step, **reading}

    taught: dict[str, Any] = {"what": "injection", "people": 2, "paraphrases": 3, "step": 9}
    found = [kept("dual head, chat", 0, 0.0, 1.0), kept("dual head, chat", 9, moved, 1.0)]
    found += [kept("single head, chat", 0, 0.0, 1.0), kept("single head, chat", 9, 5.0, 1.5)]
    for kind, hits in (("chat", [1] * 9 + [0]), ("prose", [0] * 10)):
        for asked in ("taught wording", "other wording", "all three others"):
            found.append(taught | {"specialist": kind, "asked": asked, "hits": hits})
    numbers = {"correct": 0.5, "wrong": 0.5, "ratio": 1.0, "gullible": 0.0}
    passages = (("none", ""), ("right", ""), ("wrong", "assertive"), ("wrong", "flagged"))
    for path, log_ratio in (("base", 0.0), ("chat", 0.0), ("prose", prose), ("both", 0.0)):
        for facts, (passage, framing) in itertools.product(("known", "taught"), passages):
            about: dict[str, Any] = {"facts": facts, "passage": passage, "framing": framing, "path": path}
            gain = 3.0 if passage == "right" and path != "prose" else 0.0
            values = {"log_ratios": spread(log_ratio), "log_correct": spread(gain - 5)}
            found.append({"what": "trust", **about, **numbers, **values})
    for votes, logit, margin in (("1:0", 9.0, 2.0), ("1:3", 13.0, 2.0 - prose)):
        means = {"votes": votes, "right": 1.0, "logit": logit, "margin": margin}
        about = {"facts": "known", "logits": spread(logit), "margins": spread(margin)}
        found.append({"what": "weighting", **means, **about})
    return [{"base": "b", **row} for row in found]


def spread(value: float) -> list[float]:
    return [value, value + 0.01, value - 0.02]


@pytest.mark.parametrize(
    ("moved", "prose", "expected"),
    [
        (0.0, 1.5, ["held", "held", "held", "failed", "held", "held", "held", "held", "held"]),
        (0.1, -1.5, ["failed", "held", "held", "failed", "held", "failed", "held", "held", "failed"]),
    ],
)
def test_verdicts_follow_the_numbers(moved: float, prose: float, expected: list[str]) -> None:
    assert [claim.verdict for claim in claims("b", rows(moved, prose))] == expected


def test_tables_and_sentences_say_the_numbers() -> None:
    found = rows(0.0, 1.5)
    shown = {table.caption.partition(":")[0].partition(",")[0]: table for table in tables(found)}
    assert shown["Recall of taught facts"].rows[0][-1] == "0.90 [0.72, 1.00]"
    assert shown["The base over checkpoints"].rows[0][-1] == "copa 0.60 / 0.50"
    said = findings(found, ["b"])
    assert "single head, chat: logits by 5, the base's BPB 1.000 to 1.500, with it on 1.500" in said[0]
    assert "after 9 steps of chat the facts are recalled at 0.90 in the taught wording" in said[1]
    assert "prose 4.48" in said[-1]
