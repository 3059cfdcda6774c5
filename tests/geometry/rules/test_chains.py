"""Predicted rates of chains: the tables of the theory, and every path of a graph as the other witness."""

from collections.abc import Iterator

import pytest

from topograd.geometry.rules import Chain, predict
from topograd.geometry.rules.chains import distances


def slopes(chain: Chain, kind: str) -> list[float | None]:
    return [p.slope for p in predict(chain) if p.node.startswith(f"{kind}_")]


def test_the_ladder_and_its_dual() -> None:
    chain = Chain(6)
    assert slopes(chain, "G") == [10, 8, 6, 4, 2, 0]
    assert slopes(chain, "A") == [0, 2, 4, 6, 8, 10]
    assert slopes(chain, "product") == [10] * 6
    said = {p.node: p.slope for p in predict(chain)}
    assert said["K"] == 12
    assert said["sigma_min(H_5)"] == 5


@pytest.mark.parametrize(("depth", "expected"), [(2, [6, 4]), (3, [10, 8, 6]), (6, [22, 20, 18, 16, 14, 12])])
def test_without_noise_every_slope_is_higher_and_says_so(depth: int, expected: list[int]) -> None:
    chain = Chain(depth, noise=0.0)
    assert slopes(chain, "G") == expected
    assert slopes(chain, "A") == slopes(Chain(depth), "A"), "activations know no labels"
    assert all("noise-free" in p.note for p in predict(chain) if p.node.startswith("G"))


def test_several_directions_leave_out_the_layers_own_power() -> None:
    said = {p.node: p.slope for p in predict(Chain(4, exponents=((1, 2, 1, 2), (2, 1, 3, 1))))}
    assert [said[f"G_{layer}[1]"] for layer in range(1, 5)] == [10, 6, 4, 0]
    assert [said[f"G_{layer}[2]"] for layer in range(1, 5)] == [10, 8, 2, 0]
    assert said["K"] == 12, "the least of both directions"


def test_a_bias_caps_what_goes_forward_only() -> None:
    assert slopes(Chain(4, bias=1), "A") == [0, 2, 2, 2]
    assert slopes(Chain(4, bias=2), "A") == [0, 2, 4, 4]
    assert slopes(Chain(4, bias=2), "G") == [6, 4, 2, 0]


def test_skips_shorten_the_way() -> None:
    assert slopes(Chain(4, skips=((2, 4),)), "G") == [2, 0, 2, 0]
    assert slopes(Chain(4, skips=((1, 3),)), "G") == [2, 4, 2, 0]
    assert slopes(Chain(4, skips=((1, 3),)), "A") == [0, 2, 4, 2]
    every = tuple((layer, layer + 1) for layer in range(4))
    assert slopes(Chain(4, skips=every), "product") == [0] * 4
    assert "K" not in {p.node for p in predict(Chain(4, skips=every))}, "nothing dies at the output"
    assert slopes(Chain(4, skips=((2, 4),), skip="projected"), "G") == [4, 2, 2, 0]


def paths(chain: Chain, start: int, end: int) -> Iterator[int]:
    """The cost of every path from one layer to another, one by one."""
    if start == end:
        yield 0
        return
    steps = [(start + 1, chain.powers[0][start])] if start < chain.depth else []
    steps += [(b, 0 if chain.skip == "identity" else 1) for a, b in chain.skips if a == start]
    for reached, cost in steps:
        for more in paths(chain, reached, end):
            yield cost + more


@pytest.mark.parametrize("skip", ["identity", "projected"])
@pytest.mark.parametrize("skips", [((0, 3), (2, 5)), ((1, 2), (1, 4), (3, 6)), ((0, 6),), ()])
def test_distances_are_the_least_over_all_paths(skips: tuple[tuple[int, int], ...], skip: str) -> None:
    chain = Chain(6, skips=skips, skip=skip, exponents=((2, 1, 3, 1, 2, 1),))
    found = distances(chain, 0)
    assert list(found.backward) == [min(paths(chain, layer, 6)) for layer in range(7)]
    assert list(found.forward) == [min(paths(chain, 0, layer)) for layer in range(7)]


@pytest.mark.parametrize(
    ("depth", "at", "expected"),
    [
        (4, (1,), [0, 4, 2, 0]),
        (4, (3,), [4, 2, 0, 0]),
        (4, (1, 2, 3), [0, 0, 0, 0]),
        (5, (2,), [2, 0, 4, 2, 0]),
        (6, (2, 4), [2, 0, 2, 0, 2, 0]),
        (6, (1, 5), [0, 6, 4, 2, 0, 0]),
    ],
)
def test_layernorm_resets(depth: int, at: tuple[int, ...], expected: list[int]) -> None:
    assert slopes(Chain(depth, norm="layernorm", norm_at=at), "G") == expected


@pytest.mark.parametrize(
    ("depth", "at", "activation", "expected"),
    [
        (6, (2,), "linear", [6, 4, 6, 4, 2, 0]),
        (6, (1, 2, 3, 4, 5), "linear", [10, 8, 6, 4, 2, 0]),
        (6, (1, 2, 3, 4, 5), "tanh", [2, 4, 6, 4, 2, 0]),
        (8, (1, 3), "linear", [10, 8, 6, 8, 6, 4, 2, 0]),
        (8, (1, 3), "gelu", [2, 8, 6, 8, 6, 4, 2, 0]),
    ],
)
def test_rmsnorm_caps(depth: int, at: tuple[int, ...], activation: str, expected: list[int]) -> None:
    assert slopes(Chain(depth, activation=activation, norm="rmsnorm", norm_at=at), "G") == expected


def test_outcomes_that_are_no_slope() -> None:
    dead = predict(Chain(5, 32, "relu", norm="layernorm", norm_at=(2,)))
    assert [p.expected for p in dead] == ["rate", "rate", "zero", "zero", "rate"]
    assert [p.slope for p in dead] == [2, 0, None, None, 0]
    rotated = predict(Chain(4, activation="gelu", rotation=0.1))
    assert all(p.expected == "refusal" and "theorem-reach exceeded" in p.note for p in rotated)
    assert slopes(Chain(4, rotation=0.1), "G") == [6, 4, 2, 0], "a linear chain has no preferred frame"


def test_a_square_softmax_head_has_a_gauge_zero_and_a_simplex_head_does_not() -> None:
    def smallest(head: str) -> list[float | None]:
        return slopes(Chain(4, loss="cross-entropy", head=head), "lambda_min(G")

    assert smallest("simplex") == [6, 4, 2, 0]
    assert smallest("square") == [None] * 4
    assert slopes(Chain(4, loss="cross-entropy", head="square"), "G") == [6, 4, 2, 0]


def test_sources_are_cited() -> None:
    assert "Theorem 112" in predict(Chain(4, bias=1))[0].source
    assert "Theorem 36, Theorem 106" in predict(Chain(2, exponents=((1, 2),), loss="cross-entropy"))[0].source
    assert predict(Chain(4, norm="rmsnorm", norm_at=(1,)))[0].source == "derived here"


@pytest.mark.parametrize(
    ("depth", "at", "expected"),
    [
        (5, (2,), [4, 2, 4, 2, 0]),
        (5, (1,), [6, 6, 4, 2, 0]),
        (6, (4,), [2, 0, -2, -4, 2, 0]),
        (6, (2, 4), [2, 0, 2, 0, 2, 0]),
    ],
)
def test_batch_norm_divides_by_the_spread(depth: int, at: tuple[int, ...], expected: list[int]) -> None:
    assert [p.slope for p in predict(Chain(depth, norm="batchnorm", norm_at=at))] == expected


def test_group_norm_with_live_units_is_layer_norm() -> None:
    said = [p.slope for p in predict(Chain(5, norm="groupnorm", norm_at=(2,)))]
    assert said == [p.slope for p in predict(Chain(5, norm="layernorm", norm_at=(2,)))] == [2, 0, 4, 2, 0]
