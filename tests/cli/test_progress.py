import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from topograd.cli import progress
from topograd.cli.progress import counted, training_progress, trainings_progress, work_progress

READINGS: Any = SimpleNamespace(words="BPB 2.500")


def test_plain_lines_now_and_then(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with training_progress("demo [staged]", tokens_per_step=100) as on_step:
        for step in range(1, 41):
            now[0] += 0.5
            on_step(step, 40, [3.0, 2.0], READINGS if step == 25 else None)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "demo [staged]: step 10/40, loss 3.000 2.000, 200 tokens/s, 15 s left",
        "demo [staged]: step 20/40, loss 3.000 2.000, 200 tokens/s, 10 s left",
        "demo [staged]: step 25/40, loss 3.000 2.000, BPB 2.500, 200 tokens/s, 8 s left",
        "demo [staged]: step 35/40, loss 3.000 2.000, 200 tokens/s, 2 s left",
        "demo [staged]: step 40/40, loss 3.000 2.000, 200 tokens/s",
    ]


def test_many_stages_are_shortened_and_the_speed_may_be_unknown(capfd: pytest.CaptureFixture[str]) -> None:
    with training_progress("deep") as on_step:
        on_step(8, 8, [float(k) for k in range(9)], None)
    assert capfd.readouterr().err == "deep: step 8/8, loss 0.000 1.000 2.000 … 6.000 7.000 8.000\n"


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()

    def terminal(**_: Any) -> Console:
        return Console(file=screen, force_terminal=True, width=120)

    monkeypatch.setattr(progress, "Console", terminal)
    with training_progress("staged [/x]", tokens_per_step=64) as on_step:
        on_step(1, 4, [5.0, 4.0], None)
        on_step(2, 4, [4.0, 3.0], READINGS)
    shown = screen.getvalue()
    for words in ("staged [/x]", "2/4", "loss 4.000 3.000", "BPB 2.500", "tokens/s"):
        assert words in shown


def test_trainings_at_the_same_time_each_have_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=screen, force_terminal=True, width=120))
    with trainings_progress(["backprop", "staged"]) as shown:
        shown["backprop"](3, 9, [5.0], None)
        shown["staged"](2, 9, [4.0, 3.0], None)
    lines = [line for line in screen.getvalue().splitlines() if "loss" in line]
    for line, words in zip(
        lines[-2:], (("backprop", "3/9", "loss 5.000"), ("staged", "2/9", "loss 4.000 3.000")), strict=True
    ):
        assert all(word in line for word in words)


def test_work_is_shown_at_once(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with work_progress("reading: batches") as on_more:
        assert capfd.readouterr().err == "topograd: reading: batches\n"
        for done in range(1, 9):
            now[0] += 2
            on_more(done, 8)
    assert capfd.readouterr().err.splitlines() == [
        "topograd: reading: batches: 3 of 8, 10 s left",
        "topograd: reading: batches: 6 of 8, 4 s left",
    ]


def test_work_has_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=screen, force_terminal=True, width=120))
    with work_progress("reading [x]") as on_more:
        assert "reading [x]" in screen.getvalue(), "before anything is known"
        on_more(3, 8)
    assert "3/8" in screen.getvalue()


def test_an_error_inside_is_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError), training_progress("x"):
        raise ZeroDivisionError


def test_counting_aloud_now_and_then(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    on_more = counted("cells measured")
    for done in range(1, 13):
        now[0] += 1
        on_more(done, 12)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "topograd: cells measured: 5 of 12, 7 s left",
        "topograd: cells measured: 10 of 12, 2 s left",
    ]
