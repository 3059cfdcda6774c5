"""Alignment: exact where the new base is the old one in other coordinates, and what cannot be carried."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from raising import refused
from topograd.convert.importing import import_model
from topograd.errors import ConfigError
from topograd.exec.forward import Predictor
from topograd.nn.gpt import GPT
from topograd.nn.transformer.parts import RMSNorm
from topograd.runs.adapter import Adapter, BaseIdentity, update_adapter
from topograd.runs.session import Held, LoadedTextRun, open_session
from topograd.specialists.align import alignment, carry, compared, text_to_fit, versions
from topograd.specialists.attach import attach, new_specialist
from topograd.specialists.composition import composed
from topograd.specialists.records import rows_of


def learned(base: LoadedTextRun, folder: Path, rank: int | None = 3) -> Adapter:
    adapter = new_specialist(folder, base, layers=2, head_rank=rank)
    generator = torch.Generator().manual_seed(1)
    noisy = {n: t + 0.3 * torch.randn(t.shape, generator=generator) for n, t in adapter.tensors.items()}
    return update_adapter(adapter, noisy, adapter.settings)


def rotated(base: LoadedTextRun) -> tuple[LoadedTextRun, LoadedTextRun]:
    """A base without gains, and the same function in other coordinates: the stream turned. In float64."""
    stack = copy.deepcopy(base.stack).double()
    q, _ = torch.linalg.qr(
        torch.randn(32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    )
    with torch.no_grad():
        for name, parameter in stack.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
        plain = copy.deepcopy(stack)
        for name, parameter in stack.named_parameters():
            last = name.split(".")[-2]
            if last in ("embedding", "query", "key", "value", "up", "gate") and parameter.dim() == 2:
                parameter.copy_(parameter @ q)
            elif last in ("output", "down"):
                parameter.copy_(q.T @ parameter)
    return replace(base, read_stack=Held(plain)), replace(base, read_stack=Held(stack), weights="rotated")


def biased(base: LoadedTextRun) -> LoadedTextRun:
    """A base of the same shape whose maps have biases."""
    torch.manual_seed(4)
    config = base.stack.config.changed(qkv_bias=True, output_bias=True, mlp_bias=True)  # type: ignore[union-attr, operator]
    stack = config.build(base.plan.topology)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape))
    return replace(base, read_stack=Held(stack.eval()), weights="biased")


def trained_on(base: LoadedTextRun) -> LoadedTextRun:
    """Another version of a base: its weights have moved."""
    stack = copy.deepcopy(base.stack)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return replace(base, read_stack=Held(stack), weights="trained on")


@pytest.mark.parametrize("biases", [False, True], ids=["", "biases"])
@pytest.mark.parametrize("rank", [3, None], ids=["rank", "whole"])
@torch.no_grad()
def test_a_turned_base_gets_the_same_specialist(
    imported: LoadedTextRun, tmp_path: Path, rank: int | None, biases: bool
) -> None:
    old, new = rotated(biased(imported) if biases else imported)
    tokens = torch.randint(200, (2, 12), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(Predictor(new.stack, new.plan)(tokens), Predictor(old.stack, old.plan)(tokens))
    adapter = learned(old, tmp_path / "s", rank)
    carried = carry(adapter, old, new, tmp_path / "t")
    logits = []
    for base, each in ((old, adapter), (new, carried)):
        attached = attach(base, {"s": each})
        logits.append(Predictor(attached.stack, composed(attached, {"s": 1.0}))(tokens))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-3)  # tensors are kept in float64
    same = attach(new, {"s": replace(adapter, base=carried.base)})
    wrong = Predictor(same.stack, composed(same, {"s": 1.0}))(tokens)
    assert (wrong - logits[0]).abs().max() > 100 * (logits[1] - logits[0]).abs().max()
    assert versions(old, new)["kind"] == "major"
    assert versions(old, new)["residual"] < 1e-6


@pytest.mark.parametrize("architecture", ["mamba2", "mamba3", "hybrid"])
@torch.no_grad()
def test_other_mixers_turn_with_the_stream(gpt: LoadedTextRun, tmp_path: Path, architecture: str) -> None:
    """A specialist whose base's head is turned computes the same from turned states."""
    torch.manual_seed(0)
    assert isinstance(gpt.stack, GPT)
    config = replace(gpt.stack.config, architecture=architecture, ssm_state=4, x0_blend=False)
    old = replace(gpt, read_stack=Held(GPT(config).double().eval()))
    q, _ = torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64))
    turned = copy.deepcopy(old.stack)
    turned.get_parameter("head.weight").copy_(old.stack.get_parameter("head.weight") @ q)
    new = replace(old, read_stack=Held(turned), weights="turned")
    adapter = learned(old, tmp_path / "s")
    carried = carry(adapter, old, new, tmp_path / "t")
    h, ids = torch.randn(1, 7, 16, dtype=torch.float64), torch.randint(200, (1, 7))
    logits = []
    for base, each, states in ((old, adapter, h), (new, carried, h @ q)):
        attached = attach(base, {"s": each})
        ctx = attached.stack.layer_context(states, ids)
        for layer in attached.part("s").layers:
            states = layer(states, ctx)
        logits.append(attached.stack.readout(states, attached.stages["s"]))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_norms_that_do_not_turn_are_refused(
    family: str, source: Callable[[str], tuple[Path, Any]], imported: LoadedTextRun, tmp_path: Path
) -> None:
    if family == "gpt2":
        import_model(source("gpt2")[0], tmp_path / "run", partition="2,2")
        base = open_session(tmp_path / "run")
    else:
        stack = copy.deepcopy(imported.stack)
        for layer in stack.layers:
            layer.attention_post_norm = layer.mlp_post_norm = RMSNorm(32, 1e-6, around_one=True)
        base = replace(imported, read_stack=Held(stack))
    adapter = new_specialist(tmp_path / "s", imported)
    adapter = replace(adapter, base=BaseIdentity.of(base))
    with refused(ConfigError, setting="folder"):
        carry(adapter, base, replace(base, weights="another"), tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_the_maps_are_least_squares(gpt: LoadedTextRun) -> None:
    other = trained_on(gpt)
    a, b = alignment(gpt, other)
    w1, w2 = (s.stack.get_parameter("head.weight").double() for s in (gpt, other))
    for left, right, solved in ((w2, w1, a), (w1, w2, b)):
        residual = left @ solved - right
        torch.testing.assert_close(left.T @ residual, torch.zeros_like(solved), rtol=0, atol=1e-8)
    found = versions(gpt, gpt)
    assert found["kind"] == "minor"
    assert found["residual_of_nothing"] == 0


@torch.no_grad()
def nats(base: LoadedTextRun, adapter: Adapter | None, rows: tuple[torch.Tensor, torch.Tensor]) -> float:
    """The mean loss of the targets, by the formula."""
    attached = attach(base, {} if adapter is None else {"s": adapter})
    logits = Predictor(attached.stack, composed(attached, {} if adapter is None else {"s": 1.0}))(rows[0])
    return float(F.cross_entropy(logits.flatten(0, 1).double(), rows[1].flatten(), ignore_index=-100))


def test_it_is_measured_beside_nothing(gpt: LoadedTextRun, chats: Path, tmp_path: Path) -> None:
    adapter, other = learned(gpt, tmp_path / "s"), trained_on(gpt)
    carried = carry(adapter, gpt, other, tmp_path / "t")
    found = compared(chats, adapter, carried, gpt, other, context=16)
    rows = rows_of(chats, attach(other, {"s": carried}), 16)
    expected = {
        "old base with it": nats(gpt, adapter, rows),
        "new base": nats(other, None, rows),
        "nothing done": nats(other, replace(adapter, base=carried.base), rows),
        "aligned": nats(other, carried, rows),
    }
    assert found == pytest.approx(expected, rel=1e-5)
    assert list(found) == list(expected)
    assert len({round(value, 3) for value in found.values()}) == 4
    assert carried.settings["carried_from"]["weights"] == gpt.weights


def test_on_a_turned_base_it_costs_nothing_and_without_it_much(
    imported: LoadedTextRun, chats: Path, tmp_path: Path
) -> None:
    old, new = (replace(base, read_stack=Held(base.stack.float())) for base in rotated(imported))
    adapter = learned(old, tmp_path / "s")
    found = compared(chats, adapter, carry(adapter, old, new, tmp_path / "t"), old, new, context=32)
    lost = {name: abs(found[name] - found["old base with it"]) for name in ("aligned", "nothing done")}
    assert lost["aligned"] < 1e-3
    assert lost["nothing done"] > 1000 * lost["aligned"]


def test_what_cannot_be_carried_is_refused(
    make_session: Callable[..., LoadedTextRun], gpt: LoadedTextRun, imported: LoadedTextRun, tmp_path: Path
) -> None:
    adapter = learned(gpt, tmp_path / "s")
    with refused(ConfigError, setting="new"):
        carry(adapter, gpt, imported, tmp_path / "t")
    with refused(ConfigError, setting="new"):
        carry(adapter, gpt, make_session(2), tmp_path / "t")
    assert not (tmp_path / "t").exists()


def gpt_base(like: LoadedTextRun, width: int, seed: int, **changes: Any) -> LoadedTextRun:
    """A base of another width in float64 whose heads have 8 numbers."""
    torch.manual_seed(seed)
    assert isinstance(like.stack, GPT)
    config = replace(like.stack.config, width=width, **({"heads": width // 8} | changes))
    stack = GPT(config).double().eval()
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return replace(like, read_stack=Held(stack), weights=f"{width}-{seed}")


@torch.no_grad()
def widened(base: LoadedTextRun, width: int) -> LoadedTextRun:
    """The same function with a stream of more numbers: the old one turned into a subspace of it.

    The first heads and units are the old ones; the others are random and write nothing. The embedding is
    normed, so a wider stream is longer by √(d₂ / d₁): what writes follows, and what reads makes up for it.
    """
    old = base.stack
    assert isinstance(old, GPT)
    new = gpt_base(base, width, 7)
    d = old.width
    random = torch.randn(width, width, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    q = torch.linalg.qr(random).Q[:d]
    smaller = (d / width) ** 0.5
    target = dict(new.stack.named_parameters())
    for name, parameter in old.named_parameters():
        last = name.split(".")[-2] if "." in name else name
        value = parameter
        if last in ("query", "key", "value", "up", "head"):
            value = parameter @ q * smaller
        elif last in ("output", "down"):
            value = q.T @ parameter / smaller
            target[name].zero_()
        elif last in ("embedding", "previous"):
            value = parameter @ q
        target[name][tuple(map(slice, value.shape))] = value
    return new


@pytest.mark.parametrize("by_text", [False, True], ids=["heads", "text"])
@pytest.mark.parametrize("blend", [False, True], ids=["plain", "blends x0"])
@pytest.mark.parametrize("rank", [3, None], ids=["rank", "whole"])
@torch.no_grad()
def test_a_widened_base_gets_the_same_specialist(
    gpt: LoadedTextRun, tmp_path: Path, rank: int | None, blend: bool, by_text: bool
) -> None:
    old = gpt_base(gpt, 16, 1, x0_blend=blend)
    new = widened(old, 40)
    tokens = torch.randint(200, (4, 16), generator=torch.Generator().manual_seed(0))
    said = [Predictor(base.stack, base.plan)(tokens) for base in (old, new)]
    torch.testing.assert_close(said[0], said[1])
    adapter = learned(old, tmp_path / "s", rank)
    carried = carry(adapter, old, new, tmp_path / "t", tokens if by_text else None)
    logits = []
    for base, each in ((old, adapter), (new, carried)):
        attached = attach(base, {"s": each})
        logits.append(Predictor(attached.stack, composed(attached, {"s": 1.0}))(tokens))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-3)  # tensors are kept in float64
    assert (logits[0] - said[0]).abs().max() > 1


def test_a_wider_base_has_no_nothing_done(gpt: LoadedTextRun, chats: Path, tmp_path: Path) -> None:
    old, new = (
        replace(base, read_stack=Held(copy.deepcopy(base.stack).float()))
        for narrow in [gpt_base(gpt, 16, 1)]
        for base in (narrow, widened(narrow, 24))
    )
    adapter = learned(old, tmp_path / "s")
    carried = carry(adapter, old, new, tmp_path / "t")
    found = compared(chats, adapter, carried, old, new, context=16)
    assert list(found) == ["old base with it", "new base", "aligned"]
    assert found["aligned"] == pytest.approx(found["old base with it"], abs=1e-3)
    assert abs(found["aligned"] - found["new base"]) > 0.01


def test_short_text_is_not_fitted_on(gpt: LoadedTextRun, chats: Path, tmp_path: Path) -> None:
    assert text_to_fit(chats, gpt, gpt, 16) is not None
    (tmp_path / "few.txt").write_text("a few words and not many more of them\n" * 10)
    assert text_to_fit(tmp_path / "few.txt", gpt, gpt_base(gpt, 64, 1), 16) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"heads": 2},
        {"kv_heads": 1},
        {"mlp_ratio": 0.5},
        {"width": 8},
        {"architecture": "mamba2"},
        {"layers": 2},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_base_without_room_is_refused(gpt: LoadedTextRun, tmp_path: Path, changes: dict[str, Any]) -> None:
    old = gpt_base(gpt, 16, 1)
    new = gpt_base(gpt, **({"width": 32, "seed": 2} | changes))
    adapter = learned(old, tmp_path / "s")
    with refused(ConfigError, setting="new"):
        carry(adapter, old, new, tmp_path / "t")
    assert not (tmp_path / "t").exists()
