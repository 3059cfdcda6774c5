"""The study of fields: its runs against autograd, its measures, its sentences and its figures."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from papers import study_page
from papers.gram_metrics import field_training as module
from papers.gram_metrics.field_figures import drift_panel, field_panels
from papers.gram_metrics.field_networks import (
    PRESETS,
    Sizes,
    descent,
    make_task,
    make_weights,
    reading_steps,
    sizes_of,
)
from papers.gram_metrics.field_state import state_of
from papers.gram_metrics.field_training import staged_residuals, study
from papers.gram_metrics.kernel import kernel
from papers.gram_metrics.tail_conjecture import links, rank_correlations, shares, tails, verdict
from papers.outcome import Result, asked
from raising import refused
from tests.oracles.fields import descend, projectors, staged_step
from topograd.errors import ConfigError, DivergenceError
from topograd.report.drawing import style


@pytest.fixture(scope="module")
def found() -> Result:
    return study("teacher", asked("fields", "tiny"))


@pytest.fixture(scope="module")
def record(found: Result) -> dict[str, Any]:
    return dict(found.record)


def small_run(width: int = 8, examples: int = 6) -> tuple[Any, Any]:
    task = make_task("teacher", examples, 4, width, seed=0)
    return task, make_weights(3, width, task.inputs.shape[1], seed=0)


@pytest.mark.parametrize("data", ["teacher", "digits"])
def test_rows_have_the_length_that_makes_kernels_of_order_one(data: Any) -> None:
    task = make_task(data, 40, 10, 24, seed=1)
    assert (task.inputs.shape[0], task.unseen.shape[0]) == (40, 10)
    torch.testing.assert_close(task.inputs.square().sum(1), torch.full((40,), 24.0, dtype=torch.float64))
    assert 0.2 < float(task.classes.double().mean()) < 0.8
    assert set(task.targets(3.0).tolist()) == {0.2, 3.0}
    state = state_of(make_weights(2, 24, task.inputs.shape[1], seed=0), task.inputs)
    assert state.Q(0).diagonal().tolist() == pytest.approx([1.0] * 40)
    assert not torch.equal(task.inputs, make_task(data, 40, 10, 24, seed=2).inputs)


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with refused(ConfigError, setting="data", given="digits"):
        make_task("digits", 4, 0, 8, seed=0)


def test_accuracy_counts_sides_of_the_middle() -> None:
    task, weights = small_run()
    found = (state_of(weights, task.unseen).Y > 0.6) == task.unseen_classes
    assert task.accuracy(weights) == found.double().mean().item()
    assert task.accuracy(weights, high=1e9) == (~task.unseen_classes).double().mean().item()


def test_descent_is_that_of_autograd_and_its_drives_are_the_kernels_parts() -> None:
    task, weights = small_run()
    true = descend(weights, task.inputs, task.targets(), 0.3, 5)
    for t, moment in enumerate(descent(weights, task.inputs, task.targets(), 0.3, 5)):
        torch.testing.assert_close(moment.residual, true.residuals[t], rtol=1e-10, atol=1e-12)
        parts = kernel(moment.weights, task.inputs).layers
        r, N = moment.residual, moment.state.N
        for layer, drive in enumerate(moment.drives.values()):  # the first layer first
            assert drive.square().sum().item() / N**2 == pytest.approx((r @ parts[layer] @ r).item())


def test_a_run_that_diverges_says_so() -> None:
    task, weights = small_run()
    with refused(DivergenceError, setting="eta", given=1e150):
        list(descent(weights, task.inputs, task.targets(), 1e150, 3))


def test_when_a_run_is_read() -> None:
    steps = reading_steps(500, 24)
    assert (steps[0], steps[1], steps[-1]) == (0, 1, 500)
    assert steps == sorted(set(steps))
    assert reading_steps(3, 24) == [0, 1, 2, 3]


def test_decay_shares_are_of_the_kernel_and_add_up(record: dict[str, Any]) -> None:
    sizes = PRESETS["tiny"]
    task = make_task("teacher", sizes.examples, sizes.unseen, sizes.width, seed=0)
    weights = make_weights(sizes.depth, sizes.width, task.inputs.shape[1], seed=0)
    K, r = kernel(weights, task.inputs), state_of(weights, task.inputs).Y - task.targets()
    first = record["layers"]["rows"][0]
    expected = [(r @ part @ r / (r @ K.total @ r)).item() for part in K.layers]
    assert first["decay_shares"] == pytest.approx(expected)
    assert sum(first["traces"]) == pytest.approx(K.total.diagonal().mean().item())
    assert first["moved"] == [0.0] * sizes.depth
    values, vectors = torch.linalg.eigh(K.total)
    along = (vectors.T @ r).square() / r.square().sum()
    assert first["speed"] == pytest.approx((along @ values / values.mean()).item())
    assert first["leading_share"] == pytest.approx(along[-8:].sum().item())
    assert sum(record["layers"]["carried"]) == pytest.approx(1)
    assert record["layers"]["rows"][-1]["loss"] < first["loss"]


def test_targets_nearer_to_the_start_freeze_the_kernel(record: dict[str, Any]) -> None:
    rows = record["drift"]["rows"]
    assert len(rows) == 9
    for row in rows:
        if row["width"] == 8:
            assert row["control"] == row["plain"]
        else:
            assert 0 < row["control"] < row["plain"]
    assert record["drift"]["slopes"]["control"] < record["drift"]["slopes"]["plain"] - 0.2


def test_rank_shares_are_those_of_the_projectors() -> None:
    task, weights = small_run()
    state = state_of(weights, task.inputs)
    D = projectors(weights, task.inputs, 1).diagonal(dim1=2, dim2=3).mean(-1)
    pairs = [(a, b) for a in range(6) for b in range(6) if a != b]
    same = [D[p].item() for p in pairs if task.classes[p[0]] == task.classes[p[1]]]
    other = [D[p].item() for p in pairs if task.classes[p[0]] != task.classes[p[1]]]
    found = shares(state, task, 1)
    assert found["within"] == pytest.approx(np.mean(same))
    assert found["across"] == pytest.approx(np.mean(other))
    assert found["contrast"] == pytest.approx(np.mean(same) - np.mean(other))


def test_an_outlier_is_measured_from_the_edge() -> None:
    plain = make_weights(2, 200, 200, seed=0)[1]
    assert tails(plain)["outlier"] == pytest.approx(1, abs=0.1)
    spiked = plain + 4 * torch.outer(*torch.nn.functional.normalize(torch.ones(2, 200, dtype=torch.float64)))
    assert tails(spiked)["outlier"] > 2
    assert abs(tails(spiked)["alpha_quarter"] - tails(plain)["alpha_quarter"]) < 0.2, "one value is no tail"


def test_rank_correlations_are_scipys() -> None:
    generator = np.random.default_rng(0)
    x, y = generator.integers(4, size=(3, 10)).astype(float), generator.normal(size=(3, 10))
    expected = [spearmanr(a, b).statistic for a, b in zip(x, y, strict=True)]
    assert rank_correlations(x, y).tolist() == pytest.approx(expected)


def invented(kind: str) -> list[dict[str, Any]]:
    """Runs whose exponents follow the contrast: within groups, between them only, or not at all."""
    generator = np.random.default_rng(1)
    rows = []
    for high in (1.0, 2.0, 3.0):
        for seed in range(6):
            layers = []
            for _ in range(3):
                own, noise = generator.normal(size=2)
                contrast = own + 8 * high
                tail = {"within": -contrast, "between": noise - 8 * high, "none": noise}[kind]
                changes = {"contrast": contrast, "alpha": tail, "alpha_quarter": tail, "outlier": contrast}
                layers.append({"changes": changes})
            rows.append({"high": high, "seed": seed, "layers": layers})
    return rows


@pytest.mark.parametrize(
    ("kind", "words"),
    [("within", "Supported here"), ("between", "Supported in part"), ("none", "Not supported here: neither")],
)
def test_the_verdict_tells_links_apart(kind: str, words: str) -> None:
    found = links(invented(kind))
    assert verdict(found).startswith(words)
    assert found["outlier"]["same_targets"]["rho"] == pytest.approx(1)
    if kind == "none":
        assert "one outlier and no tail." in verdict(found)
    if kind == "between":
        assert found["alpha"]["same_targets"]["low"] < 0 < found["alpha"]["same_targets"]["high"]


def test_stages_are_stepped_as_by_autograd() -> None:
    task, weights = small_run()
    after, outputs = module._staged_step(weights, task.inputs, task.targets(), 0.3, [1, 2])
    for mine, true in zip(after, staged_step(weights, task.inputs, task.targets(), 0.3, [1, 2]), strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-10, atol=1e-12)
    assert outputs.shape == (2, 6)


def test_a_stage_is_moved_by_the_stages_below() -> None:
    sizes = Sizes(depth=4, width=24, examples=16, unseen=4, steps=3, readings=3)
    for row in staged_residuals("teacher", sizes)["rows"]:
        assert row["missed_own"][0] == pytest.approx(row["missed_together"][0])
        assert row["missed_own"][1] > 0.1
        assert row["missed_together"][1] < 0.1


def test_findings_say_what_the_numbers_say(found: Result, record: dict[str, Any]) -> None:
    text = " ".join(found.findings)
    assert f"{record['layers']['rows'][0]['speed']:.2f} times as fast" in text
    assert f"to the power {record['drift']['slopes']['plain']:.2f}" in text
    assert f"{record['geometry']['links']['alpha']['all_runs']['rho']:+.2f} [" in text
    assert found.verdict == verdict(record["geometry"]["links"])
    json.dumps(record, allow_nan=False)


def test_what_layers_carry_at_several_depths_and_seeds(found: Result, record: dict[str, Any]) -> None:
    sizes = PRESETS["tiny"]
    assert [(row["depth"], row["seed"]) for row in found.rows] == [(3, 0), (3, 1), (4, 0), (4, 1)]
    assert all(sum(row["carried"]) == pytest.approx(1) for row in found.rows)
    same = next(row for row in found.rows if (row["depth"], row["seed"]) == (sizes.depth, 0))
    assert same["carried"] == pytest.approx(record["layers"]["carried"])
    (table,) = found.tables
    assert table.header[-1] == "layer 4"
    assert table.rows[0][-1] == "–"
    falling = {"depth": 2, "seed": 0, "carried": [0.6, 0.4]}
    rising = {"depth": 2, "seed": 1, "carried": [0.4, 0.6]}
    assert "Of 2 runs with 2 layers and 2 seeds each" in module._depths([falling, rising])
    assert module._depths([falling, rising]).endswith("to the last in 1.")


def test_the_same_study_twice_and_how_far_it_is(found: Result) -> None:
    told: list[tuple[int, int]] = []
    assert study("teacher", asked("fields", "tiny", on_more=lambda *done: told.append(done))) == found
    assert told == [(i + 1, len(told)) for i in range(len(told))]


def test_every_figure_has_words_and_numbers(record: dict[str, Any]) -> None:
    with style():
        drawn = field_panels(record)
    names = ["layers", "alignment", "drift", "projectors", "tails", "staged"]
    assert [panel.name for panel in drawn] == names
    for panel in drawn:
        assert panel.figure is not None
        assert panel.table is not None
        assert all(len(row) == len(panel.table.header) for row in panel.table.rows)
        assert "{" not in panel.caption


def test_sizes_that_are_asked_for() -> None:
    sizes = sizes_of(asked("fields-digits", "small", steps=7, width=9, seeds=2))
    assert sizes == replace(PRESETS["small"], steps=7, width=9, seeds=2)
    assert sizes_of(asked("fields-digits", "tiny")) == PRESETS["tiny"]


def test_presets_are_as_documented() -> None:
    small = PRESETS["small"]
    assert (small.depth, small.width, small.drift_seeds) == (4, 128, 3)
    assert (small.depths, small.depth_seeds) == ((3, 4, 6), 3)
    assert small.seeds >= 3
    assert len(small.widths) >= 4


def test_the_page_has_a_file_for_each_figure(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_page, "study_panels", lambda record: (drift_panel(record),))  # one is fast
    told = call("run", "fields", "--preset", "tiny", "--out", tmp_path / "new" / "folder")
    assert told.code == 0, told.err
    assert "- From the first layer to the last, the layers carried" in told.out
    page = tmp_path / "new" / "folder" / "fields.html"
    assert page.is_file()
    drawn = {file.name for file in (page.parent / "figures").iterdir()}
    assert drawn == {"fields-drift.svg", "fields-drift.png"}
    assert f"Page: {page}" in told.out


def test_digits_as_json(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[Path, str]] = []

    def write(folder: Path, record: dict[str, Any]) -> Path:
        written.append((folder, record["data"]))
        return folder / "page.html"

    monkeypatch.setattr(study_page, "write_study", write)
    answer = call("run", "fields-digits", "--preset", "tiny", "--out", tmp_path, "--json").json
    assert answer.keys() >= {"layers", "drift", "geometry", "staged", "findings", "verdict", "seconds"}
    page = str(tmp_path / "page.html")
    assert (answer["data"], answer["preset"], answer["page"]) == ("digits", "tiny", page)
    assert written == [(tmp_path, "digits")]
