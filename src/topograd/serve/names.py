"""Model ids with a depth: `name:depth`, for clients that cannot send the field `depth`.

    reference                  the model as it is
    reference:prefix-1         depth prefix:1
    reference:speculate        depth speculate
    reference:wand-0.001       depth wand:flip-rate:0.001
    reference:wand-rival-gain-1.5, :path-1,3, :branches-1-3*2+1-2, :speculate-4-0.5, :speculate-lookup

A depth may also follow the colon as it is: reference:prefix:1.
"""

from __future__ import annotations

import re
from pathlib import Path

from topograd.decode.calibrate import load as load_calibration
from topograd.errors import ConfigError, TopogradError
from topograd.runs.session import LoadedTextRun

RULES = ("flip-rate", "rival-gain", "sum-of-bounds")
FAMILIES = ("full", "prefix", "path", "branches", "wand", "speculate")
MAX_CHARACTERS = 300


def model_name(folder: Path) -> str:
    """The id of a run: its folder's name, without what an id cannot have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-") or "model"


def split_id(model: str) -> tuple[str, str | None]:
    """The name and the depth of a model id; None where it names no depth."""
    if len(model) > MAX_CHARACTERS:
        raise ConfigError(
            f"model has {len(model)} characters", setting="model", allowed=f"at most {MAX_CHARACTERS}"
        )
    name, colon, suffix = model.partition(":")
    return name, depth_of_suffix(suffix) if colon else None


def depth_of_suffix(suffix: str) -> str:
    """The depth that a suffix names.

    >>> depth_of_suffix("prefix-1"), depth_of_suffix("wand-0.001"), depth_of_suffix("speculate-4-0.5")
    ('prefix:1', 'wand:flip-rate:0.001', 'speculate:4:0.5')
    """
    kind, rest = re.fullmatch(r"([a-z]*)[-:]?(.*)", suffix, re.DOTALL).groups()  # type: ignore[union-attr]
    if kind not in FAMILIES:
        raise ConfigError(
            f"the depth {suffix!r} in the model id is unknown",
            setting="model",
            given=suffix,
            remedy=f"use one of {', '.join(FAMILIES)}, such as prefix-1",
        )
    if not rest:
        return str(kind)
    if kind == "wand":
        rule = next(
            (rule for rule in RULES if rest == rule or rest.startswith((f"{rule}-", f"{rule}:"))), None
        )
        number = rest if rule is None else rest[len(rule) + 1 :]
        return f"wand:{rule or 'flip-rate'}" + (f":{number}" if number else "")
    if kind == "speculate" and re.fullmatch(r"\d+-[0-9.e]+", rest):
        rest = rest.replace("-", ":", 1)
    return f"{kind}:{rest}"


def known_depths(session: LoadedTextRun) -> list[str]:
    """The depths that /v1/models lists, as suffixes of a model id."""
    exits = len(session.plan.predicting())
    depths = ["full", *(f"prefix-{j}" for j in range(1, exits)), "speculate", "speculate-lookup"]
    try:
        load_calibration(session)
    except TopogradError:
        return depths
    return [*depths, "wand", "wand-0.001", "wand-0.01"]
