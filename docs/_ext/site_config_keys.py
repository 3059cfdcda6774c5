"""Reference of a run's `config.toml`: every key, read from the dataclasses of its tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, get_args

from site_fields import described, markdown, shown

HEAD = """(config-keys)=
# Config keys

Generated from the dataclasses of a run's settings. `topograd train --config FILE.toml` lays a file over a
preset, table by table. Flags win over the file. The flag of a key is its name with dashes: `eval_every` is
`--eval-every`, `optimizer.lr_matrix` is `--optimizer.lr-matrix`. The tables `[topology]` and `[tune]` have no
prefix on the command line: `topology.partition` is `--partition`. [The topology
table](topology-table.md) has examples.
"""


def page() -> str:
    """The page in Markdown."""
    from topograd.nn.config import GPTConfig
    from topograd.nn.spec import MODELS
    from topograd.runs.config import StageOptimizer, TrainConfig

    kinds: dict[type, list[str]] = {}
    for name in MODELS:
        kinds.setdefault(MODELS[name], []).append(name)
    parts = [HEAD, *table("", "Top level", TrainConfig)]
    parts += table("optimizer.stages", "`[[optimizer.stages]]`", StageOptimizer)
    for kind, names in kinds.items():
        if kind is not GPTConfig:
            parts += table("model", f"`[model]` of kind {', '.join(names)}", kind)
    return "\n".join(parts)


def table(path: str, title: str, kind: type, value: Any = None) -> Iterator[str]:
    """A section for a dataclass, then one for each dataclass in it."""
    doc = (kind.__doc__ or "").split("\n\n")[0]
    yield f"\n## {title}\n\n{markdown(doc)}\n"
    inner = []
    for one in described(kind, value):
        if one.nested:
            inner.append(one)
            continue
        items = [
            str(item.__name__) for item in get_args(one.hint) if isinstance(item, type) and is_dataclass(item)
        ]
        typed = f"tables of {items[0]}" if items else one.typed
        default = shown(one.default)
        tail = f"{typed}; default `{default}`" if default else typed
        body = markdown(one.text).replace("\n", "\n  ") or "No further description."
        yield f"`{one.field.name}`\n: {body}\n\n  *{tail}*\n"
    for one in inner:
        below = ".".join(filter(None, (path, one.field.name)))
        names = " of kind gpt, mamba2, mamba3, hybrid" if one.field.name == "model" else ""
        yield from table(below, f"`[{below}]`{names}", one.hint, one.default)
