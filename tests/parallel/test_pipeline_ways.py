"""`bench pipeline` on a tiny model: every way is measured, table and JSON have what they promise."""

import math
from typing import Any

import pytest

import pipeline_ways as pipeline
from pipeline_settings import PipelineSettings
from pipeline_ways import pipeline_table
from raising import refused
from topograd.errors import ConfigError
from topograd.exec.thin import packed_shape

TINY: dict[str, Any] = {"width": 16, "vocab": 17, "context": 8, "batch": 1, "microbatches": 2, "rounds": 1}


def test_every_way_is_measured(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job = launch("bench", 2, settings=TINY)
    found = job.wait()[0]
    assert found is not None, job.said()
    monkeypatch.setattr(pipeline, "run_ranks", lambda settings, command: found)
    results = pipeline.bench_pipeline(PipelineSettings(**TINY))
    assert {"throughput_ratio_vs_single", "bubble"} <= results["staged"].keys()
    assert {"throughput_ratio_vs_single", "bubble", "schedule"} <= results["backprop"].keys()
    message = 1 * 8 * 16 * 4 * 2
    embeddings = 2 * 17 * 16 * 4
    assert results["bytes"]["free-int8"] < results["bytes"]["free"] < results["bytes"]["staged"]
    backprop = {results["bytes"][name] for name in pipeline.BACKPROP}
    assert backprop == {2 * message + 2 * embeddings}
    assert all(seconds > 0 for seconds in results["parts"].values())
    assert set(results["simulated"]) == {"staged", "gpipe", "1f1b", "data", *pipeline.CROSSING}
    assert pipeline_table(results).row_count == 15
    assert results["thin"] == results["ways"]["thin"]
    assert results["late"] == results["ways"]["late"]
    assert results["thin_late"] == results["ways"]["thin-late"]
    by_way = results["bytes"]
    thinner = message - 2 * math.prod(packed_shape((8, 16), pipeline.BITS))
    head = 2 * (17 * 16 * 4 + 4)  # with a flag, of two ranks: where one stage has a loss it is not added up
    assert by_way["late"] == by_way["staged"] + message - head
    assert by_way["whole"] == by_way["late"] - 2 * 4, "one group of stages, whose norm two ranks exchange"
    assert by_way["thin"] == by_way["whole"] - thinner
    assert by_way["thin-late"] == by_way["late"] - thinner
    assert by_way["thin-late-int8"] < by_way["thin-late"]


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 layers cannot be dealt evenly to 2 ranks"):
        PipelineSettings(layers=3)
    with refused(ConfigError, setting="ranks", given=1):
        PipelineSettings(ranks=1)
    with pytest.raises(ConfigError, match="--latency is 5 without a bandwidth"):
        PipelineSettings(latency=5.0)
    for ways in (("thin", "magic"), ("thin", "late")):
        with pytest.raises(ConfigError, match=f"--ways has .*{ways[1]}; choose from staged"):
            pipeline.bench_pipeline(PipelineSettings(ways=ways))


def test_without_the_right_to_shape_links_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for latency in (None, 5.0):
        with pytest.raises(ConfigError, match="--mbit needs the command ip"):
            pipeline.bench_pipeline(PipelineSettings(**TINY, mbit=10.0, latency=latency))
