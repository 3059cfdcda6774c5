"""`topograd train --parallel`: one rank of a job that torchrun started. Rank 0 speaks for all."""

from __future__ import annotations

import os
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from topograd.cli.console import note, print_json
from topograd.cli.main import INTERRUPTED
from topograd.cli.train import Train, finished, show, train
from topograd.errors import CheckpointError, DivergenceError, ParallelError
from topograd.parallel.settings import ParallelConfig, wait_for_first_rank

if TYPE_CHECKING:
    from topograd.parallel.ranks import Ranks


def train_on_ranks(args: Train, config: ParallelConfig) -> int:
    """Train this rank's stages; print on rank 0; return the exit code, the same on all ranks."""
    folder = args.resume or args.out
    assert folder is not None
    if config.stage is not None:
        return _train_alone(args, config, Path(folder))
    if args.settings.device == "cpu":  # what c10d logs of a lost peer is an error too, said in one line
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from topograd.parallel.launch import facts_of
    from topograd.parallel.ranks import join, leave

    settings = {} if args.resume is not None else args.settings.as_dict()
    more = {"--stop-after": args.stop_after, "--from": args.from_, "--parallel": config}
    ranks = join(config, facts_of(version("topograd"), settings, **more), args.settings.device)
    try:
        return _train(args, ranks, Path(folder))
    except (DivergenceError, CheckpointError):
        if ranks.first:
            raise
        wait_for_first_rank()
        return 2  # of all ranks alike: rank 0 says it
    except ParallelError as error:
        error.remedy = "; ".join(filter(None, (error.remedy, _how_to_continue(Path(folder), args))))
        raise
    finally:
        leave()


def _how_to_continue(folder: Path, args: Train) -> str:
    """What to type after a rank was lost: the last set is whole, for as many processes or for one."""
    again = f"topograd train --resume {shlex.quote(str(folder))}"
    here, all_ranks = os.environ.get("LOCAL_WORLD_SIZE", "1"), os.environ.get("WORLD_SIZE", "1")
    start = f"torchrun --nproc-per-node {here}" if here == all_ranks else "torchrun as before"
    return f"continue with: {start} -m {again} --parallel {args.parallel} (or in one process: {again})"


def _train(args: Train, ranks: Ranks, folder: Path) -> int:
    from topograd.parallel.launch import resume_on_ranks, start_on_ranks

    if args.resume is not None:
        found = finished(args)
        if found is not None:
            if ranks.first:
                show(args, *found)
            return 0
        trainer = resume_on_ranks(ranks, folder, args.from_)
    else:
        trainer = start_on_ranks(ranks, args.settings, folder)
    if ranks.first:
        return train(args, trainer)
    results = trainer.train(args.stop_after)
    wanted = min(args.stop_after or trainer.task.schedule.steps, trainer.task.schedule.steps)
    return 0 if results["steps"] >= wanted else INTERRUPTED


def _train_alone(args: Train, config: ParallelConfig, folder: Path) -> int:
    """Train one stage in a folder of its own, DIR/stage-K; one that has a checkpoint continues from it."""
    from functools import partial

    from topograd.cli.progress import training_progress
    from topograd.parallel.independent_stage import IndependentStageTask
    from topograd.parallel.launch import is_restart
    from topograd.training.runs import resume, start

    own = folder if args.resume is not None else folder / f"stage-{config.stage}"
    make = partial(IndependentStageTask, parallel=config)
    if args.resume is not None or (is_restart() and (own / "config.toml").is_file()):
        trainer = resume(own, args.from_, make)
    else:
        trainer = start(args.settings, own, make)
    with training_progress(own.name) as on_step:
        results = trainer.train(args.stop_after, on_step)
    if args.json:
        print_json(results)
    else:
        note(f"{own}: step {results['steps']}, missed {results['missed']}, replayed {results['replayed']}")
    return 0 if results["finished"] or args.stop_after else INTERRUPTED
