"""What a run computes once: the states of a frozen trunk, and the logits of another run that teaches.

    RUN/states/           what `hidden_states.py` writes
    RUN/teacher-logits/   what `sparse_teacher.py` writes; both are removed when the schedule is done

Rows are those of the loader's first epoch, as many as the schedule asks for: what a run would read again in a
second epoch, cut anew, it reads here as it was cut first.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from topograd.data import Prepared
from topograd.runs.config import TrainConfig
from topograd.runs.delta_store import DeltaStore
from topograd.runs.topology_config import OWN_TEACHER
from topograd.topology.dag import EMBEDDING
from topograd.topology.plan import Plan
from topograd.training.activation_cache import (
    CachedActivationLoader,
    OnRows,
    PlainRows,
    RowStore,
    StateBatch,
    compute_states,
    packed_rows,
)
from topograd.training.sparse_teacher import TeacherLogitRows, write_teacher

if TYPE_CHECKING:
    from topograd.training.runs import RunTask

FOLDER, LOGITS = "states", "teacher-logits"


def kept_layers(config: TrainConfig, plan: Plan) -> tuple[int, ...]:
    """The layers after which the states of the trunk are kept; none where it learns, or is no plain chain."""
    tune = config.tune
    if (
        tune.states == "none"
        or not (tune.frozen or tune.first_layer or tune.only_stage)
        or not _is_chain(plan)
    ):
        return ()
    last = len(plan.stages) - 1
    if tune.frozen:
        read = [planned for planned in plan.stages if planned.scale > 0]
        stops = {planned.stage.stop for planned in read}
        return tuple(sorted(stops | ({plan.stages[last].stage.stop} if _taught(config) else set())))
    first = plan.stages[tune.only_stage - 1].stage.start if tune.only_stage else tune.first_layer
    return (first,) if first else ()


def open_kept_loader(
    task: RunTask, layers: tuple[int, ...], on_rows: OnRows | None
) -> CachedActivationLoader:
    """Batches of the run's text with what is kept of it, computed now if it is not there."""
    config = task.config
    assert isinstance(task.data, Prepared), "settings with [images] keep nothing"
    tokens = _scheduled(config)
    inputs, targets = packed_rows(task.data.train, config.seq_len, config.seed, tokens)
    store: RowStore = PlainRows(inputs, targets)
    if layers:
        store = _states(task, layers, inputs, targets, on_rows)
    if config.topology.teacher_top:
        teacher = task.teacher
        assert teacher is not None, "`teacher_top` needs one"
        kept = write_teacher(
            task.run.folder / LOGITS,
            teacher.predictor,
            inputs,
            targets,
            name=teacher.weights,
            top=config.topology.teacher_top,
            on_rows=on_rows,
        )
        store = TeacherLogitRows(store, kept, config.device)
    return CachedActivationLoader(store, config.batch, config.seed)


def first_rows(task: RunTask, tokens: int) -> StateBatch:
    """The first rows of the run's text, with what is kept of them."""
    config = task.config
    tokens = min(tokens, _scheduled(config))
    if task.states is not None:
        store = task.states.store
        return store.rows(range(min(len(store), max(1, tokens // config.seq_len))))
    assert isinstance(task.data, Prepared), "settings with [images] have no rows of text"
    return StateBatch(*packed_rows(task.data.train, config.seq_len, config.seed, tokens), {})


def _scheduled(config: TrainConfig) -> int:
    """Tokens that the schedule asks for."""
    return config.steps * config.accumulate * config.batch * config.seq_len


def _states(
    task: RunTask, layers: tuple[int, ...], inputs: Tensor, targets: Tensor, on_rows: OnRows | None
) -> RowStore:
    store, dtype = task.run.store, task.config.tune.states
    assert isinstance(store, DeltaStore)
    assert dtype != "none"
    return compute_states(
        task.run.folder / FOLDER,
        task.stack,
        inputs,
        targets,
        base=store.base_weights,
        layers=layers,
        dtype=dtype,
        on_rows=on_rows,
    )


def remove_states(folder: Path) -> None:
    """Forget what was kept for a run that has learned all that it was to learn."""
    for name in (FOLDER, LOGITS):
        shutil.rmtree(folder / name, ignore_errors=True)


def _taught(config: TrainConfig) -> bool:
    return config.topology.teacher == OWN_TEACHER


def _is_chain(plan: Plan) -> bool:
    """Whether each stage hears the one before it and nothing else, as it is."""
    for k, planned in enumerate(plan.stages):
        if len(planned.inputs) != 1:
            return False
        port = planned.inputs[0][0]
        source = EMBEDDING if k == 0 else k - 1
        if port.source != source or port.relay != "identity" or (k and port.layer != planned.stage.start):
            return False
    return True
