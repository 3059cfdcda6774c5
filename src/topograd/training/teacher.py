"""A teacher: another run, opened and frozen, whose prediction a student follows by `distillation`."""

from __future__ import annotations

from dataclasses import dataclass

from topograd.data import Tokenizer
from topograd.data.tokenizer import FILE
from topograd.errors import ConfigError
from topograd.exec.forward import Predictor
from topograd.exec.objectives import Distillation, Objective
from topograd.runs.config import TrainConfig
from topograd.runs.session import image_spec, open_run, open_session
from topograd.runs.topology_config import AVERAGE_TEACHER, OWN_TEACHER


@dataclass(frozen=True)
class Teacher:
    """What teaches, and which weights it has."""

    predictor: Predictor
    weights: str


def open_teacher(config: TrainConfig, tokenizer: Tokenizer) -> Teacher | None:
    """The run that the settings name as the teacher, if it speaks the student's tokens; None if there is
    none, or if the model or its average teaches."""
    folder = config.topology.teacher
    if folder in (None, OWN_TEACHER, AVERAGE_TEACHER):
        return None
    assert folder is not None
    session = open_session(folder)
    if session.tokenizer.files()[FILE] != tokenizer.files()[FILE]:
        raise ConfigError(
            f"teacher {folder} has another tokenizer, so its logits are of other tokens",
            setting="teacher",
            given=folder,
            remedy="train it and its student on the same text",
        )
    if session.config.model.context < config.model.context:
        raise ConfigError(
            f"teacher {folder} sees {session.config.model.context} tokens and the student "
            f"{config.model.context}",
            setting="teacher",
            given=folder,
            remedy="give the student a smaller context",
        )
    session.stack.to(config.device).requires_grad_(False)
    return Teacher(Predictor(session.stack, session.plan), session.weights)


def open_image_teacher(config: TrainConfig) -> Teacher | None:
    """The run on pictures that the settings name as the teacher, if it names the student's classes."""
    folder = config.topology.teacher
    if folder in (None, OWN_TEACHER, AVERAGE_TEACHER):
        return None
    assert folder is not None
    opened = open_run(folder)
    ours = image_spec(config)
    theirs = image_spec(opened.config) if opened.config.model.task == "images" else None
    if theirs is None or (theirs.shape, theirs.classes) != (ours.shape, ours.classes):
        raise ConfigError(
            f"teacher {folder} was not trained on images of {ours.shape} with {ours.classes} classes",
            setting="teacher",
            given=folder,
            remedy="train it and its student on the same images",
        )
    opened.stack.to(config.device).requires_grad_(False)
    return Teacher(Predictor(opened.stack, opened.plan), opened.weights)


def objectives_of_config(config: TrainConfig) -> dict[str, Objective]:
    """Objectives whose numbers the settings give."""
    table = config.topology
    return {"distillation": Distillation(table.teacher_temperature, table.teacher_mix)}
