"""Why a causal bounded interface carries so little: hypotheses, each with the experiment that settles it.

    A  the shift is stricter than causality needs: a region that hears its own position is better
    B  at S = 8 inner regions get noise for gradients, and larger batches mend it
    C  what S = T gains is a learned smear: one more embedding, of the token before, does the same
    D  a message has no phase: the place in the segment should help to read it
    E  the authors' parameterisation as a package is better than ours
    F  short trainings flatter or wrong the interface: the preset long has four times the steps
    G  messages are used: without them, or with another row's, the loss rises
    H  an oracle: a trained dense model's stream, as the best linear reading of the canvas and of r numbers,
       per position (its own) and per segment (the tail of the one before), fed to the layers behind it
    I  messages collapse to a constant, and that is why they say little: keep them from it

Models: plain GPTs of six layers in three regions of two, on bytes, as in `interfaces.py` but smaller; CE in
nats a byte on held-out text, intervals over seeds (`verdicts.py`). B's coherence is the mean cosine of the
gradients of pairs of batches, half-way through the training, by layer of the first two regions. For H the
reading is fitted by ridge regression on training text; nothing is trained again, so it says what r numbers
hold, not what could be learned with them.

Source: "LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces" §3.1, Table 2; the hypotheses are
ours. Cost: `presets.py`. The preset small has larger batches (B), the preset long AdamW for the layers, as
the authors do (E), with controls that are trained so. Limits: small models, early in training.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from papers.fit import fit, trajectory
from papers.latent_bounded_interfaces.interface_relays import join_regions
from papers.latent_bounded_interfaces.interfaces import position_losses
from papers.outcome import Asked, Result, ResultTable, Row, check_seeds
from papers.staged_runs import bytes_config
from papers.verdicts import Claim, Interval, above
from topograd.data import Loader, Prepared, windows
from topograd.exec.train_step import train_step
from topograd.interfaces.ablation import Silence, silenced
from topograd.nn.gpt import GPT
from topograd.nn.preparation import prepare
from topograd.runs.config import TrainConfig
from topograd.runs.session import load_data
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan

REGIONS = "2,2,2"
SILENCES: tuple[Silence, ...] = ("zero", "shuffled", "mean")
PAIRS = 4
RIDGE = 1e-3


@dataclass(frozen=True)
class Model:
    """One model of the study."""

    name: str
    layers: int = 6
    kind: str | None = None
    """The kind of its interfaces; None for a dense model."""
    interface: str = ""
    smear: bool = False
    batch: int = 1
    """Rows over those of the others."""
    optimizer: str | None = None
    """Where it is not that of the settings."""


def models(context: int, preset: str = "small") -> tuple[Model, ...]:
    """Every model of a seed."""
    coarse, fine = "S=8,r=8,pool=tail", f"S={context},r=16,pool=tail"
    every = (
        Model("dense"),
        Model("shallow", layers=2),
        Model("dense + smear", smear=True),
        Model("shallow + smear", layers=2, smear=True),
        Model("S = 8", kind="segments", interface=coarse),
        Model("S = T", kind="segments", interface=fine),
        Model("own position", kind="own", interface=fine),
        Model("own position, steady", kind="steady", interface=fine),
        Model("S = 8, phase", kind="phase", interface=coarse),
        Model("S = 8, authors", kind="authors", interface=coarse),
    )
    more = {
        "small": (
            Model("dense, batch × 4", batch=4),
            Model("S = 8, batch × 4", kind="segments", interface=coarse, batch=4),
        ),
        "long": (
            Model("dense, AdamW", optimizer="adamw"),
            Model("shallow, AdamW", layers=2, optimizer="adamw"),
            Model("S = 8, authors, AdamW", kind="authors", interface=coarse, optimizer="adamw"),
        ),
    }
    return every + more.get(preset, ())


def run(args: Asked) -> Result:
    """Train every model with every seed, read what the hypotheses need, and judge each."""
    check_seeds(args.seeds)
    every = models(_config(args, 0).model.context, args.preset)
    rows: list[Row] = []
    for seed in range(args.seeds):
        for model in every:
            make = partial(measure, model, _config(args, seed))
            rows.append(args.kept.row({"model": model.name, "seed": seed}, make))
            args.on_more(len(rows), args.seeds * len(every))
    claims = tuple(_claims(rows))
    config = _config(args, 0)
    return Result(
        setting=(
            f"Six layers of width {config.model.width} in regions {REGIONS}, context {config.model.context}, "
            f"{config.steps} steps of {config.batch} rows of bytes."
        ),
        rows=rows,
        tables=(_table(rows), _silence_table(rows), _oracle_table(rows)),
        findings=tuple(_findings(rows, config)),
        claims=claims,
        seeds=args.seeds,
    )


def _config(args: Asked, seed: int) -> TrainConfig:
    return bytes_config(args, seed, batch=8, tiny_batch=2, eval_bytes=60_000)


def measure(model: Model, config: TrainConfig) -> Row:
    """Train a model; its loss, and whatever of B, G and H it can tell."""
    config, data = load_data(config)
    stack, plan = build(model, config)
    loader = Loader(data.train, config.model.context, config.batch * model.batch, config.seed)
    coherences: list[list[float]] = []

    def watch(step: int, *batch: object) -> None:
        if step == config.steps // 2 and model.layers > 2:
            coherences.append(coherence(stack, plan, data, config))

    optimizer = replace(config.optimizer, name=model.optimizer or config.optimizer.name)
    losses = fit(stack, plan, loader, config.steps, optimizer, watch)
    inputs, targets, _ = windows(data.heldout, data.tokenizer, config.model.context, config.eval_bytes)
    read = partial(_loss, stack, plan, inputs, targets)
    row: Row = {
        "model": model.name,
        "seed": config.seed,
        "ce": read(),
        "parameters": sum(p.numel() for p in stack.parameters()),
        "coherence": coherences[0] if coherences else None,
        "trajectory": trajectory(losses),
    }
    if model.kind is not None:
        for how in SILENCES:
            with silenced(stack, how):
                row[how] = read()
    if model.name == "dense":
        row["oracle"] = oracle(stack, data, config, inputs, targets)
    return row


def build(model: Model, config: TrainConfig) -> tuple[GPT, Plan]:
    """The model before its training; all of a seed have the same layers at first."""
    torch.manual_seed(config.seed)
    stack = GPT(config.gpt.changed(layers=model.layers, smear=model.smear))
    if model.kind is None:
        return stack, prepare(stack, Topology.chain(str(model.layers)))
    width, context = config.model.width, config.model.context
    join_regions(stack, model.kind, model.interface, len(REGIONS.split(",")), width, context)
    return stack, prepare(stack, Topology.regions(REGIONS))


def _loss(stack: GPT, plan: Plan, inputs: Tensor, targets: Tensor) -> float:
    return position_losses(stack, plan, inputs, targets).nanmean().item()


def coherence(stack: GPT, plan: Plan, data: Prepared, config: TrainConfig) -> list[float]:
    """For each of the first four layers: the mean cosine between gradients of pairs of batches."""
    loader = Loader(data.train, config.model.context, config.batch, config.seed + 1000)
    results: list[list[Tensor]] = []
    for _ in range(PAIRS):
        stack.zero_grad(set_to_none=True)
        train_step(stack, plan, *next(loader))
        results.append(
            [
                torch.cat([p.grad.flatten() for p in layer.parameters() if p.grad is not None])
                for layer in stack.layers[:4]
            ]
        )
    stack.zero_grad(set_to_none=True)
    pairs = list(itertools.combinations(results, 2))
    return [
        statistics.fmean(F.cosine_similarity(a[i], b[i], dim=0, eps=1e-30).item() for a, b in pairs)
        for i in range(4)
    ]


@torch.no_grad()
def oracle(
    stack: GPT, data: Prepared, config: TrainConfig, inputs: Tensor, targets: Tensor
) -> dict[str, dict[str, float]]:
    """CE of the last region behind a stream that was made of the canvas and r numbers, by way and by r."""
    learn = next(Loader(data.train, config.model.context, 64, config.seed + 2000))[0]
    x0, h = _stream(stack, learn)
    segment = config.model.context // 8
    result: dict[str, dict[str, float]] = {"own position": {}, "segment before": {}}
    mean = h.flatten(0, 1).mean(0)
    directions = torch.linalg.svd((h.flatten(0, 1) - mean).double(), full_matrices=False)[2].to(h.dtype)
    for name, rank in {"0": 0, "4": 4, "16": 16, "all": h.shape[-1]}.items():
        basis = directions[:rank].t()
        for way, values in result.items():
            read = _regression(_joined(x0, _message(way, (h - mean) @ basis, segment)), h)
            own_x0, own_h = _stream(stack, inputs)
            made = read(_joined(own_x0, _message(way, (own_h - mean) @ basis, segment)))
            values[name] = _behind(stack, made, inputs, targets)
    return result


def _stream(stack: GPT, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The canvas, and the hidden state behind the first two regions."""
    x0 = stack.embed(inputs)
    ctx, h = stack.layer_context(x0, inputs), x0
    for layer in stack.layers[:4]:
        h = layer(h, ctx)
    return x0, h


def _behind(stack: GPT, h: Tensor, inputs: Tensor, targets: Tensor) -> float:
    ctx = stack.layer_context(stack.embed(inputs), inputs)
    for layer in stack.layers[4:]:
        h = layer(h, ctx)
    return F.cross_entropy(stack.readout(h, 0).flatten(0, 1), targets.flatten()).item()


def _message(way: str, m: Tensor, segment: int) -> Tensor:
    return m if way == "own position" else _tails(m, segment)


def _tails(m: Tensor, segment: int) -> Tensor:
    """At every position, the message of the last position of the segment before; zero in the first."""
    tails = m[:, segment - 1 :: segment][:, :-1].repeat_interleave(segment, dim=1)
    return F.pad(tails, (0, 0, segment, 0))


def _joined(x0: Tensor, message: Tensor) -> Tensor:
    return torch.cat([x0, message, torch.ones_like(x0[..., :1])], dim=-1)


def _regression(inputs: Tensor, outputs: Tensor) -> Callable[[Tensor], Tensor]:
    """The linear map that reads `outputs` best from `inputs`, with a little decay."""
    x, y = inputs.flatten(0, 1).double(), outputs.flatten(0, 1).double()
    gram = x.t() @ x
    gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    weights = torch.linalg.solve(gram, x.t() @ y)
    return lambda given: (given.double() @ weights).to(given.dtype)


def of(rows: Sequence[Row], model: str, key: str = "ce") -> list[float]:
    """A reading of a model, seed by seed."""
    return [row[key] for row in rows if row["model"] == model]


def minus(rows: Sequence[Row], model: str, base: str, key: str = "ce") -> list[float]:
    """The reading of a model minus that of another, seed by seed."""
    return [a - b for a, b in zip(of(rows, model, key), of(rows, base, key), strict=True)]


class Comparison(NamedTuple):
    """A hypothesis that says of two models which is better."""

    name: str
    prediction: str
    better: str
    worse: str


COMPARISONS = (
    Comparison(
        "A: own position",
        "a region that hears its own position is better than one that hears the position before",
        "own position",
        "S = T",
    ),
    Comparison(
        "C: smear",
        "two layers with a smear are at least as good as the interface with S = T",
        "shallow + smear",
        "S = T",
    ),
    Comparison("D: phase", "a message that is read with its phase says more", "S = 8, phase", "S = 8"),
    Comparison(
        "E: parameterisation", "the authors' parameterisation is better than ours", "S = 8, authors", "S = 8"
    ),
    Comparison(
        "E: AdamW",
        "with AdamW, as published, the authors' interface is better than two layers alone",
        "S = 8, authors, AdamW",
        "shallow, AdamW",
    ),
    *(
        Comparison(
            f"F: {name} beats two layers",
            "regions that are joined by messages are better than the last of them alone",
            name,
            "shallow",
        )
        for name in ("S = 8", "S = 8, authors", "S = T")
    ),
    Comparison(
        "I: collapse",
        "messages that cannot collapse to a constant say more",
        "own position, steady",
        "own position",
    ),
)


def _claims(rows: Sequence[Row]) -> list[Claim]:
    """One or more for each hypothesis, in nats a byte where nothing else is said."""
    compared = [
        above(
            c.name, c.prediction, f"CE of {c.worse} minus that of {c.better}", minus(rows, c.worse, c.better)
        )
        for c in COMPARISONS
        if of(rows, c.better)
    ]
    used = [
        above(
            f"G: {name} is used",
            "another row's messages cost something",
            f"CE of {name} with the messages of another row minus its own",
            [row["shuffled"] - row["ce"] for row in rows if row["model"] == name],
        )
        for name in ("S = 8", "S = T", "own position")
    ]
    tails = above(
        "H: the segment's tail is not enough",
        "16 numbers of the segment before tell the later layers less than 16 of the position itself",
        "CE of the oracle per segment minus that per position",
        [o["segment before"]["16"] - o["own position"]["16"] for o in _oracles(rows)],
    )
    return sorted([*compared, *_noise_claims(rows), *used, tails], key=lambda claim: claim.name[0])


def _noise_claims(rows: Sequence[Row]) -> list[Claim]:
    """B: whether gradients of the first regions are noise, and whether larger batches mend it."""
    cosines = zip(_coherences(rows, "dense"), _coherences(rows, "S = 8"), strict=True)
    noise = above(
        "B: noise",
        "gradients of the first regions agree less between batches than the dense model's",
        "the mean cosine of the dense model minus that of S = 8",
        [statistics.fmean(a) - statistics.fmean(b) for a, b in cosines],
    )
    if not of(rows, "S = 8, batch × 4"):
        return [noise]
    gains = zip(
        minus(rows, "S = 8", "dense"), minus(rows, "S = 8, batch × 4", "dense, batch × 4"), strict=True
    )
    larger = above(
        "B: larger batches",
        "with four times the rows the interface comes nearer to the dense model",
        "its distance to the dense model minus the same with four times the rows",
        [small - large for small, large in gains],
    )
    return [noise, larger]


def _coherences(rows: Sequence[Row], model: str) -> list[list[float]]:
    return [row["coherence"] for row in rows if row["model"] == model]


def _oracles(rows: Sequence[Row]) -> list[dict[str, dict[str, float]]]:
    return [row["oracle"] for row in rows if "oracle" in row]


def _table(rows: Sequence[Row]) -> ResultTable:
    cells = []
    for name in dict.fromkeys(row["model"] for row in rows):
        own = of(rows, name)
        dense, shallow = (Interval.of(minus(rows, name, base)).mean for base in ("dense", "shallow"))
        cosines = [statistics.fmean(one) for one in _coherences(rows, name) if one is not None]
        cosine = f"{statistics.fmean(cosines):.2f}" if cosines else "–"
        spread = f"{statistics.stdev(own):.4f}" if len(own) > 1 else "–"
        cells.append(
            (name, f"{statistics.fmean(own):.4f}", spread, f"{dense:+.4f}", f"{shallow:+.4f}", cosine)
        )
    header = ("model", "CE", "±", "to dense", "to shallow", "cosine of gradients")
    return ResultTable("Nats per byte of held-out text", header, tuple(cells))


def _silence_table(rows: Sequence[Row]) -> ResultTable:
    names = [name for name in dict.fromkeys(row["model"] for row in rows) if _has(rows, name, "zero")]
    cells = tuple(
        (name, *(f"{statistics.fmean(of(rows, name, key)):.4f}" for key in ("ce", *SILENCES)))
        for name in names
    )
    caption = "What the last region hears, changed at evaluation"
    return ResultTable(caption, ("model", "as it is", *SILENCES), cells)


def _has(rows: Sequence[Row], model: str, key: str) -> bool:
    return any(key in row for row in rows if row["model"] == model)


def _oracle_table(rows: Sequence[Row]) -> ResultTable:
    result = _oracles(rows)
    ranks = list(result[0]["own position"])
    cells = tuple(
        (way, *(f"{statistics.fmean(one[way][rank] for one in result):.4f}" for rank in ranks))
        for way in ("own position", "segment before")
    )
    return ResultTable("The dense model behind a stream of the canvas and r numbers", ("way", *ranks), cells)


def _findings(rows: Sequence[Row], config: TrainConfig) -> list[str]:
    gain = statistics.fmean(minus(rows, "shallow", "dense"))
    retained = {
        name: statistics.fmean(minus(rows, "shallow", name)) / gain
        for name in ("S = 8", "S = T", "own position")
    }
    shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in retained.items())
    return [
        f"Depth is worth {gain:.4f} nats at {config.steps} steps (F); of that the interfaces keep: {shares}.",
        "Longer trainings and AdamW: --preset long. Encoders: study masked-encoder.",
    ]
