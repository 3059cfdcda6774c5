"""Conclusions from an inspection: a few sentences, each from numbers of the record.

The record is that of `CheckpointReading.as_dict`, or of `Inspection.as_dict`, which has no directions. Order:
what to trust, what is flat and why, what to do.
"""

from collections.abc import Mapping, Sequence
from typing import Any

FREE = 0.45
"""The share below which, with its whole interval, a direction is called partly free."""


def advice(record: Mapping[str, Any]) -> list[str]:
    """The sentences, most useful first."""
    sentences = [*_stream(record), *_norms(record)]
    if "directions" in record:
        sentences += _directions(record)
    if not record["fisher"]:
        sentences.append("There is no loss here, so nothing is said of gradients: give one to read G.")
    return sentences


def _stream(record: Mapping[str, Any]) -> list[str]:
    stream, without = record["stream"], record.get("stream_without_massive")
    if stream is None:
        return []
    sentences = []
    if without is not None:
        worst = max(stream["massive"], key=lambda one: one["largest"])
        first = stream["massive"][0]["layer"]
        ranks = zip(
            stream["names"], stream["effective_ranks"][1:], without["effective_ranks"][1:], strict=True
        )
        name, loud, quiet = max(ranks, key=lambda rank: rank[2] - rank[1])
        sentences.append(
            f"Massive activations: from {first} on some rows, {worst['rows']} of {stream['samples']} at "
            f"{worst['layer']}, reach {worst['largest']:.0f} in channel {worst['channel']}. They are a "
            f"constant that does not depend on the text: the effective rank after {name} is {loud:.0f} with "
            f"them and {quiet:.0f} without. Read the lines without them; keep those channels out of pruning, "
            "and out of low-precision formats with one scale a tensor."
        )
    profile = stream if without is None else without
    if profile["outside"] is not None:
        sentences.append(
            f"The stream was described and not tested: these are {profile['outside']}, of which the theory "
            "promises nothing."
        )
    elif profile["verdict"].startswith("preserved"):
        sentences.append(
            "The weakest direction of the input reaches the last layer: no layer cancels the skip, and depth "
            "loses no information."
        )
    elif min(profile["ratios"]) >= 1:
        sentences.append(
            "After no layer is the weakest direction weaker than in the input: depth loses no information. "
            f"But it {profile['verdict']}: less than half of what it is before and after, so that these "
            "layers work against the skip."
        )
    else:
        sentences.append(
            f"The weakest direction of the input does not come through ({profile['verdict']}): look at the "
            "layers named there, or read more text first if few rows were read."
        )
    return sentences


def _norms(record: Mapping[str, Any]) -> list[str]:
    norms = record["norms"]
    exact = [name for name, norm in norms.items() if norm["exact"]]
    seeming = [norm for norm in norms.values() if not norm["exact"] and norm["found"]]
    fooled = [norm for norm in seeming if norm["without_massive"] and not norm["without_massive"]["found"]]
    off = len(seeming) - len(fooled)
    sentences = []
    if exact:
        sentences.append(
            f"{len(exact)} LayerNorms remove one direction each by construction: a smallest eigenvalue of "
            "zero after them is no sign of collapse."
        )
    if fooled:
        sentences.append(
            f"{len(fooled)} RMSNorms look as if they had a kernel; it is the massive rows, and without them "
            "they have none."
        )
    if off:
        sentences.append(
            f"{off} RMSNorms have a gain so small that one channel after them is off: the flat direction "
            "there is that channel, learned, and no kernel of the norm. Where a massive channel is switched "
            "off like this, later layers do not read it."
        )
    return sentences


def _directions(record: Mapping[str, Any]) -> list[str]:
    every = record["directions"]
    groups = [one for one in every if one["kind"] == "symmetry" and one["group"] is not None]
    dead = [one for one in every if one["kind"] == "dead"]
    live = [one for one in every if one["kind"] == "live"]
    sentences = []
    if groups:
        total = sum(one["dimensions"] for one in groups)
        share = total / record["parameters"]
        sentences.append(
            f"{total} of {record['parameters']} dimensions ({share:.1%}) are flat by symmetry: curvature, "
            "distances and averages of weights along them mean nothing, and an optimizer may drift there."
        )
    unread = [one for one in dead if one["order"] is None and not one["layer"].startswith("joint")]
    faint = [one for one in unread if one["fisher"]]
    flat = [one for one in unread if not one["fisher"]]
    if flat:
        sentences.append(
            f"{len(flat)} layers have a direction on which the probe's outputs do not depend and that no "
            f"symmetry explains ({_names(flat)}): capacity that is unused on this text, a first place to "
            "prune or to put new knowledge. Read it on text of your own before you act."
        )
    if faint:
        sentences.append(
            f"{len(faint)} layers have a direction along which the outputs hardly leave their rounding "
            f"({_names(faint)}), too little for an order: flat for every purpose on this text, and called "
            "dead for want of a square."
        )
    ordered = [one for one in dead if one["order"] is not None]
    if ordered:
        one = max(ordered, key=lambda one: one["order"])
        sentences.append(
            f"{len(ordered)} directions are dead with an order; the highest is {one['order']} "
            f"({one['layer']}). There the quadratic picture fails: a Laplace approximation or a Hessian's "
            "eigenvalue underestimates how far weights may move."
        )
    if live and not dead:
        flattest = min(live, key=lambda one: one["fisher"] if one["fisher"] is not None else float("inf"))
        sentences.append(
            f"None of the {len(live)} directions that were followed is dead: this checkpoint is not at a "
            f"singularity. The flattest is in {flattest['layer']} (Fisher {flattest['fisher']:.1e}); flat is "
            "not dead, and λ counts each as one half."
        )
    elif live:
        sentences.append(f"{len(live)} followed directions are live: λ counts each as one half.")
    sentences += _shares([*live, *dead])
    if record["refused"]:
        sentences.append(f"{len(record['refused'])} readings were not possible; the reasons are listed.")
    return sentences


def _shares(directions: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the shares at the scale of the data mean."""
    read = [one for one in directions if one.get("share") and not one["layer"].startswith("joint")]
    if not read:
        return []
    free = [one for one in read if one["share"]["interval"] and one["share"]["interval"][1] < FREE]
    least = min(read, key=lambda one: one["share"]["value"])
    total = sum(one["share"]["value"] for one in read)
    words = (
        f"At the scale of the text that was read (nβ = {least['share']['n_beta']:.0f}) the {len(read)} "
        f"followed directions count {total:.2f} of λ together, where one half each would be a direction that "
        "this text fixes."
    )
    if free:
        words += (
            f" {len(free)} count clearly less ({_names(free)}): the text leaves them partly free, and "
            f"weights may move there further than their Fisher says. The least is "
            f"{least['share']['value']:.2f} ({least['layer']})."
        )
    else:
        words += " None counts clearly less: this text fixes each of them, and the quadratic picture holds."
    return [words]


def _names(directions: Sequence[Mapping[str, Any]]) -> str:
    """The layers, three at most."""
    return ", ".join([*(one["layer"] for one in directions[:3]), *(["..."] if len(directions) > 3 else [])])
