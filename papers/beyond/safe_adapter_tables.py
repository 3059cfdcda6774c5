"""Tables, figure and claims of `safe_adapters.py`: what each arm learned and forgot.

A row is as in `adapter_tables.py`, with the new text as its base; the level is that module's. A text of which
lora wins less than `LEAST` of the bits per byte with some seed has nothing to learn: it is in no claim. Needs
no torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from papers.beyond.adapter_tables import arms_of, forgetting_at, gain, has_learned, level, of
from papers.beyond.adapter_tables import drawing as drawing
from papers.beyond.adapter_tables import table as table_of_text
from papers.outcome import ResultTable, Row
from papers.verdicts import FAILED, Claim, Interval, above

OURS, USUAL = "safe", "lora"
PEERS = ("lora", "dead", "oplora", "replay", "random")
LEAST = 0.02
PREDICTION = "Held where the old text has little and the new one much, a correction learns and forgets less."


def at_level(rows: Sequence[Row], texts: Sequence[str], arm: str) -> list[float]:
    """Forgetting where all arms have learned alike, for each text and seed."""
    return [
        statistics.fmean(forgetting_at(row, level(rows, text, row["seed"])))
        for text in texts
        for row in of(rows, text, arm)
    ]


def at_end(rows: Sequence[Row], texts: Sequence[str], arm: str) -> list[float]:
    """Forgetting after the last step."""
    return [
        statistics.fmean(row["old"][-1]) - statistics.fmean(row["old"][0])
        for text in texts
        for row in of(rows, text, arm)
    ]


def learnable(texts: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """The texts of which the usual arm learns something with every seed."""
    return [t for t in texts if all(gain(row) >= LEAST * row["new"][0] for row in of(rows, t, USUAL))]


def learned_everywhere(rows: Sequence[Row], texts: Sequence[str], arm: str) -> bool:
    """Whether an arm gains a quarter of what lora does, with every text and seed."""
    return all(has_learned(rows, text, arm) for text in texts)


def claims(
    model: str, texts: Sequence[str], rows: Sequence[Row], peers: Sequence[str] = PEERS
) -> list[Claim]:
    """What was set before the run, on the texts that can be learned."""
    texts = learnable(texts, rows)
    if not texts:
        return []
    if not learned_everywhere(rows, texts, OURS):
        message = f"{OURS} gains less than a quarter of what {USUAL} does"
        rule = "failed if it does not learn"
        return [Claim(f"{model}: {OURS} learns", PREDICTION, rule, message, FAILED, ())]
    judged = []
    for peer in peers:
        name = f"{model}: {OURS} forgets less than {peer} at one level of the new text"
        if peer in arms_of(rows, texts[0]) and learned_everywhere(rows, texts, peer):
            effect = f"forgetting of {peer} less that of {OURS} at the level, bits per byte"
            judged.append(above(name, PREDICTION, effect, _less(at_level, rows, texts, peer)))
    effect = f"forgetting of {USUAL} less that of {OURS} at the end, bits per byte"
    values = _less(at_end, rows, texts, USUAL)
    judged.append(above(f"{model}: {OURS} forgets less than {USUAL} at the end", PREDICTION, effect, values))
    won = {arm: [gain(row) for text in texts for row in of(rows, text, arm)] for arm in (OURS, USUAL)}
    values = [ours - 0.9 * usual for ours, usual in zip(won[OURS], won[USUAL], strict=True)]
    effect = f"the gain of {OURS} less 0.9 of that of {USUAL}, bits per byte of the new text"
    judged.append(above(f"{model}: {OURS} learns as much as {USUAL}", PREDICTION, effect, values))
    return judged


def _less(
    what: Callable[[Sequence[Row], Sequence[str], str], list[float]],
    rows: Sequence[Row],
    texts: Sequence[str],
    peer: str,
) -> list[float]:
    pairs = zip(what(rows, texts, peer), what(rows, texts, OURS), strict=True)
    return [theirs - ours for theirs, ours in pairs]


def tables(model: str, texts: Sequence[str], rows: Sequence[Row]) -> tuple[ResultTable, ...]:
    """All that can be learned together, then each by itself."""
    lines = []
    whole, texts = texts, learnable(texts, rows)
    for arm in arms_of(rows, texts[0]) if texts else ():
        here = [row for text in texts for row in of(rows, text, arm)]
        shares = [gain(row) / row["new"][0] for row in here]
        there = "not learned"
        if learned_everywhere(rows, texts, arm):
            there = str(Interval.of(at_level(rows, texts, arm)))
        lines.append(
            (
                arm,
                f"{here[0]['parameters']:,}",
                f"{here[0]['rate']:g}",
                f"{100 * statistics.fmean(shares):.1f} %",
                str(Interval.of(at_end(rows, texts, arm))),
                there,
                f"{statistics.fmean(row['prose'] for row in here):.3f}",
            )
        )
    caption = (
        f"{model}, {', '.join(texts)}, all seeds: what of the new text's bits per byte was won, and what the "
    )
    caption += "model's own text has above the model before: at the end, and where all arms learned alike"
    header = ("arm", "learning", "rate", "learned", "forgotten", "forgotten at the level", "prose, BPB")
    return ResultTable(caption, header, tuple(lines)), *(table_of_text(text, rows) for text in whole)


def findings(model: str, texts: Sequence[str], rows: Sequence[Row]) -> tuple[str, ...]:
    """Who learns most, and who forgets least."""
    arms = arms_of(rows, texts[0])
    won = {a: statistics.fmean(gain(r) / r["new"][0] for t in texts for r in of(rows, t, a)) for a in arms}
    lost = {arm: statistics.fmean(at_end(rows, texts, arm)) for arm in arms}
    most, least = max(won, key=lambda arm: won[arm]), min(lost, key=lambda arm: lost[arm])
    return (
        f"{model}: {most} learns most: {100 * won[most]:.1f} % of the new texts' bits per byte, "
        f"and forgets {lost[most]:.3f}.",
        f"{model}: {least} forgets least at the end: {lost[least]:.3f} bits per byte, "
        f"and learns {100 * won[least]:.1f} %.",
    )
