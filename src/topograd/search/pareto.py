"""The Pareto front of trained configurations: a study that can be killed, resumed and shared.

Statement. A study asks a sampler for candidates, trains each, and records its objectives. Training goes by
rungs of s_1 < ... < s_R steps. At each rung but the last a candidate continues only if it is among the best
⌈n/f⌉ of the n that have reached the rung, itself included; best is the lowest front, then the most room
(`front.best_first`). That is asynchronous successive halving by steps, with fronts in place of one loss. The
front is drawn from the candidates that reached s_R: those alone had the same budget.

What is kept where. The storage (SQLite in the study's folder, or any database by URL) has one trial for each
candidate: its values at each rung, and in the end its objectives. The folder has `trials/NUMBER/` for each
trial, where `train` may keep checkpoints, and a lock that the working process holds.

A study is of one space, some objectives and rungs, and the settings in `base`; called again
with others it raises, because its numbers would not compare.

Resuming. A trial that was under way here and whose lock is free belonged to a process that died: it is taken
up again before anything new is asked for. Rungs in the storage are not trained again; a rung that was under
way is handed to `train` with the same folder. A candidate is tried once: where the sampler only proposes what
was tried, or what is no candidate (`candidates.py`), an untried candidate is drawn at random. One that
diverges stops where it is.

Symbols. f `reduction`, s_r `rungs`. Cost beside training: some 0.2 s a trial, for the database.
Source: "Stage-Partitioned Learning: A Configuration Space Between Backpropagation and Local Learning" §10.6
(Pareto frontier mapping); Li and others, "A system for massively parallel hyperparameter tuning"; Akiba and
others, "Optuna: a next-generation hyperparameter optimization framework".
Limits. Several machines share a study by URL, each with its own folder; a trial that died on one machine is
resumed there only. The first candidates at a rung have few others to be compared with, so some that a full
comparison would stop continue.
"""

from __future__ import annotations

import math
import random
import shutil
import socket
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from topograd.errors import ConfigError, DivergenceError, RunError
from topograd.runs.folder import Run
from topograd.search.candidates import Candidate, Space
from topograd.search.front import best_first, pareto_front
from topograd.search.properties import Direction
from topograd.search.settings import ParetoConfig
from topograd.topology.composition import Composition

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

Train = Callable[[Candidate, int, Path], Mapping[str, float]]
"""Train a candidate to that many steps, going on from what the folder holds, and read its objectives."""
State = Literal["complete", "stopped", "running"]
_TRIES = 5  # proposals of the sampler before an untried candidate is drawn


@dataclass(frozen=True)
class Tried:
    """A candidate and what it came to."""

    number: int
    candidate: Candidate
    steps: int
    """The rung that it reached."""
    values: dict[str, float]
    """Its objectives there."""
    state: State
    on_front: bool


def explore(
    space: Space,
    objectives: Mapping[str, Direction],
    train: Train,
    folder: Path,
    config: ParetoConfig,
    on_trial: Callable[[Tried], None] | None = None,
    base: str = "",
) -> list[Tried]:
    """Try candidates until there are `config.trials`, or all of the space; all that the study knows.

    `base` stands for the settings that all trainings share.
    """
    if not objectives:
        raise ConfigError(setting="objectives", given={}, allowed="at least one objective")
    work = _Work(_open(folder, config, list(objectives.values())), space, objectives, train, folder, config)
    work.check_same(base)
    work.take_up()
    wanted = min(config.trials, space.size)
    while len(work.tried()) < wanted:
        number = work.try_one()
        if on_trial:
            on_trial(next(t for t in work.results() if t.number == number))
    return work.results()


def _open(folder: Path, config: ParetoConfig, directions: list[Direction]) -> Study:
    try:
        import optuna
    except ImportError:
        raise ConfigError(
            "a Pareto study needs optuna, which is not installed",
            remedy="run: pip install 'topograd[search]'",
        ) from None
    folder.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(
            study_name=config.name,
            storage=config.storage or f"sqlite:///{(folder / 'study.db').absolute()}",
            directions=directions,
            load_if_exists=True,
        )
    except Exception as problem:  # of any database's driver
        reason = str(problem).splitlines()[0]
        raise ConfigError(
            f"storage {config.storage!r} cannot be used ({reason})",
            setting="storage",
            given=config.storage,
            remedy="give another URL",
        ) from None
    # From the same seed a resumed study would propose its first candidates again.
    seed = (config.sampler_seed + len(study.get_trials(deepcopy=False))) % 2**32
    study.sampler = optuna.samplers.TPESampler(seed=seed)
    return study


@dataclass(frozen=True)
class _Work:
    """A study, and what works on it in this process."""

    study: Study
    space: Space
    objectives: Mapping[str, Direction]
    train: Train
    folder: Path
    config: ParetoConfig

    def check_same(self, base: str) -> None:
        """Record the settings of a new study; raise ConfigError where a known one has others."""
        space, study, name_ = self.space, self.study, self.config.name
        bounds: dict[str, Any] = {
            "layers": space.layers,
            "min_depth": space.min_depth,
            "max_stages": space.max_stages,
        }
        choices = {name: list(values) for name, values in space.choices.items()}
        about: dict[str, Any] = {"objectives": dict(self.objectives), "rungs": list(self.config.rungs)}
        about |= {"space": bounds | choices, "base": base}
        known = study.user_attrs
        if "base" not in known:  # the last that is recorded: a kill may have come before it
            for name, value in about.items():
                study.set_user_attr(name, value)
            return
        for name, value in about.items():
            if known.get(name) != value:
                was = "" if name == "base" else f" ({known.get(name)}, not {value})"
                what = "trainings with other settings" if name == "base" else f"other {name}"
                raise ConfigError(
                    f"study {name_!r} has {what}{was}",
                    setting="name",
                    given=name_,
                    remedy="continue with those, or give another name or folder",
                )

    def take_up(self) -> None:
        """Finish the trials that a process left under way here."""
        import optuna

        running = [t for t in self.tried() if not t.state.is_finished()]
        for number in [t.number for t in running if t.user_attrs.get("home") == self._home()]:
            with ExitStack() as stack:
                if self._claim(stack, number) and not (t := self._frozen(number)).state.is_finished():
                    self._run(optuna.trial.Trial(self.study, t._trial_id))

    def try_one(self) -> int:
        """Try an untried candidate; its number."""
        with ExitStack() as stack:
            trial = self._ask(stack)
            self._run(trial)
        return trial.number

    def tried(self) -> list[FrozenTrial]:
        """The trials that have a candidate and are not repetitions."""
        trials = self.study.get_trials(deepcopy=False)
        return [t for t in trials if "candidate" in t.user_attrs and t.state.name != "FAIL"]

    def results(self) -> list[Tried]:
        """Every candidate of the study, by number; the front is that of the finished ones."""
        rows = []
        for trial in self.tried():
            reached = _reached(trial)
            steps = max(reached, default=0)
            values = dict(zip(self.objectives, reached.get(steps, []), strict=False))
            ended: State = "stopped" if trial.state.is_finished() else "running"
            state: State = "complete" if trial.state.name == "COMPLETE" else ended
            rows.append(Tried(trial.number, _candidate(trial), steps, values, state, False))
        done = [row for row in rows if row.state == "complete"]
        points = np.array(self._small([list(row.values.values()) for row in done]))
        front = pareto_front(points.reshape(len(done), len(self.objectives)))
        winners = {row.number for row, on in zip(done, front, strict=True) if on}
        return [replace(row, on_front=row.number in winners) for row in rows]

    def _ask(self, stack: ExitStack) -> Trial:
        """A trial with an untried candidate, claimed for this process."""
        from optuna.trial import TrialState

        for _ in range(_TRIES):
            self.study.enqueue_trial(self._proposal())
            trial = self.study.ask()
            candidate = self._candidate_of(trial)
            if candidate is not None:
                claimed = self._claim(stack, trial.number)
                assert claimed, "the number of a new trial is its own"
                trial.set_user_attr("home", self._home())
                trial.set_user_attr("partition", str(candidate.composition))
                trial.set_user_attr("settings", dict(candidate.settings))
                trial.set_user_attr("candidate", candidate.key)
                earlier = [t for t in self.tried() if t.number < trial.number]
                if all(t.user_attrs["candidate"] != candidate.key for t in earlier):
                    return trial
            # Another process took the proposal, or tries the same candidate: this trial counts for nothing.
            self.study.tell(trial, state=TrialState.FAIL)
            shutil.rmtree(self._place(trial.number), ignore_errors=True)
        raise RunError("other processes took every candidate that was drawn", remedy="call again")

    def _proposal(self) -> dict[str, object]:
        """The parameters of an untried candidate: the sampler's choice, or a random one if that repeats
        itself. The sampler is asked on a copy of the study, so that a repetition takes no trial number."""
        import optuna

        draft = optuna.create_study(directions=self.study.directions, sampler=self.study.sampler)
        draft.add_trials(self.study.get_trials())
        tried = {t.user_attrs["candidate"] for t in self.tried()}
        for _ in range(_TRIES):
            trial = draft.ask()
            candidate = self._candidate_of(trial)
            if candidate is not None and candidate.key not in tried:
                return dict(trial.params)
            draft.tell(trial, state=optuna.trial.TrialState.FAIL)
        seed = f"{self.config.sampler_seed} {len(self.study.get_trials(deepcopy=False))}"
        return _untried(tried, self.space, random.Random(seed))

    def _candidate_of(self, trial: Trial) -> Candidate | None:
        bits = [trial.suggest_categorical(f"after {i}", (False, True)) for i in range(1, self.space.layers)]
        choices = self.space.choices
        return self.space.mended(
            bits, {n: trial.suggest_categorical(n, tuple(v)) for n, v in choices.items()}
        )

    def _run(self, trial: Trial) -> None:
        """Climb the rungs that are left, and tell the study how it ended."""
        from optuna.trial import TrialState

        frozen, rungs = self._frozen(trial.number), self.config.rungs
        candidate, reached = _candidate(frozen), _reached(frozen)
        for steps in rungs:
            if steps not in reached:
                try:
                    values = self.train(candidate, steps, self._place(trial.number) / "run")
                except DivergenceError:
                    self.study.tell(trial.number, state=TrialState.PRUNED)
                    return
                reached[steps] = self._read(values)
                trial.set_user_attr(f"rung {steps}", reached[steps])
            if steps != rungs[-1] and not self._goes_on(trial.number, steps):
                self.study.tell(trial.number, state=TrialState.PRUNED)
                return
        self.study.tell(trial.number, reached[rungs[-1]])

    def _goes_on(self, number: int, steps: int) -> bool:
        """Whether a trial is among the best at a rung, of all that have reached it."""
        there = {t.number: _reached(t)[steps] for t in self.tried() if steps in _reached(t)}
        numbers = list(there)
        order = best_first(self._small(list(there.values())))
        best = [numbers[i] for i in order[: math.ceil(len(numbers) / self.config.reduction)]]
        return number in best

    def _read(self, values: Mapping[str, float]) -> list[float]:
        for name in self.objectives:
            if name not in values:
                raise ConfigError(setting="objectives", given=name, allowed=f"measured: {', '.join(values)}")
        for name in self.objectives:
            if not math.isfinite(values[name]):
                raise ConfigError(
                    setting=name, given=values[name], allowed="finite, as an objective of a study"
                )
        return [float(values[name]) for name in self.objectives]

    def _small(self, rows: Sequence[Sequence[float]]) -> list[list[float]]:
        """The values with every objective to be made small."""
        signs = [1.0 if direction == "minimize" else -1.0 for direction in self.objectives.values()]
        return [[sign * value for sign, value in zip(signs, row, strict=True)] for row in rows]

    def _frozen(self, number: int) -> FrozenTrial:
        return self.study.get_trials(deepcopy=False)[number]

    def _home(self) -> str:
        return f"{socket.gethostname()}:{self.folder.absolute()}"

    def _place(self, number: int) -> Path:
        return self.folder / "trials" / f"{number:05d}"

    def _claim(self, stack: ExitStack, number: int) -> bool:
        """Hold the lock of a trial until `stack` closes; False if another process has it."""
        place = self._place(number)
        place.mkdir(parents=True, exist_ok=True)
        try:
            stack.enter_context(Run(place).lock())
        except RunError:
            return False
        return True


def _untried(tried: Container[str], space: Space, generator: random.Random) -> dict[str, object]:
    """The parameters of a candidate that no trial has, drawn with equal chances by reservoir."""
    drawn, seen = None, 0
    for candidate in space:
        if candidate.key not in tried:
            seen += 1
            if generator.randrange(seen) == 0:
                drawn = candidate
            if seen == 10_000:  # enough to choose from; a large space is not walked to its end
                break
    if drawn is None:
        raise RunError("every candidate of the space has been tried", remedy="look at the results")
    bits = drawn.composition.boundary_vector
    settings = drawn.settings
    # A mended setting need not be among the choices; then any of them means the same.
    chosen = {n: settings[n] if settings[n] in values else values[0] for n, values in space.choices.items()}
    return {**{f"after {i}": bool(bit) for i, bit in enumerate(bits, start=1)}, **chosen}


def _candidate(trial: FrozenTrial) -> Candidate:
    return Candidate(Composition.parse(trial.user_attrs["partition"]), trial.user_attrs["settings"])


def _reached(trial: FrozenTrial) -> dict[int, list[float]]:
    """The values at each rung that a trial has reached."""
    rungs = {key: values for key, values in trial.user_attrs.items() if key.startswith("rung ")}
    return {int(key.removeprefix("rung ")): list(values) for key, values in rungs.items()}
