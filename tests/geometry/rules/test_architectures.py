"""Descriptions: what they are called, and what they refuse."""

import pytest

from raising import refused
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
    ("given", "setting"),
    [
        ({"depth": 0}, "depth"),
        ({"depth": 2.5}, "depth"),
        ({"depth": True}, "depth"),
        ({"depth": 3, "width": 1}, "width"),
        ({"depth": 3, "activation": "swish"}, "activation"),
        ({"depth": 3, "loss": "hinge"}, "loss"),
        ({"depth": 3, "widths": (4, 4)}, "widths"),
        ({"depth": 3, "exponents": ((1, 2),)}, "exponents"),
        ({"depth": 2, "width": 2, "exponents": ((1, 2), (2, 1))}, "exponents"),
        ({"depth": 3, "noise": -1.0}, "noise"),
        ({"depth": 3, "rotation": float("nan")}, "rotation"),
        ({"depth": 3, "bias": 0.5}, "bias"),
        ({"depth": 3, "skips": ((2, 2),)}, "skips"),
        ({"depth": 3, "skips": ((0, 4),)}, "skips"),
        ({"depth": 3, "skips": ((0, 2), (0, 2))}, "skips"),
        ({"depth": 2, "widths": (4, 3, 4), "skips": ((0, 2),)}, "skips"),
        ({"depth": 3, "norm": "layernorm"}, "norm_at"),
        ({"depth": 3, "norm": "layernorm", "norm_at": (3,)}, "norm_at"),
        ({"depth": 3, "activation": "relu", "norm": "rmsnorm", "norm_at": (1,)}, "width"),
    ],
)
def test_a_chain_refuses_what_is_no_chain(given: dict[str, object], setting: str) -> None:
    with refused(GeometryError, setting=setting) as caught:
        Chain(**given)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "setting"),
    [
        ({"skip": "gated", "skips": ((1, 2),)}, "skip"),
        ({"norm": "peri", "norm_at": (1,)}, "norm"),
        ({"norm": "post", "norm_at": (1,)}, "norm"),
        ({"norm": "layernorm", "norm_at": (1,), "skips": ((1, 2),)}, "skips"),
        ({"rotation": 0.1, "loss": "cross-entropy"}, "cross-entropy"),
        ({"noise": 0.0, "bias": 1}, "bias"),
    ],
)
def test_what_the_theory_leaves_out_is_named(given: dict[str, object], setting: str) -> None:
    with refused(GeometryError, setting=setting):
        Chain(3, **given)  # type: ignore[arg-type]


def test_departures_with_a_joint_rule_go_together() -> None:
    both = Chain(3, skips=((0, 2),), bias=2, exponents=((1, 2, 1),), loss="cross-entropy")
    assert both.powers == ((1, 2, 1),)
    assert Chain(2, widths=(5, 3, 4), noise=0.0).rank == 3


def test_blocks_refuse_too() -> None:
    with refused(GeometryError, setting="wiring", given="peri-norm"):
        Attention(2, wiring="peri-norm")
    with refused(GeometryError, setting="width", given=10):
        Attention(2, width=10, heads=4)
    with refused(GeometryError, setting="kind", given="glu"):
        GatedStack(1, "glu")
    with refused(GeometryError, setting="kind", given="gated"):
        Block("gated")
    with refused(GeometryError, setting="weights", given=2):
        Block("attention", 2)
    with refused(GeometryError, setting="blocks"):
        Composition(())
    with refused(GeometryError, setting="mlp", given="relu"):
        Mixer(1, "relu")


def test_variants_of_attention_have_names_and_limits() -> None:
    assert str(Attention(3, heads=4, kv_heads=2)) == "attention M=3 d=16 n=8, 4 heads on 2"
    assert str(Attention(2, positions="rope-single")).endswith("rope-single")
    assert Attention(1, heads=4, kv_heads=2).dead == {11: 1, 15: 1}
    assert Attention(1, positions="rope").dead == {14: 1, 15: 1}
    for heads, shared in ((4, 3), (8, 2)):
        with refused(GeometryError, setting="kv_heads"):
            Attention(2, heads=heads, kv_heads=shared)
    with refused(GeometryError, setting="positions", given="alibi"):
        Attention(2, positions="alibi")
    with refused(GeometryError, setting="attention"):
        Attention(2, memory=True, wiring="residual")
    with refused(GeometryError, setting="attention"):
        Attention(2, memory=True, positions="rope")
