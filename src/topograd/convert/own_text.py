"""A model's own text with the states of its stages, kept in files that are mapped into memory.

A batch of rows is written token by token; what the stages computed for it is in the cache, so keeping it
costs nothing but disk. A row is a few texts one after the other: a given beginning (`prompts.py`), and the
model's own continuation until it ends, repeats itself, or has gone on for `LONGEST` tokens. All rows have one
length, so that they continue side by side. Every fourth row is sampled, the others are greedy.

    own-text.json               of which weights, how long a row is, which stages, the seed
    block-00000.safetensors     tokens (rows, length) int32
                                own    (rows, length) uint8: 1 where the model chose it and did not loop
                                states (rows, length, stages, width) float16: h / rms(h) after each exit

A block is a function of the seed and its number and is written whole, with a SHA-256 of its tensors: a kill
loses one, and the same call writes what is missing. States have rms 1, since a readout begins with a norm:
it does not depend on the size of h (up to its ε).

Cost: one row at full depth a token, in batches where a matrix is read once for all rows; 2 stages · width
bytes a token. Source of the recipe: "EAGLE" (Li et al. 2024) §3.2, which trains on the text of the model's
users; that greedy drafts need the model's own text is in docs/how-to/import-and-export.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from topograd.convert.prompts import Prompts, Row
from topograd.decode.engine import Engine
from topograd.errors import ConfigError, DataError, RunError
from topograd.files import (
    DamagedFileError,
    hold_lock,
    read_table,
    reading_tensors,
    replacing,
    saving_tensors,
    write_json,
)
from topograd.limits import SEED, check_numbers
from topograd.runs.tensor_files import tensors_digest
from topograd.runtime.protocol import device_of
from topograd.runtime.quantize import check_precision

FORMAT = "topograd-own-text"
VERSION = 1
NAME = "own-text.json"
LONGEST = 256
"""Own tokens behind one beginning."""
LOOP = 16
"""A token is in a loop where the last LOOP tokens stood in the same text before."""
SAMPLED_EVERY = 4
HELDOUT_EVERY = 17
"""Of so many rows one is not learned from: it measures. No multiple of SAMPLED_EVERY, or all were sampled."""
TEMPERATURE = 0.8
_DELETE = "delete it, and it is written again"
OnTokens = Callable[[int, int], None]
"""Called with the tokens that are there, and how many are wanted."""


@dataclass(frozen=True)
class OwnTextConfig:
    """What blocks are made by."""

    length: int = 320
    """Tokens of a row."""
    rows: int = 32
    """Rows written side by side; a block."""
    seed: int = 0
    weights: str = "float32"
    """The precision that writes: that of the decoding which the text is for, or the fastest."""

    def __post_init__(self) -> None:
        check_numbers(self, length=(8, 2**20), rows=(1, 4096), seed=SEED)
        check_precision(self.weights)


@dataclass(frozen=True)
class Block:
    """Some rows, read from a file."""

    tokens: Tensor
    """(rows, length) int64."""
    own: Tensor
    """(rows, length) bool: chosen by the model, outside of loops."""
    states: Tensor
    """(rows, length, stages, width) float32, of rms 1."""


class OwnText:
    """The blocks in a folder; make it with `write_own_text` or `OwnText.open`."""

    def __init__(self, folder: Path, weights: str, config: OwnTextConfig) -> None:
        self.folder, self.weights, self.config = folder, weights, config
        self.blocks = sorted(folder.glob("block-*.safetensors"))

    @classmethod
    def open(cls, folder: Path | str, weights: str) -> OwnText:
        """The text in `folder`, if it is of these weights."""
        file = Path(folder) / NAME
        if not file.is_file():
            remedy = "make some with: topograd retrofit RUN"
            raise RunError(f"{folder} holds no text of a model", remedy=remedy)
        remedy = f"delete {folder}"
        values = read_table(file, FORMAT, VERSION, ("config", "weights"), RunError, remedy)
        try:
            config = OwnTextConfig(**values["config"])
        except (TypeError, ValueError) as problem:
            raise RunError(f"{file} is damaged ({problem})", remedy=remedy) from None
        if values["weights"] != weights:
            message = f"{folder} holds the text of a model with other weights"
            raise RunError(message, remedy="give another folder")
        return cls(Path(folder), weights, config)

    @property
    def tokens(self) -> int:
        """How many tokens there are, given ones included."""
        return len(self.blocks) * self.config.rows * self.config.length

    def all_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """The tokens (rows, length) of every block, and which of them are the model's own."""
        each = [_read(file, ("tokens", "own")) for file in self.blocks]
        return tuple(np.concatenate([block[i].numpy() for block in each]) for i in range(2))  # type: ignore[return-value]

    def __len__(self) -> int:
        """Rows."""
        return len(self.blocks) * self.config.rows

    def take(self, rows: Sequence[int]) -> Block:
        """These rows, of any blocks."""
        places = [divmod(row, self.config.rows) for row in rows]
        each = [_read(self.blocks[block], ("tokens", "own", "states"), place) for block, place in places]
        tokens, own, states = (torch.stack(part) for part in zip(*each, strict=True))
        return Block(tokens.long(), own.bool(), states.float())


def _read(file: Path, names: Sequence[str], row: int | None = None) -> list[Tensor]:
    with reading_tensors(file, DataError, _DELETE), safe_open(file, framework="pt") as opened:
        if row is None:
            return [opened.get_tensor(name) for name in names]
        return [opened.get_slice(name)[row] for name in names]


def write_own_text(
    folder: Path | str,
    engine: Engine,
    prompts: Prompts,
    weights: str,
    tokens: int,
    config: OwnTextConfig | None = None,
    on_tokens: OnTokens | None = None,
) -> OwnText:
    """Let the model write until there are at least `tokens` tokens; what is there is kept."""
    config = config or OwnTextConfig()
    if config.length > engine.context:
        problem = f"rows have {config.length} tokens and the model reads {engine.context}"
        raise ConfigError(problem, remedy="give less")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with hold_lock(folder / "lock"):
        if not (folder / NAME).exists():
            about = {"format": FORMAT, "version": VERSION, "weights": weights, "config": asdict(config)}
            write_json(folder / NAME, about)
        text = OwnText.open(folder, weights)
        if text.config != config:
            problem = f"{folder} was written with {text.config}, not {config}"
            raise RunError(problem, remedy="give another folder")
        for file in text.blocks:
            _verify(file)
        while text.tokens < tokens:
            if on_tokens is not None:
                on_tokens(text.tokens, tokens)
            files = ((n, folder / f"block-{n:05d}.safetensors") for n in itertools.count())
            number, file = next((n, file) for n, file in files if not file.exists())
            tensors = _write_block(engine, prompts, config, number)
            with replacing(file) as temporary, saving_tensors(file):
                save_file(tensors, temporary, metadata={"sha256": tensors_digest(tensors)})
            text = OwnText.open(folder, weights)
    return text


def _verify(file: Path) -> None:
    """Raise DataError where a block is not as it was written; version 0.3 kept no digest."""
    names = ("tokens", "own", "states")
    tensors = dict(zip(names, _read(file, names), strict=True))
    with reading_tensors(file, DataError, _DELETE), safe_open(file, framework="pt") as opened:
        known = (opened.metadata() or {}).get("sha256")
        if known not in (None, tensors_digest(tensors)):
            raise DamagedFileError("its SHA-256 is not the recorded one")


@torch.inference_mode()
def _write_block(engine: Engine, prompts: Prompts, config: OwnTextConfig, number: int) -> dict[str, Tensor]:
    tokenizer = prompts.tokenizer
    ends = tokenizer.stop_tokens or frozenset({tokenizer.separator})
    first = number * config.rows
    rows = [_Writer(prompts.row(first + i, config.length), ends) for i in range(config.rows)]
    begun = min(config.length, min(len(row.given) for row in rows))
    batch = engine.start([row.begin(begun) for row in rows])
    full = engine.exits[-1]
    device = device_of(engine.stack)
    generator = torch.Generator(device).manual_seed((config.seed * 2**20 + number) % 2**63)
    heat = torch.zeros(config.rows, 1, device=device)
    heat[::SAMPLED_EVERY] = TEMPERATURE
    for length in range(begun, config.length + 1):
        engine.run(batch, full)
        if length == config.length:
            break
        chosen = _choose(engine.logits(batch, full), heat, generator).tolist()
        engine.append(batch, [[row.next(token)] for row, token in zip(rows, chosen, strict=True)])
    counts, cache = [config.length] * config.rows, batch[0].cache
    for stage in engine.exits:  # full depth passes by the private decoders of earlier stages
        engine.run(batch, stage)
    states = [
        cache.hidden(batch, stage, counts).unflatten(0, (config.rows, config.length))
        for stage in engine.exits
    ]
    kept = torch.stack([h / h.float().square().mean(-1, keepdim=True).sqrt() for h in states], dim=2)
    return {
        "tokens": torch.tensor([row.tokens for row in rows], dtype=torch.int32),
        "own": torch.tensor([row.own for row in rows], dtype=torch.uint8),
        "states": kept.half().cpu().contiguous(),
    }


def _choose(logits: Tensor, heat: Tensor, generator: torch.Generator) -> Tensor:
    """The likeliest token of each row, or one drawn at its temperature by the largest of noisy logits."""
    hot = heat[:, 0] > 0
    noisy = logits.float()
    noise = torch.rand(noisy[hot].shape, generator=generator, device=noisy.device).clamp_(min=1e-20)
    noisy[hot] -= heat[hot] * noise.log_().neg_().log_()
    return noisy.argmax(-1)


class _Writer:
    """One row as it is written: what is given next, what was chosen."""

    def __init__(self, source: Row, ends: frozenset[int]) -> None:
        self.source, self.ends = source, ends
        self.given = source.next(ended=False)
        self.tokens: list[int] = []
        self.own: list[int] = []
        self._written = self._looped = 0
        self._seen: set[tuple[int, ...]] = set()

    def begin(self, count: int) -> list[int]:
        """The first tokens, all of them given."""
        self.tokens, self.given = self.given[:count], self.given[count:]
        self.own = [0] * count
        return list(self.tokens)

    def next(self, chosen: int) -> int:
        """The row's next token: the one that is given, or else the model's."""
        if self.given:
            self.tokens.append(self.given.pop(0))
            self.own.append(0)
            return self.tokens[-1]
        self.tokens.append(chosen)
        self._written += 1
        last = tuple(self.tokens[-LOOP:]) if self._written >= LOOP else ()
        loops = bool(last) and last in self._seen
        self._seen.add(last)
        self._looped = self._looped + 1 if loops else 0
        self.own.append(int(not loops))
        ended = chosen in self.ends
        if ended or self._looped >= LOOP or self._written >= LONGEST:
            self.given = self.source.next(ended)
            self._written = self._looped = 0
            self._seen.clear()
        return chosen


def rows_of_step(rows: Sequence[int], batch: int, seed: int, step: int) -> list[int]:
    """The rows of a batch: each epoch has every row once, in an order of (seed, epoch)."""
    chosen: list[int] = []
    for place in range(step * batch, (step + 1) * batch):
        epoch, at = divmod(place, len(rows))
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
        chosen.append(rows[int(generator.permutation(len(rows))[at])])
    return chosen


def training_rows(count: int) -> list[int]:
    """The rows that are trained on; all where there are few."""
    return [row for row in range(count) if row % HELDOUT_EVERY or count < 2 * HELDOUT_EVERY]


def greedy_rows(text: OwnText, rows: Sequence[int]) -> list[int]:
    """Those of the rows that were written greedily; all where none was."""
    return [row for row in rows if row % text.config.rows % SAMPLED_EVERY] or list(rows)


def heldout_rows(count: int) -> list[int]:
    """The rows that measure."""
    return list(range(0, count, HELDOUT_EVERY))
