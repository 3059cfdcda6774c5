"""The cost model against the published tables, with the conventions that reproduce them."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from papers.latent_bounded_interfaces.costs import (
    H100_OPS_PER_BYTE,
    ILLUSTRATIVE_RANK,
    ILLUSTRATIVE_REGIONS,
    ILLUSTRATIVE_SSM,
    ILLUSTRATIVE_TRANSFORMER,
    Region,
    SSMRegion,
    TransformerRegion,
    cost_model,
    forward_intensity,
    jacobian_flops,
    jacobian_intensity,
    least_chunk,
    published_least_chunk,
    scan_ratio,
    scan_transport,
    sequential_transport,
    table_1,
    work_span,
)
from raising import refused
from topograd.errors import ConfigError, TopologyError

PUBLISHED_TABLE_4 = {"SSM": (7.8, 7.8, 125, 500), "Transformer": (80, 80, 1275, 5100)}
REGIONS = st.one_of(
    st.builds(SSMRegion, *[st.integers(1, 64)] * 4), st.builds(TransformerRegion, *[st.integers(1, 64)] * 5)
)


def illustrative(rank: int = ILLUSTRATIVE_RANK) -> dict[str, dict[str, Any]]:
    models: dict[str, Region] = {"SSM": ILLUSTRATIVE_SSM, "Transformer": ILLUSTRATIVE_TRANSFORMER}
    return {name: cost_model(region, rank, ILLUSTRATIVE_REGIONS) for name, region in models.items()}


def test_table_4() -> None:
    ours = {
        name: (model["forward_intensity"], *model["jacobian_intensity"].values())
        for name, model in illustrative().items()
    }
    assert {name: tuple(round(x, 1) for x in row) for name, row in ours.items()} == {
        "SSM": (7.8, 7.8, 125.4, 501.6),
        "Transformer": (79.6, 79.6, 1273.1, 5092.3),
    }
    # The published digits are these, rounded: nothing differs by more than 0.6 %.
    for name, row in PUBLISHED_TABLE_4.items():
        assert ours[name] == pytest.approx(row, rel=6e-3)


def test_table_3_at_the_illustrative_configuration() -> None:
    ssm, transformer = illustrative().values()
    assert ssm["forward_flops"] == 201_326_592  # published: 2.01e8
    assert ssm["forward_bytes"] == 2 * 8 * 2048 * (768 + 16)
    assert transformer["forward_flops"] == 8 * 2048 * (768**2 + 2048 * 768 + 768 * 3072)
    assert transformer["forward_bytes"] == 2 * 8 * (2048 * 768 + 12 * 2048**2 + 2048 * 3072)
    assert ssm["jacobian_flops"] * ILLUSTRATIVE_REGIONS == pytest.approx(2.06e11, rel=2e-3)  # published
    assert ssm["jacobian_intensity"][64] == pytest.approx(64 * 768 * 16 / (768 + 16) / 2)
    for model in (ssm, transformer):
        assert model["jacobian_intensity"][64] == model["jacobian_flops"] / model["forward_bytes"]
    assert illustrative(rank=16)["SSM"]["jacobian_flops"] == ssm["jacobian_flops"] // 4


def test_the_model_holds_what_the_functions_give() -> None:
    region, rank, regions = TransformerRegion(2, 8, 16, 2, 32), 20, 5
    model = cost_model(region, rank, regions, ops_per_byte=100)
    assert list(model["jacobian_intensity"]) == [1, 16, 20]
    assert list(cost_model(region, 1, 1)["jacobian_intensity"]) == [1]
    assert model["least_chunk"] == least_chunk(region, rank, 100)
    assert model["published_least_chunk"] == published_least_chunk(region, 100)
    assert model["scan_over_jacobians"] == 2 * model["published_scan_over_jacobians"]
    totals = work_span([jacobian_flops(region, rank)] * 5, [region.forward_flops] * 5, rank)
    assert (model["work"], model["span"]) == (totals.work, totals.span)
    assert model["transport"]["LBI scan"]["flops"] == rank**3
    assert json.loads(json.dumps(model))["work"] == model["work"]


@pytest.mark.parametrize(
    ("region", "published", "counted_alike", "whole_passes"),
    [(ILLUSTRATIVE_SSM, 38, 19, 64), (ILLUSTRATIVE_TRANSFORMER, 4, 2, 4)],
)
def test_compute_bound_chunks(region: Region, published: int, counted_alike: int, whole_passes: int) -> None:
    assert published_least_chunk(region) == published
    assert published_least_chunk(region, H100_OPS_PER_BYTE / 2) == counted_alike
    assert least_chunk(region, ILLUSTRATIVE_RANK) == whole_passes
    # 295 is an H100's 989 TFLOPS of dense bf16 over its 3.35 TB/s, two FLOPs to a multiply-add.
    assert round(989.4 / 3.35) == H100_OPS_PER_BYTE


def test_a_chunk_of_38_makes_as_many_passes_as_one_of_32() -> None:
    effective = jacobian_intensity(ILLUSTRATIVE_SSM, 64, 38)
    assert effective == jacobian_intensity(ILLUSTRATIVE_SSM, 64, 32)
    assert round(effective) == 251
    assert effective < H100_OPS_PER_BYTE < 38 * forward_intensity(ILLUSTRATIVE_SSM)
    assert least_chunk(ILLUSTRATIVE_SSM, rank=16) is None  # 125: memory-bound at every chunk


@settings(max_examples=25, deadline=None)
@given(region=REGIONS, rank=st.integers(1, 40), data=st.data())
def test_intensity_is_the_chunk_times_the_forwards(region: Region, rank: int, data: st.DataObject) -> None:
    chunk = data.draw(st.integers(1, rank))
    intensity = jacobian_intensity(region, rank, chunk)
    if rank % chunk == 0:  # eqs. 10 and 11
        assert intensity == pytest.approx(chunk * forward_intensity(region))
    assert intensity <= chunk * forward_intensity(region) * (1 + 1e-12)
    bound = data.draw(st.floats(0.1, 500))
    smallest = least_chunk(region, rank, bound)
    compute_bound = [c for c in range(1, rank + 1) if jacobian_intensity(region, rank, c) >= bound]
    assert compute_bound == ([] if smallest is None else list(range(smallest, rank + 1)))


def test_the_scan_is_negligible_but_not_by_the_published_bounds_per_sample() -> None:
    as_published = [
        scan_ratio(region, 64, per_sample=False) for region in (ILLUSTRATIVE_SSM, ILLUSTRATIVE_TRANSFORMER)
    ]
    per_sample = [
        scan_ratio(region, 64, per_sample=True) for region in (ILLUSTRATIVE_SSM, ILLUSTRATIVE_TRANSFORMER)
    ]
    assert as_published == pytest.approx([2.035e-5, 5.528e-8], rel=1e-3)
    assert per_sample == pytest.approx([1.628e-4, 4.423e-7], rel=1e-3)
    assert as_published[0] < 1e-4 < per_sample[0]
    assert as_published[1] < 1e-7 < per_sample[1]


def test_work_is_r_plus_1_times_backprop_and_span_loses_the_sum() -> None:
    F, r, K = ILLUSTRATIVE_SSM.forward_flops, ILLUSTRATIVE_RANK, ILLUSTRATIVE_REGIONS
    costs = work_span([jacobian_flops(ILLUSTRATIVE_SSM, r)] * K, [F] * K, r)
    assert costs.work == K * ((r + 1) * F + r**3)
    assert costs.span == (r + 1) * F + 4 * r**3
    assert costs.work / (K * F) == pytest.approx(r + 1, rel=1e-4)  # published: (r + 1) times


def test_work_and_span_of_unequal_regions() -> None:
    costs = work_span([5.0, 70.0, 11.0], [3.0, 1.0, 20.0], rank=2)
    assert costs.work == 86 + 3 * 8 + 24
    assert costs.span == 70 + 8 * 2 + 20
    assert work_span([5.0], [3.0], rank=2).span == 8.0  # one region: nothing to combine
    with refused(ConfigError, setting="jacobian", given=3):
        work_span([1.0, 1.0, 1.0], [1.0, 1.0], rank=2)
    with refused(ConfigError, setting="jacobian", given=0):
        work_span([], [], rank=2)


def test_table_1() -> None:
    rows = table_1(ILLUSTRATIVE_TRANSFORMER, ILLUSTRATIVE_RANK, ILLUSTRATIVE_REGIONS)
    width = 8 * 2048 * 768
    assert width == pytest.approx(1.26e7, rel=2e-3)  # published
    backprop, full, lbi = (rows[name] for name in ("Sequential BP", "Full-rank scan", "LBI scan"))
    assert (backprop.flops, backprop.span, backprop.intensity) == (width**2, 16 * width**2, 1)
    assert (full.flops, full.span, full.intensity) == (width**3, 4 * width**3, width)
    assert (lbi.flops, lbi.span, lbi.intensity) == (64**3, 4 * 64**3, 64)
    assert [row.materializes for row in rows.values()] == [False, True, True]
    assert full.flops == pytest.approx(2.0e21, rel=5e-3)  # published
    assert lbi.flops == pytest.approx(2.6e5, rel=1e-2)  # published
    assert math.log10(full.flops / lbi.flops) == pytest.approx(16, abs=0.15)  # published: about 1e16; 7.6e15
    # The d² of backprop is the cost of a dense Jacobian, not of a VJP.
    assert backprop.flops / ILLUSTRATIVE_TRANSFORMER.forward_flops == pytest.approx(2137, rel=1e-3)


def test_levels_of_the_scan_round_up() -> None:
    spans = [scan_transport(2, K).span // 8 for K in (1, 2, 3, 4, 5, 8, 9)]
    assert spans == [0, 1, 2, 2, 3, 3, 4]
    assert sequential_transport(2, 5).span == 20


def test_bad_input_is_one_clear_line() -> None:
    with refused(TopologyError, setting="SSMRegion.N", given=0):
        SSMRegion(8, 16, 32, 0)
    with refused(TopologyError, setting="TransformerRegion.H", given=-1):
        TransformerRegion(8, 16, 32, -1, 64)
    with refused(TopologyError, setting="chunk", given=65):
        jacobian_intensity(ILLUSTRATIVE_SSM, 64, 65)
    with refused(TopologyError, setting="the interface's width", given=0):
        jacobian_flops(ILLUSTRATIVE_SSM, 0)
