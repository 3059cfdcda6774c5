"""Pipeline bubbles: the fraction of device time that a pipeline of P stages leaves idle.

    backprop: 2(P - 1) / (M + 2(P - 1))        stages, detached: (P - 1) / (M + P - 1)

Under backprop the pipeline fills forward and drains backward; a detached stage's backward needs only its
own forward, so it fills and never drains. A step then takes M + 2(P - 1) slots or M + P - 1, of which each
device works M, and the speedup is the ratio of the two.

Symbols: P `stages`, M `microbatches`. Cost: O(1).
Source: "Product of Experts" §4.2.

Limits. Every stage costs the same, transfers cost nothing, and the K vocabulary projections that stages add
are not counted. A forward and a backward are one slot each: the formulas are then exact if M counts the
slots in which a device works, two for each micro-batch. The paper calls M the number of micro-batches; read
so, both formulas overstate the bubble (for backprop the textbook value is (P - 1)/(M + P - 1)).

The paper's table (P = 6, 12, 24, 96) does not follow from the formulas for any single M. Its backprop column
(83, 92, 96, 99 %) and its speedup column (1.7, 1.8, 1.9, 2.0) are M = 2 throughout, that is, one micro-batch:
(P - 1)/P and 2P/(P + 1). Its column for stages (14, 8, 4, 1 %) is 1/(P + 1), which needs M = P(P - 1); at
M = 2 the formula gives (P - 1)/(P + 1), which is 71, 85, 92, 98 %. Appendix B.2's net ratios at P = 4, 0.93
with M = 16 and 0.99 with M = 32, are ratios of time, an overhead of 1.07 to 1.08 over this speedup.
"""

from topograd.topology.composition import positive_int


def backprop_bubble(stages: int, microbatches: int) -> float:
    """2(P - 1)/(M + 2(P - 1)): the idle fraction when gradients cross every boundary."""
    stages, microbatches = _checked(stages, microbatches)
    return 2 * (stages - 1) / (microbatches + 2 * (stages - 1))


def staged_bubble(stages: int, microbatches: int) -> float:
    """(P - 1)/(M + P - 1): the idle fraction when no gradient crosses a boundary."""
    stages, microbatches = _checked(stages, microbatches)
    return (stages - 1) / (microbatches + stages - 1)


def pipeline_speedup(stages: int, microbatches: int) -> float:
    """(M + 2(P - 1))/(M + P - 1): time of a backprop step over that of a staged step; from 1 to below 2.

    It is also the ratio of the busy fractions, (1 - staged_bubble)/(1 - backprop_bubble).
    """
    stages, microbatches = _checked(stages, microbatches)
    return (microbatches + 2 * (stages - 1)) / (microbatches + stages - 1)


def _checked(stages: int, microbatches: int) -> tuple[int, int]:
    return positive_int(stages, "stages"), positive_int(microbatches, "microbatches")
