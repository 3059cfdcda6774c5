"""Probe of a target's rank, logit and probability at every stage and along paths.

    stages       each stage by its own head: the base's stages, then a specialist's
    paths        base               what the base predicts
                 s                  what it predicts with specialist s
                 base head of s     W_base h_s: the specialist's state read with the base's head (§6.5.4)
                 base + s           both in equal parts, a product of two experts (§6.5.5)

For a target of several tokens t_1..t_n behind a prompt p: rank, logit and probability are those of t_1, and
`sequence` is the probability of all of it, Π P(t_i | p, t_<i): what decides in use ("Product of Experts"
§8.2.1). With a passage in front of the prompt all of it is read a second time. The rank counts from 1.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from topograd.errors import ConfigError
from topograd.exec.forward import predict, stage_outputs
from topograd.specialists.attach import Attached
from topograd.specialists.composition import composed_terms
from topograd.topology.prediction import Terms

Target = Sequence[int]


def probe(
    attached: Attached, prompt: Sequence[int], target: Target, passage: Sequence[int] | None = None
) -> dict[str, Any]:
    """The readings of a target behind a prompt, as JSON holds them; behind a passage too if there is one."""
    vocab = attached.vocabulary
    vocab.check([*prompt, *target, *(passage or ())])
    if not target:
        raise ConfigError(
            setting="target", given=list(target), allowed="at least one token: the text that should follow"
        )
    readings = _readings(attached, prompt, target)
    if passage is not None:
        readings["with_passage"] = _readings(attached, [*passage, *prompt], target)
    return readings


@torch.no_grad()
def _readings(attached: Attached, prompt: Sequence[int], target: Target) -> dict[str, Any]:
    context = attached.base.config.model.context
    begun = list(prompt) or [attached.base.tokenizer.separator]
    whole = [*begun, *target[:-1]]
    if len(whole) > context:
        raise ConfigError(
            f"prompt and target have {len(whole)} tokens",
            setting="prompt",
            given=len(whole),
            allowed=f"at most {context}",
        )
    plan, stack = attached.plan, attached.stack
    device = next(stack.parameters()).device
    inputs = torch.tensor([whole], device=device)
    predicting = plan.predicting()
    outputs = stage_outputs(stack, plan, inputs, predicting)
    ends = {k: h[:, len(begun) - 1 :] for k, h in outputs.items()}
    pieces = attached.base.tokenizer.pieces
    names = {stage: name for name, stage in attached.stages.items()}
    stages = []
    for k in predicting:
        logits = stack.readout(ends[k], plan.stages[k].head)[0]
        place = {"stage": k + 1, "layers": plan.stages[k].stage.stop, "specialist": names.get(k)}
        stages.append(place | _reading(logits, target, pieces))
    paths = []
    for name, terms in path_terms(attached).items():
        logits = predict(stack, plan, ends, terms)[0]
        paths.append({"path": name} | _reading(logits, target, pieces))
    head = attached.base.plan.prediction.full[-1][0]  # the base's last head
    for name, stage in attached.stages.items():
        logits = stack.readout(ends[stage], head)[0]
        paths.append({"path": f"base head of {name}"} | _reading(logits, target, pieces))
    return {"stages": stages, "paths": paths}


def _reading(logits: Tensor, target: Target, pieces: Sequence[bytes]) -> dict[str, Any]:
    """Of the logits (n, vocab) that predict each token of the target; `top` is the likeliest one instead."""
    first, logs = logits[0], logits.log_softmax(-1)
    value, best = first[target[0]], int(first.argmax())
    chosen = logs[range(len(target)), list(target)]
    return {
        "rank": int((first > value).sum()) + 1,
        "logit": float(value),
        "probability": float(chosen[0].exp()),
        "sequence": float(chosen.sum().exp()),
        "top": pieces[best].decode(errors="replace") if best < len(pieces) else "",
    }


def path_terms(attached: Attached) -> dict[str, Terms]:
    """The paths that are read: the base, each specialist, and each in equal parts with the base."""
    terms = {"base": composed_terms(attached, {})}
    for name in attached.stages:
        terms[name] = composed_terms(attached, {name: 1.0})
        terms[f"base + {name}"] = composed_terms(attached, {name: 0.5})
    if len(attached.stages) > 1:
        terms["all"] = composed_terms(attached, dict.fromkeys(attached.stages, 1.0))
    return terms
