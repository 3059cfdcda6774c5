"""What is wrong with flags is said before a model is converted, which may take minutes."""

from pathlib import Path

import pytest

from topograd.cli.main import main
from topograd.convert import model_argument


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("generate G --depth nonsense", "--depth"),
        ("generate G --depth prefix:0", "exit 0 does not exist"),
        ("generate G --depth speculate:nobody", "'nobody'"),
        ("generate G --depth wand:bogus:1", "'bogus'"),
        ("generate G --stages 0", "--stages"),
        ("generate G --temperature -1", "--temperature"),
        ("generate G --top-p 2", "--top-p"),
        ("generate G --tokens -1", "--tokens"),
        ("generate G --draft nowhere", "--draft 'nowhere' does not exist"),
        ("generate G --specialists nowhere", "nowhere is no specialist"),
        ("generate G --specialists nowhere --router beside", "--router 'beside' does not exist"),
        ("generate G --runtime onnx --weights bfloat16", "--weights"),
        ("generate G --specialists nowhere --runtime bogus", "--runtime"),
        ("chat G --depth path:3-1 --prompt hi", "counts down"),
        ("score G --context a --continuation b --depth nonsense", "--depth"),
        ("eval G --data nowhere", "--data 'nowhere' does not exist"),
        ("calibrate G --runtime torch --weights int8", "--weights"),
        ("serve G --runtime bogus", "--runtime"),
        ("inspect G --text nowhere", "--text 'nowhere' does not exist"),
        ("inspect G --out nowhere/page.html", "--out nowhere/page.html cannot be written"),
        ("inspect G --device bogus", "--device"),
        ("probe G --prompt a --target b --specialist nowhere", "nowhere is no specialist"),
        ("export G --out full", "full exists already"),
        ("specialist compose G --specialists nowhere --data full/text.txt", "nowhere is no specialist"),
        ("train --init G --lora-rnak 8", "did you mean --lora-rank"),
        ("train --init G --data nowhere", "--data 'nowhere' does not exist"),
        ("train --init G --old-text nowhere", "--old-text 'nowhere' does not exist"),
        ("train --init G --config nowhere.toml", "--config 'nowhere.toml' does not exist"),
        ("train --init G --device bogus", "--device"),
        ("train --init G --out full", "full holds 'text.txt' and is no run"),
        ("import G --out full", "full holds 'text.txt' and is no run"),
    ],
)
def test_flags_are_checked_before_a_conversion(
    line: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.gguf").write_bytes(b"GGUF")
    Path("full").mkdir()
    Path("full/text.txt").write_text("some text")

    def converted(source: Path) -> Path:
        pytest.fail(f"{source} was converted")

    monkeypatch.setattr(model_argument, "_converted", converted)
    monkeypatch.setattr("topograd.convert.importing._open", converted)
    before = sorted(Path().iterdir())
    assert main(line.replace(" G", " model.gguf").split()) == 2
    assert said in capsys.readouterr().err
    assert sorted(Path().iterdir()) == before
