"""Descriptions: what they are called, and what they refuse."""

import pytest

from topograd.errors import GeometryError
from topograd.geometry.rules import Attention, Block, Chain, Composition, GatedStack, Mixer


def test_a_description_names_every_departure() -> None:
    assert str(Chain(4, 6, "relu", bias=2)) == "chain L=4 d=6 relu, bias t^2"
    assert str(Chain(2, widths=(6, 3, 6), noise=0.0)) == "chain L=2 d=6-3-6 linear, noise-free"
    assert str(Chain(3, loss="cross-entropy", head="square")).endswith("cross-entropy, square head")
    assert str(Chain(2, exponents=((1, 2), (3, 1)))).endswith("α=(1,2),(3,1)")
    assert str(Chain(4, skips=((0, 2), (1, 4)), skip="projected")).endswith("projected skip 0→2 1→4")
    assert str(Chain(4, norm="rmsnorm", norm_at=(1, 3))).endswith("rmsnorm at 1,3")
    assert str(Chain(3, rotation=0.1)).endswith("rotated 0.1")
    assert str(Attention(2, heads=4, wiring="pre-norm")) == "attention M=2 d=16 n=8, 4 heads, pre-norm"
    assert str(Composition((Block("mlp", 3), Block("attention")))) == "mlp3 → attention"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"depth": 0}, "depth 0: give a whole number of at least 1"),
        ({"depth": 2.5}, "depth 2.5: give a whole number"),
        ({"depth": True}, "depth True: give a whole number"),
        ({"depth": 3, "width": 1}, "width 1: give a whole number of at least 2"),
        ({"depth": 3, "activation": "swish"}, "activation swish: give one of linear, relu, gelu, tanh"),
        ({"depth": 3, "loss": "hinge"}, "loss hinge: give one of"),
        ({"depth": 3, "widths": (4, 4)}, "give 4 of at least 2"),
        ({"depth": 3, "exponents": ((1, 2),)}, "give 3 whole powers"),
        ({"depth": 2, "width": 2, "exponents": ((1, 2), (2, 1))}, "2 dead directions in a width of 2"),
        ({"depth": 3, "noise": -1.0}, "give finite numbers from 0 on"),
        ({"depth": 3, "rotation": float("nan")}, "rotation nan: give finite numbers"),
        ({"depth": 3, "bias": 0.5}, "bias 0.5: give a whole number of at least 0"),
        ({"depth": 3, "skips": ((2, 2),)}, "a skip 2→2"),
        ({"depth": 3, "skips": ((0, 4),)}, "a skip 0→4"),
        ({"depth": 3, "skips": ((0, 2), (0, 2))}, "name each once"),
        ({"depth": 2, "widths": (4, 3, 4), "skips": ((0, 2),)}, "widths: no joint rule"),
        ({"depth": 3, "norm": "layernorm"}, "give a norm and its positions"),
        ({"depth": 3, "norm": "layernorm", "norm_at": (3,)}, "positions from 1 to 2"),
        ({"depth": 3, "activation": "relu", "norm": "rmsnorm", "norm_at": (1,)}, "lack a live channel"),
    ],
)
def test_a_chain_refuses_what_is_no_chain(given: dict[str, object], message: str) -> None:
    with pytest.raises(GeometryError, match=message) as caught:
        Chain(**given)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"skip": "gated", "skips": ((1, 2),)}, "skip gated is outside the theory"),
        ({"norm": "peri", "norm_at": (1,)}, "norm peri is outside the theory: Peri-LN"),
        ({"norm": "post", "norm_at": (1,)}, "norm post is outside the theory"),
        ({"norm": "layernorm", "norm_at": (1,), "skips": ((1, 2),)}, "skips with norm: no joint rule"),
        ({"rotation": 0.1, "loss": "cross-entropy"}, "cross-entropy with rotation: no joint rule"),
        ({"noise": 0.0, "bias": 1}, "bias with noise-free: no joint rule"),
    ],
)
def test_what_the_theory_leaves_out_is_named(given: dict[str, object], message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        Chain(3, **given)  # type: ignore[arg-type]


def test_departures_with_a_joint_rule_go_together() -> None:
    both = Chain(3, skips=((0, 2),), bias=2, exponents=((1, 2, 1),), loss="cross-entropy")
    assert both.powers == ((1, 2, 1),)
    assert Chain(2, widths=(5, 3, 4), noise=0.0).rank == 3


def test_blocks_refuse_too() -> None:
    with pytest.raises(GeometryError, match="wiring peri-norm is outside the theory"):
        Attention(2, wiring="peri-norm")
    with pytest.raises(GeometryError, match="multiple of the heads"):
        Attention(2, width=10, heads=4)
    with pytest.raises(GeometryError, match="kind glu: give one of swiglu, geglu, reglu"):
        GatedStack(1, "glu")
    with pytest.raises(GeometryError, match="block gated is outside the theory"):
        Block("gated")
    with pytest.raises(GeometryError, match="only an mlp counts its weights"):
        Block("attention", 2)
    with pytest.raises(GeometryError, match="a composition of no blocks"):
        Composition(())
    with pytest.raises(GeometryError, match="mlp relu: give one of gelu, swiglu"):
        Mixer(1, "relu")


@pytest.mark.parametrize("kind", ["gqa", "rope", "moe", "ssm"])
def test_parts_of_newer_models_are_refused_by_name(kind: str) -> None:
    with pytest.raises(GeometryError, match=f"block {kind} is outside the theory: .*; give mlp, residual"):
        Block(kind)


@pytest.mark.parametrize("norm", ["batchnorm", "groupnorm"])
def test_norms_over_batches_and_groups_are_refused_by_name(norm: str) -> None:
    with pytest.raises(GeometryError, match=f"norm {norm} is outside the theory"):
        Chain(3, norm=norm, norm_at=(1,))
