"""A specialist moved to a base of another width that was trained anew.

Bases of two widths learn the embedded corpus from their own first weights. A specialist of two layers learns
C++ behind the narrower one and is carried to the wider (`topograd specialist align`), where it stands

    heads      by the maps between the heads
    text       reading by the map between what the two bases make of some text, writing by the heads'
    trained    `text` and a few steps more
    anew       a specialist that begins there, after as few steps
    long       the same after as many steps as the carried one learned on its own base

Read are bits per byte of C++ that no step saw. What the map of `text` is fitted on is C++ that is neither
learned nor read.

Claims, set before the run, for each pair of widths, over seeds:

    moved      BPB of the wider base less that with `text` is above 0
    text       BPB of `heads` less that of `text` is above 0
    sooner     BPB of `anew` less that of `trained` is above 0
    all of it  what `text` wins on its base less 0.9 of what the specialist won on its own is above 0

Source: "Product of Experts" §10.4. Cost: three trainings of a base for each seed, and four of a specialist
for each pair. Limits: small models of bytes with heads of eight numbers; one text.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from papers.outcome import Asked, Result, ResultTable, Row
from papers.product_of_experts.specialist_surface import headers
from papers.verdicts import Claim, Drawing, Interval, Series, above
from topograd.nn.config import GPTConfig
from topograd.runs.adapter import Adapter
from topograd.runs.config import TrainConfig
from topograd.runs.session import LoadedTextRun, open_session
from topograd.specialists.align import carry
from topograd.specialists.attach import attach, new_specialist, open_specialist
from topograd.specialists.finetune import FineTuning
from topograd.specialists.interference import token_losses
from topograd.specialists.records import rows_of
from topograd.specialists.settings import FineTune
from topograd.training.runs import start

CONTEXT = 64
HEAD = 8
WAYS = ("base", "heads", "text", "trained", "anew", "long")
FASTER = 3
"""Times the product's rates, since the steps are few."""


@dataclass(frozen=True)
class Size:
    """Bases and texts."""

    widths: tuple[int, ...] = (32, 48, 64)
    base_steps: int = 300
    batch: int = 16
    few: int = 10
    learned: int = 60_000
    """Characters of C++ to learn; a third as many to fit maps on and to read."""

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return list(zip(self.widths, self.widths[1:], strict=False))


TINY = Size(widths=(8, 16), base_steps=2, batch=2, few=1, learned=3000)


def run(args: Asked) -> Result:
    """Every pair of widths, seed by seed."""
    size = TINY if args.preset == "tiny" else Size()
    rows = list[Row]()
    with tempfile.TemporaryDirectory() as temporary:
        for seed in range(args.seeds):
            study = Moving(size, seed, args, Path(temporary) / str(seed))
            for pair in size.pairs:
                key = {"from": pair[0], "to": pair[1], "seed": seed}
                rows.append({**key, **args.kept.row(key, partial(study.moved, *pair))})
                args.on_more(len(rows), args.seeds * len(size.pairs))
    return Result(
        setting=f"Bases of 4 layers, {size.base_steps} steps; specialists of two, {args.steps} steps.",
        rows=rows,
        tables=(table(size, rows),),
        drawing=drawing(size, rows),
        claims=tuple(claim for pair in size.pairs for claim in claims(pair, rows)),
        seeds=args.seeds,
    )


class Moving:
    """The bases and texts of one seed."""

    def __init__(self, size: Size, seed: int, args: Asked, place: Path) -> None:
        self.size, self.seed, self.args, self.place = size, seed, args, place
        place.mkdir(parents=True)
        self.bases: dict[int, LoadedTextRun] = {}
        learn, read = ("\n".join(texts) for texts in headers())
        third = size.learned // 3
        parts = {"learn": learn[: size.learned], "fit": learn[-third:], "read": read[:third]}
        for name, text in parts.items():
            (place / name).with_suffix(".txt").write_text(text)

    def base(self, width: int) -> LoadedTextRun:
        """A base of this width; its seed is its own."""
        if width not in self.bases:
            model = GPTConfig(
                layers=4,
                width=width,
                heads=width // HEAD,
                vocab=257,
                context=CONTEXT,
                smear=False,
                x0_blend=False,
                value_embeddings="none",
            )
            config = TrainConfig(
                steps=self.size.base_steps,
                batch=self.size.batch,
                seed=1000 * self.seed + width,
                tokenizer="bytes",
                eval_every=0,
                eval_bytes=1000,
                model=model,
            )
            start(config, self.place / f"base-{width}").train()
            self.bases[width] = open_session(self.place / f"base-{width}")
        return self.bases[width]

    def rows(self, name: str, base: LoadedTextRun) -> tuple[Tensor, Tensor]:
        return rows_of((self.place / name).with_suffix(".txt"), attach(base, {}), CONTEXT)

    def bpb(self, base: LoadedTextRun, adapter: Adapter | None) -> float:
        """Bits per byte of what is read; a token is a byte."""
        named = {} if adapter is None else {"s": adapter}
        inputs, targets = self.rows("read", base)
        losses = token_losses(attach(base, named), [dict.fromkeys(named, 1.0)], inputs, targets)
        return float(losses.double().sum() / (targets != -100).sum()) / math.log(2)

    def trained(self, folder: Path, base: LoadedTextRun, steps: int) -> Adapter:
        usual = FineTune()
        settings = FineTune(
            data=str(self.place / "learn.txt"),
            steps=steps,
            batch=self.size.batch,
            context=CONTEXT,
            save_every=steps,
            seed=self.seed,
            rate=FASTER * usual.rate,
            head_rate=FASTER * usual.head_rate,
        )
        FineTuning.start(folder, settings, base.run.folder).train()
        return open_specialist(folder)

    def anew(self, name: str, base: LoadedTextRun, steps: int) -> Adapter:
        folder = self.place / name
        new_specialist(folder, base, layers=2, seed=self.seed)
        return self.trained(folder, base, steps)

    def moved(self, narrow: int, wide: int) -> Row:
        """Bits per byte of every way, and of the old base with its specialist and without."""
        old, new = self.base(narrow), self.base(wide)
        size, name = self.size, f"{narrow}-{wide}"
        specialist = self.anew(f"own-{name}", old, self.args.steps)
        inputs, _ = self.rows("fit", old)
        by_heads = carry(specialist, old, new, self.place / f"heads-{name}")
        by_text = carry(specialist, old, new, self.place / f"text-{name}", inputs)
        found = {
            "old base": self.bpb(old, None),
            "old specialist": self.bpb(old, specialist),
            "base": self.bpb(new, None),
            "heads": self.bpb(new, by_heads),
            "text": self.bpb(new, by_text),
        }
        found["trained"] = self.bpb(new, self.trained(by_text.folder, new, size.few))
        found["anew"] = self.bpb(new, self.anew(f"anew-{name}", new, size.few))
        found["long"] = self.bpb(new, self.anew(f"long-{name}", new, self.args.steps))
        return dict(found)


def _values(rows: Sequence[Row], pair: tuple[int, int], name: str) -> list[float]:
    return [row[name] for row in rows if (row["from"], row["to"]) == pair]


def _less(rows: Sequence[Row], pair: tuple[int, int], first: str, second: str) -> list[float]:
    both = zip(_values(rows, pair, first), _values(rows, pair, second), strict=True)
    return [a - b for a, b in both]


def claims(pair: tuple[int, int], rows: Sequence[Row]) -> list[Claim]:
    """Whether it can be moved, whether text helps, whether it saves steps, and whether nothing is lost."""
    less = partial(_less, rows, pair)
    own, there = less("old base", "old specialist"), less("base", "text")
    name = f"{pair[0]} to {pair[1]}"
    return [
        above(
            f"{name}: moved",
            "a carried specialist helps before any step",
            "bits per byte won on the wider base",
            there,
        ),
        above(
            f"{name}: text",
            "a map that is fitted on text reads better than the heads'",
            "BPB by heads less that by text",
            less("heads", "text"),
        ),
        above(
            f"{name}: sooner",
            "a few steps behind it are worth more than a few steps from nothing",
            "BPB of anew less that of trained",
            less("anew", "trained"),
        ),
        above(
            f"{name}: all of it",
            "nine tenths of what it won on its own base go along",
            "what it wins there less 0.9 of what it won",
            [b - 0.9 * a for a, b in zip(own, there, strict=True)],
        ),
    ]


def table(size: Size, rows: Sequence[Row]) -> ResultTable:
    """Bits per byte below the base's, by pair and way."""
    lines = []
    for pair in size.pairs:
        cells = [str(Interval.of(_less(rows, pair, "base", way))) for way in WAYS[1:]]
        own = str(Interval.of(_less(rows, pair, "old base", "old specialist")))
        lines.append((f"{pair[0]} to {pair[1]}", own, *cells))
    header = ("widths", "on its own base", *WAYS[1:])
    return ResultTable("Bits per byte of C++ won on the base", header, tuple(lines))


def drawing(size: Size, rows: Sequence[Row]) -> Drawing:
    """What each way wins, pair by pair."""
    across = [float(wide) for _, wide in size.pairs]
    series = [
        Series.of(way, across, [_less(rows, pair, "base", way) for pair in size.pairs]) for way in WAYS[1:]
    ]
    return Drawing("Specialists moved to a wider base", "its width", "bits per byte won", tuple(series))
