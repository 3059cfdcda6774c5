"""The hand-written pullback against autograd through the real blocks, in float64."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from raising import refused
from topograd.errors import ConfigError, StackError
from topograd.interfaces import pullback as module
from topograd.interfaces.pullback import Tape, pullback, record
from topograd.nn.gpt import GPT
from topograd.nn.stack import LayerContext

VOCAB, TIME, WIDTH, BATCH, BASIS = 23, 12, 16, 2, 3
TOLERANCE = 1e-13

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "swiglu": {"mlp": "swiglu"},
    "grouped": {"kv_heads": 2},
    "one kv head, windows": {"kv_heads": 1, "windows": (3, 0)},
    "windows, all valued": {"windows": (2, 5), "value_embeddings": "all"},
    "plain": {"x0_blend": False, "value_embeddings": "none"},
    "wide window": {"windows": (TIME + 5,)},
}
POOLS = {
    "mean": lambda count: torch.full((count,), 1 / count),
    "tail": lambda count: torch.eye(count)[-1],
    "last half": lambda count: (torch.arange(count) >= count // 2) / count,
    "any": lambda count: torch.linspace(-1, 2, count).square(),
}


@dataclass
class Case:
    """A region, its input, and what it gave."""

    layers: Sequence[nn.Module]
    ctx: LayerContext
    h: Tensor
    output: Tensor
    tape: Tape


def model(dtype: torch.dtype = torch.float64, zeros: bool = False, **variant: Any) -> GPT:
    """Three blocks, whose output matrices are not zero unless asked for."""
    torch.manual_seed(0)
    sizes = {"layers": 3, "width": WIDTH, "heads": 4, "vocab": VOCAB, "context": TIME}
    gpt = GPT(**sizes | variant)
    for parameter in gpt.parameters():
        if not zeros and not parameter.any():
            nn.init.normal_(parameter, std=0.3)
    return gpt.to(dtype)


def run(
    gpt: GPT,
    region: slice = slice(0, 2),
    time: int = TIME,
    scale: float = 1.0,
    rows: Tensor | None = None,
) -> Case:
    tokens = torch.randint(0, VOCAB, (BATCH, time))
    x0 = gpt.embed(tokens).detach()
    ctx = gpt.layer_context(x0, tokens)
    h = (scale * torch.randn_like(x0)).requires_grad_()
    layers = list(gpt.layers)[region]
    with record(layers) as tape:
        output = h
        for layer in layers[:-1]:
            output = layer(output, ctx)
        output = layers[-1](output, ctx, rows=rows)
    return Case(layers, ctx, h, output, tape)


def by_autograd(case: Case, g: Tensor, weights: Tensor, segment: int, skip: int = 0) -> Tensor:
    """One call for each cotangent; `case.output` holds all positions."""
    pooled = (weights[:, None] * case.output[:, : len(weights)]).sum(1)
    each = [torch.autograd.grad(pooled, case.h, x, retain_graph=True)[0] for x in g]
    return torch.stack(each)[:, :, : len(weights)].unflatten(2, (-1, segment)).sum(3)[:, :, skip:]


def cotangents(dtype: torch.dtype = torch.float64, basis: int = BASIS) -> Tensor:
    return torch.randn(basis, BATCH, WIDTH, dtype=dtype)


def error(got: Tensor, wanted: Tensor) -> float:
    assert got.shape == wanted.shape
    return ((got - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_autograd_in_every_variant(variant: str, pool: str) -> None:
    case = run(model(**VARIANTS[variant]))
    g = cotangents()
    for count, segment, skip in ((12, 12, 0), (12, 4, 0), (8, 4, 1), (9, 3, 2)):
        weights = POOLS[pool](count).double()
        got = pullback(case.tape, g, weights, segment, skip)
        assert error(got, by_autograd(case, g, weights, segment, skip)) <= TOLERANCE


@pytest.mark.parametrize("region", [slice(0, 1), slice(1, 3), slice(0, 3)], ids=str)
def test_equals_autograd_for_regions_of_any_length(region: slice) -> None:
    case = run(model(kv_heads=2), region)
    g = cotangents()
    for pool in POOLS.values():
        weights = pool(8).double()
        got = pullback(case.tape, g, weights, 2, skip=1)
        assert error(got, by_autograd(case, g, weights, 2, skip=1)) <= TOLERANCE


@given(
    keys=st.integers(1, 13),
    rows=st.integers(1, 80),
    chunk=st.one_of(st.none(), st.integers(1, 4)),
    segment=st.sampled_from((1, 2, 3, 4, 6, 12)),
    window=st.integers(0, 12),
    pool=st.sampled_from(sorted(POOLS)),
    data=st.data(),
)
@settings(max_examples=25, deadline=None)
def test_tiles_and_chunks_do_not_matter(
    keys: int, rows: int, chunk: int | None, segment: int, window: int, pool: str, data: st.DataObject
) -> None:
    count = segment * data.draw(st.integers(1, TIME // segment))
    skip = data.draw(st.integers(0, count // segment - 1))
    case = run(model(windows=(window, 0)))
    g, weights = cotangents(), POOLS[pool](count).double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "KEYS", keys)
        patch.setattr(module, "ROWS", rows)
        got = pullback(case.tape, g, weights, segment, skip, chunk)
    assert error(got, by_autograd(case, g, weights, segment, skip)) <= TOLERANCE


def test_blocks_of_keys_as_they_are_used() -> None:
    case = run(model(windows=(70, 0)), time=160)
    g, weights = cotangents(), POOLS["mean"](150).double()
    got = pullback(case.tape, g, weights, 50, skip=1)
    assert error(got, by_autograd(case, g, weights, 50, skip=1)) <= TOLERANCE


@pytest.mark.parametrize("region", [slice(0, 1), slice(0, 2)], ids=str)
def test_a_last_block_that_ran_at_a_few_positions(region: slice) -> None:
    gpt = model(kv_heads=2, windows=(0, 5))
    torch.manual_seed(1)
    whole = run(gpt, region)
    torch.manual_seed(1)
    lean = run(gpt, region, rows=torch.tensor([3, 7, 11]))
    g = cotangents()
    for count, skip in ((4, 0), (8, 0), (8, 1), (12, 2)):
        weights = POOLS["tail"](count).double()
        wanted = by_autograd(whole, g, weights, 4, skip)
        assert error(pullback(lean.tape, g, weights, 4, skip), wanted) <= TOLERANCE
    ends = torch.zeros(12, dtype=torch.float64).index_fill(0, torch.tensor([3, 7]), 0.5)
    assert error(pullback(lean.tape, g, ends, 4), by_autograd(whole, g, ends, 4)) <= TOLERANCE


def test_output_matrices_of_zero() -> None:
    """The blocks are then identities: every position sends its own weight back."""
    case = run(model(zeros=True))
    g, weights = cotangents(), POOLS["any"](12).double()
    wanted = weights.view(3, 4).sum(1)[:, None] * g[:, :, None]
    torch.testing.assert_close(pullback(case.tape, g, weights, 4), wanted, rtol=1e-14, atol=0)


def test_tiny_states_feel_the_epsilon_of_the_norm() -> None:
    """h² ≈ 1e-14 is near ε = 2e-16, so that a norm without it would be wrong by a percent."""
    case = run(model(x0_blend=False), scale=1e-7)
    g, weights = cotangents(), POOLS["mean"](12).double()
    assert error(pullback(case.tape, g, weights, 4), by_autograd(case, g, weights, 4)) <= TOLERANCE


def test_pools_without_weight_give_zero() -> None:
    case = run(model())
    g = cotangents()
    assert not pullback(case.tape, g, torch.zeros(8, dtype=torch.float64), 4).any()
    early = torch.zeros(8, dtype=torch.float64).index_fill(0, torch.tensor([2]), 1.0)
    assert not pullback(case.tape, g, early, 4, skip=1).any()
    assert not pullback(case.tape, g, early, 4)[:, :, 1].any()


def test_float32() -> None:
    """Rounding alone: products of 16 to 64 numbers in some thirty steps."""
    case = run(model(torch.float32))
    g, weights = cotangents(torch.float32), POOLS["mean"](12)
    assert error(pullback(case.tape, g, weights, 4), by_autograd(case, g, weights, 4)) <= 1e-5


def test_later_calls_do_not_change_earlier_results() -> None:
    case = run(model())
    weights = POOLS["mean"](12).double()
    g = cotangents()
    first = pullback(case.tape, g, weights, 4)
    kept = first.clone()
    pullback(case.tape, cotangents(basis=5), weights, 4)
    pullback(case.tape, cotangents(), POOLS["tail"](4).double(), 4)
    assert torch.equal(first, kept)
    assert torch.equal(pullback(case.tape, g, weights, 4), kept)


def test_recording_leaves_the_forward_as_it_is() -> None:
    """Values and all gradients bit for bit, no hook left behind, and no graph kept by the tape."""
    gpt = model(mlp="swiglu", value_embeddings="all")
    torch.manual_seed(2)
    taped = run(gpt)
    wanted = [taped.h, *(p for layer in taped.layers for p in layer.parameters())]
    plain = taped.h
    for layer in taped.layers:
        plain = layer(plain, taped.ctx)
    assert torch.equal(plain, taped.output)
    pullback(taped.tape, cotangents(), POOLS["mean"](12).double(), 4)
    for with_tape, without in zip(
        torch.autograd.grad(taped.output.square().sum(), wanted),
        torch.autograd.grad(plain.square().sum(), wanted),
        strict=True,
    ):
        assert torch.equal(with_tape, without)
    assert not any(part._forward_hooks for layer in taped.layers for part in layer.modules())
    assert not any(factors.entry.y.requires_grad for factors in taped.tape.factors())


def test_a_second_forward_replaces_the_first() -> None:
    gpt = model()
    with record(list(gpt.layers)) as tape:
        for seed in (3, 4):
            torch.manual_seed(seed)
            tokens = torch.randint(0, VOCAB, (BATCH, TIME))
            x0 = gpt.embed(tokens).detach().requires_grad_()
            output, ctx = x0, gpt.layer_context(x0.detach(), tokens)
            for layer in gpt.layers:
                output = layer(output, ctx)
            case = Case(list(gpt.layers), ctx, x0, output, tape)
            g, weights = cotangents(), POOLS["tail"](12).double()
            assert error(pullback(tape, g, weights, 4), by_autograd(case, g, weights, 4)) <= TOLERANCE


def test_only_blocks_with_attention() -> None:
    with refused(StackError, setting="jacobian", given="pullback"):
        Tape([nn.Linear(2, 2)])
    block = model().layers[0]
    block.attention = nn.Identity()
    with refused(StackError, setting="jacobian", given="pullback"), record([block]):
        pass
    with refused(StackError, setting="layers"):
        Tape([])


def test_decoding_and_empty_tapes_are_refused() -> None:
    gpt = model()
    tokens = torch.zeros(BATCH, 1, dtype=torch.long)
    x0 = gpt.embed(tokens)
    block: Any = gpt.layers[0]
    with record([block]) as tape, pytest.raises(StackError, match="whole sequences"):
        block(x0, gpt.layer_context(x0, tokens), block.new_state(BATCH, 4))
    with pytest.raises(StackError, match="not full"):
        pullback(tape, cotangents(), torch.ones(1).double(), 1)


def test_bad_input_says_what_is_allowed() -> None:
    case = run(model())
    lean = run(model(), rows=torch.tensor([3, 7]))
    g, weights = cotangents(), POOLS["mean"](12).double()
    with refused(ConfigError, setting="cotangent"):
        pullback(case.tape, g[:, 0], weights, 4)
    with refused(ConfigError, setting="weights"):
        pullback(case.tape, g, torch.ones(13).double(), 13)
    for segment, skip in ((5, 0), (0, 0), (4, 3), (4, -1)):
        with refused(ConfigError, setting="segment"):
            pullback(case.tape, g, weights, segment, skip)
    with refused(ConfigError, setting="weights"):
        pullback(lean.tape, g, weights, 4)
