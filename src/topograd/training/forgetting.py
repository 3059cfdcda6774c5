"""Forgetting, measured while a model is fine-tuned: bits per byte of old text above those of its base.

    forgotten = BPB(old text; now) - BPB(old text; base)      learned = BPB(new; base) - BPB(new; now)

The old text is the user's (`old_text`), or rows that the base draws by itself (`decode/sampled_text.py`); of
those the first number is an estimate of KL(base ‖ now) per byte. It is cut into sequences once: every fourth
one judges, and the others are what `safe` and `dead` directions are read on. They are kept in the run:

    old-text.json    where the text is from; inputs and targets of both parts, as tokens

so that a run goes on without the file. With `max_forgetting` the old text is read CHECKS times in a run, and
at its end; where it has lost more than that, every correction is multiplied by the largest factor, to 1/64,
that loses no more (halving an interval, from the correction as it is). So the bound holds for the sequences
that judge: of other old text it holds as well as those stand for it.

Cost: JUDGED tokens forward for each reading; six more readings for each factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from topograd.data import Prepared, Tokenizer, read_corpus
from topograd.data.loader import IGNORED
from topograd.errors import ConfigError, DataError, RunError
from topograd.exec.forward import Predictor, evaluating
from topograd.files import dump_json, read_json
from topograd.nn.lora import scale_lora
from topograd.registry import Registry
from topograd.runs.config import TrainConfig
from topograd.runs.delta_store import DeltaStore
from topograd.runs.folder import Run
from topograd.runs.session import LoadedTextRun, open_session
from topograd.training.lora_directions import begin_lora
from topograd.training.trainer import Reading

if TYPE_CHECKING:
    from topograd.training.runs import RunTask

NAME = "old-text.json"
FORMAT, VERSION = "topograd-old-text", 1
SEQUENCE = 128
READ, JUDGED = 6144, 2048
"""Tokens to read directions on, and to judge by."""
DRAWN = 64
"""Tokens of a sequence that the base draws; a third of READ and JUDGED are drawn."""
CHECKS = 10
HALVINGS = 6
BATCH = 8
_CHATS: Registry[Callable[[Path, Tokenizer | None], Prepared | None]] = Registry("chat data")
_OWN: Registry[Callable[[LoadedTextRun, int, int, int], Tensor]] = Registry("own text")


@dataclass(frozen=True)
class Sequences:
    """Inputs and targets (sequences, length), and the bytes of the targets."""

    inputs: Tensor
    targets: Tensor
    nbytes: int

    @torch.no_grad()
    def bits_per_byte(self, model: Predictor) -> float:
        """Of what the model predicts."""
        device, nats = next(model.parameters()).device, 0.0
        for inputs, targets in zip(self.inputs.split(BATCH), self.targets.split(BATCH), strict=True):
            logits = model(inputs.to(device)).float()
            nats += float(F.cross_entropy(logits.mT, targets.to(device), reduction="sum").double())
        return nats / math.log(2) / self.nbytes


@dataclass(frozen=True)
class OldText:
    """Old text in two parts."""

    read: Sequences
    judged: Sequences
    source: str
    """A path, or that the base drew it."""


@dataclass(frozen=True)
class TunedReading:
    """An evaluation with what was learned and forgotten."""

    new: Reading
    learned: float
    """Bits per byte of held-out new text below the base's."""
    forgotten: float

    def as_dict(self) -> dict[str, Any]:
        return {**self.new.as_dict(), "learned": self.learned, "forgotten": self.forgotten}

    @property
    def logged(self) -> dict[str, Any]:
        return {**self.new.logged, "learned": self.learned, "forgotten": self.forgotten}

    @property
    def words(self) -> str:
        return f"{self.new.words}, forgotten {self.forgotten:.4f}"


class Forgetting:
    """The old text of a run, what its base made of it, and the bound."""

    def __init__(self, task: RunTask) -> None:
        self.task, self.tune = task, task.config.tune
        self.before: dict[str, float] = {}
        """Bits per byte of the base: `old` and `new`."""
        self.old: OldText
        self._given: OldText | None = None
        if self.tune.old_text is not None and not (task.run.folder / NAME).is_file():
            # Read here: what is no text is an error before it is a run.
            tokenizer = task.data.tokenizer  # type: ignore[union-attr]
            self._given = old_text(tokenizer, task.config.seq_len, self.tune.old_text)
        learns = [name for name, p in task.stack.named_parameters() if p.requires_grad]
        if self.tune.max_forgetting is not None and (
            others := [name for name in learns if not name.endswith(("lora_a", "lora_b"))]
        ):
            raise ConfigError(
                f"max_forgetting scales corrections, and {others[0]} learns too",
                setting="max_forgetting",
                given=self.tune.max_forgetting,
                remedy="leave out heads, relays and exits of their own",
            )

    def prepare(self, step: int, new: Callable[[], Tensor]) -> None:
        """Read the old text, or make it; before the first step directions begin and the base is read."""
        task = self.task
        file = task.run.folder / NAME
        task.run.manifest.verify(NAME)
        if not file.is_file():
            if (made := self._given) is None:
                made = drawn_text(base_of(task.run, task.config), task.config.seq_len)
            task.run.manifest.bind(NAME, dump_json(_table(made)) + "\n")
        self.old = read_old_text(file, task.data.tokenizer)  # type: ignore[union-attr]
        if step == 0:
            model = Predictor(task.stack, task.plan)
            read, directions = self.old.read.inputs.split(BATCH), self.tune.lora_directions
            with evaluating(task.stack):
                begin_lora(model, directions, read, new().split(BATCH))
                self.before = {"old": self.old.judged.bits_per_byte(model)}

    def read(self) -> float:
        """What the model has forgotten by now."""
        with evaluating(self.task.stack):
            now = self.old.judged.bits_per_byte(Predictor(self.task.stack, self.task.plan))
        return now - self.before["old"]

    def reading(self, new: Reading) -> TunedReading:
        """An evaluation of new text with what was learned and forgotten; the first one is the base's."""
        now = float(new.as_dict()["bpb"]["prediction"])
        return TunedReading(new, self.before.setdefault("new", now) - now, self.read())

    def bound(self, step: int) -> None:
        """Scale the corrections down where they have cost more than they may, if it is time to look."""
        most, steps = self.tune.max_forgetting, self.task.config.steps
        if most is None or (step % max(1, steps // CHECKS) and step < steps):
            return
        record: dict[str, Any] = {"kind": "forgetting", "step": step, "forgotten": self.read()}
        if record["forgotten"] > most:
            record["factor"] = self._scale(most)
        self.task.run.log(record)

    def _scale(self, most: float) -> float:
        """Find and apply the factor."""
        learned = {n: t.clone() for n, t in self.task.stack.state_dict().items() if ".lora_b" in n}
        low, high = 0.0, 1.0
        for _ in range(HALVINGS):
            factor = (low + high) / 2
            self._apply(learned, factor)
            low, high = (low, factor) if self.read() > most else (factor, high)
        self._apply(learned, low)
        return low

    @torch.no_grad()
    def _apply(self, learned: dict[str, Tensor], factor: float) -> None:
        own = self.task.stack.state_dict()
        for name, value in learned.items():
            own[name].copy_(value)
        scale_lora(self.task.stack, factor)


def base_of(run: Run, config: TrainConfig) -> LoadedTextRun:
    """The model that a run was fine-tuned from."""
    if isinstance(run.store, DeltaStore):
        return run.store.open_base()
    assert config.init is not None, "old text needs a base"
    return open_session(config.init)


def old_text(tokenizer: Tokenizer, seq_len: int, path: str) -> OldText:
    """The text or the chats at `path`, in sequences of at most `seq_len` tokens."""
    stream = torch.tensor(_tokens(Path(path), tokenizer))
    length = min(seq_len, SEQUENCE, len(stream) - 1)
    count = min((len(stream) - 1) // length, (READ + JUDGED) // length or 1)
    starts = torch.linspace(0, len(stream) - 1 - length, count).long()
    rows = stream[starts[:, None] + torch.arange(length + 1)]
    return _parts(rows[:, :-1], rows[:, 1:], tokenizer, str(Path(path).absolute()))


def _tokens(path: Path, tokenizer: Tokenizer) -> list[int]:
    """The documents at `path` as one stream, separators between them; of chats, every message."""
    if (chats := _CHATS["jsonl"](path, tokenizer)) is not None:
        documents = [*chats.train, *chats.heldout]
    else:
        corpus = read_corpus(path)
        documents = tokenizer.encode_batch([d.text for d in (*corpus.train, *corpus.heldout)])
    return [tokenizer.separator, *(int(t) for ids in documents for t in (*ids, tokenizer.separator))]


def drawn_text(base: LoadedTextRun, seq_len: int) -> OldText:
    """Sequences that a model draws by itself."""
    length = min(seq_len, DRAWN)
    drawn = _OWN["sampled"](base, max(4, (READ + JUDGED) // 3 // length), length, 0)
    first = torch.full_like(drawn[:, :1], base.tokenizer.separator)
    return _parts(torch.cat([first, drawn[:, :-1]], 1), drawn, base.tokenizer, "drawn by the base")


def _parts(inputs: Tensor, targets: Tensor, tokenizer: Tokenizer, source: str) -> OldText:
    """Every fourth sequence judges; with fewer than two, one does both."""
    targets = targets.masked_fill(targets == tokenizer.separator, IGNORED)
    judges = torch.arange(len(inputs)) % 4 == 0
    reads = ~judges if len(inputs) > 1 else judges
    parts = [_counted(inputs[part], targets[part], tokenizer) for part in (reads, judges)]
    return OldText(parts[0], parts[1], source)


def _counted(inputs: Tensor, targets: Tensor, tokenizer: Tokenizer) -> Sequences:
    lengths = torch.as_tensor(tokenizer.byte_lengths)
    nbytes = int(lengths[targets[targets != IGNORED]].sum())
    if nbytes < 1:
        raise DataError("the old text is empty", setting="old_text", remedy="give more of it")
    return Sequences(inputs, targets, nbytes)


def _table(text: OldText) -> dict[str, Any]:
    parts = {
        name: {"inputs": part.inputs.tolist(), "targets": part.targets.tolist()}
        for name, part in (("read", text.read), ("judged", text.judged))
    }
    return {"format": FORMAT, "version": VERSION, "source": text.source, **parts}


def read_old_text(file: Path, tokenizer: Tokenizer) -> OldText:
    """The old text that a run keeps."""
    table = read_json(file, RunError)
    try:
        if (table["format"], table["version"]) != (FORMAT, VERSION):
            raise ValueError("another format")
        parts = [
            _counted(torch.tensor(table[name]["inputs"]), torch.tensor(table[name]["targets"]), tokenizer)
            for name in ("read", "judged")
        ]
        return OldText(parts[0], parts[1], str(table["source"]))
    except (KeyError, TypeError, ValueError) as problem:
        raise RunError(f"{file} is damaged ({problem})", remedy="restore it") from None
