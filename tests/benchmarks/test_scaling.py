"""Figures of many ranks and of slow wires are written as SVG or PNG."""

from pathlib import Path

from scaling import scaling_figure, wire_figure
from simulator import Work, simulate


def test_every_method_is_in_the_legend(tmp_path: Path) -> None:
    scaling_figure(simulate(8, Work()), tmp_path / "a.svg")
    scaling_figure(simulate(8, Work()), tmp_path / "b.png")
    assert (tmp_path / "a.svg").read_text().lstrip().startswith("<?xml")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_a_line_for_each_way_over_the_wire(tmp_path: Path) -> None:
    found = [
        {"settings": {"mbit": m}, "ways": {"staged": {"throughput_ratio_vs_single": m / 10}}} for m in (1, 10)
    ]
    wire_figure(found, ["staged"], tmp_path / "wire.svg")
    assert (tmp_path / "wire.svg").stat().st_size > 1000
