"""DDCAdam against the loop of the formulas, against AdamW bit by bit, and through a save."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from papers.dead_directions.equivariance import Case, adam_w, cases, ddc, residual_and_drift
from raising import refused
from tests.oracles.ddc_adam import Adam, Joint, rescaling_step, translation_step
from topograd.errors import OptimError
from topograd.optim.ddc_adam import DDCAdam
from topograd.optim.gauges import CEShiftBias, CEShiftRowShift, ChainedReLURescale, LNScale, ReLURescale


def mlp(*widths: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i in range(len(widths) - 1):
        layers += [nn.Linear(widths[i], widths[i + 1], dtype=dtype), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def backward(model: nn.Module, seed: int) -> None:
    model.zero_grad()
    generator = torch.Generator().manual_seed(seed)
    weight = next(model.parameters())
    x = torch.randn(16, weight.shape[-1], generator=generator, dtype=torch.float64).to(weight.dtype)
    logits = model(x)
    F.cross_entropy(logits, torch.randint(logits.shape[1], (16,), generator=generator)).backward()


def flat(*parameters: Tensor) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters]).clone()


def grads(*parameters: Tensor) -> Tensor:
    return torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None]).clone()


@pytest.mark.parametrize("vertical", ["frozen", "sgd", "adam"])
@pytest.mark.parametrize("reproject", [True, False])
@pytest.mark.parametrize("name", ["0.weight", "0.bias"])
def test_translations_follow_the_formulas(vertical: Any, reproject: bool, name: str) -> None:
    model = mlp(3, 4)
    gauge = CEShiftRowShift(name) if name == "0.weight" else CEShiftBias(name)
    optimizer = DDCAdam(model.named_parameters(), [gauge], 0.1, vertical=vertical, reproject=reproject)
    parameter, adam = model.get_parameter(name), Adam(0.1)
    for seed in range(4):
        backward(model, seed)
        g = grads(parameter).view_as(parameter) + 0.3  # so that the vertical part is not rounding alone
        parameter.grad = g.clone()
        expected = translation_step(parameter.detach().clone(), g, adam, vertical, reproject)
        optimizer.step()
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("options", [{}, {"retract": True}, {"rms": True}, {"retract": True, "rms": True}])
@pytest.mark.parametrize("vertical", ["frozen", "sgd"])
def test_chains_follow_the_formulas(options: dict[str, Any], vertical: Any) -> None:
    """Three layers of degrees 2 and 1: a bias in block 1, one that follows, decay, and no symmetry needed."""
    model = mlp(3, 4, 5, 2)
    gauge = ChainedReLURescale(["0.weight", "2.weight", "4.weight"], ["0.bias", "2.bias"], [2, 1])
    optimizer = DDCAdam(
        model.named_parameters(), [gauge], 0.05, weight_decay=0.3, vertical=vertical, **options
    )
    p = dict(model.named_parameters())
    blocks = [(p["0.weight"], p["0.bias"]), (p["2.weight"],), (p["4.weight"],)]
    adam = Adam(0.05)
    settings: dict[str, Any] = {"retract": False, "rms": False, **options}
    for seed in range(4):
        backward(model, seed)
        vectors, gradients = [flat(*block) for block in blocks], [grads(*block) for block in blocks]
        follower = ([flat(p["2.bias"])], [grads(p["2.bias"])], [(2.0, 1.0, 0.0)])
        joint = Joint(vectors, gradients, *follower)
        moved, following = rescaling_step(joint, (2, 1, 1), adam, vertical=vertical, decay=0.3, **settings)
        optimizer.step()
        for block, expected in zip(blocks, moved, strict=True):
            torch.testing.assert_close(flat(*block), expected, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(flat(p["2.bias"]), following[0], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("rms", [False, True])
def test_channels_are_one_pair_each(rms: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3)).double()
    nn.init.normal_(model.get_parameter("0.bias"))
    gauge = LNScale("0.weight", "1.weight", bias="0.bias")
    optimizer = DDCAdam(model.named_parameters(), [gauge], 0.05, weight_decay=0.1, rms=rms)
    gain, bias, reader = (model.get_parameter(name) for name in ("0.weight", "0.bias", "1.weight"))
    adams = [Adam(0.05) for _ in range(4)]
    for seed in range(3):
        backward(model, seed)
        channels = [
            Joint(
                [flat(gain[i], bias[i]), flat(reader[:, i])],
                [torch.stack([grads(gain)[i], grads(bias)[i]]), grads(reader).view(3, 4)[:, i]],
            )
            for i in range(4)
        ]
        optimizer.step()
        for i, (joint, adam) in enumerate(zip(channels, adams, strict=True)):
            (one, two), _ = rescaling_step(
                joint, (1, 1), adam, vertical="frozen", decay=0.1, retract=False, rms=rms
            )
            torch.testing.assert_close(flat(gain[i], bias[i]), one, rtol=1e-11, atol=1e-13)
            torch.testing.assert_close(flat(reader[:, i]), two, rtol=1e-11, atol=1e-13)


def test_gauges_batched_together_step_as_they_do_alone() -> None:
    """Pairs with and without bias, of unequal sizes, in one optimizer or in one each."""
    shapes = {"a": (4, 3), "b": (2, 4), "c": (6, 2), "d": (3, 6), "x": (4,)}
    gauges = [ReLURescale("a", "b", bias="x"), ReLURescale("c", "d")]
    generator = torch.Generator().manual_seed(0)

    def draw() -> dict[str, Tensor]:
        return {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}

    start, rounds = draw(), [draw() for _ in range(3)]
    ends = []
    for parts in ([gauges], [gauges[:1], gauges[1:]]):
        named = {name: nn.Parameter(tensor.clone()) for name, tensor in start.items()}
        optimizers = [
            DDCAdam([(n, named[n]) for gauge in part for n in gauge.names], part, 0.1) for part in parts
        ]
        for drawn in rounds:
            for name, parameter in named.items():
                parameter.grad = drawn[name].clone()
            for optimizer in optimizers:
                optimizer.step()
        ends.append(named)
    for name in shapes:
        torch.testing.assert_close(ends[0][name], ends[1][name], rtol=1e-13, atol=0)


@pytest.mark.parametrize("way", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uncovered_parameters_get_adamw_to_the_bit(way: dict[str, Any], dtype: torch.dtype) -> None:
    model = mlp(3, 4, 5, 2, dtype=dtype)
    twin = copy.deepcopy(model)
    gauge = CEShiftBias("4.bias")
    groups: list[dict[str, Any]] = [
        {"params": [("4.bias", model.get_parameter("4.bias"))]},
        {"params": [item for item in model.named_parameters() if item[0] != "4.bias"], "weight_decay": 0.1},
    ]
    ours = DDCAdam(groups, [gauge], 0.01, **way)
    theirs = torch.optim.AdamW(
        [p for n, p in twin.named_parameters() if n != "4.bias"], 0.01, weight_decay=0.1, **way
    )
    for seed in range(5):
        backward(model, seed)
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            q.grad = None if name == "4.bias" else grads(p).view_as(p)
        ours.step()
        theirs.step()
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert name == "4.bias" or torch.equal(p, q)


@pytest.mark.parametrize("vertical", ["frozen", "adam"])
def test_a_saved_state_goes_on_to_the_bit(vertical: Any) -> None:
    gauges = [ReLURescale("0.weight", "2.weight", bias="0.bias"), CEShiftBias("2.bias")]

    def build(model: nn.Module) -> DDCAdam:
        return DDCAdam(model.named_parameters(), gauges, 0.01, vertical=vertical)

    model = mlp(3, 4, 2, dtype=torch.float32)
    optimizer = build(model)
    for seed in range(3):
        backward(model, seed)
        optimizer.step()
    twin, file = copy.deepcopy(model), io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = build(twin)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    pickled = copy.deepcopy((model, optimizer))
    for network, stepper in ((model, optimizer), (twin, resumed), pickled):
        for seed in range(3, 6):
            backward(network, seed)
            stepper.step()
    for one, *others in zip(model.parameters(), twin.parameters(), pickled[0].parameters(), strict=True):
        assert all(torch.equal(one, other) for other in others)


def test_a_state_of_other_gauges_is_refused() -> None:
    model = mlp(3, 4, 2)
    saved = DDCAdam(model.named_parameters(), [CEShiftBias("2.bias")]).state_dict()
    with refused(OptimError, setting="gauges"):
        DDCAdam(model.named_parameters(), [CEShiftRowShift("2.weight")]).load_state_dict(saved)


def test_schedulers_work() -> None:
    model = mlp(3, 2)
    optimizer = DDCAdam(model.named_parameters(), [CEShiftBias("0.bias")], 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    moved = []
    for _ in range(2):
        before = flat(*model.parameters())
        backward(model, 0)
        optimizer.step()
        schedule.step()
        moved.append((flat(*model.parameters()) - before).norm().item())
    assert moved[0] > 0.1
    assert moved[1] == 0.0


def test_without_reprojection_a_translation_is_adam_and_drifts_with_it() -> None:
    """Our correction: the paper's literal step is plain Adam, because the vertical gradient is zero."""
    (case,) = [case for case in cases() if case.name == "CEShiftRowShift"]
    drifts = [
        residual_and_drift(case, make, torch.float64, 50, 0)[1]
        for make in (ddc(0.01), ddc(0.01, reproject=False), adam_w(0.01))
    ]
    assert drifts[0] < 1e-14
    assert drifts[1] == pytest.approx(drifts[2], rel=1e-6)
    assert drifts[2] > 0.05


@pytest.mark.parametrize("case", [case for case in cases() if "Scale" in case.name or "scale" in case.name])
def test_retraction_stops_the_drift_of_log_norms(case: Case) -> None:
    plain, kept = (
        residual_and_drift(case, ddc(0.01, **options), torch.float64, 50, 0)
        for options in ({}, {"retract": True})
    )
    assert 1e-5 < plain[1] < 1e-2  # second order in the step
    assert kept[1] < 1e-13
    assert kept[0] < 1e-13


def test_vertical_adam_makes_steps_of_rounding() -> None:
    """In float32 it leaves the orbit, where frozen does not."""
    (case,) = [case for case in cases() if case.name == "ReLURescale"]
    frozen, adam = (
        residual_and_drift(case, ddc(0.01, vertical=vertical), torch.float32, 40, 0)[0]
        for vertical in ("frozen", "adam")
    )
    assert frozen < 1e-5
    assert adam > 1e-3


@pytest.mark.parametrize("options", [{"weight_decay": 0.1}, {"rms": True}])
def test_decay_and_rms_commute_with_rescalings(options: dict[str, Any]) -> None:
    for case in cases()[4:]:
        assert residual_and_drift(case, ddc(0.01, **options), torch.float64, 20, 0)[0] < 1e-13


def test_the_rate_at_a_dead_direction_is_readable_along_the_trajectory() -> None:
    """Two linear layers, one dead entry t in each: its curvature t² (σ² + t⁴) has slope 2 in t as t → 0."""
    target = torch.eye(4, dtype=torch.float64)
    target[-1, -1] = 0
    start = target.clone()
    start[-1, -1] = 0.3
    a, b = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer = DDCAdam([("a", a), ("b", b)], [ReLURescale("a", "b")], lr=3e-3)
    readings = []
    for _ in range(600):
        optimizer.zero_grad()
        product = b @ a
        (0.5 * (product - target).square().sum()).backward()
        t, out, left = a[-1, -1].item(), b[-1, -1].item(), product[-1, -1].item()
        readings.append([abs(t), out**2 * (0.1**2 + left**2)])
        optimizer.step()
    logs = torch.tensor(readings[400:], dtype=torch.float64).log()
    x, y = (logs - logs.mean(0)).unbind(1)
    assert readings[-1][0] < 0.05
    assert (x @ y / (x @ x)).item() == pytest.approx(2.0, abs=0.01)
    assert torch.equal(a.detach(), torch.diag(a.detach().diagonal()))  # aligned throughout
