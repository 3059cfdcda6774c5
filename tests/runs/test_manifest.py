"""The manifest: whatever a run did not write is refused by name, and no kill makes it refuse its own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from papers.export_run import export
from topograd import files
from topograd.data import BPETokenizer, load_tokenizer
from topograd.errors import CheckpointError, RunError
from topograd.runs import manifest
from topograd.runs.checkpoint import digest
from topograd.runs.config import TrainConfig
from topograd.runs.folder import Run
from topograd.runs.manifest import Manifest
from topograd.runs.session import open_session
from topograd.training.runs import resume, start

STEPS = 20


@pytest.fixture(scope="module")
def learned(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose tokenizer was learned from its text."""
    folder = tmp_path_factory.mktemp("learned") / "run"
    small = replace(config, tokenizer="bpe", steps=2, model=config.model.changed(vocab=280))
    start(small, folder).train()
    return Run.open(folder)


@pytest.fixture
def copy(straight: Run, tmp_path: Path) -> Run:
    return Run(shutil.copytree(straight.folder, tmp_path / "run"))


def refused(folder: Path, words: str, ways: tuple[Callable[[Path], object], ...] | None = None) -> None:
    """Every way to open the run says `words`, in one line."""
    for way in ways or (open_session, resume):
        with pytest.raises(RunError, match=words) as caught:
            way(folder)
        assert "\n" not in str(caught.value)


# Tokenizers (R1)


def test_a_foreign_tokenizer_of_another_size_is_refused(learned: Run, straight: Run, tmp_path: Path) -> None:
    copy = Run(shutil.copytree(learned.folder, tmp_path / "run"))
    shutil.copy(straight.tokenizer_file, copy.tokenizer_file)
    words = r"tokenizer\.json is not the file that this run wrote; .*would give these weights other tokens"
    refused(copy.folder, words, (open_session, resume, lambda folder: export(folder, tmp_path / "other")))


def test_a_foreign_tokenizer_of_the_same_size_is_refused(learned: Run, tmp_path: Path) -> None:
    """The last two merges exchanged: as many tokens, but others. Nothing but its digest could tell."""
    copy = Run(shutil.copytree(learned.folder, tmp_path / "run"))
    before = load_tokenizer(copy.tokenizer_file)
    assert isinstance(before, BPETokenizer)
    text = copy.tokenizer_file.read_text()
    *merges, one, two = before.merges
    copy.tokenizer_file.write_text(BPETokenizer((*merges, two, one)).files()["tokenizer.json"])
    assert copy.tokenizer_file.read_text() != text
    assert load_tokenizer(copy.tokenizer_file).vocab == before.vocab, "it can be read, and has the same size"
    refused(copy.folder, r"tokenizer\.json is not the file that this run wrote")
    copy.tokenizer_file.write_text(text)
    open_session(copy.folder)


def test_a_lost_tokenizer_is_not_made_anew(learned: Run, tmp_path: Path) -> None:
    copy = Run(shutil.copytree(learned.folder, tmp_path / "run"))
    copy.tokenizer_file.unlink()
    refused(copy.folder, r"tokenizer\.json is missing, and it belongs to the run; restore it")


# Settings (R2)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("seed = 1", "seed = 2", "seed is now 2 and was 1: restore it"),
        ("context = 16", "context = 48", "model.context is now 48 and was 16: restore it"),
        ('partition = "1,1"', 'partition = "2"', "topology.partition is now '2' and was '1,1'"),
        ("steps = 20\n", "", "steps is missing and was 20"),
        ("steps = 20\n", "steps = 20\nstep = 3\n", "step is now 3 and was not there"),
        ("steps = 20\n", "steps = \n", "it cannot be read"),
        ("steps = 20\n", "steps  = 20\n", "restore it"),
    ],
    ids=["seed", "bit", "topology", "lost", "added", "torn", "space"],
)
def test_changed_settings_are_refused_by_name(copy: Run, before: str, after: str, words: str) -> None:
    text = copy.config_file.read_text()
    assert before in text
    copy.config_file.write_text(text.replace(before, after))
    refused(copy.folder, rf"config\.toml is not the file that this run wrote; .*{words}")


def test_settings_cut_at_any_line_are_refused(copy: Run) -> None:
    """Cut there it is still TOML, and the rest would be defaults."""
    lines = copy.config_file.read_bytes().splitlines(keepends=True)
    for count in range(len(lines)):
        copy.config_file.write_bytes(b"".join(lines[:count]))
        with pytest.raises(
            RunError, match=r"config\.toml is not the file .* is missing and was .*restore it"
        ):
            copy.read_config()


def test_any_flipped_bit_of_the_settings_is_refused(copy: Run) -> None:
    content = copy.config_file.read_bytes()
    for place in range(0, len(content), 13):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        copy.config_file.write_bytes(flipped)
        with pytest.raises(RunError, match=r"config\.toml is not the file"):
            copy.read_config()


# Checkpoints


def test_a_checkpoint_of_another_run_is_refused(config: TrainConfig, straight: Run, tmp_path: Path) -> None:
    """Of the same shape, with another seed: its weights would fit."""
    other = start(replace(config, seed=2), tmp_path / "other").task.run
    foreign = straight.checkpoints / f"step-{STEPS:08d}"
    shutil.copytree(foreign, other.checkpoints / foreign.name)
    refused(other.folder, r"checkpoint .* belongs to a run with other settings or another tokenizer; restore")


def test_a_manifest_cannot_be_exchanged_with_its_files(
    copy: Run, config: TrainConfig, tmp_path: Path
) -> None:
    """Settings and manifest of another run beside these checkpoints: each fits the other, and not them."""
    other = start(replace(config, seed=2), tmp_path / "other").task.run
    for name in ("config.toml", "manifest.json"):
        shutil.copy(other.folder / name, copy.folder / name)
    refused(copy.folder, "belongs to a run with other settings", (open_session,))


# Results


def test_results_of_another_run_are_refused(copy: Run, learned: Run) -> None:
    assert copy.read_results() is not None
    shutil.copy(learned.results_file, copy.results_file)
    with pytest.raises(
        RunError, match=r"results\.json is not the file that this run wrote; delete it, and it is"
    ):
        copy.read_results()
    copy.results_file.unlink()
    assert copy.read_results() is None
    open_session(copy.folder)
    resume(copy.folder).train()
    assert copy.read_results() is not None


def test_results_name_the_weights_that_they_are_about(copy: Run) -> None:
    results = copy.read_results()
    assert results is not None
    assert results["weights"] == copy.store.weights(f"step-{STEPS:08d}") == open_session(copy.folder).weights
    assert results["weights"] != copy.store.weights("step-00000016")


# The log (R5)


LOG = r"metrics\.jsonl is not the log that step-00000020 was saved with: it is missing, cut or of another run"


def cut(run: Run, lines: int) -> None:
    content = run.metrics_file.read_bytes().splitlines(keepends=True)
    run.metrics_file.write_bytes(b"".join(content[:lines]))


def test_a_lost_log_is_noticed(copy: Run) -> None:
    copy.metrics_file.unlink()
    with pytest.raises(RunError, match=LOG + ".*; restore it, or make it an empty file to continue without"):
        resume(copy.folder)
    open_session(copy.folder)


def test_a_cut_log_names_the_checkpoint_that_it_still_fits(copy: Run, straight: Run) -> None:
    cut(copy, 19)  # 16 steps and two evaluations up to step 16, and one more step
    with pytest.raises(RunError, match=LOG + ".*resume with --from step-00000016, which it fits"):
        resume(copy.folder)
    resume(copy.folder, "step-00000016").train()
    assert copy.read_results() == (straight.read_results() or {}) | {
        key: (copy.read_results() or {})[key] for key in ("seconds", "run")
    }
    assert len(copy.metrics()) == len(straight.metrics())


def test_a_log_that_fits_no_checkpoint_names_none(copy: Run) -> None:
    cut(copy, 5)
    with pytest.raises(RunError, match=LOG) as caught:
        resume(copy.folder)
    assert "--from" not in str(caught.value)


def test_the_log_of_another_run_is_noticed(copy: Run, config: TrainConfig, tmp_path: Path) -> None:
    other = start(replace(config, seed=2), tmp_path / "other")
    other.train()
    shutil.copy(other.task.run.metrics_file, copy.metrics_file)
    with pytest.raises(RunError, match=LOG):
        resume(copy.folder)


def test_one_changed_number_in_the_log_is_noticed(copy: Run) -> None:
    text = copy.metrics_file.read_text()
    copy.metrics_file.write_text(text.replace('"step": 7', '"step": 8', 1))
    with pytest.raises(RunError, match=LOG):
        resume(copy.folder)


def test_an_emptied_log_goes_on(copy: Run, straight: Run) -> None:
    copy.metrics_file.write_text("")
    resume(copy.folder, "step-00000016").train()
    assert [r["step"] for r in copy.metrics() if r["kind"] == "train"] == [17, 18, 19, 20]
    assert copy.store.weights("step-00000020") == straight.store.weights("step-00000020")
    resume(copy.folder)


# Runs without a manifest


def as_version_01(run: Run) -> None:
    """The run without what version 0.2 binds: no manifest, and checkpoints that name no run and no log."""
    run.manifest.path.unlink()
    for name in run.store.names():
        path = run.checkpoints / name / "state.json"
        state = json.loads(path.read_text())
        for key in ("run", "metrics", "halted"):
            del state["extra"][key]
        body = {key: value for key, value in state.items() if key not in ("format", "version", "sha256")}
        path.write_text(json.dumps(state | {"sha256": digest(body)}))


def test_a_run_without_a_manifest_opens_resumes_and_is_bound_from_then_on(copy: Run, straight: Run) -> None:
    as_version_01(copy)
    open_session(copy.folder)
    assert copy.read_results() is not None
    assert not copy.manifest.exists(), "reading writes nothing"
    resume(copy.folder, "step-00000016").train()
    assert copy.manifest.exists()
    assert copy.store.weights("step-00000020") == straight.store.weights("step-00000020")
    assert copy.store.extra("step-00000020")["run"] == copy.manifest.identity() is not None
    open_session(copy.folder)
    resume(copy.folder)
    shutil.copy(straight.tokenizer_file, copy.tokenizer_file)
    copy.config_file.write_text(copy.config_file.read_text().replace("seed = 1", "seed = 2"))
    refused(copy.folder, "seed is now 2 and was 1")


def test_a_run_of_version_01_is_adopted_as_it_is(copy: Run) -> None:
    as_version_01(copy)
    before = {path.name: path.read_bytes() for path in copy.folder.iterdir() if path.is_file()}
    copy.manifest.adopt()
    after = {path.name: path.read_bytes() for path in copy.folder.iterdir() if path.is_file()}
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {"manifest.json"}
    for name in ("config.toml", "tokenizer.json", "results.json"):
        copy.manifest.verify(name)
    open_session(copy.folder)


# The manifest itself


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is damaged, it is not JSON"),
        ("[]", "is damaged or foreign; restore it"),
        ('{"format": "topograd-shards", "files": {}}', "is damaged or foreign"),
        (
            '{"format": "topograd-run", "version": 9, "files": {}}',
            "has version 9; it must be 1",
        ),
    ],
)
def test_a_damaged_manifest_is_one_line(copy: Run, content: str, words: str) -> None:
    copy.manifest.path.write_text(content)
    refused(copy.folder, rf"manifest\.json {words}")


def test_a_file_that_the_manifest_does_not_name_is_refused(copy: Run, learned: Run) -> None:
    copy.calibration_file.write_text("{}")
    with pytest.raises(RunError, match=r"calibration\.json is not the file that this run wrote; delete it"):
        copy.manifest.verify("calibration.json")


class Killed(BaseException):
    """Stands for a kill."""


def dying(after: int) -> Callable[[Any, Any], None]:
    """`os.replace` for a process that is killed when it has renamed so many files."""
    rename, done = os.replace, 0

    def replace_(temporary: Any, target: Any) -> None:
        nonlocal done
        if after:
            rename(temporary, target)
        done += 1
        if done >= after:
            raise Killed

    return replace_


def killed_writes(folder: Path, work: Callable[[Manifest], None], patch: pytest.MonkeyPatch) -> list[Path]:
    """What `work` leaves of the folder if it is killed before its first write, and after each."""
    left: list[Path] = []
    while True:
        place = Path(shutil.copytree(folder, folder.parent / f"killed-{len(left)}"))
        with patch.context() as patched:
            patched.setattr(files.os, "replace", dying(after=len(left)))
            try:
                work(Manifest(place))
            except Killed:
                left.append(place)
                continue
        shutil.rmtree(place)
        return left


@pytest.mark.parametrize("name", ["results.json", "calibration.json", "config.toml", "tokenizer.json"])
def test_a_kill_at_any_write_leaves_a_run_that_opens(
    name: str, copy: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of old and new is there, the manifest allows it."""
    old = (copy.folder / name).read_bytes() if (copy.folder / name).is_file() else b"{}"
    new = old + b"\n"
    killed = killed_writes(copy.folder, lambda bound: bound.bind(name, new), monkeypatch)
    assert len(killed) == 4, "before the first write, and after each of three"
    seen = set()
    for folder in killed:
        run = Run.open(folder)
        run.manifest.verify(name)
        run.read_config()
        run.read_results()
        assert not (folder / name).is_file() or (folder / name).read_bytes() in (old, new)
        seen.add((folder / name).is_file() and (folder / name).read_bytes() == new)
        run.manifest.bind(name, new)  # and it is written again
        assert json.loads(run.manifest.path.read_text())["files"][name] == [files.sha256(folder / name)]
    assert seen == {False, True}


def test_a_kill_while_a_run_is_made_leaves_a_folder_that_can_be_used(
    straight: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its config.toml it is no run yet; with it, it opens."""
    (tmp_path / "new").mkdir()

    def make(bound: Manifest) -> None:
        bound.bind("tokenizer.json", straight.tokenizer_file.read_bytes())
        Run(bound.folder).write_config(straight.read_config())

    killed = killed_writes(tmp_path / "new", make, monkeypatch)
    runs = 0
    for folder in killed:
        if (folder / "config.toml").exists():
            runs += 1
            assert Run.open(folder).read_config() == straight.read_config()
        else:
            make(Run.create(folder).manifest)
        assert Run.open(folder).manifest.identity() is not None
    assert (runs, len(killed)) == (2, 7)


def test_what_is_bound_twice_may_be_either_until_it_stands(tmp_path: Path) -> None:
    bound = Manifest(tmp_path)
    bound.bind("results.json", "one")
    bound.bind("results.json", "two")
    (tmp_path / "results.json").write_text("one")
    with pytest.raises(RunError, match=r"results\.json is not the file"):
        bound.verify("results.json")
    assert bound.identity() is None, "without settings and a tokenizer it names nothing"
    assert manifest.NAME == "manifest.json"


def test_a_checkpoint_that_is_asked_for_and_damaged_says_so_before_it_is_read(copy: Run) -> None:
    (copy.checkpoints / "step-00000020" / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"damaged.*resume with --from step-00000016"):
        open_session(copy.folder)


def test_a_run_on_images_is_known_by_its_settings_alone(tmp_path: Path) -> None:
    images, text = Manifest(tmp_path / "images"), Manifest(tmp_path / "text")
    for each, settings in ((images, '[model]\nkind = "mlp"\n'), (text, 'tokenizer = "bytes"\n')):
        each.folder.mkdir()
        each.bind("config.toml", settings)
    assert images.identity() is not None, "checkpoints of another run would fit"
    assert text.identity() is None, "its tokenizer belongs to it"
    text.bind("tokenizer.json", "{}")
    assert text.identity() not in (None, images.identity())
