"""`topograd serve` refuses in one line what cannot be served."""

from __future__ import annotations

import pytest

from topograd.cli.main import main
from topograd.serve.request_schema import SHARED


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


def test_help_says_which_temperature_a_request_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    assert "A request without a temperature is sampled at 1" in capsys.readouterr().out
    assert SHARED["temperature"].default == 1.0
