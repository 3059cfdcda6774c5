"""The bounded interface as a relay: settings, both ends against the loops of `reference/`, lean, decoding."""

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pieces import Decoded
from raising import refused
from tests.oracles.interfaces import canvas_with_states, interface_forward, next_states, pools
from topograd.errors import ConfigError
from topograd.exec.forward import run_stage, stage_outputs
from topograd.nn.config import ARCHITECTURES, Maps, Pool, SegmentInterface
from topograd.nn.gpt import GPT
from topograd.nn.interface import Map, SegmentRelay, add_interfaces
from topograd.nn.relays import CausalRelay
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan

WIDTH, CONTEXT, VOCAB = 8, 12, 11
CHAIN = Topology.regions("1,2,1")
POOLS: list[Pool] = ["tail", "mean", "cumulative"]
PUBLISHED = SegmentInterface(segments=1, rank=4, pool="mean", causal=False)


@cache
def model(chosen: SegmentInterface, architecture: str = "transformer") -> GPT:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "layers": 4,
        "width": WIDTH,
        "heads": 2,
        "vocab": VOCAB,
        "context": CONTEXT,
        "ssm_state": 4,
    }
    stack = GPT(**sizes, architecture=architecture).double()
    add_interfaces(stack, chosen, 3, WIDTH, CONTEXT)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return stack


def relay_of(chosen: SegmentInterface, name: str = "interface-2") -> SegmentRelay:
    relay = model(chosen).relay(name)
    assert isinstance(relay, SegmentRelay)
    return relay


def tokens(time: int = CONTEXT, batch: int = 2) -> Tensor:
    return torch.randint(VOCAB, (batch, time), generator=torch.Generator().manual_seed(2))


# Settings


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("S=8,r=16", SegmentInterface(segments=8, rank=16)),
        (" S = 4 , r=3,pool=mean ", SegmentInterface(segments=4, rank=3, pool="mean")),
        ("pool=cumulative,maps=gated", SegmentInterface(pool="cumulative", maps="gated")),
        ("S=1,r=4,pool=mean,causal=False", PUBLISHED),
        ("causal=true", SegmentInterface()),
    ],
)
def test_settings_in_words(text: str, expected: SegmentInterface) -> None:
    assert SegmentInterface.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "setting", "given"),
    [
        ("", "interface", ""),
        ("S", "interface", "S"),
        ("S=4,,r=4", "interface", "S=4,,r=4"),
        ("segments=4", "interface", "segments=4"),
        ("S=four", "interface", "four"),
        ("S=", "interface", ""),
        ("r=4.5", "interface", "4.5"),
        ("r=0", "rank", 0),
        ("r=2", "rank", 2),
        ("r=-8", "rank", -8),
        ("S=1", "segments", 1),
        ("S=0", "segments", 0),
        ("S=-4", "segments", -4),
        ("pool=max", "pool", "max"),
        ("maps=conv", "maps", "conv"),
        ("causal=no", "interface", "no"),
        ("causal=false", "causal", False),
        ("S=4,pool=mean,causal=false", "causal", False),
        ("S=1,pool=tail,causal=false", "causal", False),
        ("S=--4", "interface", "--4"),
        ("S=²", "interface", "²"),
        ("S=4,S=8", "interface", "S=4,S=8"),
    ],
)
def test_bad_settings(text: str, setting: str, given: object) -> None:
    with refused(ConfigError, setting=setting, given=given):
        SegmentInterface.parse(text)


@pytest.mark.parametrize("segments", [5, 24, 13])
def test_segments_must_divide_the_context(segments: int) -> None:
    with refused(ConfigError, setting="segments"):
        SegmentRelay(SegmentInterface(segments=segments), WIDTH, CONTEXT, first=True)


# Maps


@pytest.mark.parametrize("kind", ["mlp", "linear", "gated"])
def test_maps_by_hand(kind: Maps) -> None:
    torch.manual_seed(0)
    made = Map(kind, 5, 7, 3).double()
    x = torch.randn(2, 4, 5, dtype=torch.float64)
    outer = made.outer.weight
    if kind == "linear":
        assert made.inner is None
        expected = x @ outer.T
    else:
        assert made.inner is not None
        inner = x @ made.inner.weight.T
        if kind == "mlp":
            expected = (inner * 0.5 * (1 + torch.erf(inner / 2**0.5))) @ outer.T
        else:
            expected = (x @ outer.T) / (1 + torch.exp(-inner))
    torch.testing.assert_close(made(x), expected, rtol=1e-13, atol=1e-14)


def test_a_new_interface_says_nothing_yet() -> None:
    """Dec starts at zero: every region first sees the canvas alone, bit for bit."""
    relay = SegmentRelay(SegmentInterface(segments=4, rank=4), WIDTH, CONTEXT, first=False)
    assert relay.alpha is not None
    assert relay.alpha.item() == 1
    stack, inputs = GPT(layers=1, width=WIDTH, heads=2, vocab=VOCAB), tokens()
    x0 = stack.embed(inputs)
    assert torch.equal(relay.receive(torch.randn(2, 3, 4), stack.layer_context(x0, inputs)), x0)


def test_relays_are_the_stack_s_own() -> None:
    stack = GPT(layers=4, width=8, heads=2, vocab=11, context=CONTEXT).to(torch.bfloat16)
    add_interfaces(stack, SegmentInterface(segments=4), 3, 8, CONTEXT)
    assert sorted(stack.learned_relays()) == ["interface-1", "interface-2"]
    assert {p.dtype for p in stack.relays.parameters()} == {torch.bfloat16}
    first, second = stack.relay("interface-1"), stack.relay("interface-2")
    assert isinstance(first, CausalRelay)
    assert isinstance(first, SegmentRelay)
    assert isinstance(second, SegmentRelay)
    assert first.alpha is None, "LN undoes the first scale"
    assert second.alpha is not None


# The two ends


@settings(max_examples=25, deadline=None)
@given(pool=st.sampled_from(POOLS), segments=st.sampled_from([2, 3, 4, 6, 12]), time=st.integers(1, CONTEXT))
def test_both_ends_are_the_reference_s(pool: Pool, segments: int, time: int) -> None:
    chosen = SegmentInterface(segments=segments, rank=4, pool=pool)
    stack, relay, inputs = model(chosen), relay_of(chosen), tokens(time)
    h = torch.randn(2, time, WIDTH, dtype=torch.float64)
    states = relay.ends(time)
    assert states == len(pools(relay, h)) == min(time // (CONTEXT // segments), segments - 1)
    heard = torch.randn(2, states, 4, dtype=torch.float64)
    x0 = stack.embed(inputs)
    received = relay.receive(heard, stack.layer_context(x0, inputs))
    torch.testing.assert_close(received, canvas_with_states(relay, x0, list(heard.unbind(1))))
    assert torch.equal(received[:, : relay.segment], x0[:, : relay.segment]), "segment 0 hears nothing"
    if states:
        torch.testing.assert_close(relay.pool(h), torch.stack(pools(relay, h), dim=1))
        said = torch.stack(next_states(relay, h, list(heard.unbind(1))), dim=1)
        torch.testing.assert_close(relay.send(h, heard), said, rtol=1e-12, atol=1e-13)
        assert said.mean(-1).abs().max() < 1e-14
        torch.testing.assert_close(said.norm(dim=-1), torch.full((2, states), 2.0, dtype=torch.float64))


def test_the_first_boundary_hears_no_state() -> None:
    chosen = SegmentInterface(segments=4, rank=4)
    relay = relay_of(chosen, "interface-1")
    h, x0 = torch.randn(2, 2, CONTEXT, WIDTH, dtype=torch.float64)
    expected = torch.stack(next_states(relay, h, []), dim=1)
    for heard in (x0, None):
        torch.testing.assert_close(relay.send(h, heard), expected, rtol=1e-12, atol=1e-13)


def test_the_published_interface_pools_and_tells_everything() -> None:
    relay, stack, inputs = relay_of(PUBLISHED), model(PUBLISHED), tokens(9)
    h, heard = torch.randn(2, 9, WIDTH).double(), torch.randn(2, 1, 4).double()
    torch.testing.assert_close(relay.pool(h), h.mean(1, keepdim=True))
    assert relay.ends(9) == 1
    assert relay.needed(9) == (9, None)
    x0 = stack.embed(inputs)
    expected = x0 + relay.decode(heard[:, 0])[:, None]
    torch.testing.assert_close(relay.receive(heard, stack.layer_context(x0, inputs)), expected)


# The whole forward


@pytest.mark.parametrize("time", [CONTEXT, 10, 9])
@pytest.mark.parametrize("pool", POOLS)
def test_forward_is_the_reference_s(pool: Pool, time: int) -> None:
    stack = model(SegmentInterface(segments=4, rank=4, pool=pool))
    h = stage_outputs(stack, Plan.of(CHAIN, 4), tokens(time), [2])[2]
    expected, _ = interface_forward(stack, CHAIN, tokens(time))
    torch.testing.assert_close(stack.readout(h, 2), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("pool", POOLS)
def test_lean_sends_the_same(pool: Pool, architecture: str) -> None:
    """Nothing of the last segment runs, and with a tail pool the last layer only where segments end."""
    stack, inputs = model(SegmentInterface(segments=4, rank=4, pool=pool), architecture), tokens()
    x0 = stack.embed(inputs)
    ctx, message = stack.layer_context(x0, inputs), x0
    for planned in Plan.of(CHAIN, 4).stages[:-1]:
        whole, sent = run_stage(stack, planned, [message], ctx)
        lean, sent_lean = run_stage(stack, planned, [message], ctx, lean=True)
        port = planned.outputs[0]
        torch.testing.assert_close(sent_lean[port], sent[port], rtol=1e-12, atol=1e-13)
        read = torch.tensor([2, 5, 8]) if pool == "tail" else torch.arange(9)
        assert lean.shape[1] == len(read)
        torch.testing.assert_close(lean, whole[:, read], rtol=1e-12, atol=1e-13)
        message = sent[port]


@pytest.mark.parametrize("time", [CONTEXT, 10, 9, 8, 3])
def test_lean_runs_what_is_read_of_short_inputs(time: int) -> None:
    relay = relay_of(SegmentInterface(segments=4, rank=4))
    count, rows = relay.needed(time)
    ends = [t for t in (2, 5, 8) if t < time]
    assert rows is not None
    assert rows.tolist() == ends
    assert count == (ends[-1] + 1)


# Decoding


def decoded(stack: GPT, parts: list[int]) -> Tensor:
    plan, inputs = Plan.of(CHAIN, 4), tokens()
    states = Decoded(stack, plan, len(inputs), CONTEXT)
    said = [states.outputs(part, [2])[2] for part in inputs.split(parts, dim=1)]
    return stack.readout(torch.cat(said, dim=1), 2)


@pytest.mark.parametrize("parts", [[1] * CONTEXT, [5, 1, 1, 4, 1], [3, 9], [CONTEXT]], ids=str)
@pytest.mark.parametrize("pool", POOLS)
def test_decoding_is_teacher_forcing(pool: Pool, parts: list[int]) -> None:
    stack = model(SegmentInterface(segments=4, rank=4, pool=pool))
    expected, _ = interface_forward(stack, CHAIN, tokens())
    torch.testing.assert_close(decoded(stack, parts), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_decodes(architecture: str) -> None:
    stack = model(SegmentInterface(segments=4, rank=4, pool="mean"), architecture)
    expected, _ = interface_forward(stack, CHAIN, tokens())
    torch.testing.assert_close(decoded(stack, [1] * CONTEXT), expected, rtol=1e-11, atol=1e-12)


def test_one_segment_for_each_position_decodes() -> None:
    stack = model(SegmentInterface(segments=CONTEXT, rank=3))
    expected, _ = interface_forward(stack, CHAIN, tokens())
    torch.testing.assert_close(decoded(stack, [1] * CONTEXT), expected, rtol=1e-11, atol=1e-12)


def test_the_published_interface_cannot_decode() -> None:
    with refused(ConfigError, setting="causal", given=False):
        decoded(model(PUBLISHED), [1] * CONTEXT)


def test_inputs_longer_than_the_context() -> None:
    chosen = SegmentInterface(segments=4, rank=4)
    with refused(ConfigError, setting="context", given=13):
        stage_outputs(model(chosen), Plan.of(CHAIN, 4), tokens(13), [2])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("pool", POOLS)
def test_inputs_within_the_first_segment(pool: Pool, architecture: str) -> None:
    """No segment is over: the last region hears the canvas alone."""
    stack: Any = model(SegmentInterface(segments=4, rank=4, pool=pool), architecture)
    inputs = tokens(2)
    h = stage_outputs(stack, Plan.of(CHAIN, 4), inputs, [2])[2]
    x0 = stack.embed(inputs)
    torch.testing.assert_close(h, stack.layers[3](x0, stack.layer_context(x0, inputs)))
