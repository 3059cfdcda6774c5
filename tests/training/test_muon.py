"""Muon against the plain formulas (float64), against torch.optim.Muon (bfloat16), and on its own."""

import io
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from raising import refused
from tests.oracles.muon import muon_step, newton_schulz
from topograd.errors import ConfigError
from topograd.training import muon as module
from topograd.training.muon import COEFFICIENTS, Muon, newton_schulz_dtype, orthogonalise

DEFAULTS: dict[str, Any] = {
    "lr": 0.02,
    "weight_decay": 0.1,
    "momentum": 0.95,
    "nesterov": True,
    "ns_coefficients": COEFFICIENTS,
    "eps": 1e-7,
    "ns_steps": 5,
    "adjust_lr_fn": "original",
}


@dataclass(frozen=True)
class Case:
    name: str
    shapes: tuple[tuple[int, int], ...]
    settings: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


CASES = [
    Case("one square", ((8, 8),)),
    Case("batch of squares", ((6, 6),) * 3),
    Case("wide, Gram form", ((4, 16),) * 2),
    Case("tall, Gram form", ((16, 4),) * 2),
    Case("barely wide, direct", ((6, 8), (8, 6))),
    Case("shapes interleaved", ((4, 12), (5, 5), (4, 12), (12, 4), (5, 5))),
    Case("rows and columns", ((1, 7), (7, 1), (1, 1))),
    Case("plain momentum", ((4, 4), (4, 16)), {"nesterov": False}),
    Case("no momentum, no decay", ((4, 4), (4, 16)), {"momentum": 0.0, "weight_decay": 0.0}),
    Case("rms of AdamW", ((4, 4), (16, 4), (12, 4)), {"adjust_lr_fn": "match_rms_adamw"}),
    Case("no Newton-Schulz", ((4, 8),), {"ns_steps": 0}),
    Case("one step", ((4, 8),), {"ns_steps": 1}),
    Case("more steps than a Gram run", ((4, 16), (16, 4)), {"ns_steps": 12}),
    Case("other coefficients", ((4, 16), (4, 4)), {"ns_coefficients": (1.875, -1.25, 0.375)}),
    Case("a too large for Gram runs", ((4, 16),), {"ns_coefficients": (600.0, -1.0, 0.5), "ns_steps": 1}),
    Case("gradient below eps", ((4, 16), (4, 4)), {"eps": 10.0}),
]


def matrices(
    shapes: tuple[tuple[int, int], ...], seed: int, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def run(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], seeds: range) -> None:
    """Steps with a new gradient for each seed."""
    shapes = tuple((p.shape[0], p.shape[1]) for p in params)
    for seed in seeds:
        for p, grad in zip(params, matrices(shapes, 1000 + seed, params[0].dtype), strict=True):
            p.grad = grad
        optimizer.step()


def start(shapes: tuple[tuple[int, int], ...], dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    return [nn.Parameter(value) for value in matrices(shapes, 7, dtype)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference_in_float64(case: Case) -> None:
    options = {**DEFAULTS, **case.settings}
    params = start(case.shapes)
    optimizer = Muon(params, **options)
    run(optimizer, params, range(4))
    expected = [(p, torch.zeros_like(p)) for p in matrices(case.shapes, 7)]
    for seed in range(4):
        grads = matrices(case.shapes, 1000 + seed)
        expected = [muon_step(p, g, B, **options) for (p, B), g in zip(expected, grads, strict=True)]
    for p, (value, momentum) in zip(params, expected, strict=True):
        torch.testing.assert_close(p.data, value, rtol=0, atol=1e-12)
        torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], momentum, rtol=0, atol=1e-14)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 3), st.integers(0, 8))
def test_any_shape_equals_the_reference(rows: int, cols: int, count: int, ns_steps: int) -> None:
    shapes = ((rows, cols),) * count
    params = start(shapes)
    options = {**DEFAULTS, "ns_steps": ns_steps}
    run(Muon(params, **options), params, range(1))
    for p, value, grad in zip(params, matrices(shapes, 7), matrices(shapes, 1000), strict=True):
        expected, _ = muon_step(value, grad, torch.zeros_like(value), **options)
        torch.testing.assert_close(p.data, expected, rtol=0, atol=1e-12)


def spectrum(rows: int, cols: int, values: Tensor) -> Tensor:
    """A matrix with the given singular values."""
    generator = torch.Generator().manual_seed(3)
    left = torch.linalg.qr(torch.randn(rows, rows, generator=generator, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(cols, rows, generator=generator, dtype=torch.float64))[0]
    return left * values @ right.T


@pytest.mark.parametrize("shape", [(16, 16), (16, 64), (64, 16), (12, 17)])
def test_singular_values_land_in_a_band_around_one(shape: tuple[int, int]) -> None:
    """The scalar map x → a x + b x³ + c x⁵, five times, takes [0.002, 1] into [0.68, 1.21]."""
    batch = torch.stack(matrices((shape,) * 3, 11))
    before = torch.linalg.svdvals(batch / torch.linalg.matrix_norm(batch)[:, None, None])
    assert before.min() > 0.002
    after = torch.linalg.svdvals(orthogonalise(batch, COEFFICIENTS, 5, 1e-7))
    assert after.min() > 0.68
    assert after.max() < 1.21
    a, b, c = COEFFICIENTS
    expected = before
    for _ in range(5):
        expected = a * expected + b * expected**3 + c * expected**5
    torch.testing.assert_close(after, expected.sort(descending=True).values, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ns_steps", [5, 6, 12, 20])
@pytest.mark.parametrize(
    "values",
    [torch.logspace(0, -8, 16), torch.eye(16)[0], torch.tensor([1.0] + [1e-3] * 15)],
    ids=["decaying", "rank one", "gap"],
)
def test_gram_form_in_float32_keeps_its_bound_on_hard_spectra(values: Tensor, ns_steps: int) -> None:
    """A run may make 2^18 of float32's rounding, 2^-24, in an eigenvalue of A: it is 1e-3 of O (measured).

    With many steps even the direct form lifts its rounding in the null space of U up to 1; then only the band
    can be asked for. Runs that did not end would give 1e18 here.
    """
    U = spectrum(16, 64, values.double())
    found = orthogonalise(U.float()[None], COEFFICIENTS, ns_steps, 1e-7)[0].double()
    assert torch.linalg.matrix_norm(found, 2) < 1.21
    if ns_steps <= 6:
        error = found - newton_schulz(U, COEFFICIENTS, ns_steps, 1e-7)
        assert torch.linalg.matrix_norm(error, 2) < 2e-3


def test_float32_stays_close_to_float64() -> None:
    """Well-conditioned gradients: 5 steps of a = 3.44 times float32's epsilon, some 1e-5."""
    for shape in ((16, 16), (16, 64), (64, 16)):
        (U,) = matrices((shape,), 5)
        found = orthogonalise(U.float()[None], COEFFICIENTS, 5, 1e-7)[0]
        torch.testing.assert_close(found.double(), newton_schulz(U, COEFFICIENTS, 5, 1e-7), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(16, 16), (16, 64), (64, 16)])
def test_bfloat16_takes_the_direct_step(shape: tuple[int, int]) -> None:
    """bfloat16 rounds at 2^-9 and five steps amplify it: a few percent. A Gram run would give 1e6 here."""
    wide = spectrum(16, max(shape), torch.tensor([1.0] + [0.01] * 15, dtype=torch.float64))
    U = wide if shape[0] == 16 else wide.T
    found = orthogonalise(U.bfloat16()[None], COEFFICIENTS, 5, 1e-7)[0].double()
    expected = newton_schulz(U, COEFFICIENTS, 5, 1e-7)
    assert (found - expected).norm() < 0.1 * expected.norm()


TORCH_CASES = [
    {},
    {"nesterov": False},
    {"adjust_lr_fn": "match_rms_adamw"},
    {"momentum": 0.8, "weight_decay": 0.0},
]
TORCH_SHAPES = ((16, 16), (16, 64), (64, 16), (16, 64))


@pytest.mark.parametrize("options", TORCH_CASES, ids=str)
def test_follows_torch(options: dict[str, Any]) -> None:
    """torch runs Newton-Schulz in bfloat16: O differs by a few percent (2^-9, amplified in 5 steps)."""
    ours, theirs = start(TORCH_SHAPES, torch.float32), start(TORCH_SHAPES, torch.float32)
    first = [p.detach().clone() for p in ours]
    optimizer, peer = (
        Muon(ours, **{**DEFAULTS, **options}),
        torch.optim.Muon(theirs, **{**DEFAULTS, **options}),
    )
    run(optimizer, ours, range(3))
    run(peer, theirs, range(3))
    for p, q, origin in zip(ours, theirs, first, strict=True):
        assert torch.equal(optimizer.state[p]["momentum_buffer"], peer.state[q]["momentum_buffer"])
        assert (p - q).norm() < 0.05 * (q - origin).norm()


@pytest.mark.parametrize("options", TORCH_CASES, ids=str)
def test_follows_torch_closely_without_newton_schulz(options: dict[str, Any]) -> None:
    """With ns_steps = 0, O is U/‖U‖ and bfloat16 rounds three times (U, the norm, the ratio): below 2^-7."""
    ours, theirs = start(TORCH_SHAPES, torch.float32), start(TORCH_SHAPES, torch.float32)
    first = [p.detach().clone() for p in ours]
    chosen = {**DEFAULTS, **options, "ns_steps": 0, "weight_decay": 0.0}
    run(Muon(ours, **chosen), ours, range(1))
    run(torch.optim.Muon(theirs, **chosen), theirs, range(1))
    for p, q, origin in zip(ours, theirs, first, strict=True):
        assert (p != origin).all()
        rounding = 4 * torch.finfo(torch.float32).eps * origin.abs().max()  # of θ itself
        assert ((p - q).abs() <= 2**-7 * (q - origin).abs() + rounding).all()


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(4, 4), (4, 16), (16, 4)])
def test_equals_torch_bit_for_bit_where_bfloat16_is_exact(shape: tuple[int, int], adjust_lr_fn: str) -> None:
    """A gradient with a single one is its own U/‖U‖ in any dtype: decay and learning rate stand alone."""
    options = {**DEFAULTS, "adjust_lr_fn": adjust_lr_fn, "ns_steps": 0, "momentum": 0.0}
    ours, theirs = start((shape,), torch.float32), start((shape,), torch.float32)
    optimizer, peer = Muon(ours, **options), torch.optim.Muon(theirs, **options)
    for place in range(3):
        for p in (*ours, *theirs):
            p.grad = torch.zeros(shape)
            p.grad[place, place] = 1.0
        optimizer.step()
        peer.step()
        assert torch.equal(ours[0], theirs[0])


def test_a_zero_gradient_only_decays() -> None:
    params = start(((4, 4), (4, 16)), torch.float32)
    expected = [p.detach() * (1 - 0.02 * 0.1) for p in params]
    for p in params:
        p.grad = torch.zeros_like(p)
    Muon(params, **DEFAULTS).step()
    for p, value in zip(params, expected, strict=True):
        assert torch.equal(p, value)


def test_small_batches_give_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = ((4, 6),) * 5
    whole, pieces = start(shapes), start(shapes)
    run(Muon(whole), whole, range(2))
    monkeypatch.setattr(module, "BATCH_ELEMENTS", 50)  # two matrices at a time
    run(Muon(pieces), pieces, range(2))
    for p, q in zip(whole, pieces, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_saved_state_continues_bit_for_bit(dtype: torch.dtype) -> None:
    shapes = ((6, 6), (4, 16), (16, 4), (6, 6))
    params = start(shapes, dtype)
    optimizer = Muon(params, lr=0.05)
    run(optimizer, params, range(3))
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    resumed = [nn.Parameter(p.detach().clone()) for p in params]
    run(optimizer, params, range(3, 6))

    second = Muon(resumed, lr=0.5, momentum=0.1)
    saved.seek(0)
    second.load_state_dict(torch.load(saved, weights_only=True))
    assert second.param_groups[0]["lr"] == 0.05
    run(second, resumed, range(3, 6))
    for p, q in zip(params, resumed, strict=True):
        assert p.dtype == optimizer.state[p]["momentum_buffer"].dtype == dtype
        assert torch.equal(p, q)
        assert torch.equal(optimizer.state[p]["momentum_buffer"], second.state[q]["momentum_buffer"])


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    params = start(((4, 4), (4, 4)))
    before = params[1].detach().clone()
    params[0].grad = torch.ones(4, 4, dtype=torch.float64)
    optimizer = Muon(params)
    optimizer.step()
    assert torch.equal(params[1], before)
    assert params[1] not in optimizer.state
    assert not torch.equal(params[0], start(((4, 4),))[0])


def test_the_closure_is_run_with_gradients_and_its_loss_returned() -> None:
    (p,) = start(((4, 8),))
    optimizer = Muon([p], lr=0.1, weight_decay=0.0)

    def closure() -> float:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss.item()

    losses = [optimizer.step(closure) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] == start(((4, 8),))[0].square().sum().item()
    assert optimizer.step() is None


def test_groups_have_their_own_settings() -> None:
    params = start(((12, 4), (4, 4)))
    groups: list[dict[str, Any]] = [{"params": params[:1], "lr": 0.1}, {"params": params[1:]}]
    optimizer = Muon(groups, lr=0.02)
    run(optimizer, params, range(1))
    values, grads = matrices(((12, 4), (4, 4)), 7), matrices(((12, 4), (4, 4)), 1000)
    for i, options in enumerate(({"lr": 0.1}, {"lr": 0.02})):
        zeros = torch.zeros_like(values[i])
        expected, _ = muon_step(values[i], grads[i], zeros, **{**DEFAULTS, **options})
        torch.testing.assert_close(params[i].data, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("amx", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_dtype_on_a_cpu_follows_its_matrix_unit(
    amx: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert newton_schulz_dtype.__wrapped__(torch.device("cpu")) == dtype
    assert newton_schulz_dtype.__wrapped__(torch.device("meta")) == torch.float32


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"lr": math.nan},
        {"lr": "fast"},
        {"weight_decay": -0.1},
        {"momentum": 1.0},
        {"momentum": -0.1},
        {"nesterov": 1},
        {"eps": 0.0},
        {"ns_steps": -1},
        {"ns_steps": 100},
        {"ns_steps": 2.5},
        {"ns_coefficients": (1.0, 2.0)},
        {"ns_coefficients": (1.0, 2.0, math.inf)},
        {"adjust_lr_fn": "none"},
    ],
    ids=str,
)
def test_bad_settings_are_one_line(options: dict[str, Any]) -> None:
    ((setting, given),) = options.items()
    with refused(ConfigError, setting=setting) as error:
        Muon(start(((4, 4),)), **options)
    assert error.value.given is given


@pytest.mark.parametrize(
    "parameter",
    [torch.zeros(4), torch.zeros(2, 2, 2), torch.zeros(2, 2, dtype=torch.complex64), torch.zeros(0, 3)],
    ids=lambda p: f"{tuple(p.shape)} {p.dtype}",
)
def test_what_is_not_a_real_matrix_is_refused(parameter: Tensor) -> None:
    good = start(((4, 4),))
    optimizer = Muon(good)
    with refused(ConfigError, setting="params") as error:
        optimizer.add_param_group({"params": [nn.Parameter(parameter)]})
    assert "\n" not in str(error.value)
    assert len(optimizer.param_groups) == 1


def test_a_sparse_gradient_is_refused_before_anything_moves() -> None:
    params = start(((4, 4), (4, 4)))
    optimizer = Muon([{"params": params[:1]}, {"params": params[1:]}])
    params[0].grad = torch.ones(4, 4, dtype=torch.float64)
    params[1].grad = torch.ones(4, 4, dtype=torch.float64).to_sparse()
    with pytest.raises(ConfigError, match="sparse"):
        optimizer.step()
    assert torch.equal(params[0], start(((4, 4),))[0])
    assert not optimizer.state


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_it_follows_the_cpu() -> None:
    """The GPU may run Newton-Schulz in bfloat16: a few percent, as against torch above."""
    shapes = ((16, 16), (16, 64), (64, 16))
    first, here = start(shapes, torch.float32), start(shapes, torch.float32)
    there = [nn.Parameter(p.detach().cuda()) for p in here]
    grads = matrices(shapes, 1000, torch.float32)
    for p, q, grad in zip(here, there, grads, strict=True):
        p.grad, q.grad = grad, grad.cuda()
    Muon(here, **DEFAULTS).step()
    Muon(there, **DEFAULTS).step()
    for p, q, origin in zip(here, there, first, strict=True):
        assert (p - q.cpu()).norm() < 0.05 * (p - origin).norm()
