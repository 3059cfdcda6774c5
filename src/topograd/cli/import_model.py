"""`topograd import`: make a run of a model from outside."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from topograd.cli.console import Json, note, parse, show


@dataclass(frozen=True, kw_only=True)
class Import:
    """Make a run of a Hugging Face folder, a GGUF file or an adapter of peft's; every verb works on it."""

    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SOURCE")]
    """A folder with config.json, *.safetensors and tokenizer.json, or a .gguf file (extra `models`)."""
    out: Path
    """The run's folder."""
    base: Annotated[Path | None, tyro.conf.arg(metavar="MODEL")] = None
    """The model of an adapter, where it is not the one that the adapter names."""
    partition: str = "L"
    """Layers per stage, as "10,10,10": where it may be left early; "L" is one stage."""
    context: int | None = None
    """Positions that the run sees; by default those of the model, at most 2048."""
    copy: tyro.conf.FlagCreatePairsOff[bool] = False
    """Copy the weights into the run, instead of referring to them by path and hash."""
    json: Json = False


def run(argv: list[str]) -> int:
    args = parse(Import, argv, "import")
    from topograd.convert.importing import import_model

    note(f"reading {args.source}")
    found = import_model(
        args.source,
        args.out,
        partition=args.partition,
        context=args.context,
        copy=args.copy,
        base=args.base,
    )
    if not found["native"]:
        note(
            f"{found['architecture']} has no stack of its own here: transformers runs it, and every token is "
            "computed from the whole text before it"
        )
    show(args.json, found, _line)
    return 0


def _line(found: dict[str, Any]) -> str:
    return (
        f"{found['run']}: {found['architecture']}, {found['layers']} layers, "
        f"{found['parameters'] / 1e6:.1f} M parameters, weights {found['weights']}, {found['seconds']:.1f} s"
    )
