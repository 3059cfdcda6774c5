"""Whether the published interface can learn to say something, and why it says nothing in an encoder of text.

Statement. In an encoder of text nobody reads the published module's messages (`interface_verdict.py`). Either
the module is wrong, or training loses its messages, or they have nothing to say. Two tasks tell which:

    planted    a row's first token is one of four labels, the last four tokens are hidden, and what stood
               there is the label. A layer sees two positions each way, so that all six together see 12, and
               the label lies 28 away: only a message, which pools the whole row, can bring it
    text       hidden bytes of text, the encoder of `interface_verdict.py`, with its rate of the matrices

each with several learning rates of the interface: 0.01 is what tuning chose for text after 400 steps. Read
are the loss, the loss with another row's messages, and the spread of the messages over the data: the root
mean square around their mean, 0 where a message tells nothing (at most about the gain of their LayerNorm).

What a rate can do: LN makes the scale of m_k + tanh(α) Enc(...) free. A part of it that is the same for all
rows helps at once, as a bias of the next region; steps of fixed size let it grow, and then the part that
differs from row to row is small beside it, with all gradients through it.

The claims are in `_claims` and were set before the first run; exploring them used other seeds and sizes.
Source: "LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces" §3.1, eqs. 4-5; the question is
ours, as is the planted task.
Cost: `presets.py`. Limits: a planted task shows that the module can be trained, not what text would need.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from topograd.nn.encoder import Encoder
from torch import Tensor

from papers.fit import fit
from papers.latent_bounded_interfaces import interface_verdict
from papers.latent_bounded_interfaces.interface_verdict import ARMS, REGIONS, message_spreads
from papers.latent_bounded_interfaces.interfaces import position_losses
from papers.outcome import Asked, Result, ResultTable, Row, check_seeds
from papers.staged_runs import bytes_config
from papers.verdicts import Claim, above, percent, within
from topograd.interfaces.ablation import silenced
from topograd.nn.config import GPTConfig
from topograd.nn.interface_config import parse_interface
from topograd.nn.preparation import prepare
from topograd.nn.stack import LayerContext
from topograd.runs.config import OptimizerConfig
from topograd.topology.dag import Topology

LABELS, FILLERS, HIDDEN = 4, 8, 4
REACH = 2
"""Positions that a layer sees each way."""
TIME = 32
RANK = 16
RATES = (0.0003, 0.001, 0.01)
"""Of the planted task's interfaces; text has the first and the last."""
SLOW, FAST = RATES[0], RATES[-1]
CHANCE = math.log(LABELS)
FIRST_SEED = 10


class Near(Encoder):
    """An encoder whose layers see `REACH` positions each way."""

    def layer_context(self, x0: Tensor, inputs: Tensor, offset: int | Tensor = 0) -> LayerContext:
        ctx = super().layer_context(x0, inputs, offset)
        place = torch.arange(x0.shape[1])
        return replace(ctx, mask=(place[:, None] - place).abs() <= REACH)


def planted(rows: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows whose first token is told by the last ones."""
    inputs = torch.randint(LABELS, LABELS + FILLERS, (rows, TIME), generator=draw)
    inputs[:, :1] = labels = torch.randint(LABELS, (rows, 1), generator=draw)
    inputs[:, -HIDDEN:] = LABELS + FILLERS
    targets = torch.full_like(inputs, -100)
    targets[:, -HIDDEN:] = labels
    return inputs, targets


def measure_planted(rate: float | None, width: int, steps: int, seed: int) -> Row:
    """Train on the planted task, the published interface at this rate or the dense model."""
    torch.manual_seed(seed)
    config = GPTConfig(layers=6, width=width, heads=2, vocab=LABELS + FILLERS + 1, context=TIME)
    plain = replace(config, head_std=0.0, smear=False, x0_blend=False, value_embeddings="none")
    stack, words = Near(plain), f"published:r={RANK}"
    regions = Topology.regions(REGIONS, words, first_region=parse_interface(words).first_region)
    plan = prepare(stack, Topology.chain("6") if rate is None else regions)
    draw = torch.Generator().manual_seed(seed)
    batches: Iterator[tuple[Tensor, Tensor]] = (planted(16, draw) for _ in range(steps))
    fit(stack, plan, batches, steps, OptimizerConfig(lr_matrix=0.003, lr_relay=rate or SLOW))
    inputs, targets = planted(128, torch.Generator().manual_seed(0))
    row: Row = {"ce": position_losses(stack, plan, inputs, targets).nanmean().item()}
    if rate is not None:
        with silenced(stack, "shuffled"):
            row["shuffled"] = position_losses(stack, plan, inputs, targets).nanmean().item()
        row["spread"] = message_spreads(stack, plan, inputs)
    return row


def measure_text(args: Asked, arm: str, rate: float, seed: int) -> Row:
    """The encoder of text with the interface's rate."""
    config = bytes_config(args, seed, batch=8, tiny_batch=2, eval_bytes=60_000, steps=args.parts("steps")[1])
    matrices = 0.01 if arm == "dense" else 0.02  # as tuned in `interface_verdict.py`
    rates = OptimizerConfig(lr_matrix=matrices, lr_relay=rate)
    row = interface_verdict.measure(ARMS[f"encoder, {arm}"], config, rates)
    return {name: row[name] for name in ("ce", "shuffled", "spread") if name in row}


def run(args: Asked) -> Result:
    """Every arm of both tasks with every seed, and the claims."""
    check_seeds(args.seeds)
    steps, width = args.parts("steps")[0], 32 if args.preset != "tiny" else 8
    rows: list[Row] = []
    todo = [("planted", None, "dense"), *(("planted", rate, "published") for rate in RATES)]
    todo += [("text", SLOW, "dense"), ("text", SLOW, "shallow")]
    todo += [("text", rate, "published") for rate in (SLOW, FAST)]
    for seed in range(FIRST_SEED, FIRST_SEED + args.seeds):
        for task, rate, arm in todo:
            key = {"task": task, "arm": arm, "rate": rate, "seed": seed}
            if task == "planted":
                make = partial(measure_planted, rate, width, steps, seed)
            else:
                make = partial(measure_text, args, arm, rate or SLOW, seed)
            rows.append(key | args.kept.row(key, make))
            args.on_more(len(rows), args.seeds * len(todo))
    return Result(
        setting=f"Six layers in regions {REGIONS}: a planted label, {steps} steps; text, "
        f"{args.parts('steps')[1]} steps of width {args.width}.",
        rows=rows,
        tables=(_table(rows),),
        claims=tuple(_claims(rows)),
        seeds=args.seeds,
    )


def of(rows: Sequence[Row], task: str, arm: str, rate: float | None, key: str = "ce") -> list[float]:
    """A reading by seed; of the spreads, the last boundary's."""
    wanted = (task, arm, rate)
    found = [row[key] for row in rows if (row["task"], row["arm"], row["rate"]) == wanted]
    return [value[-1] if key == "spread" else value for value in found]


def kept(rows: Sequence[Row], rate: float) -> list[float]:
    """The share of what depth is worth on text, by seed."""
    dense, shallow = (of(rows, "text", arm, SLOW) for arm in ("dense", "shallow"))
    own = of(rows, "text", "published", rate)
    return [(s - o) / (s - d) for d, s, o in zip(dense, shallow, own, strict=True)]


def _claims(rows: Sequence[Row]) -> list[Claim]:
    def minus(left: tuple[str, float, str], right: tuple[str, float, str]) -> list[float]:
        (task, rate, key), (other_task, other_rate, other_key) = left, right
        ours = of(rows, task, "published", rate, key)
        theirs = of(rows, other_task, "published", other_rate, other_key)
        return [a - b for a, b in zip(ours, theirs, strict=True)]

    learned = [CHANCE - ce for ce in of(rows, "planted", "published", SLOW)]
    return [
        within(
            "only a message can tell",
            "the dense model does not know the label",
            "chance minus the dense model's loss",
            [CHANCE - ce for ce in of(rows, "planted", "dense", None)],
            0.05,
        ),
        above(
            "the published interface learns it",
            f"at the rate {SLOW:g} its loss is below a tenth of chance",
            "chance minus its loss",
            learned,
            0.9 * CHANCE,
        ),
        above(
            "messages tell it",
            "with another row's messages it is worse than chance",
            "its loss with another row's messages minus chance",
            [loss - CHANCE for loss in of(rows, "planted", "published", SLOW, "shuffled")],
        ),
        above(
            "a fast interface loses its messages",
            f"at the rate {FAST:g} they differ less from row to row",
            f"spread of the last message at {SLOW:g} minus that at {FAST:g}",
            minus(("planted", SLOW, "spread"), ("planted", FAST, "spread")),
        ),
        above(
            "on text too",
            f"at the rate {FAST:g} they differ less from row to row",
            f"spread of the last message at {SLOW:g} minus that at {FAST:g}",
            minus(("text", SLOW, "spread"), ("text", FAST, "spread")),
        ),
        above(
            "on text messages are used at the slow rate",
            "another row's messages cost something",
            "the loss with another row's messages minus its own",
            minus(("text", SLOW, "shuffled"), ("text", SLOW, "ce")),
        ),
        above(
            "the slow rate is better on text",
            "messages that live keep more of depth",
            f"the loss at {FAST:g} minus that at {SLOW:g}",
            minus(("text", FAST, "ce"), ("text", SLOW, "ce")),
        ),
        above(
            "the slow rate beats shallow on text",
            "the interface beats the last region alone",
            f"the share of depth that is kept at {SLOW:g}",
            kept(rows, SLOW),
        ),
    ]


def _table(rows: Sequence[Row]) -> ResultTable:
    cells = []
    for task, arm, rate in dict.fromkeys((row["task"], row["arm"], row["rate"]) for row in rows):
        joined = arm == "published"
        own = of(rows, task, arm, rate)
        cells.append(
            (
                f"{task}, {arm}" + (f", rate {rate:g}" if joined else ""),
                f"{statistics.fmean(own):.4f}",
                f"{statistics.fmean(of(rows, task, arm, rate, 'shuffled')):.4f}" if joined else "–",
                f"{statistics.fmean(of(rows, task, arm, rate, 'spread')):.1e}" if joined else "–",
                percent(kept(rows, rate)) if joined and task == "text" else "–",
            )
        )
    header = ("task and arm", "loss", "with another row's messages", "spread of the last message")
    return ResultTable("Nats of a hidden token", (*header, "share of depth kept, 90 %"), tuple(cells))
