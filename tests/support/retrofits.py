"""A run with all that decoding may read beside weights: a draft stage, a table, exits, a calibration."""

import shutil
from pathlib import Path

import numpy as np
import torch
from torch import nn

from topograd.decode.calibration.measure import Calibration, PositionCosts, heldout_readings
from topograd.decode.calibration.policy import ExpectedGainPolicy
from topograd.decode.calibration.store import store
from topograd.decode.calibration.tune import DrafterSelection, Tuning
from topograd.decode.depths import engine_of
from topograd.decode.lookup import NGramTable
from topograd.decode.retrofitted import KIND, retrofit_tensors
from topograd.nn.draft_stage import DraftStage
from topograd.nn.translator import Translator
from topograd.runs.adapter import BaseIdentity, create_adapter
from topograd.runs.session import LoadedTextRun, heldout_text, open_session


def add_draft(session: LoadedTextRun, std: float) -> None:
    """A draft stage, a table, a translator for every exit but the last, as `topograd retrofit` does."""
    translators = {}
    for head in range(len(session.plan.predicting()) - 1):
        translators[head] = Translator(session.stack.width)
        nn.init.normal_(translators[head].affine.weight, std=std)
    stage, table = DraftStage(session.stack, torch.arange(40)), NGramTable.of(np.array([[1, 2]]), least=1)
    tensors = retrofit_tensors(stage, table, translators)
    base, folder = BaseIdentity.of(session), session.run.folder / "draft"
    create_adapter(folder, kind=KIND, base=base, tensors=tensors, settings={}, card="")


def retrofitted_copy(source: Path, folder: Path) -> Path:
    """A copy of a run with drafts and a calibration that says that all drafters together pay."""
    session = open_session(shutil.copytree(source, folder))
    add_draft(session, 0.1)
    readings = heldout_readings(session, heldout_text(session, None, 300))
    choice = DrafterSelection(("lookup", "table", "draft"), ExpectedGainPolicy(), 2.0)
    costs = PositionCosts({1: 0.5, 4: 0.75})
    tuning = Tuning(choice, choice, costs)
    store(session, engine_of(session).runtime, Calibration.of(readings, session.step), tuning)
    return folder
