"""Counters in Prometheus' format."""

from __future__ import annotations

import re

import pytest

from topograd.serve.metrics import Counters, Histogram


def test_histograms_count_from_below() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.add(value)
    assert histogram.lines("x") == [
        'x_bucket{le="1.0"} 2',
        'x_bucket{le="2.0"} 3',
        'x_bucket{le="+Inf"} 4',
        "x_sum 12.0",
        "x_count 4",
    ]


def test_every_line_is_a_sample_or_a_type(capsys: pytest.CaptureFixture[str]) -> None:
    counters = Counters()
    counters.request("/v1/completions", 200)
    counters.admitted(10, 4)
    counters.written(3)
    counters.first(0.02)
    counters.step(0.01, 2)
    counters.finished("stop", 5, 4)
    counters.failed(ValueError("a bug"))
    assert "a bug" in capsys.readouterr().err
    text = counters.text(running=1, waiting=2)
    sample = re.compile(r"[a-z_]+(\{[a-z]+=\"[^\"]*\"(,[a-z]+=\"[^\"]*\")*\})? [0-9.e+-]+")
    for line in text.splitlines():
        assert line.startswith("# TYPE topograd_") or sample.fullmatch(line), line
    for line in (
        'topograd_requests_total{route="/v1/completions",status="200"} 1',
        "topograd_cached_prompt_tokens_total 4",
        "topograd_generated_tokens_total 3",
        "topograd_accepted_draft_tokens_total 4",
        "topograd_texts_waiting 2",
        "topograd_internal_errors_total 1",
    ):
        assert line in text.splitlines()
