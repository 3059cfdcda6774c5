"""Sampling: the filters against an obvious version, and the exactness of the rejection rule in float64."""

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from raising import refused
from topograd.decode.engine import Engine
from topograd.decode.sampling import (
    Sampling,
    acceptance,
    draw,
    probabilities,
    quantile,
    residual,
    verify,
)
from topograd.errors import ConfigError, DivergenceError

VOCAB = 12
LARGEST_UNIFORM = 1 - 2.0**-53


def logits(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(*shape, VOCAB, dtype=torch.float64, generator=generator)


def distribution(*weights: float) -> Tensor:
    w = torch.tensor(weights, dtype=torch.float64)
    return w / w.sum()


def obvious(z: list[float], sampling: Sampling) -> list[float]:
    """Sort, keep the first k, keep until the threshold is reached, normalise: the sums in exact fractions."""
    kept = sorted(range(len(z)), key=lambda token: (-z[token], token))[: sampling.top_k]
    weight = {token: Fraction(math.exp((z[token] - max(z)) / sampling.temperature)) for token in kept}
    nucleus: list[int] = []
    for token in kept:
        nucleus.append(token)
        reached = sum(weight[t] for t in nucleus) / sum(weight.values())
        if sampling.top_p is not None and reached >= sampling.top_p:
            break
    likeliest = max(weight[token] for token in nucleus)
    nucleus = [token for token in nucleus if weight[token] >= (sampling.min_p or 0) * likeliest]
    total = sum(weight[token] for token in nucleus)
    return [float(weight[token] / total) if token in nucleus else 0.0 for token in range(len(z))]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("top_k", [None, 1, 5, VOCAB, 100])
@pytest.mark.parametrize("top_p", [None, 1e-9, 0.5, 0.9, 0.9999, 1.0])
@pytest.mark.parametrize("min_p", [None, 0.0, 0.15, 1.0])
def test_probabilities_against_the_obvious_version(
    temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    z = logits(0, 2, 3)
    p = probabilities(z, sampling)
    assert p.shape == z.shape
    assert p.dtype == torch.float64
    for got, row in zip(p.view(-1, VOCAB).tolist(), z.view(-1, VOCAB).tolist(), strict=True):
        assert got == pytest.approx(obvious(row, sampling), rel=1e-12, abs=0.0)


def test_ties_keep_exactly_k_and_the_token_that_reaches_the_threshold() -> None:
    equal = torch.zeros(4)
    assert probabilities(equal, Sampling(temperature=1.0, top_k=3)).tolist() == [1 / 3, 1 / 3, 1 / 3, 0]
    assert probabilities(equal, Sampling(temperature=1.0, top_p=0.5)).tolist() == [0.5, 0.5, 0, 0]
    assert probabilities(equal, Sampling(temperature=1.0, top_p=0.51)).tolist() == [1 / 3, 1 / 3, 1 / 3, 0]


def test_the_threshold_is_on_what_top_k_left() -> None:
    z = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()
    # of the first two, the first has 4/7: enough for 0.55, though it has 0.4 of everything
    assert probabilities(z, Sampling(temperature=1.0, top_k=2, top_p=0.55)).count_nonzero() == 1
    assert probabilities(z, Sampling(temperature=1.0, top_p=0.55)).count_nonzero() == 2


def test_a_threshold_of_one_keeps_the_whole_tail() -> None:
    z = torch.tensor([0.0, 0.0, 0.0, -40.0, -45.0], dtype=torch.float64)  # e^-40 is lost in a sum near 1
    p = probabilities(z, Sampling(temperature=1.0, top_p=1.0))
    assert torch.equal(p, probabilities(z, Sampling(temperature=1.0)))
    assert p.count_nonzero() == 5


def test_greedy_is_the_first_of_the_largest() -> None:
    z = torch.tensor([[1.0, 3.0, 3.0], [0.0, -1.0, -2.0]])
    p = probabilities(z, Sampling(top_k=2, top_p=0.5))
    assert p.tolist() == [[0, 1, 0], [1, 0, 0]]
    assert p.dtype == torch.float64


@pytest.mark.parametrize("temperature", [1e-6, 1e-300, 5e-324])
def test_a_tiny_temperature_does_not_overflow(temperature: float) -> None:
    z = torch.tensor([1.0, 1e4, -1e4], dtype=torch.float64)
    assert probabilities(z, Sampling(temperature=temperature)).tolist() == [0, 1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_logits_are_widened_first_and_left_as_they_were(dtype: torch.dtype) -> None:
    z = logits(1).to(dtype).requires_grad_()
    before = z.detach().clone()
    sampling = Sampling(temperature=0.7, top_k=6, top_p=0.9)
    p = probabilities(z, sampling)
    assert torch.equal(p, probabilities(before.double(), sampling))
    assert not p.requires_grad
    assert torch.equal(z, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_refused(bad: float, temperature: float) -> None:
    z = logits(0, 2)
    z[1, 3] = bad
    with refused(DivergenceError, setting="logits"):
        probabilities(z, Sampling(temperature=temperature))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-0.1, math.nan, math.inf)),
        ("top_k", 0),
        *(("top_p", value) for value in (0.0, 1.01, math.nan)),
        *(("min_p", value) for value in (-0.1, 1.01, math.nan)),
        *(("presence_penalty", value) for value in (math.inf, math.nan)),
        ("frequency_penalty", math.nan),
        *(("repetition_penalty", value) for value in (0.0, -1.0, math.inf, math.nan)),
        *(("logit_bias", value) for value in ({-1: 1.0}, {1: math.inf})),
        *(("seed", value) for value in (-1, 2**63)),
    ],
)
def test_settings_that_make_no_sense_are_refused(name: str, value: Any) -> None:
    with refused(ConfigError, setting=name) as caught:
        Sampling(**{name: value})
    assert repr(getattr(caught.value, "given", None)) == repr(value)


def test_greedy_is_the_default_and_the_bounds_are_allowed() -> None:
    assert Sampling().greedy
    assert not Sampling(temperature=5e-324, top_k=1, top_p=1.0, seed=2**63 - 1).greedy


@pytest.mark.parametrize(
    "p",
    [
        distribution(0, 0, 1, 0),
        distribution(0, 3, 0, 1, 0),
        distribution(1, 0, 0, 2),
        distribution(*([0] + [0.1] * 10 + [0])),  # the sum of ten tenths is not 1
        distribution(0, 1e-300, 1, 1e-300, 0),
        probabilities(logits(3), Sampling(temperature=1.0, top_k=4)),
    ],
    ids=["one", "inner", "ends", "tenths", "tiny", "filtered"],
)
def test_a_token_of_probability_zero_is_never_drawn(p: Tensor) -> None:
    steps = (p.cumsum(0) / p.sum()).tolist()
    around = [math.nextafter(step, to) for step in steps for to in (0.0, 1.0)]
    for u in [0.0, LARGEST_UNIFORM, *steps, *around]:
        if 0 <= u < 1:
            assert p[quantile(p, u)] > 0, u


def test_quantile_inverts_the_cumulative_sum() -> None:
    p = distribution(1, 2, 0, 1)
    us = [0.0, 0.2, 0.25, 0.5, 0.74, 0.75, LARGEST_UNIFORM]
    assert [quantile(p, u) for u in us] == [0, 0, 1, 1, 1, 3, 3]
    assert quantile(distribution(*[1] * 2048), 0.5) == 1024


def test_draws_follow_the_distribution() -> None:
    p = distribution(0.5, 0.0, 0.2, 0.3)
    generator = torch.Generator().manual_seed(0)
    draws = torch.tensor([draw(p, generator) for _ in range(4000)])
    shares = torch.bincount(draws, minlength=4) / len(draws)
    assert (shares - p).abs().max() < 0.03  # about 4 standard deviations
    assert shares[1] == 0


def cases() -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs (q, p) of a draft and a target."""
    warm, cut = Sampling(temperature=1.3), Sampling(temperature=0.8, top_k=4)
    p, q = probabilities(logits(1), warm), probabilities(logits(2), warm)
    return {
        "full": (q, p),
        "draft-filtered": (probabilities(logits(2), cut), p),
        "target-filtered": (q, probabilities(logits(1), cut)),
        "both-filtered": (probabilities(logits(2), cut), probabilities(logits(1), cut)),
        "nucleus": (q, probabilities(logits(1), Sampling(temperature=1.0, top_p=0.7))),
        "disjoint": (distribution(1, 2, 0, 0), distribution(0, 0, 3, 1)),
        "equal": (p, p.clone()),
        "nearly-equal": (p, probabilities(logits(1) + 1e-15 * logits(5), warm)),
        "draft-greedy": (probabilities(logits(2), Sampling()), p),
        "target-greedy": (q, probabilities(logits(1), Sampling())),
        "tiny-draft": (distribution(1e-300, 1, 1), distribution(1, 1, 0)),
    }


@pytest.mark.parametrize("case", cases())
def test_the_outcome_has_exactly_the_targets_distribution(case: str) -> None:
    """Summed over every draft and both branches, from the functions that `verify` runs."""
    q, p = cases()[case]
    rest = residual(q, p)
    assert rest.min() >= 0
    assert float(rest.sum()) == pytest.approx(1, abs=1e-12)
    outcome = torch.zeros_like(p)
    for token in q.nonzero().flatten().tolist():
        accepted = acceptance(token, q, p)
        assert 0 <= accepted <= 1
        outcome[token] += q[token] * accepted
        outcome += q[token] * (1 - accepted) * rest
    torch.testing.assert_close(outcome, p, rtol=0.0, atol=1e-12)


def test_verify_end_to_end() -> None:
    q, p = distribution(0.4, 0.3, 0.2, 0.0, 0.1), distribution(0.1, 0.2, 0.3, 0.4, 0.0)
    generator = torch.Generator().manual_seed(0)
    tokens, accepted, count = [], 0, 8000
    for _ in range(count):
        drafted = draw(q, generator)
        kept, token = verify(drafted, q, p, generator)
        assert not kept or token == drafted
        tokens.append(token)
        accepted += kept
    shares = torch.bincount(torch.tensor(tokens), minlength=5) / count
    # four standard deviations of a share near 1/2; the draws without the residual rule are 0.05 away
    assert (shares - p).abs().max() < 0.0225
    assert accepted / count == pytest.approx(float(torch.minimum(p, q).sum()), abs=0.0225)
    assert shares[4] == 0


def test_equal_distributions_accept_everything_and_disjoint_ones_nothing() -> None:
    generator = torch.Generator().manual_seed(1)
    p = probabilities(logits(1), Sampling(temperature=1.0))
    for _ in range(200):
        token = draw(p, generator)
        assert verify(token, p, p.clone(), generator) == (True, token)
    q, p = cases()["disjoint"]
    assert {verify(draw(q, generator), q, p, generator) for _ in range(100)} == {(False, 2), (False, 3)}


def test_greedy_distributions_are_verified_by_equality() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = distribution(0, 1, 0), distribution(0, 0, 1)
    assert verify(1, one, one, generator) == (True, 1)
    assert verify(1, one, other, generator) == (False, 2)


def test_a_residual_that_rounding_emptied_is_the_target() -> None:
    p = distribution(0.5, 0.5)
    q = torch.tensor([0.5, math.nextafter(0.5, 1.0)], dtype=torch.float64)  # sums to 1 + 2^-53
    assert acceptance(1, q, p) < 1
    assert residual(q, p) is p


def test_a_token_that_the_draft_cannot_have_drawn_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="drawn"):
        acceptance(2, *cases()["disjoint"])


def stream(generator: torch.Generator) -> list[int]:
    return [draw(distribution(*[1] * 50), generator) for _ in range(20)]


def test_sequences_have_their_own_streams_and_the_first_is_a_single_ones(engine: Engine) -> None:
    before = torch.get_rng_state()
    cache = engine.new_cache()
    rows = [stream(cache.new(Sampling(seed=7).shifted(r)).generator) for r in range(3)]
    assert len({tuple(row) for row in rows}) == 3
    assert [stream(cache.new(Sampling(seed=7 + r)).generator) for r in range(3)] == rows
    assert torch.equal(torch.get_rng_state(), before), "the global generator is not touched"


def test_the_largest_seed_has_rows_too() -> None:
    last = Sampling(seed=2**63 - 1)
    assert last.shifted(0).seed == 2**63 - 1
    assert last.shifted(1).seed == 0
