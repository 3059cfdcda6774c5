"""What the study of specialists and facts shows: its tables, sentences, figure, and claims with verdicts.

Claims about facts are judged by the 90 % interval of a mean over facts (`verdicts.py`, whose seeds are facts
here): one model, other facts. Trust is the mean of log P(correct) - log P(wrong) behind passages.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from papers.outcome import ResultTable, Row
from papers.product_of_experts.fifty_prompts import SCORES
from papers.verdicts import FAILED, HELD, Claim, Drawing, Interval, Series, above, each, within

TABLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "stages": (
        "Where known facts live, by stage of the base; the last stage of the others is what was added",
        ("model", "stage", "median_rank", "first", "mean_logit"),
    ),
    "injection": (
        "Recall of taught facts, with 90 % intervals over facts",
        ("specialist", "people", "paraphrases", "step", "asked", "recall"),
    ),
    "preservation": (
        "The base over checkpoints: its logits move by 0 with a dual head",
        ("model", "step", "base_max_abs_logit_delta", "base_bpb", "base_choices", "bpb", "choices", "tasks"),
    ),
    "trust": (
        "Behind passages: P(correct), P(wrong), median ratio, share of facts where the wrong answer wins",
        ("facts", "passage", "framing", "path", "correct", "wrong", "ratio", "gullible"),
    ),
    "weighting": (
        "Votes of base and chat specialist, on facts that the base may know and on taught ones",
        ("facts", "votes", "right", "logit", "margin"),
    ),
    "together": ("Recall in wordings that were not taught", ("path", "recall")),
    "prompts": ("Fifty prompts by rule", ("path", "category", *SCORES)),
}


def tables(rows: Sequence[Row]) -> list[ResultTable]:
    """A table for each question."""
    return [
        ResultTable(
            caption,
            ("base", *columns),
            tuple(
                (row["base"], *(_cell(row, column) for column in columns))
                for row in rows
                if row["what"] == kind
            ),
        )
        for kind, (caption, columns) in TABLES.items()
        if any(row["what"] == kind for row in rows)
    ]


def _cell(row: Row, column: str) -> str:
    if column == "recall" and "hits" in row:
        result = Interval.of(row["hits"])
        span = "" if math.isinf(result.low) else f" [{max(result.low, 0):.2f}, {min(result.high, 1):.2f}]"
        return f"{result.mean:.2f}{span}"
    if column == "tasks":
        shares = row["base_tasks"], row["tasks"]
        return "; ".join(f"{name} {shares[0][name]:.2f} / {shares[1][name]:.2f}" for name in shares[1]) or "-"
    value: Any = row[column]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def claims(base: str, rows: Sequence[Row]) -> list[Claim]:
    """What the paper says, on one base."""
    own = [row for row in rows if row["base"] == base]
    results = [*_claims_about_the_base(own), *_claims_about_recall(own), *_claims_about_passages(own)]
    results.append(_claim_about_votes(own))
    return [replace(claim, name=f"{base}: {claim.name}") for claim in results]


def _claims_about_the_base(own: Sequence[Row]) -> list[Claim]:
    retained = [row for row in own if row["what"] == "preservation"]
    dual = [row["base_max_abs_logit_delta"] for row in retained if row["model"].startswith("dual")]
    single = [row for row in retained if row["model"].startswith("single")]
    rise = single[-1]["base_bpb"] / single[0]["base_bpb"] - 1
    return [
        Claim(
            "the base does not move",
            "logits of the base are bit-identical at every checkpoint of a dual head (§6.5)",
            "held if the largest change of a logit is 0 at every checkpoint",
            f"{max(dual)} over {len(dual)} checkpoints",
            HELD if max(dual) == 0 else FAILED,
            tuple(dual),
        ),
        Claim(
            "a single head moves it",
            "training the shared head destroys the base's own path (§6.3)",
            "held if the base's BPB rises by more than 1 %, failed if it does not",
            f"BPB {single[0]['base_bpb']:.3f} to {single[-1]['base_bpb']:.3f}, largest logit change "
            f"{single[-1]['base_max_abs_logit_delta']:.2f}",
            HELD if rise > 0.01 else FAILED,
            (rise,),
        ),
    ]


def _claims_about_recall(own: Sequence[Row]) -> list[Claim]:
    return [
        above(
            f"facts are learned from {kind}",
            "a specialist takes new facts in (positive control)",
            "facts that are named in all three wordings that were never taught, over facts,",
            _hits(own, kind, _last(own), "all three others"),
            0.5,
        )
        for kind in ("chat", "prose")
    ]


def _claims_about_passages(own: Sequence[Row]) -> list[Claim]:
    def behind(passage: str, path: str, facts: str = "known") -> list[float]:
        return _trust(own, path, passage, facts=facts, of="log_correct")

    wrong = {path: _trust(own, path) for path in ("chat", "prose")}
    framed = {name: _trust(own, "base", framing=name) for name in ("flagged", "assertive")}
    return [
        above(
            "a right passage recovers what is not known",
            "the answer is up to 712 times as likely behind a right passage (§8.2.1, R1)",
            "the gain in log P(correct) behind a right passage, the base on facts that only the specialists "
            "were taught,",
            _less(behind("right", "base", "taught"), behind("none", "base", "taught")),
            math.log(10),
        ),
        above(
            "prose is less gullible than chats",
            "behind wrong passages P(correct) / P(wrong) is 4 to 6 times that of chats (§6.6.3)",
            "the difference in log ratio, prose less chat, over facts,",
            _less(wrong["prose"], wrong["chat"]),
        ),
        above(
            "prose answers less to right passages",
            "behind right passages P(correct) is 4 to 12 times lower than that of chats (§6.6.5)",
            "the difference in log P(correct), chat less prose, over facts,",
            _less(behind("right", "chat"), behind("right", "prose")),
        ),
        within(
            "a warning does not help",
            "framings of a wrong claim give near-identical probabilities (§8.2.1, R5)",
            "the change of the base's log ratio from asserted to flagged as false, over facts,",
            _less(framed["flagged"], framed["assertive"]),
            math.log(2),
        ),
    ]


def _claim_about_votes(own: Sequence[Row]) -> Claim:
    votes = {r["votes"]: r for r in own if r["what"] == "weighting" and r["facts"] == "known"}
    base, heavy = votes["1:0"], votes["1:3"]
    return each(
        "votes trade confidence against margin",
        "with three votes of four for the specialist the right logit rises and its margin falls (§6.5.6)",
        "the rise of the logit, and the fall of the margin, over facts,",
        [_less(heavy["logits"], base["logits"]), _less(base["margins"], heavy["margins"])],
    )


def _less(values: Sequence[float], others: Sequence[float]) -> list[float]:
    return [value - other for value, other in zip(values, others, strict=True)]


def _people(own: Sequence[Row]) -> int:
    people: int = next(row["people"] for row in own if row["what"] == "injection")
    return people


def _last(own: Sequence[Row]) -> int:
    """The last step at which recall of the first world was read."""
    world = [row for row in own if row["what"] == "injection" and row["people"] == _people(own)]
    return max(row["step"] for row in world if row["specialist"] in ("chat", "prose"))


def _hits(own: Sequence[Row], kind: str, step: int, args: str) -> list[float]:
    (row,) = [
        r
        for r in own
        if r["what"] == "injection"
        and (r["specialist"], r["step"], r["asked"], r["people"]) == (kind, step, args, _people(own))
        and r["paraphrases"] == 3
    ]
    return [float(hit) for hit in row["hits"]]


def _trust(
    own: Sequence[Row],
    path: str,
    passage: str = "wrong",
    framing: str | None = None,
    facts: str = "known",
    of: str = "log_ratios",
) -> list[float]:
    """log P(correct) - log P(wrong) of each fact behind such passages, or log P(correct): the mean over
    framings."""
    values = [
        row[of]
        for row in own
        if row["what"] == "trust"
        and (row["facts"], row["passage"], row["path"]) == (facts, passage, path)
        and framing in (None, row["framing"])
    ]
    return [statistics.fmean(some) for some in zip(*values, strict=True)]


def findings(rows: Sequence[Row], bases: Sequence[str]) -> list[str]:
    """Sentences about each base."""
    sentences = []
    for base in bases:
        own = [row for row in rows if row["base"] == base]
        models = dict.fromkeys(row["model"] for row in own if row["what"] == "preservation")
        ends = []
        for model in models:
            retained = [row for row in own if row["what"] == "preservation" and row["model"] == model]
            before, after = retained[0], retained[-1]
            moved = max(row["base_max_abs_logit_delta"] for row in retained)
            ends.append(
                f"{model}: logits by {moved:.4g}, the base's BPB "
                f"{before['base_bpb']:.3f} to {after['base_bpb']:.3f}, with it on {after['bpb']:.3f}"
            )
        sentences.append(f"{base}, what training moved. " + "; ".join(ends) + ".")
        last = _last(own)
        shares = {
            kind: [statistics.fmean(_hits(own, kind, last, a)) for a in ("taught wording", "other wording")]
            for kind in ("chat", "prose")
        }
        sentences += [
            f"{base}: after {last} steps of {kind} the facts are recalled at {taught:.2f} in the taught "
            f"wording and {other:.2f} in others."
            for kind, (taught, other) in shares.items()
        ]
        ratios = {
            path: math.exp(statistics.median(_trust(own, path))) for path in ("base", "chat", "prose", "both")
        }
        sentences.append(
            f"{base}: P(correct) / P(wrong) behind wrong passages, median over facts: "
            + ", ".join(f"{path} {value:.3g}" for path, value in ratios.items())
            + "."
        )
    return sentences


def drawing(rows: Sequence[Row]) -> Drawing:
    """The largest change of a base's logit over the steps, for the dual heads and the controls."""
    series = []
    for base in dict.fromkeys(row["base"] for row in rows):
        for model in dict.fromkeys(row["model"] for row in rows if row["what"] == "preservation"):
            own = [
                r for r in rows if r["what"] == "preservation" and (r["base"], r["model"]) == (base, model)
            ]
            steps = [float(row["step"]) for row in own]
            series.append(
                Series.of(f"{base}: {model}", steps, [[row["base_max_abs_logit_delta"]] for row in own])
            )
    return Drawing("What training does to the base", "step", "largest change of a base logit", tuple(series))
