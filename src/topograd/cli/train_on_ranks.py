"""`topograd train --parallel`: one rank of a job that torchrun started. Rank 0 speaks for all."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from topograd.cli.console import note, print_json
from topograd.cli.main import INTERRUPTED
from topograd.cli.train import Train, finished, show, train
from topograd.errors import CheckpointError, DivergenceError
from topograd.parallel.settings import ParallelConfig, wait_for_first_rank

if TYPE_CHECKING:
    from topograd.parallel.ranks import Ranks


def train_on_ranks(asked: Train, config: ParallelConfig) -> int:
    """Train this rank's stages; print on rank 0; return the exit code, the same on all ranks."""
    folder = asked.resume or asked.out
    assert folder is not None
    if config.stage is not None:
        return _train_alone(asked, config, Path(folder))
    if asked.settings.device == "cpu":  # what c10d logs of a lost peer is an error too, said in one line
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from topograd.parallel.launch import facts_of
    from topograd.parallel.ranks import join, leave

    settings = {} if asked.resume is not None else asked.settings.as_dict()
    more = {"--stop-after": asked.stop_after, "--from": asked.from_, "--parallel": config}
    ranks = join(config, facts_of(version("topograd"), settings, **more), asked.settings.device)
    try:
        return _train(asked, ranks, Path(folder))
    except (DivergenceError, CheckpointError):
        if ranks.first:
            raise
        wait_for_first_rank()
        return 2  # of all ranks alike: rank 0 says it
    finally:
        leave()


def _train(asked: Train, ranks: Ranks, folder: Path) -> int:
    from topograd.parallel.launch import resume_on_ranks, start_on_ranks

    if asked.resume is not None:
        found = finished(asked)
        if found is not None:
            if ranks.first:
                show(asked, *found)
            return 0
        trainer = resume_on_ranks(ranks, folder, asked.from_)
    else:
        trainer = start_on_ranks(ranks, asked.settings, folder)
    if ranks.first:
        return train(asked, trainer)
    results = trainer.train(asked.stop_after)
    wanted = min(asked.stop_after or trainer.task.schedule.steps, trainer.task.schedule.steps)
    return 0 if results["steps"] >= wanted else INTERRUPTED


def _train_alone(asked: Train, config: ParallelConfig, folder: Path) -> int:
    """Train one stage in a folder of its own, DIR/stage-K; one that has a checkpoint goes on from there."""
    from functools import partial

    from topograd.cli.progress import training_progress
    from topograd.parallel.independent_stage import IndependentStageTask
    from topograd.parallel.launch import is_restart
    from topograd.training.runs import resume, start

    own = folder if asked.resume is not None else folder / f"stage-{config.stage}"
    make = partial(IndependentStageTask, parallel=config)
    if asked.resume is not None or (is_restart() and (own / "config.toml").is_file()):
        trainer = resume(own, asked.from_, make)
    else:
        trainer = start(asked.settings, own, make)
    with training_progress(own.name) as on_step:
        results = trainer.train(asked.stop_after, on_step)
    if asked.json:
        print_json(results)
    else:
        note(f"{own}: step {results['steps']}, missed {results['missed']}, replayed {results['replayed']}")
    return 0 if results["finished"] or asked.stop_after else INTERRUPTED
