"""The chunked cross-entropy against the plain one: value, gradients, memory, precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracles.cross_entropy import plain_cross_entropy
from topograd.exec import linear_cross_entropy as module
from topograd.exec.linear_cross_entropy import chunk_tokens, linear_cross_entropy

if TYPE_CHECKING:
    from tests.exec.conftest import LogitsWatch

TOKENS, WIDTH, VOCAB = 21, 16, 50

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def inputs(dtype: torch.dtype = torch.float64, tokens: int = TOKENS) -> Inputs:
    """x (N, d), W (V, d), b (V), y (N); tokens 7 to 14 (a whole chunk of 7) and the last are ignored."""
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(n, WIDTH, generator=generator, dtype=torch.float64) for n in (tokens, VOCAB))
    bias = torch.randn(VOCAB, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, VOCAB, (tokens,), generator=generator)
    targets[7:14] = targets[-1] = -100
    return x.to(dtype), weight.to(dtype), bias.to(dtype), targets


def graded(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    softcap: float | None = None,
    chunk: int | None = None,
    plain: bool = False,
    incoming: float = 1.0,
) -> dict[str, Tensor]:
    """The loss and the gradients of x, weight and bias."""
    leaves = {"x": x, "weight": weight, "bias": bias}
    x, weight, bias = (None if t is None else t.detach().clone().requires_grad_() for t in leaves.values())  # type: ignore[assignment]
    if plain:
        loss = plain_cross_entropy(x, weight, targets, bias, softcap)
    else:
        loss = linear_cross_entropy(x, weight, targets, bias, softcap=softcap, chunk=chunk)
    (loss * incoming).backward()
    result = {"x": x.grad, "weight": weight.grad, "bias": None if bias is None else bias.grad}
    return {"loss": loss.detach(), **{name: g for name, g in result.items() if g is not None}}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        torch.testing.assert_close(
            actual[name], value, rtol=0, atol=tolerance * float(value.abs().max()), msg=name
        )


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, 7, TOKENS, TOKENS + 5])
def test_equals_the_plain_version_in_float64(chunk: int, with_bias: bool, softcap: float | None) -> None:
    x, weight, bias, y = inputs()
    given = x, weight, bias if with_bias else None, y
    expected = graded(*given, softcap=softcap, plain=True)
    assert len(expected) == 3 + with_bias
    assert_close(graded(*given, softcap=softcap, chunk=chunk), expected, 1e-12)


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_equals_the_plain_version_in_float32(chunk: int) -> None:
    # The two differ in the order of at most 21 + 50 additions, each of which rounds by 2^-24 of the largest
    # term: 71 * 6e-8 = 4e-6.
    given = inputs(torch.float32)
    assert_close(graded(*given, chunk=chunk), graded(*given, plain=True), 4e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk", [TOKENS, TOKENS + 5, None])
def test_bit_equal_when_one_chunk_covers_everything(
    chunk: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    given = inputs(dtype)
    expected = graded(*given, softcap=softcap, plain=True)
    actual = graded(*given, softcap=softcap, chunk=chunk)
    differing = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not differing


def test_leading_shapes_may_be_any() -> None:
    x, weight, bias, y = inputs()
    flat = graded(x, weight, bias, y, chunk=4)
    shaped = graded(x.view(3, 7, WIDTH), weight, bias, y.view(3, 7), chunk=4)
    assert torch.equal(flat.pop("x"), shaped.pop("x").flatten(0, 1))
    assert all(torch.equal(flat[name], shaped[name]) for name in flat)


@pytest.mark.parametrize("chunk", [5, TOKENS])
def test_all_targets_ignored_is_zero_and_finite(chunk: int) -> None:
    x, weight, bias, y = inputs()
    for name, value in graded(x, weight, bias, torch.full_like(y, -100), chunk=chunk).items():
        assert torch.equal(value, torch.zeros_like(value)), name


@pytest.mark.parametrize("chunk", [4, TOKENS])
def test_incoming_gradient_scales_all_gradients(chunk: int) -> None:
    given = inputs()
    actual = graded(*given, chunk=chunk, incoming=-0.3)
    expected = graded(*given, plain=True, incoming=-0.3)
    assert float(expected["x"].abs().max()) > 0
    assert_close(actual, expected, 1e-12)


@pytest.mark.parametrize("wanted", ["x", "weight", "bias"])
def test_gives_only_the_gradients_that_are_wanted(wanted: str) -> None:
    x, weight, bias, y = inputs()
    leaves = {"x": x, "weight": weight, "bias": bias}
    leaves[wanted].requires_grad_()
    linear_cross_entropy(x, weight, y, bias, chunk=4).backward()
    grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    assert grads.keys() == {wanted}
    leaf, expected = grads[wanted], graded(x, weight, bias, y, plain=True)[wanted]
    assert leaf is not None
    torch.testing.assert_close(leaf, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("disabled", [True, False])
def test_no_gradient_is_computed_when_none_is_wanted(disabled: bool, logits_watch: type[LogitsWatch]) -> None:
    x, weight, bias, y = inputs()
    if disabled:  # parameters that would take gradients, evaluated under no_grad
        x, weight, bias = x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()
    with torch.set_grad_enabled(not disabled), logits_watch(VOCAB, WIDTH) as watch:
        loss = linear_cross_entropy(x, weight, y, bias, chunk=4)
    assert not loss.requires_grad
    assert torch.equal(loss, graded(x, weight, bias, y, chunk=4)["loss"])
    assert "_log_softmax" in watch.operations
    assert not [name for name in watch.operations if "backward" in name or name == "mm"]


def test_never_holds_more_than_a_chunk_of_logits(logits_watch: type[LogitsWatch]) -> None:
    """A tensor of logits never has more rows than a chunk, and what lives at once does not grow with N."""
    chunk, peaks = 10, []
    for tokens in (40, 160):
        x, weight, bias, y = inputs(tokens=tokens)
        with logits_watch(VOCAB, WIDTH) as watch:
            linear_cross_entropy(
                x.requires_grad_(), weight.requires_grad_(), y, bias, softcap=9.0, chunk=chunk
            ).backward()
        assert watch.rows == chunk
        peaks.append(watch.peak)
    assert peaks[0] == peaks[1]
    assert peaks[0] <= 8 * chunk * VOCAB  # logits, tanh, log-softmax and their gradients


def test_the_watch_sees_the_plain_version_hold_all_logits(logits_watch: type[LogitsWatch]) -> None:
    x, weight, bias, y = inputs(tokens=40)
    with logits_watch(VOCAB, WIDTH) as watch:
        plain_cross_entropy(x.requires_grad_(), weight, y, bias).backward()
    assert watch.rows == 40


def test_default_chunk_fits_the_budget() -> None:
    for vocab in (50, 2048, 4000):
        assert chunk_tokens(vocab) * vocab <= module.CHUNK_ELEMENTS < (chunk_tokens(vocab) + 1) * vocab
    assert chunk_tokens(module.CHUNK_ELEMENTS) == 128, "never less than 128 tokens"


def test_bfloat16_autocast_is_close() -> None:
    # bfloat16 keeps 8 bits: x, W and the logits are off by 2^-9 each, and the logits are of size 10 or less:
    # a probability is off by 10 * 2^-9 = 2 %, and the gradients by that, their own rounding aside.
    given = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = graded(*given, chunk=6)
        plain = graded(*given, plain=True)
    exact = graded(*given, plain=True)
    assert all(value.dtype == torch.float32 for value in actual.values()), (
        "gradients come back as parameters are"
    )
    assert_close(actual, exact, 0.03)
    assert float(torch.sub(actual["loss"], plain["loss"]).abs()) < 1e-4, "the loss itself is float32 in both"


@pytest.mark.parametrize("chunk", [4, 7, 1000])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_z_loss_is_that_of_all_logits_at_once(chunk: int, softcap: float | None) -> None:
    """log Z of each counted target, squared, by autograd; value and every gradient."""
    x, weight, bias, targets = inputs()
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    z = F.linear(leaves[0], leaves[1], leaves[2])
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    counted = targets != -100
    nats = F.cross_entropy(z, targets)
    expected = nats + 0.3 * z[counted].exp().sum(-1).log().square().mean()
    expected.backward()
    again = [t.clone().requires_grad_() for t in (x, weight, bias)]
    loss = linear_cross_entropy(
        again[0], again[1], targets, again[2], softcap=softcap, z_weight=0.3, chunk=chunk
    )
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    assert loss > nats + 0.1
    for result, leaf in zip(again, leaves, strict=True):
        torch.testing.assert_close(result.grad, leaf.grad, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("frozen", [False, True], ids=["all learn", "weight frozen"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk", [4, 64])
def test_a_low_rank_delta_is_the_whole_matrix(chunk: int, softcap: float | None, frozen: bool) -> None:
    """W + U D by parts and whole: the loss and every gradient."""
    x, weight, bias, targets = inputs()
    generator = torch.Generator().manual_seed(4)
    up, down = (torch.randn(n, generator=generator, dtype=x.dtype) for n in ((VOCAB, 3), (3, WIDTH)))

    def graded_by(plain: bool) -> list[Tensor | None]:
        leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias, up, down)]
        leaves[1].requires_grad_(not frozen)
        a, w, b, u, d = leaves
        if plain:
            loss = plain_cross_entropy(a, w + u @ d, targets, b, softcap)
        else:
            loss = linear_cross_entropy(a, w, targets, b, low_rank=(u, d), softcap=softcap, chunk=chunk)
        (3 * loss).backward()
        return [loss.detach(), *(leaf.grad for leaf in leaves)]

    for ours, theirs in zip(graded_by(False), graded_by(True), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
