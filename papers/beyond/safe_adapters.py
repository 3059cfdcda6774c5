"""What LoRA in safe directions forgets, against null-space peers and replay, on three new texts.

The product (`topograd train --lora-directions safe`) against what others do, at one rank and one number of
steps, batches and forward passes, on SmolLM2 where its wheel is and else on the model that comes with the
package. Arms, on the maps that read the residual stream (small leaves out random and pissa):

    lora            A random, B zero, both learn                                  LoRA
    random          A random and held                                             the control of held arms
    pissa           the leading singular vectors of W                             PiSSA
    dead            A held where the old text has least second moment: what LoRA-Null with a held A holds
    safe            A held where the new text has most for what the old one has   ours
    oplora          A and B orthogonal to W's leading singular vectors            OPLoRA, which reads no text
    replay          lora, and half of each batch is old text

New texts: code (some modules of the standard library), facts (invented people, asked and answered), german
(the messages of this machine's German catalogs, where there are any). Every second window is learned and
others test; of facts the same ones are asked in another order. The old text is the model's own: rows that it
drew by itself at temperature 1, some to read the geometry on (and to replay), others to judge by; prose of
the language reference is judged at the end beside it. Rates: for each arm the best of three on the last new
text, with a seed that is not used again; where the best is at an end of the grid, one beyond it is tried too,
until it lies between two others.

Claims, set before the run, each over all pairs of a new text and a seed, where lora wins 2 % of the text at
least:

    forgetting at the level (`adapter_tables.py`): lora, random, dead, oplora and replay less safe is above 0
    forgetting at the end: lora less safe is above 0
    learning: what safe gains less 0.9 of what lora gains is above 0

Source: "LoRA" (Hu et al.), "PiSSA" (Meng et al.), "LoRA-Null" (Tang et al.), "OPLoRA" (Xiong and Xie).
Cost on one core: seconds for tiny; small an hour on SmolLM2, long three.
Limits. One rank, one length of text, sequences of 64 tokens, few steps; pairs of one text share the text's
kind, so that nine of them are fewer than nine texts.
"""

from __future__ import annotations

import gettext
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from papers.beyond.adapter_placement import READERS
from papers.beyond.bases import Windows, bits_per_byte, cut, folders
from papers.beyond.safe_adapter_tables import claims, drawing, findings, tables
from papers.fit import best_between
from papers.outcome import Asked, Result, Row
from papers.product_of_experts.facts import World
from topograd.data import read_corpus
from topograd.decode.sampled_text import sampled_text
from topograd.exec.forward import Predictor
from topograd.geometry.safe_directions import input_moments
from topograd.nn.lora import add_lora, merge_lora
from topograd.runs.session import LoadedTextRun, open_session
from topograd.training.lora_directions import Directions, begin_lora, hold_directions

TUNING = 100
CATALOGS = Path("/usr/share/locale/de/LC_MESSAGES")
SPARED = 16
"""Leading singular vectors of a map that `oplora` leaves alone."""


@dataclass(frozen=True)
class Arm:
    """One way to learn."""

    name: str
    directions: Directions = "plain"
    spares: bool = False
    """A and B stay orthogonal to the leading singular vectors of W."""
    replays: bool = False

    @property
    def held(self) -> bool:
        return self.directions in ("random", "dead", "safe")


ARMS = (
    Arm("lora"),
    Arm("safe", "safe"),
    Arm("dead", "dead"),
    Arm("random", "random"),
    Arm("oplora", spares=True),
    Arm("replay", replays=True),
    Arm("pissa", "pissa"),
)


@dataclass(frozen=True)
class Size:
    """How much of everything, in windows of `length` tokens."""

    length: int = 64
    old: int = 32
    """Of the old text, to read on and to replay."""
    judged: int = 8
    prose: int = 4
    new: int = 24
    """Of a new text, to learn."""
    tested: int = 6
    batch: int = 2
    rank: int = 4
    rates: tuple[float, ...] = (2e-3, 6e-3, 1.8e-2)
    held_rates: tuple[float, ...] = (6e-3, 1.8e-2, 5.4e-2)
    stops: tuple[float, ...] = (0.5, 1.0)
    arms: tuple[str, ...] = tuple(arm.name for arm in ARMS)


SMALL = Size(arms=("lora", "safe", "dead", "oplora", "replay"))
LONG = Size(stops=(0.25, 0.5, 1.0))
TINY = Size(length=32, old=4, judged=2, prose=1, new=4, tested=2, rank=2, rates=(3e-3,), held_rates=(3e-2,))


def run(args: Asked) -> Result:
    """Every arm on every new text, seed by seed."""
    texts = [text for text in TEXTS if text != "german" or CATALOGS.is_dir()]
    name, folder = list(folders(args).items())[-1]
    size = {"tiny": TINY, "long": LONG}.get(args.preset, SMALL)
    study, rows = Study(name, open_session(folder), size, args), list[Row]()
    for row in study.rows(texts):
        rows.append(row)
        args.on_more(len(rows), args.seeds * len(texts) * len(size.arms))
    return Result(
        setting=f"Model: {name}. New texts: {', '.join(texts)}. Old text: the model's own. Rank {size.rank}, "
        f"{args.steps} steps of {size.batch} sequences of {size.length} tokens.",
        rows=rows,
        tables=tables(name, texts, rows),
        findings=findings(name, texts, rows),
        drawing=drawing(rows, texts[0]),
        claims=tuple(claims(name, texts, rows)),
        seeds=args.seeds,
    )


def code(seed: int) -> list[str]:
    """Some modules of the standard library."""
    named = [d for d in read_corpus(None).train if d.name.endswith(".py") and len(d.text) > 2000]
    return [d.text[:8000] for d in random.Random(seed).sample(named, 3)]


def facts(seed: int) -> list[str]:
    """Questions and answers about invented people."""
    records = World.make(people=12, seed=seed).records()
    lines = [
        f"Question: {a['content']}\nAnswer: {b['content']}\n" for a, b in (r["messages"] for r in records)
    ]
    return ["\n".join(lines[i : i + 8]) for i in range(0, len(lines), 8)]


def german(seed: int) -> list[str]:
    """Messages of programs in German."""
    found: list[str] = []
    for file in sorted(CATALOGS.glob("*.mo")):
        try:
            with file.open("rb") as opened:
                catalog = gettext.GNUTranslations(opened)._catalog  # type: ignore[attr-defined]
        except (OSError, UnicodeDecodeError):
            continue
        found += [text for key, text in catalog.items() if key and isinstance(text, str) and len(text) > 80]
    random.Random(seed).shuffle(found)
    return ["\n".join(found[i : i + 12]) for i in range(0, min(len(found), 360), 12)]


TEXTS: Mapping[str, Callable[[int], list[str]]] = {"facts": facts, "code": code, "german": german}


class Study:
    """One model and everything that an arm needs of it."""

    def __init__(self, name: str, session: LoadedTextRun, size: Size, args: Asked) -> None:
        self.name, self.session, self.size, self.args, self.steps = name, session, size, args, args.steps
        self._read: tuple[tuple[str, int], dict[str, Tensor]] = (("", 0), {})
        self.model = Predictor(session.stack, session.plan).eval().requires_grad_(False)
        self.maps = {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear) and name.startswith("stack.layers.") and name.endswith(READERS)
        }

    def rows(self, texts: Sequence[str]) -> Iterator[Row]:
        """Every arm on every text, seed by seed."""
        arms = self.arms(texts[-1])
        rates = {arm: self.tuned(arm, texts[-1]) for arm in arms}
        for seed in range(self.args.seeds):
            for text in texts:
                for arm in arms:
                    key = self._key(arm, text, seed, rates[arm])
                    yield {**key, **self._kept(key, partial(self.learn, arm, text, seed, rates[arm]))}

    def arms(self, text: str) -> Sequence[Arm]:
        """What is compared; what an arm needs beside a rate may be tuned on a text."""
        return [arm for arm in ARMS if arm.name in self.size.arms]

    def _key(self, arm: Arm, text: str, seed: int, rate: float) -> Row:
        return {"base": text, "arm": arm.name, "seed": seed, "rate": rate}

    def _kept(self, key: Row, make: Callable[[], Row]) -> Row:
        return self.args.kept.row({"model": self.name, **key}, make)

    @cached_property
    def old(self) -> tuple[Windows, Windows]:
        """The model's own text: to read on, and to judge by."""
        size = self.size
        rows = size.old + size.judged

        def draw() -> Row:
            return {"tokens": sampled_text(self.session, rows, size.length).tolist()}

        tokens = self._kept({"own text": rows, "length": size.length}, draw)["tokens"]
        documents = [[*row, self.session.tokenizer.separator] for row in tokens]
        text = cut(self.session, documents, size.length, rows)
        parts = [
            Windows(*(x[part] for x in (text.inputs, text.targets, text.nbytes)))
            for part in (slice(size.old), slice(size.old, None))
        ]
        return parts[0], parts[1]

    @cached_property
    def prose(self) -> Windows:
        """The language reference: prose about Python."""
        documents = [d.text for d in read_corpus(None).heldout if not d.name.endswith(".py")]
        return self._cut(documents, self.size.prose)

    def new(self, text: str, seed: int) -> tuple[Windows, Windows]:
        """A text to learn, and other windows of it to test on; of facts the same in another order."""
        documents, size = TEXTS[text](seed), self.size
        if text == "facts":
            again = random.Random(seed + 1).sample(documents, len(documents))
            return self._cut(documents, size.new), self._cut(again, size.tested)
        both = self._cut(documents, 2 * size.new)
        parts = [(x[::2], x[1::2][: size.tested]) for x in (both.inputs, both.targets, both.nbytes)]
        learn, test = zip(*parts, strict=True)
        return Windows(*learn), Windows(*test)

    def _cut(self, documents: Sequence[str], rows: int) -> Windows:
        encoded = self.session.tokenizer.encode_batch(list(documents))
        return cut(self.session, encoded, self.size.length, rows)

    def tuned(self, arm: Arm, text: str) -> float:
        """The rate that wins most bits per byte of a new text."""

        def end(rate: float) -> float:
            made = partial(self.learn, arm, text, TUNING, rate, tuning=True)
            return float(self._kept(self._key(arm, text, TUNING, rate), made)["new"][-1])

        rates = self.rates(arm)
        return rates[0] if len(rates) == 1 else best_between(rates, end)

    def rates(self, arm: Arm) -> tuple[float, ...]:
        """Those that are tried first."""
        return self.size.held_rates if arm.held else self.size.rates

    def before(self, text: str, seed: int) -> Row:
        """Bits per byte of the new text and of the old one before any step."""

        def read() -> Row:
            _, test = self.new(text, seed)
            new = statistics.fmean(bits_per_byte(self.model, test))
            return {"new": new, "old": bits_per_byte(self.model, self.old[1])}

        return self._kept({"base": text, "before": True, "seed": seed}, read)

    def learn(self, arm: Arm, text: str, seed: int, rate: float, tuning: bool = False) -> Row:
        """Bits per byte at every stop, first before any step; to tune a rate of the new text alone."""
        before = {name: module.weight for name, module in self.maps.items()}
        learn, test = self.new(text, seed)
        torch.manual_seed(seed)
        try:
            parameters = self._place(arm, text, seed)
            row: Row = {"parameters": sum(p.numel() for p in parameters)}
            curve = self._curve(arm, parameters, learn, test, seed, rate, tuning)
        finally:
            merge_lora(self.model)
            for name, module in self.maps.items():
                module.weight = before[name]
        if tuning:
            return row | curve
        first = self.before(text, seed)
        return row | curve | {key: [first[key], *curve[key]] for key in ("new", "old")}

    def _place(self, arm: Arm, text: str, seed: int) -> list[nn.Parameter]:
        form = "held" if arm.held else "shifted" if arm.directions == "pissa" else "plain"
        add_lora(self.maps.values(), self.size.rank, alpha=self.size.rank, form=form)  # type: ignore[arg-type]
        if arm.directions in ("dead", "safe"):
            kind: Literal["dead", "safe"] = "dead" if arm.directions == "dead" else "safe"
            hold_directions(self.maps, kind, *self.moments(text, seed))
        else:
            begin_lora(self.model, arm.directions)
        return [p for p in self.model.parameters() if p.requires_grad]

    @cached_property
    def old_moments(self) -> dict[str, Tensor]:
        """Of what every map reads on the old text."""
        return input_moments(self.model, self.maps, self.old[0].inputs.split(8))

    def moments(self, text: str, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Of what every map reads on the old text and on a new one; the last new one is remembered."""
        if self._read[0] != (text, seed):
            learn, _ = self.new(text, seed)
            self._read = (text, seed), input_moments(self.model, self.maps, learn.inputs.split(8))
        return self.old_moments, self._read[1]

    def _curve(
        self,
        arm: Arm,
        parameters: list[nn.Parameter],
        learn: Windows,
        test: Windows,
        seed: int,
        rate: float,
        tuning: bool,
    ) -> Row:
        optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
        generator = torch.Generator().manual_seed(seed)
        stops = {max(1, round(share * self.steps)) for share in ((1.0,) if tuning else self.size.stops)}
        spared = self._leading() if arm.spares else {}
        row: Row = {"stops": [0, *sorted(stops)], "new": [], "old": []}
        for step in range(1, self.steps + 1):
            optimizer.zero_grad()
            self._loss(arm, learn, generator).backward()
            optimizer.step()
            self._spare(spared)
            if step in stops:
                row["new"].append(statistics.fmean(bits_per_byte(self.model, test)))
                if not tuning:
                    row["old"].append(bits_per_byte(self.model, self.old[1]))
        if not tuning:
            row["prose"] = statistics.fmean(bits_per_byte(self.model, self.prose))
        return row

    def _loss(self, arm: Arm, learn: Windows, generator: torch.Generator) -> Tensor:
        """Of one step."""
        inputs, targets = self._batch(arm, learn, generator)
        return F.cross_entropy(self.model(inputs).mT, targets)

    def _batch(self, arm: Arm, learn: Windows, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Sequences of the new text; with replay the second half is of the old one."""
        size = self.size.batch
        rows = torch.randint(len(learn.inputs), (size,), generator=generator)
        inputs, targets = learn.inputs[rows], learn.targets[rows]
        if arm.replays:
            there, old = size // 2, self.old[0]
            rows = torch.randint(len(old.inputs), (there,), generator=generator)
            inputs = torch.cat([inputs[there:], old.inputs[rows]])
            targets = torch.cat([targets[there:], old.targets[rows]])
        return inputs, targets

    @torch.no_grad()
    def _leading(self) -> dict[str, tuple[Tensor, Tensor]]:
        """U and V of the leading singular vectors of every map."""
        result = {}
        for name, module in self.maps.items():
            rank = min(SPARED, min(module.weight.shape) // 2)
            U, _, V = torch.svd_lowrank(module.weight, q=rank + 8, niter=4)
            result[name] = U[:, :rank], V[:, :rank]
        return result

    @torch.no_grad()
    def _spare(self, leading: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Take the leading directions out of every correction."""
        for name, (U, V) in leading.items():
            a, b = (self.maps[name].get_parameter(p) for p in ("lora_a", "lora_b"))
            a.sub_((a @ V) @ V.T)
            b.sub_(U @ (U.T @ b))
