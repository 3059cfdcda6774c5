"""What each layer of a fine-tuned model learned and forgot: the change of bits per byte, shared out by layer.

    W(s) = W₀ + s Δ, Δ = W₁ - W₀       from the base's weights to the tuned ones
    share of ℓ = ∫₀¹ ⟨∂BPB/∂W_ℓ (W(s)), Δ_ℓ⟩ ds ≈ mean over s = (i - ½) / POINTS, i = 1..POINTS
    Σ_ℓ share of ℓ = BPB(W₁) - BPB(W₀), but for the error of the mean, which is returned as `rest`

Learned is minus the share on new text, forgotten the share on old text. A share depends on the straight path:
it is what a layer did together with the others, and not what the model would lose without it.

Cost: POINTS forward and backward passes over each text. Source: "Axiomatic Attribution for Deep Networks"
(Sundararajan et al. 2017), with weights for inputs. Limits: text; up to `TOKENS` tokens of new text.
"""

import math
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.exec.forward import Predictor
from topograd.runs.session import heldout_text, open_session
from topograd.training.forgetting import BATCH, NAME, Sequences, base_of, read_old_text

POINTS = 4
TOKENS = 2048
ELSEWHERE = "embedding and head"


def has_old_text(folder: Path) -> bool:
    """Whether a run measured what it forgot."""
    return (folder / NAME).is_file()


def layer_shares(folder: Path) -> dict[str, Any]:
    """Learned and forgotten by layer, from 1, of a run that was fine-tuned with old text."""
    session = open_session(folder)
    base = base_of(session.run, session.config)
    new = heldout_text(session)
    rows = max(1, TOKENS // new.inputs.shape[1])
    counted = new.targets[:rows][new.targets[:rows] != -100]
    nbytes = int(torch.as_tensor(session.tokenizer.byte_lengths)[counted].sum())
    texts = {
        "learned": Sequences(new.inputs[:rows], new.targets[:rows], nbytes),
        "forgotten": read_old_text(folder / NAME, session.tokenizer).judged,
    }
    model = Predictor(session.stack, session.plan)
    before = dict(Predictor(base.stack, session.plan).state_dict())
    each = {name: shares(model, before, text) for name, text in texts.items()}
    sign = {"learned": -1.0, "forgotten": 1.0}
    names = list(each["learned"])
    table = [{"layer": n, **{k: sign[k] * each[k][n] for k in each}} for n in names if n != "rest"]
    totals = {k: sign[k] * sum(each[k].values()) for k in each}
    return {"layers": table, **totals, "rest": {k: sign[k] * each[k]["rest"] for k in each}}


def shares(
    model: nn.Module, before: dict[str, Tensor], text: Sequences, points: int = POINTS
) -> dict[str, float]:
    """The change of bits per byte from the weights `before` to the model's own, by layer; and the rest."""
    after = {name: p.detach().clone() for name, p in model.named_parameters()}
    common = [name for name in after if name in before]  # heads that were added have no before
    moved = {n: after[n] - before[n] for n in common if not torch.equal(after[n], before[n])}
    wanted = {name: p for name, p in model.named_parameters() if name in moved}
    found = {_layer(name): 0.0 for name in after if _layer(name) != ELSEWHERE}
    found |= {ELSEWHERE: 0.0} if any(_layer(name) == ELSEWHERE for name in moved) else {}
    try:
        ends = []
        for s in (0.0, 1.0):
            _place(wanted, before, moved, s)
            ends.append(text.bits_per_byte(model))  # type: ignore[arg-type]
        for i in range(points):
            _place(wanted, before, moved, (i + 0.5) / points)
            for name, gradient in _gradients(model, wanted, text).items():
                found[_layer(name)] += float((gradient.double() * moved[name].double()).sum()) / points
    finally:
        _place(wanted, after, moved, 0.0)
    return found | {"rest": ends[1] - ends[0] - math.fsum(found.values())}


@torch.no_grad()
def _place(
    parameters: dict[str, nn.Parameter], first: dict[str, Tensor], moved: dict[str, Tensor], s: float
) -> None:
    for name, parameter in parameters.items():
        parameter.data = first[name] + s * moved[name] if s else first[name].clone()


def _gradients(model: nn.Module, parameters: dict[str, nn.Parameter], text: Sequences) -> dict[str, Tensor]:
    """Of bits per byte, by each parameter."""
    for parameter in parameters.values():
        parameter.requires_grad_(True)
        parameter.grad = None
    device = next(model.parameters()).device
    for inputs, targets in zip(text.inputs.split(BATCH), text.targets.split(BATCH), strict=True):
        logits = model(inputs.to(device)).float()
        nats = F.cross_entropy(logits.mT, targets.to(device), reduction="sum")
        (nats / (math.log(2) * text.nbytes)).backward()
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items()}
    for parameter in parameters.values():
        parameter.requires_grad_(False)
        parameter.grad = None
    return found


def _layer(name: str) -> str:
    match = re.search(r"layers\.(\d+)\.", name)
    return ELSEWHERE if match is None else str(int(match[1]) + 1)
