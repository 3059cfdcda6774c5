"""Retrofit: what a frozen model can be given, in an adapter, so that it writes faster; the base is unchanged.

    own text     the model continues many prompts, in batches; its states are kept (`own_text.py`)
    draft stage  one layer that reads states one position late, trained on that (`draft_training.py`)
    table        what followed runs of tokens in that text (`decode/lookup.py`)
    exits        what the stages before the last predict, read through translators (`translators.py`)

The text of a user, `data`, gives beginnings and rows that are read and not written, beside the model's own.
The parameters of the base are read and never written: it is bit-identical before and after.

Cost: a token of own text is a row at full depth in a batch, and the training about as much again. Both
survive a kill and resume; the work is in the folder `text`, or beside the adapter until that is whole.
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from topograd.convert.draft_training import DraftTraining, draft_agreement, train_draft_stage
from topograd.convert.own_text import OwnText, OwnTextConfig, heldout_rows, training_rows, write_own_text
from topograd.convert.prompts import Prompts
from topograd.convert.translators import fit_exits
from topograd.data.corpus import read_corpus
from topograd.decode.depths import engine_of
from topograd.decode.lookup import NGramTable
from topograd.decode.retrofitted import KIND, open_retrofit, retrofit_folder, retrofit_tensors
from topograd.errors import ConfigError, RunError
from topograd.limits import check_numbers
from topograd.nn.draft_stage import DraftStage, rank_tokens
from topograd.nn.translator import Translator
from topograd.runs.adapter import BaseIdentity, create_adapter
from topograd.runs.session import LoadedTextRun

OnWork = Callable[[str, int, int], None]
"""Called with what is done, how much of it, and of how much."""


@dataclass(frozen=True)
class RetrofitConfig:
    """How much text, and how the stage is taught."""

    tokens: int = 500_000
    """Tokens of text, given ones included."""
    vocabulary: int = 8192
    """Tokens that the draft stage can say: the most frequent of the text."""
    depths: int = 1
    """States that it reads: of the last exit, and of earlier ones."""
    slots: int = 1
    """Tokens that one pass of it guesses: 1 is a chain, more are a block."""
    text: OwnTextConfig = field(default_factory=OwnTextConfig)
    training: DraftTraining = field(default_factory=DraftTraining)

    def __post_init__(self) -> None:
        check_numbers(self, tokens=(64, 2**36), vocabulary=(2, 2**24), depths=(1, 16), slots=(1, 16))


def retrofit(
    session: LoadedTextRun,
    out: Path | str | None = None,
    config: RetrofitConfig | None = None,
    *,
    data: Path | str | None = None,
    text: Path | str | None = None,
    init: Path | str | None = None,
    exits: bool = False,
    on_work: OnWork | None = None,
) -> dict[str, Any]:
    """Make the adapter `out` of a run, by default its own `draft/`, and say what came of it.

    `text` is a folder that keeps the model's own text, `init` an adapter whose stage is trained further; with
    `exits`, the stages before the last are given readings that prefixes and `calibrate` then use.
    """
    config, began = config or RetrofitConfig(), time.perf_counter()
    if init is not None and (config.depths, config.slots) != (1, 1):
        problem = "a draft stage that is taught on keeps its depths and slots"
        raise ConfigError(problem, setting="init", given=init, remedy="leave --depths and --slots out")
    folder = retrofit_folder(session) if out is None else Path(out)
    check_room(session, folder)
    work = folder.with_name(f"{folder.name}.work") if text is None else Path(text)
    session.stack.requires_grad_(False)
    tell: OnWork = on_work or (lambda what, done, of: None)
    written = _write(session, work, config, data, lambda done, of: tell("tokens of own text", done, of))
    tokens, own = written.all_tokens()
    learning = training_rows(len(written))
    torch.manual_seed(config.training.seed)
    if init is None:
        counted = torch.from_numpy(tokens[learning])
        vocabulary = rank_tokens(counted, session.config.model.vocab, config.vocabulary)
        run = {planned.index for planned in session.plan.needed(session.plan.last)}  # not private decoders
        there = [i for i, stage in enumerate(session.plan.predicting()) if stage in run]
        last, count = len(there) - 1, min(config.depths, len(there))
        places = [last - i * last // max(count - 1, 1) for i in reversed(range(count))]  # equally far apart
        depths = [there[place] for place in places]
        stage = DraftStage(session.stack, vocabulary, depths, config.slots)
    else:
        stage = open_retrofit(session, init).stage.train().requires_grad_(True)
    vocabulary = stage.vocabulary
    train_draft_stage(
        stage, written, config.training, work, lambda step, of, *_: tell("steps of teaching", step, of)
    )
    table = NGramTable.of(tokens[learning], own[learning])
    held = torch.from_numpy(tokens[heldout_rows(len(written))])
    found = {
        "tokens": written.tokens,
        "own": int(own.sum()),
        "vocabulary": len(vocabulary),
        "depths": 1 if stage.depths is None else len(stage.depths),
        "slots": stage.slots,
        "coverage": float(torch.isin(held, vocabulary).float().mean()),
        "parameters": sum(p.numel() for p in stage.parameters()),
        "table": len(table),
        **draft_agreement(stage, written),
    }
    translators: dict[int, Translator] = {}
    if exits:
        translators, found["exits"] = fit_exits(
            session, written, lambda done, of: tell("exits", done, of), work=work
        )
    adapter = create_adapter(
        folder,
        kind=KIND,
        base=BaseIdentity.of(session),
        tensors=retrofit_tensors(stage, table, translators),
        settings={"found": found, "config": asdict(config), "init": None if init is None else str(init)},
        card=_card(session, found),
    )
    session.remembered.clear()  # it may be of an adapter that was there before
    if text is None:
        shutil.rmtree(work)
    return {"run": str(session.run.folder), "adapter": str(adapter.folder), **found} | {
        "seconds": time.perf_counter() - began
    }


def check_room(session: LoadedTextRun, folder: Path) -> None:
    """Refuse, before long work, a folder that cannot be the adapter and a model that cannot have one."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        remedy = "pass another --out, or remove it"
        raise RunError(f"{folder} exists and is not an empty folder", remedy=remedy)
    prediction = session.plan.prediction
    if prediction.full != ((session.plan.last, 1.0),):
        problem = f"{session.run.folder} predicts by several stages ({prediction.kind})"
        remedy = "a draft stage reads one: retrofit a model that predicts by its last stage"
        raise ConfigError(problem, remedy=remedy)
    DraftStage(session.stack, torch.arange(2))


def _write(
    session: LoadedTextRun,
    work: Path,
    config: RetrofitConfig,
    data: Path | str | None,
    on_tokens: Callable[[int, int], None],
) -> OwnText:
    prompts = Prompts(session.tokenizer, read_corpus(data).train, config.text.seed)
    engine = engine_of(session, weights=config.text.weights)
    shape = replace(config.text, length=min(config.text.length, engine.context))
    return write_own_text(work, engine, prompts, session.weights, config.tokens, shape, on_tokens)


def _card(session: LoadedTextRun, found: dict[str, Any]) -> str:
    rates = ", ".join(f"{rate:.3f}" for rate in found["agreement"])
    return "\n".join(
        [
            f"# A draft stage for {session.run.folder.name}",
            "",
            "One layer that guesses the next tokens of its base, which verifies them: the text is its.",
            "",
            f"- parameters: {found['parameters']:,}; draft vocabulary: {found['vocabulary']:,} tokens, which "
            f"cover {found['coverage']:.3f} of held-out text",
            f"- states that it reads: {found['depths']}; tokens that a pass guesses: {found['slots']}",
            f"- taught on {found['tokens']:,} tokens, {found['own']:,} of them its own outside of loops",
            f"- agreement with the base on held-out own text, by step: {rates}",
            f"- table of own text: {found['table']:,} entries",
            "",
            "The base is referred to by hash and was not changed.",
        ]
    )
