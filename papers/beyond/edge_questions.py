"""Further questions about edges that are cut, late or thin: stages, optimizers, lengths, bits, sizes.

Statement and arms: `edges.py`, `edge_arms.py`. Each question is a study of its own, with claims that were set
before its first row was there:

    edges-stages    six stages of one layer, the first of which is five steps late, one loss at the end. Is
                    late still better than cut?
    edges-uniform   is one step for all better than one a border of six stages?
    edges-alone     one loss, at the end, so that the gap of an arm is its price: 8, 4 and 3 bits, late
    edges-adamw     cut, four bits and late of `edges`, with AdamW for everything
    edges-length    backprop, cut and late over three times the steps: does the gap of late edges vanish?
    edges-rates     six late stages: do rates that fall with the lateness help, or weights that are foretold?
    edges-size      backprop, cut, four bits and late at twice the width
    edges-early     early losses make three late stages dear. Is it that what they tell the head comes late,
                    or what each tells its own stage?

They keep their measurements among those of `edges`, so that what several have in common is trained once.

What was known when the claims were set: `edges` with five seeds (docs/results/2026-11-18-edges.md); for six
late stages one seed with rates that were not tuned (+3.7 to +5.9 %); for AdamW and uniform one seed and half
of the steps (late +1.4 %, uniform +2.1 %); for 3 bits the same (+0.4 %); for six stages that are cut the BPB
of the seed that chooses rates. 8 bits were added later, when `edges-alone` had three seeds of its other arms.
`edges-early` was added when `edges` and `edges-alone` had theirs.

Rates. Where an arm and its length are those of `edges`, its rate is what that study chose (0.01, between
0.005 and 0.02), and so is that of six stages that are cut. Six late stages, uniform, AdamW and twice the
width choose theirs, on the same seed and in the same way.
Over three times the steps 0.005 is tried beside 0.01, and what lies below if it is better; what lies above is
not, since 0.02 was worse for every arm already over a third of them.

Cost: `presets.py`. Limits: those of `edges.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from papers.beyond.edge_arms import (
    AHEAD,
    BACKPROP,
    BOTH,
    CUT,
    HEAD,
    LATE,
    OWN,
    SIX,
    SLOWER,
    THIN,
    UNIFORM,
    WHOLE,
    ways,
)
from papers.beyond.edges import GOAL, Question, answer, better, core_claims, near, of
from papers.outcome import Asked, Result, Row
from papers.staged_runs import minus
from papers.verdicts import Claim, within

CHOSEN = {BACKPROP: 0.01, LATE: 0.01}
"""What `edges` chose for its 1600 steps."""
ADAMW_RATES = (0.002, 0.004, 0.001)
NOTHING = 0.3
"""A gap below this, in percent, is none."""


def stages(args: Asked) -> Result:
    """Six stages of one layer."""
    arms = {arm: ways(SIX, exits=0.0)[arm] for arm in (BACKPROP, CUT, LATE)}
    return answer(args, Question(arms, _stage_claims, chosen={BACKPROP: 0.01, CUT: 0.01}))


def uniform(args: Asked) -> Result:
    """One step late for all."""
    arms = {arm: ways(SIX, exits=0.0)[arm] for arm in (BACKPROP, LATE, UNIFORM)}
    return answer(args, Question(arms, _uniform_claims, chosen={BACKPROP: 0.01}))


def rates(args: Asked) -> Result:
    """Six late stages that do something about it."""
    arms = {arm: ways(SIX)[arm] for arm in (BACKPROP, LATE, SLOWER, AHEAD, BOTH)}
    return answer(args, Question(arms, _rate_claims, chosen={BACKPROP: CHOSEN[BACKPROP]}))


def adamw(args: Asked) -> Result:
    """AdamW for everything."""
    arms = {arm: ways()[arm] for arm in (BACKPROP, CUT, LATE, THIN[4])}
    return answer(args, Question(arms, core_claims, rates=ADAMW_RATES, optimizer="adamw"))


def length(args: Asked) -> Result:
    """Three times the steps."""
    arms = {arm: ways()[arm] for arm in (BACKPROP, CUT, LATE)}
    return answer(args, Question(arms, _length_claims, rates=(0.01, 0.005), widest=(0.001, 0.015)))


def alone(args: Asked) -> Result:
    """One loss, at the end."""
    arms = {arm: ways(exits=0.0)[arm] for arm in (BACKPROP, *THIN.values(), LATE)}
    return answer(args, Question(arms, _alone_claims, chosen=CHOSEN))


def size(args: Asked) -> Result:
    """Twice the width."""
    arms = {arm: ways()[arm] for arm in (BACKPROP, CUT, LATE, THIN[4])}
    return answer(args, Question(arms, core_claims))


def early(args: Asked) -> Result:
    """Early losses that are not late."""
    arms = {arm: ways()[arm] for arm in (BACKPROP, WHOLE, LATE, HEAD, OWN)}
    return answer(args, Question(arms, _early_claims, chosen=CHOSEN))


def _stage_claims(rows: Sequence[Row]) -> list[Claim]:
    return [
        better(rows, LATE, CUT, "six stages with late gradient are better than six with none"),
        near(rows, LATE, f"six stages with late gradient come within {GOAL:g} % of backprop"),
    ]


def _uniform_claims(rows: Sequence[Row]) -> list[Claim]:
    return [
        better(rows, UNIFORM, LATE, "one step late everywhere is better than up to five, one a border"),
        near(rows, UNIFORM, f"one step late everywhere comes within {GOAL:g} % of backprop"),
    ]


def _rate_claims(rows: Sequence[Row]) -> list[Claim]:
    return [
        better(rows, SLOWER, LATE, "rates over the root of the lateness are better than one rate"),
        better(
            rows,
            AHEAD,
            LATE,
            "a forward on weights that are foretold is better than one on those that are there",
        ),
        within(
            f"{BOTH}: rounding adds nothing",
            f"four bits add less than {NOTHING:g} points to what lateness costs",
            f"the gap of {BOTH} minus that of {LATE}, points,",
            minus(of(rows, BOTH), of(rows, LATE)),
            NOTHING,
        ),
    ]


def _length_claims(rows: Sequence[Row]) -> list[Claim]:
    return [
        *core_claims(rows),
        near(rows, LATE, "over three times the steps the gap of late edges vanishes", NOTHING),
    ]


def _alone_claims(rows: Sequence[Row]) -> list[Claim]:
    return [
        *(_free(rows, arm) for arm in THIN.values()),
        near(rows, THIN[3], f"three bits come within {GOAL:g} % of backprop"),
        near(rows, LATE, f"a late gradient without early losses comes within {GOAL:g} % of backprop"),
    ]


def _early_claims(rows: Sequence[Row]) -> list[Claim]:
    return [
        better(rows, HEAD, LATE, "it helps that the head learns from early losses at once"),
        better(rows, OWN, LATE, "it helps that each stage learns from its own loss at once"),
        near(rows, OWN, f"then three late stages with early losses come within {GOAL:g} % of backprop"),
    ]


def _free(rows: Sequence[Row], arm: str) -> Claim:
    return within(
        f"{arm} is free",
        f"rounding costs less than {NOTHING:g} %",
        f"the gap of {arm}, percent,",
        of(rows, arm),
        NOTHING,
    )
