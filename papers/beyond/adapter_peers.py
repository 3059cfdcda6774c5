"""More peers of LoRA in safe directions: EWC, CorDA, self-distillation, LoPT and a specialist.

The setting is that of `safe_adapters.py`: the maps that read the residual stream, one rank, and for every arm
as many steps on as many sequences. Old text is the model's own. The model that comes with the package has all
arms; the preset long has the first ones on SmolLM2 (where its wheel is). Arms:

    lora, safe, dead   as there; SmolLM2's rates are those that were tuned there
    ewc          LoRA, and in the loss λ/2 Σ F (ΔW)², F the diagonal Fisher of W on the old text     EWC
    corda        A, B the least components of W C, over C, subtracted from the correction; both learn   CorDA
    distil       LoRA; half of each batch is old text, with λ KL(model before ‖ model) as its loss
    lopt         LoRA; the gradient stops at the middle layer, and the half below learns that a small
                 decoder gives its input back from its output                                          LoPT
    specialist   one layer and a head of rank 16 behind the frozen model (`topograd attach`)           ours

F is the mean over old sequences of the squared gradient, per token, so that λ = 1 estimates the KL per token
to second order. C is the second moment of a map's inputs on the old text, with 0.01 of its mean diagonal
added; its unit is chosen so that A and B are equally large. LoPT's decoder is LayerNorm, d to d/4, GELU,
d/4 to d; it learns at the arm's rate. A specialist is read switched on, as the mean of the logits of the
model and of the specialist ("half"), and switched off ("off", the largest change of a logit).

O-LoRA keeps each task's adapter orthogonal to those of earlier tasks. Here is one task, so it would be lora.

λ: for ewc and distil the one with the least bits per byte of the new and of the old text together, at lora's
rate; then the rate, as for every arm. Both on the last new text with a seed that is not used again; where
the best is at an end of its grid, one beyond is tried until it lies between two others. SmolLM2 takes the λ
that the other model's run chose, since λ multiplies nats per token in both.

Claims, set before the run, for each model over all pairs of a new text (facts, german) and a seed; texts of
which lora wins less than 2 % with some seed are left out; an arm that gains less than a quarter of what lora
does has not learned and is in no claim:

    forgetting at the level (`adapter_tables.py`): each peer less safe is above 0
    forgetting at the end: lora less safe is above 0
    learning: what safe gains less 0.9 of what lora gains is above 0

Source: "Overcoming catastrophic forgetting in neural networks" (Kirkpatrick et al.), "CorDA" (Yang et al.,
knowledge-preserved), "LoPT" (arXiv 2605.04913), "O-LoRA" (Wang et al.).
Cost on one core: seconds for tiny; small five minutes, long half an hour.
Limits. Those of `safe_adapters.py`. A specialist has five times as many parameters that learn, and its steps
cost a third. The 32 rows of old text that ewc, corda and distil read are those of safe and dead.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from papers.beyond.bases import Windows, bits_per_byte, folders
from papers.beyond.safe_adapter_tables import claims, drawing, findings, tables
from papers.beyond.safe_adapters import CATALOGS, SMALL, TINY, TUNING, Arm, Study
from papers.fit import best_between
from papers.outcome import Asked, Result, Row
from topograd.exec.forward import Predictor
from topograd.nn.lora import add_lora, begin_at
from topograd.runs.session import open_session
from topograd.specialists.attach import attach, new_specialist
from topograd.specialists.composition import Weights, composed

HELD = (6e-3, 1.8e-2, 5.4e-2)
DAMPING = 0.01
PEERS = ("lora", "dead", "ewc", "distil", "corda", "lopt", "specialist")
KNOWN = {"lora": 6e-3, "safe": 1.8e-2, "dead": 1.8e-2}
"""SmolLM2's rates of `safe_adapters.py`."""
LARGE = ("lora", "safe", "distil", "ewc", "dead")
"""Arms of SmolLM2."""
FACTORS = {"ewc": 1000.0, "distil": 1.0}
"""Chosen on the packaged model."""
ON: Weights = {"new": 1.0}
HALF: Weights = {"new": 0.5}
OFF: Weights = {}


@dataclass(frozen=True)
class Peer(Arm):
    """An arm with rates of its own, and for some a factor λ."""

    rates: tuple[float, ...] = (2e-3, 6e-3, 1.8e-2)
    factors: tuple[float, ...] = ()
    factor: float = 1.0


ARMS = (
    Peer("lora"),
    Peer("safe", "safe", rates=HELD),
    Peer("dead", "dead", rates=HELD),
    Peer("ewc", factors=(1.0, 10.0, 100.0, 1e3, 1e4)),
    Peer("distil", factors=(1.0, 4.0, 16.0)),
    Peer("specialist", rates=(1e-3, 3e-3, 9e-3)),
    Peer("corda"),
    Peer("lopt"),
)


def run(args: Asked) -> Result:
    """Every arm on both texts, seed by seed."""
    texts = ["facts", "german"] if CATALOGS.is_dir() else ["facts"]
    size = TINY if args.preset == "tiny" else SMALL
    models = folders(args)
    name = list(models)[-1] if args.preset == "long" else "reference"
    study = PeerStudy(name, open_session(models[name]), size, args)
    rows: list[Row] = []
    for row in study.rows(texts):
        rows.append(row)
        args.on_more(len(rows), args.seeds * len(texts) * len(_arms_on(name)))
    return Result(
        setting=f"Model: {name}. New texts: {', '.join(texts)}. Old text: the model's own. "
        f"Rank {size.rank}, {args.steps} steps of {size.batch} sequences of {size.length} tokens.",
        rows=rows,
        tables=tables(name, texts, rows),
        findings=(*findings(name, texts, rows), *_more(name, rows)),
        drawing=drawing(rows, texts[0]),
        claims=tuple(claims(name, texts, rows, PEERS)),
        seeds=args.seeds,
    )


def _arms_on(model: str) -> list[Peer]:
    named = {arm.name: arm for arm in ARMS}
    if model == "reference":
        return list(ARMS)
    known = {name: replace(named[name], rates=(rate,)) for name, rate in KNOWN.items()}
    factors = {name: replace(named[name], factor=factor, factors=()) for name, factor in FACTORS.items()}
    return [(known | factors).get(name, named[name]) for name in LARGE]


def _more(model: str, rows: Sequence[Row]) -> Iterator[str]:
    """What was chosen, and the specialist in its other readings."""
    for arm in ("ewc", "distil"):
        # A row has the λ that was chosen for it; SmolLM2's rows take the other model's.
        chosen = next((row.get("factor", FACTORS[arm]) for row in rows if row["arm"] == arm), None)
        if chosen is not None:
            yield f"{model}: λ of {arm} is {chosen:g}."
    ours = [row for row in rows if row["arm"] == "specialist"]
    if ours:
        won = statistics.fmean((row["new"][0] - row["half"]["new"]) / row["new"][0] for row in ours)
        first = [statistics.fmean(row["old"][0]) for row in ours]
        lost = statistics.fmean(row["half"]["old"] - f for row, f in zip(ours, first, strict=True))
        moved = max(row["off"] for row in ours)
        yield (
            f"{model}: half of a specialist learns {100 * won:.1f} % and forgets {lost:.3f} bits per byte; "
            f"switched off, no logit of the model changed by more than {moved:g}."
        )


def least_factors(weight: Tensor, moment: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """A (rank, inputs) and B (outputs, rank): the least components of W C, over C; B A is that part of W."""
    eye = torch.eye(len(moment), dtype=moment.dtype)
    C = moment + DAMPING * moment.diagonal().mean() * eye
    U, S, Vh = torch.linalg.svd(weight.to(C.dtype) @ C, full_matrices=False)
    a = torch.linalg.solve(C, Vh[-rank:], left=False) * S[-rank:, None]
    b = U[:, -rank:]
    even = (a.norm() / b.norm()).sqrt()
    return a / even, b * even


class PeerStudy(Study):
    """The study with these peers."""

    def arms(self, text: str) -> Sequence[Arm]:
        return [self.with_factor(arm, text) for arm in _arms_on(self.name)]

    def rates(self, arm: Arm) -> tuple[float, ...]:
        assert isinstance(arm, Peer)
        return arm.rates[:1] if self.args.preset == "tiny" else arm.rates

    def with_factor(self, arm: Peer, text: str) -> Peer:
        """With the factor of its grid that has the least bits per byte of both texts together."""
        if not arm.factors or self.args.preset == "tiny":
            return arm

        def both(factor: float) -> float:
            tried = replace(arm, factor=factor)
            made = partial(self.learn, tried, text, TUNING, usual)
            row = self._kept(self._key(tried, text, TUNING, usual) | {"both": True}, made)
            return float(row["new"][-1]) + statistics.fmean(row["old"][-1])

        usual = self.tuned(_arms_on(self.name)[0], text)
        return replace(arm, factor=best_between(arm.factors, both))

    def _key(self, arm: Arm, text: str, seed: int, rate: float) -> Row:
        factor = {"factor": arm.factor} if isinstance(arm, Peer) and arm.factors else {}
        return super()._key(arm, text, seed, rate) | factor

    def learn(self, arm: Arm, text: str, seed: int, rate: float, tuning: bool = False) -> Row:
        with ExitStack() as self._closing:
            if arm.name == "specialist":
                return self._specialist(arm, text, seed, rate, tuning)
            return super().learn(arm, text, seed, rate, tuning)

    def _place(self, arm: Arm, text: str, seed: int) -> list[nn.Parameter]:
        if arm.name == "ewc":
            _ = self.fisher  # of the model as it is without corrections
        if arm.name == "corda":
            add_lora(self.maps.values(), self.size.rank, alpha=self.size.rank, form="shifted")
            for name, (a, b) in self.least.items():
                begin_at(self.maps[name], a, b)
            return [p for p in self.model.parameters() if p.requires_grad]
        return super()._place(arm, text, seed) + (self._cut_below() if arm.name == "lopt" else [])

    def _loss(self, arm: Arm, learn: Windows, generator: torch.Generator) -> Tensor:
        assert isinstance(arm, Peer)
        if arm.name == "distil":
            return self._distilled(arm.factor, learn, generator)
        loss = super()._loss(arm, learn, generator)
        if arm.name == "ewc":
            loss = loss + arm.factor / 2 * self._penalty()
        return loss + self._local if arm.name == "lopt" else loss

    @cached_property
    def least(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Of CorDA, map by map."""
        return {
            name: least_factors(module.weight, self.old_moments[name], self.size.rank)
            for name, module in self.maps.items()
        }

    @cached_property
    def fisher(self) -> dict[str, Tensor]:
        """Mean square of the gradients of the old text's sequences, per token, for every number of W."""
        old, weights = self.old[0], {name: module.weight for name, module in self.maps.items()}
        sums = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        for weight in weights.values():
            weight.requires_grad_(True)
        for inputs, targets in old.batches(1):
            loss = F.cross_entropy(self.model(inputs).mT, targets, reduction="sum")
            for total, gradient in zip(
                sums.values(), torch.autograd.grad(loss, list(weights.values())), strict=True
            ):
                total.addcmul_(gradient, gradient, value=1 / old.targets.numel())
        for weight in weights.values():
            weight.requires_grad_(False)
        return sums

    def _penalty(self) -> Tensor:
        """Σ F (ΔW)² over all maps."""
        parts = []
        for name, module in self.maps.items():
            a, b = (module.get_parameter(p) for p in ("lora_a", "lora_b"))
            parts.append((self.fisher[name] * (b @ a).square()).sum())
        return torch.stack(parts).sum()

    @cached_property
    @torch.no_grad()
    def before_logits(self) -> Tensor:
        """Of the model before, on the old text that is read."""
        return torch.cat([self.model(inputs).log_softmax(-1) for inputs in self.old[0].inputs.split(4)])

    def _distilled(self, factor: float, learn: Windows, generator: torch.Generator) -> Tensor:
        """Cross-entropy on new sequences, and on as many old ones the divergence from the model before."""
        there, old = self.size.batch // 2, self.old[0]
        new = torch.randint(len(learn.inputs), (self.size.batch - there,), generator=generator)
        rows = torch.randint(len(old.inputs), (there,), generator=generator)
        logits = self.model(torch.cat([learn.inputs[new], old.inputs[rows]]))
        usual = F.cross_entropy(logits[: len(new)].mT, learn.targets[new])
        now = logits[len(new) :].log_softmax(-1).flatten(0, 1)
        before = self.before_logits[rows].flatten(0, 1)
        return usual + factor * F.kl_div(now, before, reduction="batchmean", log_target=True)

    def _cut_below(self) -> list[nn.Parameter]:
        """Stop gradients at the middle layer; the decoder's parameters."""
        layers: Any = self.model.stack.layers
        first, last, width = layers[0], layers[len(layers) // 2 - 1], self.model.stack.width
        decoder = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width // 4), nn.GELU(), nn.Linear(width // 4, width)
        )

        def read(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._below = args[0].detach()

        def cut(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            self._local = F.mse_loss(decoder(output), self._below)
            return output.detach()

        self._closing.callback(first.register_forward_pre_hook(read).remove)
        self._closing.callback(last.register_forward_hook(cut).remove)
        return list(decoder.parameters())

    def _specialist(self, arm: Arm, text: str, seed: int, rate: float, tuning: bool) -> Row:
        """A stage and a head behind the model, which is read on, half and off."""
        learn, test = self.new(text, seed)
        with TemporaryDirectory() as folder:
            made = new_specialist(Path(folder) / "new", self.session, layers=1, seed=seed)
            attached = attach(self.session, {"new": made})
        on, half, off = (
            Predictor(attached.stack, composed(attached, weights)) for weights in (ON, HALF, OFF)
        )
        parameters = [p for p in on.parameters() if p.requires_grad]
        model, self.model = self.model, on
        self._closing.callback(setattr, self, "model", model)
        row: Row = {"parameters": sum(p.numel() for p in parameters)}
        row |= self._curve(arm, parameters, learn, test, seed, rate, tuning)
        if tuning:
            return row
        self.model = model
        first = self.before(text, seed)
        row |= {key: [first[key], *row[key]] for key in ("new", "old")}
        row["half"] = {
            "new": statistics.fmean(bits_per_byte(half, test)),
            "old": statistics.fmean(bits_per_byte(half, self.old[1])),
        }
        with torch.no_grad():
            some = test.inputs[:1]
            return row | {"off": float((off(some) - model(some)).abs().max())}
