"""Batches of a run with cached activations: hidden states of a frozen trunk, and a teacher's logits.

    RUN/hidden-states/    written by `activation_cache.py`
    RUN/teacher-rows/     written by `sparse_teacher.py`; both are removed when the schedule is done

Sequences are those of the loader's first epoch, as many as the schedule needs; later epochs repeat them.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from topograd.data import Prepared
from topograd.runs.config import TrainConfig
from topograd.runs.delta_store import DeltaStore
from topograd.runs.topology_config import OWN_TEACHER
from topograd.topology.dag import EMBEDDING
from topograd.topology.plan import Plan
from topograd.training.activation_cache import (
    CachedActivationLoader,
    OnRows,
    PlainSequences,
    SequenceStore,
    StateBatch,
    compute_states,
    packed_rows,
)
from topograd.training.sparse_teacher import TeacherLogitRows, write_teacher

if TYPE_CHECKING:
    from topograd.training.runs import RunTask

FOLDER, LOGITS = "hidden-states", "teacher-rows"


def cached_layers(config: TrainConfig, plan: Plan) -> tuple[int, ...]:
    """The layers whose states are cached; none where the trunk learns, or is no plain chain."""
    tune = config.tune
    if (
        tune.states == "none"
        or not (tune.frozen or tune.first_layer or tune.only_stage)
        or not _is_chain(plan)
    ):
        return ()
    if tune.frozen:
        read = [planned for planned in plan.stages if planned.scale > 0]
        stops = {planned.stage.stop for planned in read}
        taught = config.topology.teacher == OWN_TEACHER
        return tuple(sorted(stops | ({plan.stages[-1].stage.stop} if taught else set())))
    first = plan.stages[tune.only_stage - 1].stage.start if tune.only_stage else tune.first_layer
    return (first,) if first else ()


def open_cached_loader(
    task: RunTask, layers: tuple[int, ...], on_rows: OnRows | None
) -> CachedActivationLoader:
    """Batches of the run's text with what is cached, computed now if it is not there."""
    config = task.config
    assert isinstance(task.data, Prepared), "images have no cache"
    inputs, targets = packed_rows(task.data.train, config.seq_len, config.seed, _scheduled(config))
    store: SequenceStore = PlainSequences(inputs, targets)
    if layers:
        base, dtype = task.run.store, config.tune.states
        assert isinstance(base, DeltaStore)
        assert dtype != "none"
        store = compute_states(
            task.run.folder / FOLDER,
            task.stack,
            inputs,
            targets,
            base=base.base_weights,
            layers=layers,
            dtype=dtype,
            on_rows=on_rows,
        )
    if config.topology.teacher_top:
        teacher = task.teacher
        assert teacher is not None, "`teacher_top` needs one"
        logits = write_teacher(
            task.run.folder / LOGITS,
            teacher.predictor,
            inputs,
            targets,
            name=teacher.weights,
            top=config.topology.teacher_top,
            on_rows=on_rows,
        )
        store = TeacherLogitRows(store, logits, config.device)
    return CachedActivationLoader(store, config.batch, config.seed)


def first_sequences(task: RunTask, tokens: int) -> StateBatch:
    """The first sequences of the run's text, with what is cached of them."""
    config = task.config
    tokens = min(tokens, _scheduled(config))
    if task.states is not None:
        store = task.states.store
        return store.rows(range(min(len(store), max(1, tokens // config.seq_len))))
    assert isinstance(task.data, Prepared), "images have no text"
    return StateBatch(*packed_rows(task.data.train, config.seq_len, config.seed, tokens), {})


def _scheduled(config: TrainConfig) -> int:
    """Tokens that the schedule asks for."""
    return config.steps * config.accumulate * config.batch * config.seq_len


def remove_cache(folder: Path) -> None:
    """Delete the cache of a run that is finished."""
    for name in (FOLDER, LOGITS):
        shutil.rmtree(folder / name, ignore_errors=True)


def _is_chain(plan: Plan) -> bool:
    """Whether each stage reads the one before it and nothing else, through no relay."""
    for k, planned in enumerate(plan.stages):
        if len(planned.inputs) != 1:
            return False
        port = planned.inputs[0][0]
        source = EMBEDDING if k == 0 else k - 1
        if port.source != source or port.relay != "identity" or (k and port.layer != planned.stage.start):
            return False
    return True
