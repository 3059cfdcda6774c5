import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from raising import refused
from topograd.errors import ConfigError, DivergenceError
from topograd.search.candidates import Candidate, Space
from topograd.search.pareto import Tried, explore
from topograd.search.properties import Direction
from topograd.search.settings import ParetoConfig
from waiting import LIMIT

pytest.importorskip("optuna")
OBJECTIVES: dict[str, Direction] = {"loss": "minimize", "stages": "maximize"}
HEADS = {"heads": ("shared", "per-stage")}
SPACE = Space(4, choices=HEADS)
SMALL = Space(2, choices=HEADS)


class Recorder:
    """A training that only writes down what it was asked; more stages cost more, more steps less."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def __call__(self, candidate: Candidate, steps: int, folder: Path) -> Mapping[str, float]:
        self.calls.append((candidate.key, steps))
        extra = 0.5 * (candidate.settings["heads"] == "per-stage")
        stages = candidate.composition.stages
        return {"loss": stages + extra + candidate.composition.parts[0] / 10 + 1 / steps, "stages": stages}


def config(**settings: object) -> ParetoConfig:
    return ParetoConfig(**{"trials": 8, "rungs": (2, 4), **settings})  # type: ignore[arg-type]


def test_a_study_tries_each_candidate_once_and_draws_the_front(tmp_path: Path) -> None:
    train = Recorder()
    seen: list[Tried] = []
    found = explore(SPACE, OBJECTIVES, train, tmp_path, config(trials=5), seen.append)
    assert len(found) == len(seen) == 5
    assert len({tried.candidate.key for tried in found}) == 5
    assert len(train.calls) == len(set(train.calls))
    complete = [tried for tried in found if tried.state == "complete"]
    stopped = [tried for tried in found if tried.state == "stopped"]
    assert len(complete) + len(stopped) == 5
    assert {tried.steps for tried in complete} == {4}
    assert {tried.steps for tried in stopped} == {2}
    assert stopped, "halving stopped nobody"
    for tried in complete:
        better = [
            other
            for other in complete
            if other.values["loss"] <= tried.values["loss"]
            and other.values["stages"] >= tried.values["stages"]
            and other.values != tried.values
        ]
        assert tried.on_front == (not better)
    assert not any(tried.on_front for tried in stopped)


def test_going_on_repeats_nothing_and_ends_with_the_space(tmp_path: Path) -> None:
    first, second, third = Recorder(), Recorder(), Recorder()
    explore(SMALL, OBJECTIVES, first, tmp_path, config(trials=2))
    found = explore(SMALL, OBJECTIVES, second, tmp_path, config(trials=100))
    assert len(found) == SMALL.size == 4
    assert not set(first.calls) & set(second.calls)
    assert {key for key, _ in first.calls + second.calls} == {candidate.key for candidate in SMALL}
    assert explore(SMALL, OBJECTIVES, third, tmp_path, config(trials=100)) == found
    assert third.calls == []


def test_trials_are_numbered_without_gaps_and_every_folder_has_a_trial(tmp_path: Path) -> None:
    """The sampler repeats itself in a small space; its repetitions are no trials."""

    def train(candidate: Candidate, steps: int, folder: Path) -> Mapping[str, float]:
        folder.mkdir(parents=True, exist_ok=True)
        return Recorder()(candidate, steps, folder)

    trials = explore(SMALL, OBJECTIVES, train, tmp_path, config(trials=4))
    assert [trial.number for trial in trials] == [0, 1, 2, 3]
    folders = sorted((tmp_path / "trials").iterdir())
    assert [folder.name for folder in folders] == ["00000", "00001", "00002", "00003"]
    assert all((folder / "run").is_dir() for folder in folders)


def test_an_interrupted_trial_is_taken_up_at_its_rung(tmp_path: Path) -> None:
    done = Recorder()

    def interrupted(candidate: Candidate, steps: int, folder: Path) -> Mapping[str, float]:
        if steps == 4:
            raise KeyboardInterrupt
        return done(candidate, steps, folder)

    with pytest.raises(KeyboardInterrupt):
        explore(SPACE, OBJECTIVES, interrupted, tmp_path, config())
    assert len(done.calls) == 1
    after = Recorder()
    found = explore(SPACE, OBJECTIVES, after, tmp_path, config(trials=1))
    assert after.calls == [(done.calls[0][0], 4)]
    assert [(tried.number, tried.state) for tried in found] == [(0, "complete")]


def test_a_killed_process_loses_only_the_rung_under_way(tmp_path: Path) -> None:
    """A real SIGKILL, at the third training."""
    script = textwrap.dedent(
        """
        import os, signal, sys
        from pathlib import Path
        from topograd.search.candidates import Space
        from topograd.search.pareto import explore
        from topograd.search.settings import ParetoConfig

        def train(candidate, steps, folder):
            with open(Path(sys.argv[1]) / "calls", "a") as file:
                file.write(f"{candidate.key}|{steps}\\n")
            if len((Path(sys.argv[1]) / "calls").read_text().splitlines()) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return {"loss": float(candidate.composition.stages), "stages": candidate.composition.stages}

        space = Space(4, choices={"heads": ("shared", "per-stage")})
        objectives = {"loss": "minimize", "stages": "maximize"}
        explore(space, objectives, train, Path(sys.argv[1]), ParetoConfig(trials=4, rungs=(2, 4)))
        """
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=LIMIT)
    assert ended.returncode == -signal.SIGKILL
    before = [tuple(line.split("|")) for line in (tmp_path / "calls").read_text().splitlines()]
    assert len(before) == 3
    train = Recorder()
    found = explore(SPACE, OBJECTIVES, train, tmp_path, config(trials=4))
    again = [(key, str(steps)) for key, steps in train.calls]
    assert again[0] == before[2]
    assert not set(again) & set(before[:2])
    assert len(again) == len(set(again))
    assert len(found) == 4
    assert all(tried.state != "running" for tried in found)


def test_a_kill_while_a_study_records_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from optuna.study import Study

    record = Study.set_user_attr

    def killed(study: Study, key: str, value: object) -> None:
        if key == "space":
            raise KeyboardInterrupt
        record(study, key, value)

    with monkeypatch.context() as patch:
        patch.setattr(Study, "set_user_attr", killed)
        with pytest.raises(KeyboardInterrupt):
            explore(SPACE, OBJECTIVES, Recorder(), tmp_path, config(trials=2))
    assert len(explore(SPACE, OBJECTIVES, Recorder(), tmp_path, config(trials=2))) == 2


def test_a_trial_that_another_process_works_on_is_left_alone(tmp_path: Path) -> None:
    inner = Recorder()

    def outer(candidate: Candidate, steps: int, folder: Path) -> Mapping[str, float]:
        if not inner.calls:  # meanwhile, another one joins the same study
            explore(SPACE, OBJECTIVES, inner, tmp_path, config(trials=2))
            assert candidate.key not in {key for key, _ in inner.calls}
        return Recorder()(candidate, steps, folder)

    found = explore(SPACE, OBJECTIVES, outer, tmp_path, config(trials=2))
    assert inner.calls
    assert len(found) == 2
    assert all(tried.state != "running" for tried in found)


def test_a_diverging_candidate_stops_and_the_study_goes_on(tmp_path: Path) -> None:
    def train(candidate: Candidate, steps: int, folder: Path) -> Mapping[str, float]:
        if candidate.settings["heads"] == "shared":
            raise DivergenceError("not finite")
        return Recorder()(candidate, steps, folder)

    found = explore(SMALL, OBJECTIVES, train, tmp_path, config(trials=4))
    shared = [tried for tried in found if tried.candidate.settings["heads"] == "shared"]
    assert len(shared) == 2
    assert {(tried.state, tried.steps) for tried in shared} == {("stopped", 0)}
    assert any(tried.on_front for tried in found)


def test_a_space_whose_proposals_are_mended_or_skipped_is_tried_to_its_end(tmp_path: Path) -> None:
    """Most proposals mean a candidate that was tried, or none; the study still finds every one, once."""
    space = Space(3, choices={"heads": ("shared",), "source": ("layer:1",)})
    train = Recorder()
    found = explore(space, OBJECTIVES, train, tmp_path, config(trials=99))
    assert len(found) == space.size == len({tried.candidate.key for tried in found})
    assert {tried.candidate.key for tried in found} == {candidate.key for candidate in space}
    sources = {str(t.candidate.composition): t.candidate.settings["source"] for t in found}
    assert sources == {"3": "none", "2,1": "layer:1", "1,1,1": "layer:1"}, "1,2 would receive it anyway"


def test_a_study_may_live_in_a_database_elsewhere(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/elsewhere.db"
    found = explore(SPACE, OBJECTIVES, Recorder(), tmp_path / "a", config(trials=2, storage=url))
    other = Recorder()
    assert explore(SPACE, OBJECTIVES, other, tmp_path / "b", config(trials=2, storage=url)) == found
    assert other.calls == []
    assert not (tmp_path / "a" / "study.db").exists()


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        (lambda: config(rungs=(4, 2)), "rungs"),
        (lambda: config(rungs=()), "rungs"),
        (lambda: config(trials=0), "trials"),
        (lambda: config(reduction=1.0), "reduction"),
        (lambda: config(reduction=float("inf")), "reduction"),
        (lambda: config(rungs=(1, 10**12)), "rungs"),
        (lambda: config(sampler_seed=-1), "sampler_seed"),
    ],
)
def test_bad_settings(change: Callable[[], ParetoConfig], setting: str) -> None:
    with refused(ConfigError, setting=setting):
        change()


def test_bad_studies(tmp_path: Path) -> None:
    explore(SPACE, OBJECTIVES, Recorder(), tmp_path, config(trials=1))
    with refused(ConfigError, setting="name", given="pareto"):
        explore(SPACE, OBJECTIVES, Recorder(), tmp_path, config(rungs=(2, 8)))
    with refused(ConfigError, setting="name", given="pareto"):
        explore(SMALL, OBJECTIVES, Recorder(), tmp_path, config())
    with refused(ConfigError, setting="name", given="pareto"):
        explore(SPACE, OBJECTIVES, Recorder(), tmp_path, config(), base="width 99")
    with refused(ConfigError, setting="storage"):
        explore(SPACE, OBJECTIVES, Recorder(), tmp_path, config(storage="nosuch://x"))
    with refused(ConfigError, setting="objectives", given="speed"):
        explore(SPACE, {"speed": "maximize"}, Recorder(), tmp_path / "c", config())
    with refused(ConfigError, setting="objectives"):
        explore(SPACE, {}, Recorder(), tmp_path / "d", config())
    assert (tmp_path / "study.db").exists()
