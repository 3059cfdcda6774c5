"""Upgrade of `config.toml` from earlier versions.

version 1   no [topology] table; alternating layers were counted from the last
version 2   (0.2) [model] for a GPT, and beside it [imported], [adapted] or [images] for other models;
            other names of some settings (NAMES)
"""

from collections.abc import Mapping
from typing import Any

from topograd.errors import ConfigError

NAMES = {
    "transmissivity": "grad_scale",
    "transmissivities": "grad_scales",
    "source_transmissivity": "source_grad_scale",
    "optimizer.matrices": "lr_matrix",
    "optimizer.embeddings": "lr_embedding",
    "optimizer.head": "lr_head",
    "optimizer.scalars": "lr_scalar",
    "optimizer.relays": "lr_relay",
    "tune.window": "seq_len",
}
"""Settings of version 2 and below, alone or in one table, and what they are called today."""


def upgraded(values: Mapping[str, Any], version: int) -> dict[str, Any]:
    """The tables of settings of some version, as of version 3."""
    tables = dict(values)
    if version <= 2:
        tables = _renamed(tables)
    if version == 1:
        tables = _from_version_1(tables)
    if version <= 2:
        tables = _from_version_2(tables)
    return tables


def _renamed(values: Any, table: str = "") -> Any:
    """Settings with today's names, in tables and in lists of tables."""
    if isinstance(values, list):
        return [_renamed(value, table) for value in values]
    if not isinstance(values, Mapping):
        return values
    return {
        NAMES.get(f"{table}.{name}", NAMES.get(name, name)): _renamed(value, name)
        for name, value in values.items()
    }


def _from_version_1(values: Mapping[str, Any]) -> dict[str, Any]:
    moved = {"partition", "objective", "grad_scale", "bus", "reduction", "interface"}
    topology = {name: value for name, value in values.items() if name in moved}
    if "stage_heads" in values:
        topology["heads"] = values["stage_heads"]
    rest = {name: value for name, value in values.items() if name not in moved | {"stage_heads"}}
    return {**rest, "topology": topology, "model": {"count_from": "last", **_table(rest, "model")}}


def _from_version_2(values: Mapping[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in values.items() if name not in ("imported", "adapted", "images")}
    sizes = _table(values, "model")
    if "images" in values:
        table = dict(_table(values, "images"))
        network = str(table.pop("model", "mlp"))
        named = {"kind": "image", "network": network} if ":" in network else {"kind": network}
        rest["model"] = {**named, **table}
    elif "imported" in values:
        table = dict(_table(values, "imported"))
        family, trained = table.pop("family", "llama"), table.get("context")
        context = sizes.get("context", trained)
        own = {} if context == trained else {"trained_context": trained}
        rest["model"] = {**table, **own, "kind": family, "context": context}
    elif "adapted" in values:
        table = dict(_table(values, "adapted"))
        rest["model"] = {**table, "kind": "hf", "context": sizes.get("context", table.get("context"))}
    return rest


def _table(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = values.get(name, {})
    if not isinstance(table, Mapping):
        raise ConfigError(setting=name, given=table, allowed="a table")
    return table
