"""Pooling in log space: values, what the mean promises, and what only the product does."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from raising import refused
from topograd.decode.log_op import compose
from topograd.errors import ConfigError
from topograd.exec.forward import stage_outputs
from topograd.nn.gpt import GPT
from topograd.nn.pooling import pool, shrinkage_weight
from topograd.nn.transformer.parts import norm
from topograd.topology.branches import branches, parse_branches
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan


def product(logits: list[Tensor], weights: list[float]) -> Tensor:
    return pool(logits, weights).log_softmax(-1)


def shrunk(logits: list[Tensor]) -> Tensor:
    return pool(logits, "shrinkage").log_softmax(-1)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.fixture
def logits() -> list[Tensor]:
    """Three branches' logits (2, 5, 11), far from uniform and from each other's level."""
    torch.manual_seed(0)
    return list(
        3 * torch.randn(3, 2, 5, 11, dtype=torch.float64) + torch.tensor([0.0, 7.0, -4.0]).view(3, 1, 1, 1)
    )


def entropy(log_p: Tensor) -> Tensor:
    return -(log_p.exp() * log_p).sum(-1)


def log_of(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def kl(log_r: Tensor, log_p: Tensor) -> Tensor:
    return (log_r.exp() * (log_r - log_p)).sum(-1)


def test_compose_is_the_geometric_mean_renormalised(logits: list[Tensor]) -> None:
    weights = [2.0, 0.5, 1.5]
    powers = torch.stack([z.softmax(-1) ** (w / 4) for z, w in zip(logits, weights, strict=True)]).prod(0)
    expected = powers / powers.sum(-1, keepdim=True)
    close(compose(logits, weights).exp(), expected)


def test_product_is_the_product_renormalised(logits: list[Tensor]) -> None:
    """Eq. 1 equals eq. 2, with exponents."""
    weights = [2.0, 0.5, 1.0]
    powers = torch.stack([z.softmax(-1) ** w for z, w in zip(logits, weights, strict=True)]).prod(0)
    expected = powers / powers.sum(-1, keepdim=True)
    close(product(logits, weights).exp(), expected)


@pytest.mark.parametrize("pooled", [compose, product], ids=["compose", "product"])
def test_a_branch_twice_is_weight_two(
    logits: list[Tensor], pooled: Callable[[list[Tensor], list[float]], Tensor]
) -> None:
    a, b, _ = logits
    close(pooled([a, a, b], [1, 1, 1]), pooled([a, b], [2, 1]))
    assert not torch.allclose(pooled([a, b], [2, 1]), pooled([a, b], [1, 1]))


def test_only_the_ratio_of_weights_matters_to_the_mean(logits: list[Tensor]) -> None:
    close(compose(logits, [30, 10, 20]), compose(logits, [3, 1, 2]))
    assert not torch.allclose(product(logits, [30, 10, 20]), product(logits, [3, 1, 2]))


@pytest.mark.parametrize("weights", [[1, 1, 1], [3, 1, 0.25]], ids=str)
def test_equal_branches_are_their_mean(logits: list[Tensor], weights: list[float]) -> None:
    close(compose([logits[0]] * 3, weights), logits[0].log_softmax(-1))


def test_weight_zero_leaves_a_branch_out(logits: list[Tensor]) -> None:
    close(compose(logits, [0, 1, 0]), logits[1].log_softmax(-1))


def test_a_constant_per_token_and_branch_changes_nothing(logits: list[Tensor]) -> None:
    moved = [z + 5 * torch.randn(2, 5, 1, dtype=torch.float64) for z in logits]
    close(compose(moved, [1, 2, 3]), compose(logits, [1, 2, 3]))
    close(product(moved, [1, 2, 3]), product(logits, [1, 2, 3]))
    close(shrunk(moved), shrunk(logits))


def test_shrunk_is_the_product_with_weights_per_token(logits: list[Tensor]) -> None:
    pooled = shrunk(logits)
    for b in range(2):
        for t in range(5):
            rows = [z[b, t] for z in logits]
            weights = [float(shrinkage_weight(row)) for row in rows]
            close(pooled[b, t], product(rows, weights))
    unsure = torch.zeros_like(logits[0])
    close(shrunk([logits[0], unsure]), shrunk([logits[0]]))


# What the mean promises (Theorem 2.4.4 as far as it is true of it).


def test_the_mean_minimises_the_weighted_divergence(logits: list[Tensor]) -> None:
    """Σ w_b KL(r || p_b) = KL(r || p) - log Z for every r, so p is the best r, and the only one."""
    weights = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    experts = [z.log_softmax(-1) for z in logits]
    pooled = compose(logits, weights.tolist())
    log_z = torch.stack([w * e for w, e in zip(weights, experts, strict=True)]).sum(0).logsumexp(-1)

    def cost(log_r: Tensor) -> Tensor:
        return torch.stack([w * kl(log_r, e) for w, e in zip(weights, experts, strict=True)]).sum(0)

    close(cost(pooled), -log_z)
    for scale in (0.01, 1.0, 5.0):
        r = (pooled + scale * torch.randn_like(pooled)).log_softmax(-1)
        close(cost(r), kl(r, pooled) - log_z)
        assert (cost(r) > cost(pooled)).all()


def test_the_mean_gives_each_token_at_least_its_geometric_mean(logits: list[Tensor]) -> None:
    floor = torch.stack(logits).log_softmax(-1).mean(0)
    assert (compose(logits, [1, 1, 1]) >= floor).all()


def test_the_mean_raises_what_all_support_where_their_doubts_differ() -> None:
    """§6.5.5's mechanism: the shared token wins although each branch alone prefers another."""
    a, b = log_of(0.4, 0.59, 0.01), log_of(0.4, 0.01, 0.59)
    pooled = compose([a, b], [1, 1])
    assert int(pooled.argmax()) == 0
    assert pooled[0].exp() > 0.7
    mixture = (a.exp() + b.exp()) / 2
    assert mixture[0] == pytest.approx(0.4), "a mixture does not"


def test_the_mean_need_not_sharpen() -> None:
    sharp, flat = log_of(0.9, 0.05, 0.05), log_of(0.34, 0.33, 0.33)
    assert entropy(sharp) < entropy(compose([sharp, flat], [1, 1])) < entropy(flat)


def test_the_mean_of_log_odds_is_linear(logits: list[Tensor]) -> None:
    odds = [z[..., 4] - z[..., 7] for z in logits]
    pooled = compose(logits, [1, 2, 5])
    expected = (odds[0] + 2 * odds[1] + 5 * odds[2]) / 8
    close(pooled[..., 4] - pooled[..., 7], expected)


# What only the product promises.


def test_a_larger_exponent_lowers_the_entropy(logits: list[Tensor]) -> None:
    falling = [entropy(product([logits[0]], [beta])) for beta in (0.5, 1.0, 2.0, 4.0)]
    assert all((after < before).all() for before, after in itertools.pairwise(falling))
    close(product([logits[0]] * 2, [1, 1]), product([logits[0]], [2]))


def test_the_product_raises_a_top_token_on_which_all_agree(logits: list[Tensor]) -> None:
    agreed = [z.scatter(-1, torch.full((2, 5, 1), 3), z.max(-1, keepdim=True).values) for z in logits]
    top = torch.stack([z.softmax(-1)[..., 3] for z in agreed]).max(0).values
    assert (product(agreed, [1, 1, 1])[..., 3].exp() > top).all()
    assert (compose(agreed, [1, 1, 1])[..., 3].exp() < top).any(), "the mean may not"


def test_even_agreement_on_the_top_token_may_raise_the_entropy() -> None:
    """Two likely tokens and a tail of 100; the other expert rules out the second and lifts the tail."""
    tail = 100
    sharp = log_of(0.41, 0.39, *[0.2 / tail] * tail)
    other = log_of(1.01, 1e-6, *[1.0] * tail).log_softmax(-1)
    assert int(sharp.argmax()) == int(other.argmax()) == 0
    pooled = product([sharp, other], [1, 1])
    assert pooled[0] > sharp[0]
    assert entropy(pooled) > entropy(sharp)


# Per-stage heads, and paths through a model.


@pytest.fixture
def model() -> GPT:
    """Four stages of one layer with heads of their own, in float64, every parameter disturbed."""
    torch.manual_seed(0)
    stack = GPT(layers=4, width=16, heads=2, vocab=13, context=8).double().eval()
    stack.add_heads(range(4))
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return stack


@torch.no_grad()
def test_two_levels_are_the_stages_own_readouts(model: GPT) -> None:
    plan = Plan.of(Topology.chain("1,1,1,1"), 4)
    hidden = stage_outputs(model, plan, torch.randint(13, (2, 7)), range(4))
    weights = [1.0, 2.0, 0.5, 3.0]
    shared = [F.linear(norm(hidden[k]), model.head.weight) for k in range(4)]
    specific = [F.linear(norm(hidden[k]), model.head.deltas[str(k)](None)) for k in range(4)]
    own = compose([model.readout(hidden[k], k) for k in range(4)], weights)
    both = [s + own for s, own in zip(shared, specific, strict=True)]
    close(compose(both, weights), own)
    assert not torch.allclose(compose(shared, weights), own)
    model.head.softcap = 2.0
    capped = compose([model.readout(hidden[k], k) for k in range(4)], weights)
    assert not torch.allclose(compose(both, weights), capped), "a cap is not a product"


@torch.no_grad()
def test_branches_of_a_model_composed(model: GPT) -> None:
    """From what a user types to a distribution."""
    weights = parse_branches("1-4 + 1,3 + 1-4")
    found = branches(Plan.of(Topology.chain("1,1,1,1"), 4), list(weights))
    inputs = torch.randint(13, (2, 7))
    hidden = stage_outputs(model, found.plan, inputs, found.ends)
    logits = [model.readout(hidden[node], found.plan.stages[node].head) for node in found.ends]
    x0 = model.embed(inputs)
    ctx = model.layer_context(x0, inputs)
    skip = model.readout(model.layers[2](model.layers[0](x0, ctx), ctx), 2)
    expected = ((2 * model(inputs) + skip) / 3).log_softmax(-1)
    close(compose(logits, list(weights.values())), expected)


# Margins.

WASHINGTON, W, MASON, BUSH = range(4)
STAGE_4 = torch.tensor([9.81, 7.50, 6.10, 6.80], dtype=torch.float64)
STAGE_5 = torch.tensor([14.25, 11.65, 14.50, 13.70], dtype=torch.float64)


@pytest.mark.parametrize(
    ("weights", "runner_up", "margin"),
    [
        ([1, 0], W, 2.3),
        ([1, 1], MASON, 1.7),
        ([1, 2], MASON, 1.1),
        ([1, 3], MASON, 0.7),
        ([2, 1], BUSH, 2.2),
        ([3, 1], W, 2.4),
    ],
    ids=str,
)
def test_the_papers_sweep_of_weights_is_one_linear_family(
    weights: list[float], runner_up: int, margin: float
) -> None:
    """§6.5.6: two branches' logits, solved from the table, give its six runners-up and margins.

    The table is rounded to 0.1, and so are the logits that can be solved from it.
    """
    best = compose([STAGE_4, STAGE_5], weights).topk(2)
    assert best.indices.tolist() == [WASHINGTON, runner_up]
    assert float(best.values[0] - best.values[1]) == pytest.approx(margin, abs=0.1)


@pytest.mark.parametrize(
    "weights",
    [[1, 1], [1, -1, 1], [0, 0, 0], [1, math.nan, 1], [1, math.inf, 1]],
    ids=["few", "negative", "zero", "nan", "infinite"],
)
def test_bad_weights(logits: list[Tensor], weights: list[float]) -> None:
    with refused(ConfigError, setting="weights"):
        compose(logits, weights)


def test_nothing_to_pool() -> None:
    with refused(ConfigError, setting="logits"):
        compose([], [])
