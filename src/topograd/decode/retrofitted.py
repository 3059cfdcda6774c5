"""The adapter that `topograd retrofit` gives a run: a draft stage, a table of the model's own text, exits.

    stage.*    the parameters of the draft stage, with its vocabulary
    table.*    the keys, tokens and shares of the table
    exit.K.*   the translator of the exit with head K (`nn/translator.py`), where it has exits

The adapter lies in the run's folder as `draft/`, or wherever `--draft` says. It names its base by hash, so
one of another model raises RunError (`runs/adapter.py`). Exits are read where the adapter is the run's own:
they belong to what the run's prefixes predict, and to its calibration.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from topograd.decode.lookup import NGramTable
from topograd.errors import ConfigError, RunError
from topograd.nn.draft_stage import DraftStage
from topograd.nn.translator import Translator
from topograd.runs.adapter import Adapter, is_adapter, open_adapter
from topograd.runs.session import LoadedTextRun

KIND = "draft"
FOLDER = "draft"
"""Where a run's own adapter lies."""


@dataclass(frozen=True)
class Retrofitted:
    """An opened adapter."""

    stage: DraftStage
    table: NGramTable
    adapter: Adapter

    @property
    def settings(self) -> Mapping[str, Any]:
        """How it was made."""
        return self.adapter.settings


def retrofit_folder(session: LoadedTextRun) -> Path:
    """Where a run's adapter is by default."""
    return session.run.folder / FOLDER


def has_retrofit(session: LoadedTextRun) -> bool:
    """Whether the run was given a draft stage."""
    return is_adapter(retrofit_folder(session))


def open_retrofit(session: LoadedTextRun, folder: Path | str | None = None) -> Retrofitted:
    """The draft stage and the table of a run, from its own folder or another."""
    adapter = own_adapter(session) if folder is None else open_adapter(folder, KIND)
    if adapter is None:
        remedy = f"make one with: topograd retrofit {session.run.folder}"
        raise ConfigError(f"{session.run.folder} has no draft stage", setting="draft", remedy=remedy)
    with _fitting(session, adapter):
        return Retrofitted(
            stage_of(session, adapter.tensors), NGramTable.from_tensors(adapter.tensors), adapter
        )


@contextmanager
def _fitting(session: LoadedTextRun, adapter: Adapter) -> Iterator[None]:
    """The adapter is of this run's model, and what the block reads of its tensors fits."""
    adapter.check_base(session)
    try:
        yield
    except (KeyError, RuntimeError, ValueError, IndexError) as problem:
        line = " ".join(str(problem).split())[:160]
        message = f"{adapter.folder} does not fit its base ({line})"
        remedy = "retrofit it again"
        raise RunError(message, setting="adapter", given=adapter.folder, remedy=remedy) from None


def stage_of(session: LoadedTextRun, tensors: Mapping[str, Tensor]) -> DraftStage:
    """The draft stage whose parameters are among these tensors."""
    own = {name.removeprefix("stage."): t for name, t in tensors.items() if name.startswith("stage.")}
    depths, exits = own.get("depths"), len(session.plan.predicting())
    if depths is not None:  # exits of the run, the last of them last
        whole = depths.dtype == torch.long and depths.dim() == 1 and len(depths) > 1
        if not whole or min(depths.tolist()) < 0 or not max(depths.tolist()) == int(depths[-1]) == exits - 1:
            raise ValueError(f"it reads the exits {depths.tolist()} of {exits}, counted from 0")
    slots = len(own["masks"]) + 1 if "masks" in own else 1
    with torch.random.fork_rng(devices=[]):
        stage = DraftStage(
            session.stack, own["vocabulary"], None if depths is None else depths.tolist(), slots
        )
    stage.load_state_dict(own)
    return stage.eval().requires_grad_(False)


def open_exits(session: LoadedTextRun) -> dict[int, Translator]:
    """The translators of a run's exits, by head; none where its adapter has none, or there is no adapter."""
    adapter = _exits_adapter(session)
    if adapter is None:
        return {}
    with _fitting(session, adapter):
        return _translators(session, adapter.tensors)


def exits_digest(session: LoadedTextRun) -> str | None:
    """Which exits a calibration is of: the digest of the adapter; None where the run reads its own."""
    adapter = _exits_adapter(session)
    return None if adapter is None else adapter.digest


def own_adapter(session: LoadedTextRun) -> Adapter | None:
    """The run's own adapter, read once for an open run; None where it has none."""
    if not has_retrofit(session):
        return None
    return session.once(KIND, lambda: open_adapter(retrofit_folder(session), KIND))


def _exits_adapter(session: LoadedTextRun) -> Adapter | None:
    adapter = own_adapter(session)
    return adapter if adapter and any(name.startswith("exit.") for name in adapter.tensors) else None


def _translators(session: LoadedTextRun, tensors: Mapping[str, Tensor]) -> dict[int, Translator]:
    like, translators = next(session.stack.parameters()), {}
    names = [name.split(".") for name in tensors if name.startswith("exit.")]
    for head in sorted({int(name[1]) for name in names}):
        start = f"exit.{head}."
        with torch.random.fork_rng(devices=[]):
            translator = Translator(session.stack.width)
        own = {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}
        translator.load_state_dict(own)
        translators[head] = translator.to(like.device, like.dtype).eval().requires_grad_(False)
    return translators


def retrofit_tensors(
    stage: DraftStage, table: NGramTable, exits: Mapping[int, Translator] | None = None
) -> dict[str, Tensor]:
    """What an adapter keeps."""
    own = {f"stage.{name}": t.detach().cpu() for name, t in stage.state_dict().items()}
    return own | table.tensors() | exit_tensors(exits or {})


def exit_tensors(exits: Mapping[int, Translator]) -> dict[str, Tensor]:
    """The parameters of translators, by head."""
    return {
        f"exit.{head}.{name}": t.detach().cpu()
        for head, translator in exits.items()
        for name, t in translator.state_dict().items()
    }
