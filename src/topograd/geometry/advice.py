"""What a practitioner should make of a reading: a few sentences, each from numbers that are in it.

It reads the plain record of `CheckpointReading.as_dict` (or of `Inspection.as_dict`: then nothing is said of
directions). The order is that of use: what to trust, what is flat and why, what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def advice(record: Mapping[str, Any]) -> list[str]:
    """The sentences, most useful first."""
    said = [*_stream(record), *_norms(record)]
    if "directions" in record:
        said += _directions(record)
    if not record["fisher"]:
        said.append("There is no loss here, so nothing is said of gradients: give one to read G.")
    return said


def _stream(record: Mapping[str, Any]) -> list[str]:
    stream, without = record["stream"], record.get("stream_without_massive")
    if stream is None:
        return []
    said = []
    if without is not None:
        worst = max(stream["massive"], key=lambda one: one["largest"])
        first = stream["massive"][0]["layer"]
        ranks = zip(
            stream["names"], stream["effective_ranks"][1:], without["effective_ranks"][1:], strict=True
        )
        name, loud, quiet = max(ranks, key=lambda found: found[2] - found[1])
        said.append(
            f"Massive activations: from {first} on some rows, {worst['rows']} of {stream['samples']} at "
            f"{worst['layer']}, reach {worst['largest']:.0f} in channel {worst['channel']}. They are a "
            f"constant and not what the text says: the effective rank behind {name} is {loud:.0f} with them "
            f"and {quiet:.0f} without. Read the lines without them; keep those channels out of pruning, and "
            "out of low-precision formats with one scale a tensor."
        )
    found = stream if without is None else without
    if found["outside"] is not None:
        said.append(
            f"The stream was described and not tested: these are {found['outside']}, of which the theory "
            "promises nothing."
        )
    elif found["verdict"].startswith("preserved"):
        said.append(
            "The weakest direction of the input reaches the last layer: no layer cancels the skip, and depth "
            "loses no information."
        )
    elif min(found["ratios"]) >= 1:
        said.append(
            "Behind no layer is the weakest direction weaker than in the input: depth loses no information. "
            f"But it {found['verdict']}: less than half of what it is before and after, so that these layers "
            "work against the skip."
        )
    else:
        said.append(
            f"The weakest direction of the input does not come through ({found['verdict']}): look at the "
            "layers named there, or read more text first if few rows were read."
        )
    return said


def _norms(record: Mapping[str, Any]) -> list[str]:
    norms = record["norms"]
    exact = [name for name, norm in norms.items() if norm["exact"]]
    seeming = [norm for norm in norms.values() if not norm["exact"] and norm["found"]]
    fooled = [norm for norm in seeming if norm["without_massive"] and not norm["without_massive"]["found"]]
    off = len(seeming) - len(fooled)
    said = []
    if exact:
        said.append(
            f"{len(exact)} LayerNorms kill one direction each by construction: a smallest eigenvalue of zero "
            "behind them is no sign of collapse."
        )
    if fooled:
        said.append(
            f"{len(fooled)} RMSNorms look as if they had a kernel; it is the massive rows, and without them "
            "they have none."
        )
    if off:
        said.append(
            f"{off} RMSNorms have a gain so small that one channel behind them is off: the flat direction "
            "there is that channel, learned, and no kernel of the norm. Where a massive channel is switched "
            "off like this, what comes behind does not see it."
        )
    return said


def _directions(record: Mapping[str, Any]) -> list[str]:
    every = record["directions"]
    gauges = [one for one in every if one["kind"] == "gauge" and one["group"] is not None]
    dead = [one for one in every if one["kind"] == "dead"]
    live = [one for one in every if one["kind"] == "live"]
    said = []
    if gauges:
        total = sum(one["dimensions"] for one in gauges)
        share = total / record["parameters"]
        said.append(
            f"{total} of {record['parameters']} dimensions ({share:.1%}) are flat by symmetry: curvature, "
            "distances and averages of weights along them mean nothing, and an optimizer may drift there."
        )
    unread = [one for one in dead if one["order"] is None and not one["layer"].startswith("joint")]
    faint = [one for one in unread if one["fisher"]]
    flat = [one for one in unread if not one["fisher"]]
    if flat:
        said.append(
            f"{len(flat)} layers have a direction that the probe does not notice and no symmetry explains "
            f"({_names(flat)}): capacity that is unused on this text, a first place to prune or to put new "
            "knowledge. Read it on text of your own before you act."
        )
    if faint:
        said.append(
            f"{len(faint)} layers have a direction along which the outputs hardly leave their rounding "
            f"({_names(faint)}), too little for an order: flat for every purpose on this text, and called "
            "dead for want of a square."
        )
    ordered = [one for one in dead if one["order"] is not None]
    if ordered:
        one = max(ordered, key=lambda one: one["order"])
        said.append(
            f"{len(ordered)} directions are dead with an order; the highest is {one['order']} "
            f"({one['layer']}). There the quadratic picture fails: a Laplace approximation or a Hessian's "
            "eigenvalue underestimates how far weights may move."
        )
    if live and not dead:
        flattest = min(live, key=lambda one: one["fisher"] if one["fisher"] is not None else float("inf"))
        said.append(
            f"None of the {len(live)} directions that were followed is dead: this checkpoint is not at a "
            f"singularity. The flattest is in {flattest['layer']} (Fisher {flattest['fisher']:.1e}); flat is "
            "not dead, and λ counts each as one half."
        )
    elif live:
        said.append(f"{len(live)} followed directions are live: λ counts each as one half.")
    if record["refused"]:
        said.append(f"{len(record['refused'])} things were not said; the reasons are listed.")
    return said


def _names(directions: Sequence[Mapping[str, Any]]) -> str:
    """The layers, three at most."""
    return ", ".join([*(one["layer"] for one in directions[:3]), *(["..."] if len(directions) > 3 else [])])
