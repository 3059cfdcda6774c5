"""Sentences come from the numbers of a record."""

from typing import Any

from topograd.geometry.advice import advice


def direction(layer: str, kind: str, order: int | None = None, group: str | None = None) -> dict[str, Any]:
    return {"layer": layer, "kind": kind, "order": order, "group": group, "fisher": 0.5, "dimensions": 9}


def record(**more: Any) -> dict[str, Any]:
    stream: dict[str, Any] = {
        "massive": [],
        "effective_ranks": [5.0, 4.0],
        "outside": None,
        "verdict": "preserved",
    }
    stream |= {"ratios": [0.5], "names": ["layers.0"], "samples": 70}
    plain = {"stream": stream, "stream_without_massive": None, "norms": {}, "fisher": "monte-carlo"}
    return {**plain, "parameters": 90, "directions": [], "refused": [], **more}


def said(**more: Any) -> str:
    return " ".join(advice(record(**more)))


def test_streams() -> None:
    assert "reaches the last layer" in said()
    assert said(stream=None) == ""
    falling = {**record()["stream"], "verdict": "falling with depth"}
    assert "does not come through (falling with depth)" in said(stream=falling)
    dipping = {**falling, "verdict": "dips at layers.1", "ratios": [3.0, 1.2, 4.0]}
    assert "After no layer is the weakest direction weaker" in said(stream=dipping)
    assert "But it dips at layers.1" in said(stream=dipping)
    assert "described and not tested" in said(stream={**falling, "outside": "post-norm layers"})
    massive = {"layer": "layers.3", "rows": 7, "largest": 2500.0, "channel": 11}
    loud = {**record()["stream"], "massive": [massive]}
    quiet = {**record()["stream"], "effective_ranks": [5.0, 4.9]}
    words = said(stream=loud, stream_without_massive=quiet)
    assert "from layers.3 on some rows, 7 of 70 at layers.3, reach 2500 in channel 11" in words
    assert "after layers.0 is 4 with them and 5 without" in words


def test_norms_and_a_missing_loss() -> None:
    fooled = {"exact": False, "found": True, "without_massive": {"found": False}}
    off = {"exact": False, "found": True, "without_massive": {"found": True}}
    words = said(
        norms={"a": {"exact": True, "found": True, "without_massive": None}, "b": fooled, "c": off, "d": off}
    )
    assert "1 LayerNorms remove one direction" in words
    assert "1 RMSNorms look as if" in words
    assert "2 RMSNorms have a gain so small" in words
    assert "no loss here" in said(fisher=None)


def test_directions() -> None:
    words = said(
        directions=[
            direction("v", "symmetry", group="GL(3)"),
            {**direction("up", "dead"), "fisher": 0.0},
            direction("faint", "dead"),
            direction("joint: up, down", "dead", 2),
            direction("down", "live", 1),
        ],
        refused=["something"],
    )
    for part in (
        "9 of 90 dimensions (10.0%)",
        "1 layers have a direction on which the probe",
        "(faint)",
        "the highest is 2",
        "1 readings were not possible",
    ):
        assert part in words
    assert "None of the 1 directions" in said(directions=[direction("down", "live", 1)])


def test_shares_say_what_the_text_fixes() -> None:
    def one(value: float) -> dict[str, Any]:
        share = {"n_beta": 500.0, "value": value, "interval": [value - 0.01, value + 0.01]}
        return {**direction(f"at {value}", "live", 1), "share": share}

    words = said(directions=[one(0.5), one(0.2)])
    assert "nβ = 500" in words
    assert "count 0.70 of λ together" in words
    assert "1 count clearly less (at 0.2)" in words
    assert "None counts clearly less" in said(directions=[one(0.5)])
    assert "nβ" not in said(directions=[direction("a", "live", 1)])
