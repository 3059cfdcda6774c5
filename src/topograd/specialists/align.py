"""Transfer of a specialist to another base: a later version of its own, one trained anew, or a wider one.

"Product of Experts" §10.4: vocabulary space is the frame that two bases share. With W₁ (vocab, d₁) and
W₂ (vocab, d₂) the heads behind the gains of their norms, n₁, n₂ the normed states of the two bases on the
same tokens, the maps are least squares in closed form (of the least norm where there are several):

    A = argmin ‖W₁ - W₂ A‖       (d₂, d₁)    what writes: it says the same through the other head
    B = argmin ‖W₂ - W₁ B‖       (d₁, d₂)    what reads, without text
    B = argmin Σ ‖n₁ - B n₂‖²    (d₁, d₂)    what reads, with text

A specialist reads its stream by matrices M (queries, keys, values, up, gate; the head's V) and writes into it
by matrices O (attention's output, the MLP's down) and their biases. Carried over they are M B and A O: each
layer then computes in the new coordinates what it computed in the old ones, up to the norm, which commutes
with B only where B is orthogonal up to a factor. So it is exact where the new stream is the old one turned,
or turned into a part of a wider one; a good start otherwise, and a few steps of training mend the rest. Gains
of the specialist's own norms go into the matrices behind them. In a wider layer the specialist's heads and
units are the first; the others begin as a new specialist's do and write nothing yet.

A whole head is carried as W_s B. `versions` tells minor versions (trained on) from major ones (trained anew)
by the residual of the heads, W + W_K where the stage that the specialist reads has one of its own.

Limits. The tokenizers are the same, and so are the number of layers, the width of a head and how many heads
share a key: a head's numbers are turned by position, each pair at a speed that follows from its place in the
head, so that no linear map makes heads of one width heads of another. There must be room for its heads and
units, so a narrower base has none; layers without attention are carried at one width alone. x0, where a layer
blends it in, is read by the same B. Layers whose norm takes the mean off or has a gain behind what is written
(LayerNorm of GPT-2; the norms behind each part of Gemma 2 and 3) do not turn with the stream, and are
refused.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.data.loader import IGNORED
from topograd.errors import ConfigError
from topograd.exec.forward import evaluating, stage_outputs
from topograd.nn.heads import FullDelta, LowRankDelta
from topograd.nn.stack import Stack
from topograd.nn.transformer.block import Block
from topograd.nn.transformer.parts import TransposedLinear
from topograd.runs.adapter import Adapter, BaseIdentity, create_adapter
from topograd.runs.session import LoadedTextRun
from topograd.specialists.attach import (
    KIND,
    Attached,
    Shape,
    attach,
    card,
    new_part,
    new_specialist,
    open_specialist,
)
from topograd.specialists.composition import Weights
from topograd.specialists.finetune import FineTuning
from topograd.specialists.interference import token_losses
from topograd.specialists.records import rows_of
from topograd.specialists.settings import FineTune

Maps = tuple[Tensor, Tensor]
"""(A, B): from the old base's space to the new one's (d₂, d₁), and back (d₁, d₂)."""
TOKENS_PER_NUMBER = 8
"""Of text for each number of the new stream, at least."""
MOST_TOKENS = 16_384
ROUNDING = 1e-5
"""Of the largest singular value: smaller ones of matrices in float32 are taken for 0."""
READS = ("query", "key", "value", "qkv", "up", "gate", "in_proj")
WRITES = ("output", "down", "out_proj")


def head_matrix(base: LoadedTextRun) -> Tensor:
    """The head that a specialist starts from behind the gain of the last norm, in float64: (vocab, width)."""
    head = base.stack.shared_head
    assert head is not None, "a specialist's base has one"
    stage = base.plan.prediction.full[-1][0]
    return head.matrix(stage).detach().double() * _gain(getattr(base.stack, "norm", None))


@torch.no_grad()
def alignment(old: LoadedTextRun, new: LoadedTextRun, inputs: Tensor | None = None) -> Maps:
    """(A, B) by the heads; with rows of tokens B is by what both bases make of them."""
    w1, w2 = head_matrix(old), head_matrix(new)
    a = _least_squares(w2, w1)
    if inputs is None:
        return a, _least_squares(w1, w2)
    n1, n2 = (last_states(base, inputs) for base in (old, new))
    return a, _least_squares(n2, n1).T


def _least_squares(left: Tensor, right: Tensor) -> Tensor:
    """argmin ‖left X - right‖ of the least norm; what is rounding of float32 on the left does not count."""
    return torch.linalg.lstsq(left, right, rcond=ROUNDING).solution


def text_to_fit(path: Path, old: LoadedTextRun, new: LoadedTextRun, context: int | None) -> Tensor | None:
    """Rows of a text that both bases can read, for B; None where it is too short for as many unknowns."""
    inputs, _ = rows_of(path, attach(old, {}), context)
    enough = inputs.numel() >= TOKENS_PER_NUMBER * new.stack.width
    return inputs[: MOST_TOKENS // inputs.shape[1] + 1] if enough else None


def last_states(base: LoadedTextRun, inputs: Tensor, batch: int = 8) -> Tensor:
    """(tokens, width) in float64: what a specialist reads of each position but the first, normed."""
    stage = base.plan.prediction.full[-1][0]
    device = next(base.stack.parameters()).device
    with evaluating(base.stack):
        parts = [
            stage_outputs(base.stack, base.plan, rows.to(device), [stage])[stage][:, 1:].double()
            for rows in inputs.split(batch)
        ]
    states = torch.cat(parts).flatten(0, 1)
    return F.rms_norm(states, states.shape[-1:])


def versions(old: LoadedTextRun, new: LoadedTextRun) -> dict[str, Any]:
    """How far two versions are apart: relative residuals of the alignment, and of doing nothing."""
    w1, w2 = head_matrix(old), head_matrix(new)
    a, _ = alignment(old, new)
    size = torch.linalg.norm(w1)
    nothing = float(torch.linalg.norm(w1 - w2) / size) if w1.shape == w2.shape else None
    residual = float(torch.linalg.norm(w1 - w2 @ a) / size)
    minor = nothing is not None and nothing < 0.5
    return {"kind": "minor" if minor else "major", "residual": residual, "residual_of_nothing": nothing}


@torch.no_grad()
def carry(
    adapter: Adapter,
    old: LoadedTextRun,
    new: LoadedTextRun,
    folder: Path | str,
    inputs: Tensor | None = None,
) -> Adapter:
    """The specialist of `old` as one of `new`, in a new folder, by the heads and, if given, rows of text."""
    adapter.check_base(old)
    _check(adapter, old, new)
    shape, (a, b) = Shape.of(adapter), alignment(old, new, inputs)
    part = attach(old, {"old": adapter}).part("old")
    carried = new_part(new, shape)
    for ours, theirs in zip(part.layers, carried.layers, strict=True):
        _carry_layer(ours, theirs, a, b)
    gains = [_gain(getattr(base.stack, "norm", None)) for base in (old, new)]
    _carry_head(part.head, carried.head, b, *gains)
    return create_adapter(
        folder,
        kind=KIND,
        base=BaseIdentity.of(new),
        tensors=carried.tensors(),
        settings=dict(adapter.settings) | {"carried_from": {"weights": old.weights, "aligned": True}},
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
    """Mean nats a token of a text: the old base and specialist, the new base, and the specialist on it.

    As it was, without being aligned, where it fits.
    """
    after = attach(new, {"s": carried})
    rows = rows_of(path, after, context)
    on: Weights = {"s": 1.0}
    found = {
        "old base with it": _nats(attach(old, {"s": adapter}), on, rows),
        "new base": _nats(after, {}, rows),
    }
    if all(tensor.shape == carried.tensors[name].shape for name, tensor in adapter.tensors.items()):
        same = attach(new, {"s": replace(adapter, base=BaseIdentity.of(new))})
        found["nothing done"] = _nats(same, on, rows)
    return found | {"aligned": _nats(after, on, rows)}


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
    return float(losses.double().sum() / (targets != IGNORED).sum())


def _check(adapter: Adapter, old: LoadedTextRun, new: LoadedTextRun) -> None:
    problem = _misfit(old.stack, new.stack)
    if old.tokenizer.digest != new.tokenizer.digest or old.stack.vocab != new.stack.vocab:
        problem = "its tokenizer is another, so that the heads share no vocabulary"
    if problem is not None:
        raise ConfigError(
            f"{adapter.folder} cannot be carried to {new.run.folder}: {problem}",
            setting="new",
            given=str(new.run.folder),
            remedy="train a new specialist",
        )
    behind = any(getattr(layer, "attention_post_norm", None) is not None for layer in old.stack.layers)
    if behind or any(isinstance(module, nn.LayerNorm | TransposedLinear) for module in old.stack.modules()):
        raise ConfigError(
            f"the norms of {old.run.folder} take the mean off or stand behind what a layer writes, which no "
            "map between two streams keeps",
            setting="folder",
            given=str(adapter.folder),
            allowed="a specialist of a base with gains before its layers alone, as Llama's or a GPT's",
            remedy="train a new specialist",
        )


def _misfit(old: Stack, new: Stack) -> str | None:
    """Why the layers of one have no place in those of the other, if they have none."""
    if len(old.layers) != len(new.layers):
        return f"it has {len(new.layers)} layers and the specialist stands behind {len(old.layers)}"
    ours, theirs = old.layers[-1], new.layers[-1]
    shapes = [{name: tuple(p.shape) for name, p in layer.named_parameters()} for layer in (ours, theirs)]
    if shapes[0] == shapes[1]:
        return None
    if shapes[0].keys() != shapes[1].keys() or not isinstance(ours, Block) or not isinstance(theirs, Block):
        return "its layers are of another kind, or no attention, whose parts grow with the width"
    kinds = [(part.head_width, part.heads // part.kv_heads) for part in (ours.attention, theirs.attention)]
    if kinds[0] != kinds[1]:
        return (
            f"its heads have {kinds[1][0]} numbers, {kinds[1][1]} to a key, and the specialist's "
            f"{kinds[0][0]}, {kinds[0][1]} to a key: positions turn the numbers of a head by its width"
        )
    if theirs.attention.heads < ours.attention.heads or len(theirs.mlp.up.weight) < len(ours.mlp.up.weight):
        return "its layers have fewer heads or units than the specialist's"
    return None


def _carry_layer(old: nn.Module, new: nn.Module, a: Tensor, b: Tensor) -> None:
    """Put a layer's matrices, re-expressed, into a new layer; gains of norms go into what reads behind them.

    What the new layer has more of (heads, units of the MLP) stays as it began: it adds nothing yet.
    """
    gains = {name: _gain(getattr(old, name, None)) for name in ("attention_norm", "mlp_norm")}
    target = dict(new.named_parameters())
    for name, parameter in old.named_parameters():
        module, _, kind = name.rpartition(".")
        last, weight = module.rpartition(".")[2], parameter.double()
        if module in gains:
            around_one = getattr(new.get_submodule(module), "around_one", False)
            target[name].fill_(0.0 if around_one else 1.0)
            continue
        if kind == "weight" and last in READS:
            weight = (weight * gains["attention_norm" if "attention" in module else "mlp_norm"]) @ b
        elif last in WRITES:
            weight = a @ weight
        target[name][tuple(map(slice, weight.shape))] = weight.to(parameter.dtype)


def _carry_head(
    old: nn.Module, new: nn.Module, b: Tensor, gain: Tensor | float, new_gain: Tensor | float
) -> None:
    """W_s diag(g₁) B diag(1/g₂): what the delta reads stands behind the last norm's gain, old and new."""
    for name, matrix in old.named_parameters():
        reads = isinstance(old, FullDelta) or (isinstance(old, LowRankDelta) and name == "down")
        carried = ((matrix.double() * gain) @ b / new_gain).to(matrix.dtype) if reads else matrix
        new.get_parameter(name).copy_(carried)


def _gain(norm: nn.Module | None) -> Tensor | float:
    """The gain of a norm; 1 where it has none."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor):
        return 1.0
    return weight.detach().double() + (1.0 if getattr(norm, "around_one", False) else 0.0)
