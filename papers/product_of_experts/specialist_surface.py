"""How deep a specialist should be for how much text: layers against tokens on a frozen base.

A specialist of L layers with a head of its own (L = 0: the head alone) learns N tokens of a new text behind a
frozen base. What it predicts is read on windows of other files, as bits per byte by window:

    gain(L, N) = BPB of the base - BPB of base and specialist

The new text is C++, the headers that torch is installed with; a tenth of the files judges. The N tokens are
the first N / CONTEXT of the learned windows in an order that is drawn once: less text is part of more.
The base runs once: its last states of every window are kept (`training/activation_cache.py`), and each
training reads them. The specialist, its optimizer and its schedule are the product's (`topograd specialist
finetune`); all rates are those times one factor, the best of `FACTORS` (which grow where the best is at an
end), with one layer and the least text, on a seed and on windows that judge nothing.

Claims, set before the run, with the intervals of `verdicts.py` over seeds, or over the held-out windows where
there is one seed:

    head alone      gain(0, least N) is above 0
    more text       for each L, gain(L, most N) less gain(L, least N) is above 0
    depth pays      gain(6, most N) less gain(1, most N) is above 0
    and with text   what 6 layers gain on 1 is more with most N than with least N: the difference is above 0

Cost: a specialist costs its layers and the readout, 6 multiply-adds a parameter and token, and Muon's steps.
Minutes are in `presets.py`: small is the reference model with 10^4 and 10^5 tokens, three seeds; long is
SmolLM2 with 10^4 and 3 · 10^4, one seed.
Source: "Product of Experts" §6.6 has one depth and one size. Limits: one text; one factor for all depths;
passes over the text (`Size.passes`) fall as it grows, so that steps grow less than tokens; windows of one
file are not independent.
"""

from __future__ import annotations

import math
import statistics
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from papers.beyond.bases import Windows, cut, folders
from papers.fit import best_between
from papers.outcome import Asked, Result, ResultTable, Row
from papers.verdicts import Claim, Drawing, Interval, Series, above, each
from topograd.errors import DivergenceError
from topograd.exec.forward import Predictor, evaluating
from topograd.exec.linear_cross_entropy import chunk_tokens
from topograd.runs.session import LoadedTextRun, open_session
from topograd.specialists.attach import Attached, attach, new_specialist, open_specialist
from topograd.specialists.composition import composed
from topograd.specialists.finetune import NAME
from topograd.specialists.settings import FineTune
from topograd.training.activation_cache import (
    CachedActivationLoader,
    HiddenStates,
    StateBatch,
    compute_states,
)
from topograd.training.optimizers import make_optimizers
from topograd.training.step_runner import StepRunner

DEPTHS = (0, 1, 2, 6)
FACTORS = (1.0, 3.0, 9.0)
"""Of the product's rates, of which each base takes the best."""
TUNING = 100
LEAST_CHARACTERS = 500
"""Of a header; shorter ones are lists of includes."""


@dataclass(frozen=True)
class Size:
    """How much of everything for one base."""

    passes: Mapping[int, int]
    """By tokens of new text: how often it is read."""
    context: int = 256
    batch: int = 8
    heldout: int = 48
    """Windows that judge; as many others choose the factor."""
    depths: tuple[int, ...] = DEPTHS

    @property
    def least(self) -> int:
        return min(self.passes)

    @property
    def most(self) -> int:
        return max(self.passes)


SIZES: Mapping[str, Mapping[str, Size]] = {
    "tiny": {"reference": Size({32: 1, 64: 1}, 16, 2, 2, (0, 1, 2))},
    "small": {"reference": Size({10**4: 8, 10**5: 2})},
    "long": {"smollm2": Size({10**4: 2, 3 * 10**4: 1}, batch=4, heldout=24)},
}


def run(args: Asked) -> Result:
    """Every depth with every size on each base, seed by seed."""
    found = folders(args)
    sizes = {name: size for name, size in SIZES[args.preset].items() if name in found}
    total = sum(len(size.depths) * len(size.passes) for size in sizes.values()) * args.seeds
    rows = list[Row]()
    with tempfile.TemporaryDirectory() as temporary:
        for name, size in sizes.items():
            surface = Surface(name, open_session(found[name]), size, args, Path(temporary))
            for row in surface.rows():
                rows.append(row)
                args.on_more(len(rows), total)
    return Result(
        setting=f"Bases: {', '.join(sizes)}. New text: C++ headers of torch. "
        + " ".join(_setting(name, size) for name, size in sizes.items()),
        rows=rows,
        tables=tuple(table(name, size, rows) for name, size in sizes.items()),
        drawing=drawing(rows, next(iter(sizes.items()))),
        claims=tuple(claim for name, size in sizes.items() for claim in claims(name, size, rows)),
        seeds=args.seeds,
    )


def _setting(name: str, size: Size) -> str:
    passes = ", ".join(f"{number} of {tokens:,} tokens" for tokens, number in size.passes.items())
    return f"{name}: passes {passes}; steps of {size.batch} windows of {size.context}."


def headers() -> tuple[list[str], list[str]]:
    """(to learn, held out): headers of torch and c10 by name, every tenth held out."""
    root = Path(sysconfig.get_path("purelib")) / "torch" / "include"
    files = sorted((*(root / "torch" / "csrc").rglob("*.h"), *(root / "c10").rglob("*.h")))
    texts = [text for file in files if len(text := file.read_text(errors="replace")) >= LEAST_CHARACTERS]
    return [text for i, text in enumerate(texts) if i % 10], texts[::10]


class Surface:
    """One base with its new text, and the states that it has on it."""

    def __init__(self, name: str, session: LoadedTextRun, size: Size, args: Asked, place: Path) -> None:
        self.name, self.session, self.size, self.args = name, session, size, args
        self.temporary = place
        kept = args.kept.file
        self.place = (place if kept is None else kept.parent) / f"surface-{args.preset}-{name}"
        (stage, _), *others = session.plan.prediction.full
        assert not others, "the base predicts by one stage"
        self.layer = session.plan.topology.stages[stage].stop

    def rows(self) -> list[Row]:
        """The base, and every cell."""
        factor = best_between(FACTORS, self._tuning_loss)
        cells: list[Row] = [
            {"layers": layers, "tokens": tokens, "seed": seed, "factor": factor}
            for seed in range(self.args.seeds)
            for tokens in self.size.passes
            for layers in self.size.depths
        ]
        base: Row = self._kept({"base alone": True}, lambda: {"bpb": self.base_bpb()})
        return [
            {**cell, "before": base["bpb"], **self._kept(cell, partial(self.cell, **cell))} for cell in cells
        ]

    def _kept(self, key: Row, make: Any) -> Row:
        return {"base": self.name, **self.args.kept.row({"base": self.name, **key}, make)}

    def _tuning_loss(self, factor: float) -> float:
        key = {"layers": 1, "tokens": self.size.least, "seed": TUNING, "factor": factor}
        try:
            made = self._kept(key, lambda: self.cell(1, self.size.least, TUNING, factor, part=1))
        except DivergenceError:
            return math.inf
        return statistics.fmean(made["bpb"])

    @cached_property
    def learned(self) -> Windows:
        """The windows to learn, in an order that is drawn once."""
        text = self._windows(headers()[0], self.size.most // self.size.context)
        order = torch.randperm(len(text.inputs), generator=torch.Generator().manual_seed(0))
        return Windows(*(x[order] for x in (text.inputs, text.targets, text.nbytes)))

    @cached_property
    def judges(self) -> Windows:
        """The windows that judge, and between them those that choose the rates."""
        return self._windows(headers()[1], 2 * self.size.heldout)

    def _windows(self, texts: Sequence[str], rows: int) -> Windows:
        encoded = self.session.tokenizer.encode_batch(list(texts))
        return cut(self.session, encoded, self.size.context, rows)

    def states(self, text: Windows, name: str) -> HiddenStates:
        """The base's last states of every window, computed once."""
        return compute_states(
            self.place / name,
            self.session.stack,
            text.inputs,
            text.targets,
            base=self.session.weights,
            layers=[self.layer],
        )

    def base_bpb(self) -> list[float]:
        return self._read(attach(self.session, []), {})

    def cell(self, layers: int, tokens: int, seed: int, factor: float, part: int = 0) -> Row:
        """Train one specialist; its bits per byte by window, and how many parameters learned."""
        folder = Path(tempfile.mkdtemp(dir=self.temporary)) / "specialist"
        new_specialist(folder, self.session, layers=layers, seed=seed)
        attached = attach(self.session, {NAME: open_specialist(folder)})
        windows = max(tokens // self.size.context, 1)
        steps = max(windows * self.size.passes[tokens] // self.size.batch, 1)
        losses = self.train(attached, windows, steps, seed, factor)
        return {
            "bpb": self._read(attached, {NAME: 1.0}, part),
            "parameters": sum(p.numel() for p in attached.part(NAME).parameters()),
            "steps": steps,
            "loss": statistics.fmean(losses[-max(steps // 10, 1) :]),
        }

    def train(self, attached: Attached, windows: int, steps: int, seed: int, factor: float) -> list[float]:
        """So many steps on the first windows, as `FineTuning` takes them; the loss of each."""
        rates = FineTune()
        settings = FineTune(rate=factor * rates.rate, head_rate=factor * rates.head_rate)
        optimizer = settings.optimizer(self.session.config.optimizer)
        plan = composed(attached, {NAME: 1.0})
        loop = StepRunner(attached.stack, make_optimizers(attached.stack, optimizer), clip=optimizer.clip)
        store = First(self.states(self.learned, "learned"), windows)
        loader = CachedActivationLoader(store, min(self.size.batch, windows), seed)
        losses = []
        attached.stack.train()
        for step in range(steps):
            loop.optimizers.set_rates(step, steps)
            done = loop.step(plan, [next(loader)], step + 1)
            losses.append(float(done.losses[attached.stages[NAME]]))
        attached.stack.eval()
        return losses

    @torch.no_grad()
    def _read(self, attached: Attached, weights: Mapping[str, float], part: int = 0) -> list[float]:
        """Bits per byte of every second held-out window, from the base's states."""
        store = self.states(self.judges, "judges")
        model = Predictor(attached.stack, composed(attached, weights))
        (stage, _), *_ = model.plan.prediction.full
        head = model.plan.stages[stage].head
        rows = range(part, len(store), 2)
        nats = []
        with evaluating(attached.stack):
            for i in rows:
                batch = store.rows([i])
                h = model.outputs(batch.inputs, batch.states)[stage][0]
                y = batch.targets[0]
                chunks = zip(*(x.split(chunk_tokens(attached.vocabulary.size)) for x in (h, y)), strict=True)
                losses = (
                    F.cross_entropy(attached.stack.readout(a, head), b, reduction="sum") for a, b in chunks
                )
                nats.append(sum(map(float, losses)))
        nbytes = self.judges.nbytes.tolist()
        return [value / math.log(2) / nbytes[i] for i, value in zip(rows, nats, strict=True)]


@dataclass(frozen=True)
class First:
    """The first windows of what is kept."""

    kept: HiddenStates
    windows: int

    def __len__(self) -> int:
        return min(self.windows, len(self.kept))

    def rows(self, chosen: Any) -> StateBatch:
        return self.kept.rows(chosen)


def gains(name: str, rows: Sequence[Row], layers: int, tokens: int) -> list[float]:
    """Bits per byte below the base's: by seed, or by window where there is one seed."""
    cells = [row for row in rows if (row["base"], row["layers"], row["tokens"]) == (name, layers, tokens)]
    windows = [[a - b for a, b in zip(row["before"], row["bpb"], strict=True)] for row in cells]
    return windows[0] if len(windows) == 1 else [statistics.fmean(each) for each in windows]


def _minus(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(left, right, strict=True)]


def claims(name: str, size: Size, rows: Sequence[Row]) -> list[Claim]:
    """Whether the head alone learns, text helps, and depth pays, and with text more."""
    gain = partial(gains, name, rows)
    deep = size.depths[-1]
    pays = {tokens: _minus(gain(deep, tokens), gain(1, tokens)) for tokens in (size.least, size.most)}
    more = [_minus(gain(layers, size.most), gain(layers, size.least)) for layers in size.depths]
    few, many = f"{size.least:,}", f"{size.most:,}"
    return [
        above(
            f"{name}: head alone",
            "a specialist without layers learns",
            f"bits per byte won by a head alone from {few} tokens",
            gain(0, size.least),
        ),
        each(
            f"{name}: more text",
            "every depth learns more from more text",
            f"what {many} tokens win less what {few} do, at {', '.join(map(str, size.depths))} layers",
            more,
        ),
        above(
            f"{name}: depth pays",
            "more layers win more where there is most text",
            f"what {deep} layers win less what one does, from {many} tokens",
            pays[size.most],
        ),
        above(
            f"{name}: and with text more",
            "depth is worth more the more text there is",
            f"what {deep} layers win on one from {many} tokens less the same from {few}",
            _minus(pays[size.most], pays[size.least]),
        ),
    ]


def table(name: str, size: Size, rows: Sequence[Row]) -> ResultTable:
    """Gains with their intervals: a line for each depth."""
    own = [row for row in rows if row["base"] == name]
    lines = []
    for layers in size.depths:
        parameters = next(row["parameters"] for row in own if row["layers"] == layers)
        cells = [str(Interval.of(gains(name, rows, layers, tokens))) for tokens in size.passes]
        lines.append((str(layers), f"{parameters:,}", *cells))
    before, factor = statistics.fmean(own[0]["before"]), own[0]["factor"]
    caption = f"{name}: bits per byte won of {before:.3f}, by layers and tokens; rates times {factor:g}"
    return ResultTable(caption, ("layers", "learning", *(f"{n:,} tokens" for n in size.passes)), tuple(lines))


def drawing(rows: Sequence[Row], first: tuple[str, Size]) -> Drawing:
    """What each depth wins by tokens, on the first base."""
    name, size = first
    across = [math.log10(tokens) for tokens in size.passes]
    series = [
        Series.of(f"{layers} layers", across, [gains(name, rows, layers, tokens) for tokens in size.passes])
        for layers in size.depths
    ]
    return Drawing(
        f"{name}: a specialist's depth and its text", "log10 of tokens", "bits per byte", tuple(series)
    )
