"""Predicted rates of blocks: closed forms against the recursion."""

import pytest

from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.rules import Attention, Block, Composition, GatedStack, Mixer, predict
from topograd.geometry.rules.blocks import amplitudes


@pytest.mark.parametrize("blocks", range(1, 9))
def test_attention_chains_follow_the_closed_form(blocks: int) -> None:
    said = {p.node: p.slope for p in predict(Attention(blocks))}
    for p in range(1, blocks + 1):
        out = 4 * min(blocks - p, p + 1)
        assert (said[f"Q_{p}"], said[f"K_{p}"]) == (4 * p - 2, 4 * p - 2)
        assert (said[f"V_{p}"], said[f"O_{p}"]) == (out + 2, out)
    assert said["input gradient"] == 4
    assert said["output"] == 4 * blocks


def test_the_fitted_constant_of_the_paper_is_not_enough() -> None:
    said = {p.node: p for p in predict(Attention(6))}
    assert said["O_2"].slope == 12, "4 min(M - p, 2) would be 8"
    assert "D* = p + 1" in said["O_2"].note
    assert said["O_5"].note == ""


def test_residuals_take_the_chain_away() -> None:
    for wiring in ("residual", "pre-norm"):
        said = {p.node: p.slope for p in predict(Attention(3, wiring=wiring))}
        assert [said[f"{part}_2"] for part in "QKVO"] == [2, 2, 2, 0]
    assert {p.slope for p in predict(Mixer(3))} == {0}


def test_gated_stacks_double() -> None:
    assert [predict(GatedStack(blocks))[0].slope for blocks in (1, 2, 3)] == [6, 18, 42]
    said = {p.node: p.slope for p in predict(GatedStack(3))}
    assert [said[f"gradient_{m}"] for m in (1, 2, 3)] == [42, 36, 24]


def test_scalar_blocks_add() -> None:
    mlps = (Block("mlp", 2), Block("residual"), Block("mlp", 3))
    assert amplitudes(mlps) == ([0, 2, 2, 5], [5, 3, 3, 0])
    said = {p.node: p.slope for p in predict(Composition(mlps))}
    assert (said["gradient_1"], said["output_3"]) == (10, 10)


def test_attention_first_is_not_additive() -> None:
    first = {p.node: p for p in predict(Composition((Block("attention"), Block("mlp", 2))))}
    assert first["gradient_1"].slope == 4
    assert "not additive (8)" in first["gradient_1"].note
    last = {p.node: p for p in predict(Composition((Block("mlp", 2), Block("attention"))))}
    assert last["gradient_1"].slope == 8
    assert last["gradient_1"].note == ""


def slopes(net: Attention, part: str) -> list[float | None]:
    said = {p.node: p.slope for p in predict(net)}
    return [said[f"{part}_{p}"] for p in range(1, net.blocks + 1)]


def test_shared_keys_and_whole_pairs_are_plain_attention() -> None:
    for net in (Attention(3, heads=4, kv_heads=2), Attention(3, positions="rope")):
        assert [slopes(net, part) for part in "QKOV"] == [[2, 6, 10], [2, 6, 10], [8, 4, 0], [10, 6, 2]]


def test_live_ways_through_scores() -> None:
    single = Attention(3, positions="rope-single")
    assert [slopes(single, part) for part in "QKOV"] == [[0, 0, 0], [0, 0, 0], [2, 2, 0], [4, 4, 2]]
    memory = Attention(3, memory=True)
    assert [slopes(memory, part) for part in "QKOV"] == [[2, 2, 2], [2, 6, 6], [4, 4, 0], [6, 6, 2]]


def test_experts_and_scans() -> None:
    assert amplitudes((Block("experts"),) * 3) == ([0, 2, 4, 6], [1, 1, 1, 0])
    assert amplitudes((Block("scan"),) * 2) == ([0, 3, 9], [1, 1, 0])


def test_anything_else_is_refused() -> None:
    with refused(GeometryError, setting="architecture", given="resnet"):
        predict("resnet")  # type: ignore[arg-type]
