"""The cost of a second `generate` of one token over the token itself, in a run as it is and retrofitted.

    python benchmarks/second_generate.py [RUN] [--rounds 15] [--json]

A loaded model keeps what it has read (calibration, adapters, digests), so only the first call pays for it. In
turns: `Model.generate` of a one-token prompt and one token, and the same token by the strategy alone.

    full            RUN at full depth
    retrofitted     a copy of RUN at its default depth, with a draft stage over the whole vocabulary, a table,
                    a translator for every exit, and a calibration by which all drafters pay together. What
                    is measured is what must be read, so the draft stage is not trained.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from topograd.decode.calibration.measure import Calibration, PositionCosts, heldout_readings
from topograd.decode.calibration.policy import ExpectedGainPolicy
from topograd.decode.calibration.store import store
from topograd.decode.calibration.tune import DrafterSelection, Tuning
from topograd.decode.depths import engine_of, strategy_of
from topograd.decode.lookup import NGramTable
from topograd.decode.model import Model, load
from topograd.decode.retrofitted import KIND, retrofit_folder, retrofit_tensors
from topograd.decode.speculation import Speculate
from topograd.decode.strategies import generate_batch
from topograd.nn.draft_stage import DraftStage
from topograd.nn.translator import Translator
from topograd.pretrained import REFERENCE
from topograd.runs.adapter import BaseIdentity, create_adapter
from topograd.runs.session import heldout_text, open_session
from topograd.timing import ratio, take_turns


@dataclass(frozen=True)
class Settings:
    """Which run, and how often."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")] = REFERENCE
    rounds: int = 15
    bytes: int = 20_000
    """Held-out text that the retrofitted copy is calibrated on."""
    json: bool = False


def retrofitted(run: Path, folder: Path, limit_bytes: int) -> Path:
    """A calibrated copy of a run with everything that `topograd retrofit` adds."""
    session = open_session(shutil.copytree(run, folder))
    shutil.rmtree(retrofit_folder(session), ignore_errors=True)
    text = heldout_text(session, None, limit_bytes)
    stage = DraftStage(session.stack, torch.arange(session.config.model.vocab))
    translators = {k: Translator(session.stack.width) for k in range(len(session.plan.predicting()) - 1)}
    tensors = retrofit_tensors(stage, NGramTable.of(text.inputs.numpy()), translators)
    base = BaseIdentity.of(session)
    create_adapter(retrofit_folder(session), kind=KIND, base=base, tensors=tensors, settings={}, card="")
    pays = DrafterSelection(("lookup", "table", "draft"), ExpectedGainPolicy(), 2.0)
    tuning = Tuning(pays, pays, PositionCosts({1: 1.0, 8: 1.7}))
    calibration = Calibration.of(heldout_readings(session, text), session.step)
    store(session, engine_of(session).runtime, calibration, tuning)
    return folder


def overhead(model: Model, depth: str | None, rounds: int) -> dict[str, Any]:
    """`generate` of one token over the same token by the strategy alone."""
    prompt = [model.session.tokenizer.separator]
    strategy = strategy_of(depth or "speculate", model.session, model.engine)
    assert model.generate(prompt, 1, depth=depth).depth == (depth or "speculate")

    def token() -> None:
        if isinstance(strategy, Speculate):
            strategy.drafter.policy.forget()  # as `generate` does: both draft the same
        generate_batch(strategy, [prompt], 1)

    turns = {"generate": lambda: model.generate(prompt, 1, depth=depth), "token": token}
    seconds = take_turns(turns, rounds, warmup=2)
    return ratio(seconds, "generate", "token").as_dict()


def main() -> None:
    """Measure and print."""
    settings = tyro.cli(Settings)
    with tempfile.TemporaryDirectory() as place:
        other = load(retrofitted(settings.run, Path(place, "run"), settings.bytes))
        results = {
            "full": overhead(load(settings.run), "full", settings.rounds),
            "retrofitted": overhead(other, None, settings.rounds),
        }
    if settings.json:
        print(json.dumps(results))
        return
    for name, spread in results.items():
        print(f"generate over token, {name}: {spread}")


if __name__ == "__main__":
    main()
