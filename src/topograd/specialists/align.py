"""Transfer of a specialist to a new version of its base, by aligning their heads.

"Product of Experts" §10.4: vocabulary space is the frame that two versions share. With W₁, W₂ (vocab, width)
the heads (behind the gains of their norms), the maps that say the same thing in the other's space are least
squares over the whole vocabulary, in closed form:

    A = argmin ‖W₁ - W₂ A‖ = (W₂ᵀ W₂)⁻¹ W₂ᵀ W₁         from v1's space to v2's, (d₂, d₁)
    B = argmin ‖W₂ - W₁ B‖ = (W₁ᵀ W₁)⁻¹ W₁ᵀ W₂         from v2's space to v1's, (d₁, d₂)

A specialist reads its stream by matrices M (queries, keys, values, up, gate; the head's V) and writes into it
by matrices O (attention's output, the MLP's down). Carried over they are M B and A O: each layer then
computes in v2's coordinates what it computed in v1's, up to the norm, which commutes with B only where B is
orthogonal up to a factor. So it is the exact map for a rotation of the base, a good start otherwise, and a
few steps of training mend the rest. Gains of the specialist's own norms go into the matrices behind them.

Minor versions (trained on, same shape) need little: A and B are near the identity. Major ones (trained anew)
are what this is for. A whole head is carried as W_s B. `versions` tells minor from major, by the residual of
the heads, W + W_K where the stage that the specialist reads has one of its own.

Limits: bases whose layers have the same shape and whose tokenizers are the same. Layers whose norm takes the
mean off or has a gain behind what is written (LayerNorm of GPT-2; the norms behind each part of Gemma 2 and
3) do not turn with the stream, and are refused.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from topograd.errors import ConfigError
from topograd.nn.heads import FullDelta, LowRankDelta
from topograd.nn.stack import Stack
from topograd.nn.transformer.parts import TransposedLinear
from topograd.runs.adapter import Adapter, BaseIdentity, create_adapter
from topograd.runs.session import LoadedTextRun
from topograd.specialists.attach import (
    KIND,
    Attached,
    Shape,
    attach,
    card,
    new_specialist,
    open_specialist,
)
from topograd.specialists.composition import Weights
from topograd.specialists.finetune import FineTuning
from topograd.specialists.interference import token_losses
from topograd.specialists.records import rows_of
from topograd.specialists.settings import FineTune

READS = ("query", "key", "value", "qkv", "up", "gate", "in_proj")
WRITES = ("output", "down", "out_proj")


def head_matrix(base: LoadedTextRun) -> Tensor:
    """The head that a specialist starts from behind the gain of the last norm, in float64: (vocab, width)."""
    head = base.stack.shared_head
    assert head is not None, "a specialist's base has one"
    stage = base.plan.prediction.full[-1][0]
    return head.matrix(stage).detach().double() * _last_gain(base.stack)


def alignment(old: LoadedTextRun, new: LoadedTextRun) -> tuple[Tensor, Tensor]:
    """(A, B): from the old base's space to the new one's, and back."""
    w1, w2 = head_matrix(old), head_matrix(new)
    return torch.linalg.lstsq(w2, w1).solution, torch.linalg.lstsq(w1, w2).solution


def versions(old: LoadedTextRun, new: LoadedTextRun) -> dict[str, Any]:
    """How far two versions are apart: relative residuals of the alignment, and of doing nothing."""
    w1, w2 = head_matrix(old), head_matrix(new)
    a, _ = alignment(old, new)
    size = torch.linalg.norm(w1)
    nothing = float(torch.linalg.norm(w1 - w2) / size) if w1.shape == w2.shape else None
    residual = float(torch.linalg.norm(w1 - w2 @ a) / size)
    minor = nothing is not None and nothing < 0.5
    return {"kind": "minor" if minor else "major", "residual": residual, "residual_of_nothing": nothing}


def carry(
    adapter: Adapter, old: LoadedTextRun, new: LoadedTextRun, folder: Path | str, *, aligned: bool = True
) -> Adapter:
    """The specialist of `old` as one of `new`, in a new folder; without `aligned`, with the same weights."""
    adapter.check_base(old)
    _check(adapter, old, new)
    shape = Shape.of(adapter)
    attached = attach(old, {"old": adapter})
    part = attached.part("old")
    if aligned:
        a, b = alignment(old, new)
        with torch.no_grad():
            for layer in part.layers:
                _carry_layer(layer, a, b)
            _carry_head(part.head, b, _last_gain(old.stack), _last_gain(new.stack))
    origin = {"weights": old.weights, "aligned": aligned}
    return create_adapter(
        folder,
        kind=KIND,
        base=BaseIdentity.of(new),
        tensors=part.tensors(),
        settings=dict(adapter.settings) | {"carried_from": origin},
        card=card(
            Path(folder).name, new, shape, [f"Carried over from a specialist of `{old.run.folder.name}`."]
        ),
    )


def compared(
    path: Path,
    adapter: Adapter,
    carried: Adapter,
    old: LoadedTextRun,
    new: LoadedTextRun,
    context: int | None = None,
) -> dict[str, float]:
    """Mean nats a token of a text: the old base and specialist, the new base, and the specialist on it."""
    before, after = attach(old, {"s": adapter}), attach(new, {"s": carried})
    same = attach(new, {"s": replace(adapter, base=BaseIdentity.of(new))})  # its weights as they are
    rows = rows_of(path, after, context)
    on: Weights = {"s": 1.0}
    return {
        "old base with it": _nats(before, on, rows),
        "new base": _nats(after, {}, rows),
        "nothing done": _nats(same, on, rows),
        "aligned": _nats(after, on, rows),
    }


def trained_on(
    path: Path, carried: Adapter, new: LoadedTextRun, steps: int, context: int | None = None
) -> dict[str, float]:
    """Mean nats a token of a text after so many steps on it: of the carried specialist, which is trained in
    its folder, and of one of the same shape that begins anew."""
    settings, shape = FineTune(data=str(path), steps=steps, context=context), Shape.of(carried)
    found: dict[str, float] = {}
    rows = rows_of(path, attach(new, {"s": carried}), context)
    with tempfile.TemporaryDirectory() as place:
        fresh = new_specialist(
            Path(place) / "s",
            new,
            layers=shape.layers,
            head_rank=shape.head_rank,
            whole_head=shape.head_rank is None,
            tokens=shape.tokens,
        )
        for name, adapter in (("aligned and trained", carried), ("trained anew", fresh)):
            FineTuning.start(adapter.folder, settings, new.run.folder).train()
            attached = attach(new, {"s": open_specialist(adapter.folder)})
            found[name] = _nats(attached, {"s": 1.0}, rows)
    return found


def _nats(attached: Attached, weights: Weights, rows: tuple[Tensor, Tensor]) -> float:
    """Mean nats of the targets of some rows."""
    inputs, targets = rows
    losses = token_losses(attached, [weights], inputs, targets)
    return float(losses.double().sum() / (targets != -100).sum())


def _check(adapter: Adapter, old: LoadedTextRun, new: LoadedTextRun) -> None:
    if old.tokenizer.digest != new.tokenizer.digest:
        raise ConfigError(
            f"{new.run.folder} has another tokenizer than the base of {adapter.folder}, so their "
            "heads share no vocabulary",
            setting="new",
            given=str(new.run.folder),
            remedy="train a new specialist",
        )
    shapes = [
        {name: tuple(p.shape) for name, p in base.stack.layers[-1].named_parameters()} for base in (old, new)
    ]
    if shapes[0] != shapes[1] or len(old.stack.layers) != len(new.stack.layers):
        raise ConfigError(
            f"the layers of {new.run.folder} have other shapes than those of the base of {adapter.folder}",
            setting="new",
            given=str(new.run.folder),
            remedy="train a new specialist",
        )
    if any(isinstance(m, nn.LayerNorm | TransposedLinear) for m in old.stack.modules()) or _post_norms(old):
        raise ConfigError(
            f"the norms of {old.run.folder} take the mean off or stand behind what a layer writes, which no "
            "map between two streams keeps",
            setting="folder",
            given=str(adapter.folder),
            allowed="a specialist of a base with gains before its layers alone, as Llama's or a GPT's",
            remedy="train a new specialist",
        )


def _post_norms(base: LoadedTextRun) -> bool:
    return any(getattr(layer, "attention_post_norm", None) is not None for layer in base.stack.layers)


def _carry_layer(layer: nn.Module, a: Tensor, b: Tensor) -> None:
    """Re-express a layer's matrices; the gains of its norms go into the matrices that read behind them."""
    gains = _gains(layer)
    for name, module in layer.named_modules():
        last = name.rpartition(".")[2]
        if not isinstance(getattr(module, "weight", None), Tensor) or isinstance(module, nn.Embedding):
            continue
        weight: Tensor = module.weight
        if last in READS:
            gain = gains.get("attention_norm" if "attention" in name else "mlp_norm")
            wide = weight.double() if gain is None else weight.double() * gain
            weight.copy_((wide @ b).to(weight.dtype))
        elif last in WRITES:
            weight.copy_((a @ weight.double()).to(weight.dtype))
    for name in gains:
        norm = layer.get_submodule(name)
        norm.weight.fill_(0.0 if getattr(norm, "around_one", False) else 1.0)  # type: ignore[operator]


def _gains(layer: nn.Module) -> dict[str, Tensor]:
    gains = {}
    for name in ("attention_norm", "mlp_norm"):
        norm = getattr(layer, name, None)
        if isinstance(norm, nn.Module) and isinstance(getattr(norm, "weight", None), Tensor):
            gain = norm.weight.detach().double().clone()  # type: ignore[operator]
            gains[name] = 1 + gain if getattr(norm, "around_one", False) else gain
    return gains


def _carry_head(delta: nn.Module, b: Tensor, old: Tensor | float, new: Tensor | float) -> None:
    """W_s diag(g₁) B diag(1/g₂): what the delta reads stands behind the last norm's gain, old and new."""
    carried = {"down": delta.down} if isinstance(delta, LowRankDelta) else {}
    carried |= {"weight": delta.weight} if isinstance(delta, FullDelta) else {}
    for matrix in carried.values():
        matrix.copy_(((matrix.double() * old) @ b / new).to(matrix.dtype))


def _last_gain(stack: Stack) -> Tensor | float:
    """The gain of the norm before the head; 1 where it has none."""
    norm = getattr(stack, "norm", None)
    if not isinstance(norm, nn.Module) or not isinstance(getattr(norm, "weight", None), Tensor):
        return 1.0
    gain: Tensor = norm.weight.detach().double()  # type: ignore[operator]
    return 1 + gain if getattr(norm, "around_one", False) else gain
