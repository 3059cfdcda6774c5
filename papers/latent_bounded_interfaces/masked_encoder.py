"""A bounded interface in an encoder, where pooling the whole sequence is legitimate.

In a language model the published interface reads the future (`leak.py`), and causal ones carry little
(`interface_hypotheses.py`). A masked model may read everything: attention sees all positions, a share of the
bytes is hidden, and the loss is that of the hidden ones. So the published form, one state of r numbers for
the whole sequence, is no cheat here. What is it worth?

    dense             six layers
    shallow           two layers, which is all that a silent interface leaves
    whole, r          regions 2,2,2 joined by the mean of the sequence in r numbers (LBI, eqs. 4-5)
    own position, r   the same with r numbers for every position: S = T without a shift

    share kept = (CE shallow - CE of the arm) / (CE shallow - CE dense)

Whether messages are heard is read by giving each row another row's. That the scan is exact with attention
both ways is read as well: the largest difference between its gradients and autograd's, over the largest
gradient, in float64.

Models: plain GPTs of six layers on bytes, without the causal mask and with one more token, the mask. Shapes:
inputs and targets (rows, time), targets -100 where nothing is hidden. Hidden places are drawn anew for each
batch, and once for the held-out text. Source: "LBI: Parallel Scan Backpropagation via Latent Bounded
Interfaces" §3.1; the question is ours. Cost: `presets.py`. Limits: small models, early in training; what a
hidden byte needs is mostly near it, so tasks about whole sequences may use a whole state better.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from papers.fit import fit, trajectory
from papers.latent_bounded_interfaces.interface_hypotheses import REGIONS, Model, minus, of
from papers.latent_bounded_interfaces.interface_relays import join_regions
from papers.latent_bounded_interfaces.interfaces import position_losses
from papers.outcome import Asked, Result, ResultTable, Row, check_seeds
from papers.staged_runs import bytes_config
from papers.verdicts import Claim, above
from topograd.data import Loader, windows
from topograd.data.masked import HIDDEN, hide
from topograd.exec.gradient import Autograd
from topograd.exec.train_step import train_step
from topograd.interfaces.ablation import silenced
from topograd.interfaces.engines import Scan
from topograd.nn.config import GPTConfig
from topograd.nn.gpt import Encoder
from topograd.nn.preparation import prepare
from topograd.runs.config import TrainConfig
from topograd.runs.session import load_data
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan

WHOLE = "S=1,r={},pool=mean,causal=false"
MODELS = (
    Model("dense"),
    Model("shallow", layers=2),
    Model("whole, r = 16", kind="segments", interface=WHOLE.format(16)),
    Model("whole, r = 48", kind="segments", interface=WHOLE.format(48)),
    Model("own position, r = 16", kind="own", interface="S=2,r=16,pool=tail"),
)
JOINED = tuple(model.name for model in MODELS if model.kind is not None)


def run(args: Asked) -> Result:
    """Train every model with every seed, and judge."""
    check_seeds(args.seeds)
    rows: list[Row] = []
    for seed in range(args.seeds):
        for model in MODELS:
            make = partial(measure, model, _config(args, seed))
            rows.append(args.kept.row({"model": model.name, "seed": seed}, make))
            args.on_more(len(rows), args.seeds * len(MODELS))
    claims = tuple(_claims(rows))
    config = _config(args, 0)
    return Result(
        setting=(
            f"Six layers of width {config.model.width} in regions {REGIONS}, attention both ways, context "
            f"{config.model.context}, {config.steps} steps of {config.batch} rows of bytes, {HIDDEN:.0%} "
            "of them hidden."
        ),
        rows=rows,
        tables=(_table(rows),),
        findings=tuple(_findings(rows)),
        claims=claims,
        seeds=args.seeds,
    )


def _config(args: Asked, seed: int) -> TrainConfig:
    return bytes_config(args, seed, batch=16, tiny_batch=2, eval_bytes=120_000)


def build(model: Model, config: GPTConfig, seed: int) -> tuple[Encoder, Plan]:
    """The model before its training; all of a seed have the same layers at first."""
    torch.manual_seed(seed)
    stack = Encoder(replace(config, layers=model.layers, vocab=config.vocab + 1))
    if model.kind is None:
        return stack, prepare(stack, Topology.chain(str(model.layers)))
    join_regions(stack, model.kind, model.interface, len(REGIONS.split(",")), config.width, config.context)
    return stack, prepare(stack, Topology.regions(REGIONS))


def measure(model: Model, config: TrainConfig) -> Row:
    """Train a model; its loss on hidden bytes, with another row's messages too, and the scan's error."""
    config, data = load_data(config)
    stack, plan = build(model, config.gpt, config.seed)
    token, draw = config.model.vocab, torch.Generator().manual_seed(config.seed)
    loader = Loader(data.train, config.model.context, config.batch, config.seed)
    batches: Iterator[tuple[Tensor, Tensor]] = (hide(inputs, token, draw) for inputs, _ in loader)
    losses = fit(stack, plan, batches, config.steps, config.optimizer)
    text, _, _ = windows(data.heldout, data.tokenizer, config.model.context, config.eval_bytes)
    inputs, targets = hide(text, token, torch.Generator().manual_seed(0))
    row: Row = {
        "model": model.name,
        "seed": config.seed,
        "ce": position_losses(stack, plan, inputs, targets).nanmean().item(),
        "trajectory": trajectory(losses),
    }
    if model.kind is not None:
        with silenced(stack, "shuffled"):
            row["shuffled"] = position_losses(stack, plan, inputs, targets).nanmean().item()
    if model.kind == "segments":
        row["scan_error"] = scan_error(stack.double(), plan, inputs[:2], targets[:2])
    return row


def scan_error(stack: Encoder, plan: Plan, inputs: Tensor, targets: Tensor) -> float:
    """The largest difference between gradients by scan and by autograd, over the largest gradient."""
    results: list[list[Tensor]] = []
    for engine in (Autograd(), Scan()):
        stack.zero_grad(set_to_none=True)
        train_step(stack, plan, inputs, targets, gradient=engine)
        results.append([p.grad.clone() for p in stack.parameters() if p.grad is not None])
    stack.zero_grad(set_to_none=True)
    wrong = max((a - b).abs().max().item() for a, b in zip(*results, strict=True))
    return wrong / max(a.abs().max().item() for a in results[0])


def kept(rows: Sequence[Row], model: str) -> list[float]:
    """The share of what depth is worth that a model keeps, by seed."""
    gains = zip(minus(rows, "shallow", model), minus(rows, "shallow", "dense"), strict=True)
    return [own / whole for own, whole in gains]


def _claims(rows: Sequence[Row]) -> list[Claim]:
    """In nats a hidden byte where nothing else is said."""
    whole, own = "whole, r = 16", "own position, r = 16"
    return [
        above(
            "depth",
            "six layers are better than two",
            "CE of the shallow model minus that of the dense one",
            minus(rows, "shallow", "dense"),
        ),
        above(
            "a whole state is heard",
            "another sequence's state costs something",
            f"CE of {whole} with the messages of another row minus its own",
            [row["shuffled"] - row["ce"] for row in rows if row["model"] == whole],
        ),
        above(
            "a whole state helps",
            "regions that are joined by the mean of the sequence are better than the last of them alone",
            f"CE of the shallow model minus that of {whole}",
            minus(rows, "shallow", whole),
        ),
        above(
            "a whole state carries depth",
            "it keeps more than half of what depth is worth",
            f"the share kept by {whole} minus 0.5",
            [share - 0.5 for share in kept(rows, whole)],
        ),
        above(
            "positions carry more",
            "as many numbers for every position are better than for the whole",
            f"CE of {whole} minus that of {own}",
            minus(rows, whole, own),
        ),
    ]


def _table(rows: Sequence[Row]) -> ResultTable:
    cells = []
    for name in dict.fromkeys(row["model"] for row in rows):
        own = of(rows, name)
        spread = f"{statistics.stdev(own):.4f}" if len(own) > 1 else "–"
        share = f"{statistics.fmean(kept(rows, name)):.2f}" if name in JOINED else "–"
        other = f"{statistics.fmean(of(rows, name, 'shuffled')):.4f}" if name in JOINED else "–"
        cells.append((name, f"{statistics.fmean(own):.4f}", spread, share, other))
    header = ("model", "CE", "±", "share of depth kept", "CE with another row's messages")
    return ResultTable("Nats per hidden byte of held-out text", header, tuple(cells))


def _findings(rows: Sequence[Row]) -> list[str]:
    gain = statistics.fmean(minus(rows, "shallow", "dense"))
    message = ", ".join(f"{name} {100 * statistics.fmean(kept(rows, name)):.0f} %" for name in JOINED)
    worst_error = max(row["scan_error"] for row in rows if "scan_error" in row)
    return [
        f"Depth is worth {gain:.4f} nats a hidden byte; of that the interfaces keep: {message}.",
        f"With attention both ways the scan's gradients are autograd's to {worst_error:.1e} (float64).",
    ]
