from typing import Any

import pytest

from calls import shown
from papers.gram_metrics import checks
from papers.gram_metrics.check_fields import kernel_table, simulation_table


def test_the_kernel_is_the_tangent_kernel(call: Any) -> None:
    answer = call("check", "kernel", "--depth", 3, "--width", 16, "--examples", 8, "--seed", 1, "--json").json
    assert answer.keys() == {"relative_error_vs_ntk", "layers", "seconds", "seconds_reference"}
    assert answer["relative_error_vs_ntk"] <= 1e-12
    assert [layer["layer"] for layer in answer["layers"]] == [1, 2, 3]
    assert all(layer["relative_error"] <= 1e-12 for layer in answer["layers"])
    assert sum(layer["share_of_trace"] for layer in answer["layers"]) == pytest.approx(1)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_run_in_fields_is_the_run_in_weights(depth: int, call: Any) -> None:
    words = ("--depth", depth, "--width", 16, "--examples", 8, "--steps", 40, "--json")
    answer = call("check", "simulate", *words).json
    assert answer["max_abs_error_vs_weights"] <= 1e-12
    assert answer["mask_crossings"] > 0
    assert answer["frozen_max_abs_error"] > 1e-6
    assert answer["last_loss"] < answer["first_loss"]


def test_flags_arrive(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def compare(*given: Any) -> dict[str, Any]:
        asked.append(given)
        return {}

    for name in ("compare_with_ntk", "compare_with_weights"):
        monkeypatch.setattr(checks, name, compare)
    words = "simulate --depth 2 --width 3 --examples 4 --steps 5 --eta 0.5 --seed 6"
    for line in ("kernel", "simulate", words):
        assert call("check", *line.split(), "--json").json == {}
    assert asked == [(4, 128, 64, 0), (1, 64, 32, 500, 0, None), (2, 3, 4, 5, 6, 0.5)]


def test_tables_for_people(call: Any) -> None:
    kernel = call("check", "kernel", "--depth", 2, "--width", 8, "--examples", 4).out
    assert "K from fields against Jacobians" in kernel
    assert "│   all │              1.000 │" in kernel
    run = call("check", "simulate", "--width", 8, "--examples", 4, "--steps", 5).out
    for words in ("largest error against the weights", "mask crossings", "the same of the frozen kernel"):
        assert f"│ {words} " in run


def test_tables_fit_a_terminal() -> None:
    layer = {"layer": 12, "share_of_trace": 0.25, "relative_error": 3e-15}
    answer = {"layers": [layer], "relative_error_vs_ntk": 2e-15, "seconds": 1.5, "seconds_reference": 100}
    assert "│    12 │              0.250 │        3.0e-15 │" in shown(kernel_table(answer))
    assert "1500.0 ms; Jacobians 100000.0 ms" in shown(kernel_table(answer))
    keys = [f"{name}_error" for name in ("frozen_max_abs", "relinearised_max_abs")]
    keys += ["max_abs_error_vs_weights", "eta", "first_loss", "last_loss", "seconds", "seconds_weights"]
    table = shown(simulation_table({**dict.fromkeys(keys, 1.5e-15), "mask_crossings": 12}))
    assert "│ 1.5e-15" in table
    assert "…" not in table


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("kernels", "'kernels' was given to check; choose one of catalogue"),
        ("kernel --depth 0", "topograd: --depth is 0; it must be at least 1"),
        ("kernel --examples 0", "topograd: --examples is 0; it must be at least 1"),
        ("kernel --width -3", "topograd: --width is -3; it must be at least 1"),
        ("kernel --steps 3", "Unrecognized options: --steps"),
        ("simulate --steps -1", "topograd: --steps is -1; it must be at least 0"),
        ("simulate --eta 0", "topograd: --eta is 0.0; it must be at least 1e-300"),
        ("simulate --width 8 --examples 4 --eta 1e308", "take a smaller eta"),
        ("kernel --width 100000 --examples 1000", "choose a smaller --examples, --depth or --width"),
        ("simulate --depth 2 --steps 1000000000", "choose a smaller --depth, --width, --examples or --steps"),
        ("simulate --eta nan", "--eta is 'nan'; it must be a finite number"),
    ],
)
def test_bad_input_is_one_line(words: str, why: str, call: Any) -> None:
    assert why in call("check", *words.split()).refusal


def test_each_question_explains_itself(call: Any) -> None:
    overview = call("check", "--help").out
    assert "equivariance,cells,kernel,simulate,costs,parity,leak,plan} ..." in overview
    assert "  simulate      Run gradient descent in the fields" in overview
    for question in ("kernel", "simulate"):
        answer = call("check", question, "--help")
        assert (answer.code, answer.err) == (0, "")
        assert answer.out.startswith(f"usage: python -m papers check {question}")
