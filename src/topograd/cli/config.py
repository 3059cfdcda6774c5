"""`topograd config`: the settings of a training as a JSON schema, for completion and checks in editors.

An editor that knows TOML schemas reads the first line of a config file: `#:schema train.schema.json`.
"""

import inspect
import json
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from topograd.cli.console import parse_one_of
from topograd.cli.flags import field_docs

_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean"}


@dataclass(frozen=True, kw_only=True)
class Schema:
    """Print the JSON schema of the files that `topograd train --config` reads."""


def run(argv: list[str]) -> int:
    parse_one_of({"schema": Schema}, argv, "config")
    print(json.dumps(train_schema(), indent=2))
    return 0


def train_schema() -> dict[str, Any]:
    """The schema of a training's settings; None is left out, because TOML has no null."""
    from topograd.runs.config import VERSION, TrainConfig

    schema = _object(TrainConfig)
    schema["properties"] |= {"version": {"const": VERSION}, "model": _models()}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "topograd training settings"}
    return head | schema


def _models() -> dict[str, Any]:
    """The [model] table: its kind decides which other keys there are. Kinds of your own have any."""
    from topograd.nn.spec import MODELS

    kinds: dict[type, list[str]] = {}
    for name in MODELS:
        kinds.setdefault(MODELS[name], []).append(name)
    cases = []
    for spec, names in kinds.items():
        known: list[Mapping[str, Any]] = [{"enum": names}]
        known += [{"pattern": "^resnet[0-9]+$"}] if "resnet" in names else []
        case: dict[str, Any] = {"properties": {"kind": {"anyOf": known}}}
        case |= {} if "gpt" in names else {"required": ["kind"]}  # a table without a kind is a GPT's
        table = _object(spec, ("family",))  # which its kind names
        table["properties"] = {"kind": {"type": "string"}, **table["properties"]}
        cases.append({"if": case, "then": table})
    own = {"pattern": "^[A-Za-z_][\\w.]*:[A-Za-z_][\\w.]*$"}
    kind = {"type": "string", "anyOf": [{"enum": list(MODELS)}, {"pattern": "^resnet[0-9]+$"}, own]}
    kind["description"] = "The kind of model, or package.module:MySpec of your own."
    return {"type": "object", "properties": {"kind": kind}, "allOf": cases}


def _object(kind: Any, without: tuple[str, ...] = ()) -> dict[str, Any]:
    docs, hints = field_docs(kind), get_type_hints(kind)
    properties = {}
    named = [field for field in fields(kind) if field.name not in without]
    for field in named:
        properties[field.name] = schema = _value(hints[field.name])
        if field.name in docs:
            schema["description"] = " ".join(docs[field.name].split())
        if field.default not in (MISSING, None) and not is_dataclass(field.default):
            schema["default"] = field.default
    required = [f.name for f in named if f.default is MISSING and f.default_factory is MISSING]
    table = {"type": "object", "description": inspect.cleandoc(kind.__doc__ or ""), "properties": properties}
    return table | {"additionalProperties": False} | ({"required": required} if required else {})


def _value(hint: Any) -> dict[str, Any]:
    if get_origin(hint) in (Union, types.UnionType):
        options = [_value(option) for option in get_args(hint) if option is not type(None)]
        return options[0] if len(options) == 1 else {"anyOf": options}
    if get_origin(hint) is Literal:
        return {"enum": list(get_args(hint))}
    if get_origin(hint) is tuple:
        items = get_args(hint)
        if items[-1] is Ellipsis:
            return {"type": "array", "items": _value(items[0])}
        return {"type": "array", "prefixItems": [_value(item) for item in items], "minItems": len(items)} | {
            "maxItems": len(items)
        }
    return _object(hint) if is_dataclass(hint) else {"type": _TYPES[hint]} if hint in _TYPES else {}
