"""The cost model, the replay of drafts, and the choice of a rule."""

import math
import random

import pytest

from raising import refused
from topograd.decode.autotune import LONGEST, DraftRule, Outcome, RowCosts, choose, simulate
from topograd.errors import ConfigError, DataError

CHEAP = RowCosts(draft=1.0, deep={1: 3.0, 2: 3.2, 4: 3.8, 8: 5.0, 16: 8.0}, full=4.0)
"""Rows in a batch cost little: speculation pays."""
DEAR = RowCosts(draft=1.0, deep={1: 3.0, 2: 6.0}, full=4.0)
"""Rows in a batch cost as much as alone: it cannot."""


def expected_speedup(chance: float, longest: int, costs: RowCosts) -> float:
    """Over full depth, where `longest` tokens are always drafted and each agrees with this chance alone."""
    tokens = sum(chance**i for i in range(longest + 1))  # (1 - a^{n+1}) / (1 - a), also at a = 1
    return tokens * costs.full / costs.round_seconds(longest)


def coins(chance: float, tokens: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [int(source.random() < chance) for _ in range(tokens)]


def slowly(
    margins: list[float], agrees: list[int], lengths: list[int], rule: DraftRule, costs: RowCosts
) -> tuple[int, int, int, float]:
    """Tokens, drafts kept, drafts made and seconds, as a decoder would go: one draft at a time."""
    tokens = kept = made = 0
    seconds = 0.0
    begin = 0
    for length in lengths:
        margin, agree = margins[begin : begin + length], agrees[begin : begin + length]
        begin += length
        position = 0
        while position + rule.longest < length:
            seconds += costs.draft
            drafts: list[int] = []
            while margin[position + len(drafts)] > rule.threshold and len(drafts) < rule.longest:
                drafts.append(agree[position + len(drafts)])
                seconds += costs.draft
            seconds += costs.deep_seconds(len(drafts) + 1)
            made += len(drafts)
            for right in drafts:
                if not right:
                    break
                kept += 1
                tokens += 1
                position += 1
            tokens += 1
            position += 1
    return tokens, kept, made, seconds


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("longest", [1, 3, 8])
def test_against_a_decoder_that_goes_token_by_token(threshold: float, longest: int) -> None:
    source = random.Random(1)
    lengths = [40, 1, 7, 8, 9, 200]
    margins = [source.random() for _ in range(sum(lengths))]
    agrees = [int(source.random() < 0.4 + 0.6 * margin) for margin in margins]
    rule = DraftRule(threshold, longest)
    tokens, kept, made, seconds = slowly(margins, agrees, lengths, rule, CHEAP)
    found = simulate(margins, agrees, lengths, rule, CHEAP)
    assert found.tokens_per_second == pytest.approx(tokens / seconds, rel=1e-12)
    assert found.speedup == pytest.approx(CHEAP.full * tokens / seconds, rel=1e-12)
    assert found.acceptance == pytest.approx(kept / made, rel=1e-12)
    assert found.mean_draft == pytest.approx(made / (tokens - kept), rel=1e-12)


def test_a_replay_by_hand() -> None:
    """Longest 2, threshold 1, seven positions; rounds start at positions 0 to 4.

    At 0: drafts 0 and 1, both right, so tokens 0, 1 and the full model's 2; three rows.
    At 3: its margin is 1, not above it, so no draft and one token; one row.
    At 4: drafts 4 and 5, the first wrong, so one token, one draft wasted; three rows.
    """
    margins = [2.0, 2.0, 9.0, 1.0, 2.0, 2.0, 2.0]
    agrees = [1, 1, 0, 1, 0, 1, 1]
    found = simulate(margins, agrees, [7], DraftRule(1.0, 2), CHEAP)
    seconds = (3 + 3.5) + (1 + 3.0) + (3 + 3.5)
    assert found.tokens_per_second == pytest.approx(5 / seconds, rel=1e-12)
    assert found.speedup == pytest.approx(4 * 5 / seconds, rel=1e-12)
    assert (found.acceptance, found.mean_draft) == (2 / 4, 4 / 3)


@pytest.mark.parametrize("longest", [1, 2, 5, 16])
@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_the_closed_form_is_exact_where_nothing_is_random(chance: float, longest: int) -> None:
    """Up to the rounding of a sum."""
    lengths = [37, 50]
    agrees = coins(chance, sum(lengths))
    found = simulate([1.0] * len(agrees), agrees, lengths, DraftRule(0.0, longest), CHEAP)
    assert found.speedup == pytest.approx(expected_speedup(chance, longest, CHEAP), rel=1e-12)
    assert found.acceptance == chance
    assert found.mean_draft == longest


@pytest.mark.parametrize("longest", [1, 3, 8])
@pytest.mark.parametrize("chance", [0.3, 0.6, 0.9])
def test_the_closed_form_on_independent_drafts(chance: float, longest: int) -> None:
    """The tolerance is four standard errors of the mean number of tokens in a round."""
    lengths = [500] * 40
    agrees = coins(chance, sum(lengths), seed=longest)
    found = simulate([1.0] * len(agrees), agrees, lengths, DraftRule(0.0, longest), CHEAP)
    tail = [chance**i for i in range(1, longest + 1)]  # the chance of keeping at least i drafts
    mean = 1 + sum(tail)
    variance = sum((2 * i - 1) * p for i, p in enumerate(tail, start=1)) - sum(tail) ** 2
    error = math.sqrt(variance / (sum(lengths) / mean)) / mean
    assert error < 0.01
    assert found.speedup == pytest.approx(expected_speedup(chance, longest, CHEAP), rel=4 * error)
    assert found.acceptance == pytest.approx(sum(tail) / longest, rel=4 * error * mean / sum(tail))


def test_a_closed_form_by_hand() -> None:
    tokens = (1 - 0.5**4) / (1 - 0.5)
    assert expected_speedup(0.5, 3, CHEAP) == pytest.approx(4.0 * tokens / (4 * 1.0 + 3.8), rel=1e-12)


def test_a_threshold_that_nothing_passes_is_plain_decoding() -> None:
    found = simulate([0.5] * 20, [1] * 20, [20], DraftRule(0.5, 4), CHEAP)
    assert found == Outcome(0.25, 1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("rows", "seconds"), [(1, 3.0), (2, 3.2), (3, 3.5), (6, 4.4), (16, 8.0), (18, 8.75)], ids=str
)
def test_deep_seconds(rows: int, seconds: float) -> None:
    assert CHEAP.deep_seconds(rows) == pytest.approx(seconds, rel=1e-12)


def test_below_the_smallest_size() -> None:
    assert RowCosts(1.0, {4: 5.0, 2: 3.0}, 4.0).deep_seconds(1) == pytest.approx(2.0, rel=1e-12)


def test_choose_is_the_best_of_its_grid() -> None:
    """Margins that tell right from wrong: a threshold beats drafting always."""
    source = random.Random(2)
    margins = [round(source.random(), 3) for _ in range(3000)]
    agrees = [int(source.random() < (0.97 if margin > 0.4 else 0.2)) for margin in margins]
    lengths = [250] * 12
    rule = choose(margins, agrees, lengths, CHEAP)
    assert rule is not None
    assert 0.2 < rule.threshold < 0.7
    assert rule.longest in LONGEST
    best = simulate(margins, agrees, lengths, rule, CHEAP).speedup
    always = max(simulate(margins, agrees, lengths, DraftRule(0.0, n), CHEAP).speedup for n in LONGEST)
    assert best > always + 0.05
    for longest in LONGEST:
        assert best >= simulate(margins, agrees, lengths, DraftRule(rule.threshold, longest), CHEAP).speedup


def test_choose_drafts_long_where_everything_agrees() -> None:
    assert choose([1.0] * 200, [1] * 200, [200], CHEAP) == DraftRule(0.0, 16)


@pytest.mark.parametrize(
    ("chance", "costs"), [(0.05, CHEAP), (0.9, DEAR)], ids=["drafts-are-wrong", "rows-are-dear"]
)
def test_turned_off_where_it_loses(chance: float, costs: RowCosts) -> None:
    agrees = coins(chance, 2000)
    margins = [float(1 + i % 7) for i in range(2000)]
    assert choose(margins, agrees, [200] * 10, costs) is None


@pytest.mark.parametrize(("full", "kept"), [(1.019, False), (1.021, True)], ids=["below", "above"])
def test_two_percent_are_asked_for(full: float, kept: bool) -> None:
    """One draft, always right: two tokens for 2 draft + deep(2) = 2 seconds, so the speedup is `full`.

    A longer draft costs more than it gives.
    """
    costs = RowCosts(draft=0.5, deep={1: 1.0, 2: 1.0, 3: 9.0}, full=full)
    assert (choose([1.0] * 60, [1] * 60, [60], costs) == DraftRule(0.0, 1)) is kept
    assert (choose([1.0] * 60, [1] * 60, [60], costs) is None) is not kept


def test_short_sequences_limit_the_draft() -> None:
    assert choose([1.0] * 15, [1] * 15, [5, 5, 5], CHEAP) == DraftRule(0.0, 4)
    assert choose([1.0] * 3, [1] * 3, [1, 1, 1], CHEAP) is None
    assert choose([], [], [], CHEAP) is None
    with pytest.raises(DataError, match="no sequence is longer than 5 tokens, the longest draft"):
        simulate([1.0] * 15, [1] * 15, [5, 5, 5], DraftRule(0.0, 5), CHEAP)


def test_bad_numbers() -> None:
    for agrees, lengths in (([1], [2]), ([1, 1], [3])):
        with pytest.raises(ConfigError, match=r"2 margins, \d agreements and sequences of \d tokens"):
            simulate([1.0, 1.0], agrees, lengths, DraftRule(0.0, 1), CHEAP)
        with pytest.raises(ConfigError, match="the three must be equal"):
            choose([1.0, 1.0], agrees, lengths, CHEAP)
    for threshold, longest in ((-1.0, 1), (math.nan, 1), (0.0, 0)):
        with refused(ConfigError, setting="threshold"):
            DraftRule(threshold, longest)
    for sizes in ((), (1,), (0, 1)):
        with pytest.raises(ConfigError, match="give two sizes from 1 up"):
            RowCosts(1.0, dict.fromkeys(sizes, 1.0), 1.0)
    for draft, deep, full in ((0.0, 1.0, 1.0), (1.0, math.nan, 1.0), (1.0, 1.0, math.inf)):
        with pytest.raises(ConfigError, match="a cost must be finite and above 0"):
            RowCosts(draft, {1: 1.0, 2: deep}, full)
