"""Does geometry know where an adapter should sit? LoRA in dead and safe directions, at equal rank and steps.

A trained model learns a small text, invented facts in prose (`product_of_experts/facts.py`), through low-rank
corrections B A of the maps that read its stream: queries, keys, values, and the maps into the MLP. Arms:

    lora            A random, B zero, both learn                                     the usual way
    lora, A held    the same, and A stays as it is                                   a control
    pissa           A, B the leading singular vectors of W, both learn               PiSSA
    dead            A the directions that the old text uses least, held              `safe_directions.py`
    safe            A those that the new text uses most for what the old one does, held
    named layers    lora with twice the rank, in the half of the layers whose gradients are most of the new
    other layers    the same in the other half

All arms have the same rank, steps, batches, AdamW and, where A learns, as many parameters; `held` arms have
fewer, and their control too. Each arm takes the best of its rates for the new text, on a seed that is not
used again (SmolLM2: one rate for arms whose A learns, ten times it for the others). Read at several stops:

    new        bits per byte of the facts in another order
    old        bits per byte of held-out text of the corpus; forgetting is what it has above the model before
    level      the bits per byte at which the arm that gains least has half of its gain; arms with less than a
               quarter of lora's gain have not learned, and are left out of the level
    forgetting at the level, by a line between stops: arms that learn more slowly do not look safer for it

Source: "LoRA" (Hu et al.), "PiSSA" (Meng et al.); dead directions after "Dead Directions: Geometric Singular
Learning" §5.1. The question is ours.
Cost on one core: seconds for tiny; small some five minutes for each model.
Limits. One task; a base that was trained on the old text (the reference model) or on other text (SmolLM2).
Intervals are over seeds on the reference model, over windows of the old text on SmolLM2, one seed there.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from papers.beyond.adapter_tables import claims, drawing, findings, table
from papers.beyond.bases import Base, Windows, bits_per_byte, cut, folders, open_base
from papers.outcome import Asked, Result, Row
from papers.product_of_experts.facts import World
from topograd.geometry.safe_directions import Kind, MapReading, adapter_directions, read_maps
from topograd.nn.lora import add_lora, merge_lora

READERS = ("query", "key", "value", "gate", "up")
TUNING = 100
PARAPHRASES = 3


@dataclass(frozen=True)
class Arm:
    """One way to place an adapter."""

    name: str
    start: Literal["random", "pissa"] | Kind = "random"
    held: bool = False
    layers: Literal["all", "named", "other"] = "all"


ARMS = (
    Arm("lora"),
    Arm("lora, A held", held=True),
    Arm("pissa", "pissa"),
    Arm("dead", "dead", held=True),
    Arm("safe", "safe", held=True),
    Arm("named layers", layers="named"),
    Arm("other layers", layers="other"),
)


@dataclass(frozen=True)
class Size:
    """How much of everything; `stops` are shares of the steps."""

    people: int
    length: int
    old: int
    """Windows of old text to read the geometry on."""
    heldout: int
    new: int
    """Windows of the facts to judge on."""
    batch: int
    rank: int
    rates: tuple[float, ...]
    held_rates: tuple[float, ...]
    """Of arms whose A is held: at the others' rates they learn little in these steps."""
    arms: tuple[str, ...] = tuple(arm.name for arm in ARMS)
    stops: tuple[float, ...] = (0.25, 0.5, 1.0)


SIZES = {
    "reference": Size(12, 64, 48, 24, 8, 4, 4, (3e-3, 1e-2), (1e-2, 3e-2, 1e-1)),
    "smollm2": Size(12, 64, 32, 8, 4, 2, 4, (3e-3,), (3e-2,), tuple(arm.name for arm in ARMS[:-2])),
}
TINY = Size(2, 32, 4, 2, 2, 2, 2, (3e-3,), (3e-2,), ("lora", "pissa", "safe", "named layers"), (0.5, 1.0))


def run(args: Asked) -> Result:
    """Every arm on every model that is there."""
    tiny, models = args.preset == "tiny", folders(args)
    rows: list[Row] = []
    todo = {name: TINY if tiny else SIZES[name] for name in models}
    seeds = {name: args.seeds if name == "reference" else 1 for name in models}
    total = sum(seeds[name] * len(size.arms) for name, size in todo.items())
    for (name, folder), steps in zip(models.items(), args.parts("steps"), strict=False):
        size = todo[name]
        study = _Placement(open_base(name, folder, size.length, size.old, size.heldout), size, steps)
        for arm in (arm for arm in ARMS if arm.name in size.arms):
            rate, *others = study.rates(arm)
            if others:
                key = {"base": name, "arm": arm.name, "seed": TUNING}
                rate = args.kept.row(key, partial(study.tune, arm))["rate"]
            for seed in range(seeds[name]):
                key = {"base": name, "arm": arm.name, "seed": seed, "rate": rate}
                result = args.kept.row(key, partial(study.learn, arm, seed, rate))
                rows.append({**key, **result})
                args.on_more(len(rows), total)
    judged = [claim for name in models for claim in claims(name, rows)]
    return Result(
        setting=f"Models: {', '.join(models)}. Facts about invented people, learned through corrections of "
        "low rank of the maps that read the stream; forgetting on held-out text of the corpus.",
        rows=rows,
        tables=tuple(table(name, rows) for name in models),
        findings=tuple(sentence for name in models for sentence in findings(name, rows)),
        drawing=drawing(rows, next(reversed(models))),
        claims=tuple(judged),
        seeds=args.seeds,
    )


class _Placement:
    """One model and everything that an arm needs of it."""

    def __init__(self, base: Base, size: Size, steps: int) -> None:
        self.base, self.size, self.steps = base, size, steps
        self.layers = [f"stack.layers.{i}" for i in range(len(base.session.stack.layers))]
        self.maps = [
            name
            for name, module in base.model.named_modules()
            if isinstance(module, nn.Linear) and name.startswith("stack.layers.") and name.endswith(READERS)
        ]
        self._old: dict[str, MapReading] = {}
        self._new: dict[int, dict[str, MapReading]] = {}

    def facts(self, seed: int) -> tuple[Windows, Windows]:
        """A world's text to learn, and the same facts in another order."""
        world = World.make(people=self.size.people, seed=seed)
        tokenizer, length = self.base.session.tokenizer, self.size.length
        texts = [" ".join(one.prose(PARAPHRASES)) for one in (world, replace(world, seed=seed + 1))]
        learn, judge = ([tokenizer.encode(text)] for text in texts)
        return cut(self.base.session, learn, length, 10**3), cut(
            self.base.session, judge, length, self.size.new
        )

    def readings(self, seed: int) -> tuple[dict[str, MapReading], dict[str, MapReading]]:
        """What the old text says of the maps, and what a world's text does."""
        if not self._old:
            self._old = read_maps(self.base.model, self.maps, self.base.train.batches(8))
        if seed not in self._new:
            learn, _ = self.facts(seed)
            self._new = {seed: read_maps(self.base.model, self.maps, learn.batches(8)[:2])}
        return self._old, self._new[seed]

    def rates(self, arm: Arm) -> tuple[float, ...]:
        """The learning rates that an arm may have."""
        return self.size.held_rates if arm.held else self.size.rates

    def tune(self, arm: Arm) -> Row:
        """The rate with the least bits per byte on the new text at the end."""
        tried = {rate: self.learn(arm, TUNING, rate, stops=())["new"][-1] for rate in self.rates(arm)}
        return {"rate": min(tried, key=lambda rate: tried[rate]), "tried": list(tried.values())}

    def learn(self, arm: Arm, seed: int, rate: float, stops: tuple[float, ...] | None = None) -> Row:
        """New and old bits per byte at every stop, first before any step; with () the last new ones alone."""
        model, size, (learn, judge) = self.base.model, self.size, self.facts(seed)
        before = {name: model.get_submodule(name).weight for name in self.maps}
        torch.manual_seed(seed)
        try:
            parameters = self.place(arm, seed)
            return {
                "parameters": sum(p.numel() for p in parameters),
                **self._curve(parameters, learn, judge, seed, rate, size.stops if stops is None else stops),
            }
        finally:
            merge_lora(model)
            for name, weight in before.items():
                model.get_submodule(name).weight = weight

    def _curve(
        self,
        parameters: list[nn.Parameter],
        learn: Windows,
        judge: Windows,
        seed: int,
        rate: float,
        shares: tuple[float, ...],
    ) -> Row:
        model = self.base.model
        optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
        generator = torch.Generator().manual_seed(seed)
        stops = {0, *(max(1, round(share * self.steps)) for share in shares)} if shares else set()
        result: Row = {"stops": sorted(stops), "new": [], "old": []}
        for step in range(self.steps + 1):
            if step in stops or step == self.steps:
                result["new"].append(statistics.fmean(bits_per_byte(model, judge)))
            if step in stops:
                result["old"].append(bits_per_byte(model, self.base.heldout))
            if step < self.steps:
                rows = torch.randint(len(learn.inputs), (self.size.batch,), generator=generator)
                loss = F.cross_entropy(model(learn.inputs[rows]).mT, learn.targets[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return result

    def place(self, arm: Arm, seed: int) -> list[nn.Parameter]:
        """Give the model an arm's adapters; the parameters that learn."""
        chosen = self.chosen(arm, seed)
        rank = self.size.rank * (1 if arm.layers == "all" else 2)
        maps = [name for name in self.maps if name.rsplit(".", 2)[0] in chosen]
        modules = [self.base.model.get_submodule(name) for name in maps]
        add_lora(modules, rank, alpha=rank)
        learning: list[nn.Parameter] = []
        shared: dict[int, Tensor] = {}
        for name, module in zip(maps, modules, strict=True):
            self._begin(arm, name, module, seed, shared)
            a, b = module.get_parameter("lora_a"), module.get_parameter("lora_b")
            a.requires_grad_(not arm.held)
            learning += [parameter for parameter in (a, b) if parameter.requires_grad]
        return learning

    @torch.no_grad()
    def _begin(self, arm: Arm, name: str, module: nn.Module, seed: int, shared: dict[int, Tensor]) -> None:
        """The first values of one adapter; maps that read one tensor have the same directions."""
        a, b = module.get_parameter("lora_a"), module.get_parameter("lora_b")
        if arm.start == "pissa":
            weight = module.get_parameter("weight")
            U, S, V = torch.svd_lowrank(weight, q=len(a) + 4, niter=4)
            b.copy_(U[:, : len(a)] * S[: len(a)].sqrt())
            a.copy_((V[:, : len(a)] * S[: len(a)].sqrt()).T)
            module.weight = nn.Parameter(weight - b @ a, requires_grad=False)
        elif arm.start != "random":
            old, new = (reading[name].A for reading in self.readings(seed))
            if id(old) not in shared:
                shared[id(old)] = adapter_directions(arm.start, old, new, len(a))
            a.copy_(shared[id(old)])

    def chosen(self, arm: Arm, seed: int) -> set[str]:
        """The layers that get an adapter."""
        if arm.layers == "all":
            return set(self.layers)
        old, new = self.readings(seed)
        energy: dict[str, Tensor] = {}
        for layer in self.layers:
            maps = [name for name in self.maps if name.rsplit(".", 2)[0] == layer]
            parts = [torch.tensor([new[name].energy, old[name].energy]) for name in maps]
            energy[layer] = torch.stack(parts).sum(0)
        order = sorted(self.layers, key=lambda layer: float(energy[layer][0] / energy[layer][1]))
        half = len(order) // 2
        return set(order[-half:] if arm.layers == "named" else order[:half])
