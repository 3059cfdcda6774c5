"""`topograd train --task images`, and what the other verbs do with its runs."""

import json
from pathlib import Path

import pytest

from topograd.cli.main import main
from topograd.runs.folder import Run

JSON = "--json"


def words(idx_folder: Path, out: Path) -> list[str]:
    settings = [
        "--data",
        str(idx_folder),
        "--widths",
        "12",
        "9",
        "--steps",
        "6",
        "--batch",
        "16",
        "--seed",
        "1",
    ]
    return ["train", "--task", "images", *settings, "--out", str(out)]


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, object]:
    assert main(list(argv)) == 0, capsys.readouterr().err
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("topograd: ")
    return said


def test_the_contract(idx_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    found = answer(capsys, *words(idx_folder, folder), "--model", "mlp", "--partition", "1,1,1", JSON)
    accuracy = found["accuracy"]
    assert isinstance(accuracy, dict)
    assert len(accuracy["prefix"]) == 3
    assert 0 <= accuracy["prediction"] <= 1
    again = answer(capsys, "train", "--resume", str(folder), JSON)
    assert again["accuracy"] == accuracy
    measured = answer(capsys, "eval", str(folder), JSON)
    assert measured["accuracy"] == accuracy
    compared = answer(capsys, "compare", str(folder), str(folder), JSON)
    assert compared["runs"][0]["gap"]["prediction"] == 0  # type: ignore[index]
    page = answer(capsys, "report", str(folder), JSON)
    assert "data:image/png" in Path(str(page["report"])).read_text()


def test_tables_for_people(image_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(image_run.folder), "--images", "30"]) == 0
    assert "accuracy" in capsys.readouterr().out
    assert main(["compare", str(image_run.folder), str(image_run.folder)]) == 0
    assert "+0.00 points" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["generate", "calibrate", "export"])
def test_verbs_of_text_say_so_in_one_line(
    verb: str, image_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--out", str(tmp_path / "out")] if verb == "export" else []
    assert "was trained on images" in refusal(capsys, verb, str(image_run.folder), *more)


def test_bad_words_are_refused_by_their_flags(
    idx_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], image_run: Run, straight: Run
) -> None:
    start = words(idx_folder, tmp_path / "no")
    assert "--model 'no' is unknown" in refusal(capsys, *start, "--model", "no")
    assert "--widths" in refusal(capsys, *start, "--widths", "3", "0")
    assert "partition 1,1 has 2 layers" in refusal(capsys, *start, "--partition", "1,1")
    assert "--preset is for models of text" in refusal(capsys, *start, "--preset", "tiny")
    assert "--data" in refusal(capsys, "train", "--task", "images")
    gone = tmp_path / "gone"
    assert f"{gone} does not exist" in refusal(capsys, *words(gone, tmp_path / "no"))
    assert not (tmp_path / "no" / "config.toml").exists()
    assert "trained on images; leave it out" in refusal(capsys, "eval", str(image_run.folder), "--bytes", "9")
    assert "--weights is int8" in refusal(capsys, "eval", str(image_run.folder), "--weights", "int8")
    text = ["train", "--preset", "tiny", "--init", str(image_run.folder), "--out", str(tmp_path / "no")]
    assert "a run on images; give one on text" in refusal(capsys, *text)
    assert "runs of one kind" in refusal(capsys, "compare", str(image_run.folder), str(straight.folder))


VIT = [
    "--task",
    "images",
    "--data",
    "digits",
    "--model",
    "vit",
    "--depth",
    "3",
    "--widths",
    "8",
    "--heads",
    "2",
]


@pytest.mark.parametrize(
    "form",
    ["published:r=5", "published:r=5/4,read=both/message", "residual:r=2", "residual:r=2/3,bypass=0.5"],
)
def test_regions_of_an_encoder_by_a_scan(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Attention reads all patches, so one state of them all is no leak; the scan has autograd's gradients."""
    flags = ["train", *VIT, "--partition", "1,1,1", "--interface", form, "--steps", "3", "--batch", "4"]
    plain = answer(capsys, *flags, "--out", str(tmp_path / "plain"), JSON)
    run = str(tmp_path / "run")
    scanned = answer(capsys, *flags, "--backward", "scan", "--out", run, "--stop-after", "1", JSON)
    scanned = answer(capsys, "train", "--resume", run, JSON)
    losses = [found["loss"]["prediction"] for found in (plain, scanned)]  # type: ignore[index]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert answer(capsys, "eval", run, JSON)["accuracy"] == scanned["accuracy"]


def test_interfaces_that_do_not_fit_a_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["train", *VIT, "--partition", "1,1,1", "--steps", "1", "--out", str(tmp_path / "run")]
    assert "it must be published, residual or S=1,pool=mean,causal=false" in refusal(
        capsys, *flags, "--interface", "S=4,r=4"
    )
    mlp = ["train", "--task", "images", "--data", "digits", "--model", "mlp", "--partition", "1,1,1"]
    out = ["--out", str(tmp_path / "other")]
    assert "shape of the embedding, as vit" in refusal(capsys, *mlp, "--interface", "residual:r=2", *out)
