"""Start and resume of a run on all ranks of a job."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from topograd.errors import ParallelError, TopogradError
from topograd.parallel.rank_task import RankTask
from topograd.parallel.ranks import Ranks, wait_until_read
from topograd.parallel.settings import wait_for_first_rank
from topograd.reading import flat_settings
from topograd.runs.config import TrainConfig
from topograd.training.runs import Make, RunTrainer, resume, start


def facts_of(version: str, settings: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """What must be the same on every rank."""
    facts = {"version of topograd": version, "version of torch": torch.__version__}
    return facts | {name: str(value) for name, value in more.items()} | flat_settings(settings)


def is_restart() -> bool:
    """Whether torchrun has started this job again after a rank died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def start_on_ranks(ranks: Ranks, config: TrainConfig, folder: Path) -> RunTrainer:
    """A new run; rank 0 makes its folder, and the others open it. A restart continues what is there."""
    make = partial(RankTask, ranks=ranks)
    if is_restart() and (folder / "config.toml").is_file():
        return resume_on_ranks(ranks, folder)
    return _first_then_all(
        ranks, lambda: start(config, folder, make), lambda: resume(folder, make=make), "making the run"
    )


def resume_on_ranks(ranks: Ranks, folder: Path, name: str | None = None) -> RunTrainer:
    """The run in `folder`, from the newest checkpoint of any number of ranks or the one called `name`."""
    make: Make = partial(RankTask, ranks=ranks)
    again: Callable[[], RunTrainer] = lambda: resume(folder, name, make)  # noqa: E731
    return _first_then_all(ranks, again, again, "opening the run")


def _first_then_all(
    ranks: Ranks, first: Callable[[], RunTrainer], then: Callable[[], RunTrainer], what: str
) -> RunTrainer:
    """Rank 0 first, which reports errors; then the others, on what it has prepared."""
    if ranks.first:
        try:
            with ranks.busy(what):
                trainer = first()
        except TopogradError as error:
            ranks.tell("run", str(error))
            wait_until_read(ranks.store, ranks.config.world)
            raise
        ranks.tell("run", "")
    elif ranks.follow("run", 0, f"{what} on rank 0"):
        ranks.store.set(f"read/{ranks.rank}", "1")
        wait_for_first_rank()
        raise SystemExit(2)
    else:
        with ranks.busy(what):
            try:
                trainer = then()
            except TopogradError as error:
                raise ParallelError(f"rank {ranks.rank}: {error}") from None
            ranks.tell(f"ready/{ranks.rank}", "")
    for other in range(1, ranks.config.world):
        ranks.follow(f"ready/{other}", other, f"{what} on rank {other}")
    return trainer
