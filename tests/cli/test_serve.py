"""`topograd serve` refuses in one line what cannot be served."""

from __future__ import annotations

import pytest

from topograd.cli.main import main


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--host", "0.0.0.0"], "clients must show a token"),
        (["--port", "70000"], "--port is 70000; it must be from 0 to 65535"),
        (["--rows", "0"], "rows is 0; it must be at least 1"),
        (["--seconds", "nan"], "it must be a finite number"),
        (["no/such/run", "--port", "0"], "no/such/run"),
        (["--prot", "1"], "--prot"),
    ],
)
def test_bad_input_is_one_line(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOPOGRAD_TOKEN", raising=False)
    assert main(["serve", *argv]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
