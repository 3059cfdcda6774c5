"""Consolidation of the checkpoints of ranks and independent stages into one.

A set of a job (`checkpoint_set.py`) is read whole anyway; here it is written again as one file of weights and
one of optimizers. The folders of independent stages (`independent_stage.py`) become one new run: the newest
step that all of them have, the weights of each from its own folder, the embedding from the first, the losses
of all in one log. Stages that were added later bring the settings of the deepest.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from topograd.errors import CheckpointError, ConfigError
from topograd.nn.stack import Stack
from topograd.parallel.layout import Layout
from topograd.runs.checkpoint import FolderStore, Optimizers, read_state
from topograd.runs.checkpoint_set import optimizer_parts, read_set
from topograd.runs.folder import Run
from topograd.runs.session import bind_tokenizer, build_stack, read_settings, read_tokenizer
from topograd.training.optimizers import make_optimizers


def consolidate_run(folder: Path) -> dict[str, Any]:
    """Write the newest set of a run again as one process would; returns what was done."""
    run = Run.open(folder)
    with run.lock():
        store = run.store
        names = store.names()
        if not names:
            raise CheckpointError(f"{folder} has no checkpoint yet", remedy="train it first")
        before = store.weights(names[-1])
        config = read_settings(run)
        stack, plan = build_stack(config)
        optimizers = make_optimizers(stack, config.optimizer, plan).optimizers
        loaded = store.load(names[-1], stack, optimizers)
        store.save(
            step=loaded.step,
            model=stack,
            optimizers=optimizers,
            extra=loaded.extra,
            keep=config.keep,
            tensors=loaded.tensors,
        )
        after = store.weights(names[-1])
        results = run.read_results()
        if results is not None and results.get("weights") == before:
            run.write_results(results | {"weights": after})
    return {"run": str(folder), "step": loaded.step, "weights": after}


def consolidate_stages(folders: Sequence[Path], out: Path) -> dict[str, Any]:
    """One new run in `out` of the folders of all stages, in order."""
    runs = [Run.open(folder) for folder in folders]
    stores = [FolderStore(run.checkpoints) for run in runs]
    common = set.intersection(*({*store.names()} for store in stores))
    if not common:
        raise CheckpointError(
            f"no step was saved by all of the {len(folders)} stages",
            setting="folders",
            remedy="train on until they have saved the same",
        )
    name = max(common)
    config = read_settings(runs[-1])
    stack, plan = build_stack(config)
    if len(plan.stages) != len(folders):
        raise ConfigError(
            f"{len(folders)} folders are given",
            setting="folders",
            given=len(folders),
            allowed=f"{len(plan.stages)}, one for each stage",
        )
    layout = Layout.of(plan, len(plan.stages), stack=stack)
    optimizers = make_optimizers(stack, config.optimizer, plan).optimizers
    for k, store in enumerate(stores):
        _take_stage(stack, layout, optimizers, store.folder / name, k)
    extra = dict(stores[-1].extra(name))
    made = Run.create(out)
    bind_tokenizer(made, read_tokenizer(runs[0]))
    made.write_config(config.as_dict())
    step = int(name.rpartition("-")[2])
    for record in _log(runs, step):
        made.log(record)
    extra |= {
        "run": made.manifest.identity(),
        "metrics": made.log_mark(step),
        "halted": sorted({k for store in stores for k in store.extra(name).get("halted", ())}),
    }
    FolderStore(made.checkpoints).save(step=step, model=stack, optimizers=optimizers, extra=extra, keep=1)
    return {"run": str(out), "step": step, "weights": FolderStore(made.checkpoints).weights(name)}


@torch.no_grad()
def _take_stage(stack: Stack, layout: Layout, optimizers: Optimizers, path: Path, k: int) -> None:
    """Stage k's own tensors and optimizer state; the first brings what is shared too."""
    weights, rest = read_set(path, read_state(path))
    own = stack.state_dict()
    names = set(layout.names(stack, k))
    if k == 0:
        elsewhere = {name for other in range(1, layout.ranks) for name in layout.names(stack, other)}
        names = {name for name in own if name not in elsewhere}
    missing = sorted(name for name in names if name not in weights)
    if missing:
        raise CheckpointError(
            f"checkpoint {path} lacks {missing[0]!r}",
            setting="folders",
            given=str(path),
            remedy="give the folders in order of stages",
        )
    for name in names:
        own[name].copy_(weights[name])
    parameters = {name: p for name, p in stack.named_parameters() if name in names}
    for title, states in optimizer_parts(rest).items():
        for name, entries in states.items():
            if name in parameters:
                optimizers[title].state[parameters[name]] = entries


def _log(runs: Sequence[Run], step: int) -> list[dict[str, Any]]:
    """The losses of all stages, step by step; a stage that missed one has null."""
    found: dict[int, list[float | None]] = {}
    for k, run in enumerate(runs):
        for record in run.metrics():
            if record["kind"] == "train" and record["step"] <= step:
                found.setdefault(record["step"], [None] * len(runs))[k] = record["loss"][0]
    return [{"kind": "train", "step": number, "loss": losses} for number, losses in sorted(found.items())]
