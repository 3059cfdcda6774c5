"""`topograd export`: write a run's model for transformers, for llama.cpp or for ONNX Runtime."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from topograd.cli.console import Folder, Json, out, parse, print_json
from topograd.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a run's model: a folder for transformers, a GGUF file for llama.cpp, or its stages as ONNX."""

    folder: Folder
    """The run's folder."""
    out: Path
    """The new folder to write."""
    format: Literal["hf", "gguf", "onnx"] = "hf"
    """hf: config.json, safetensors, tokenizer.json; gguf: one file (extra `models`); onnx: a graph for each
    stage and a script that runs them (extra `runtime`)."""
    weights: Literal["F32", "F16", "Q8_0"] | None = None
    """How a GGUF file keeps matrices; by default F32, as the other formats always do."""
    json: Json = False


def run(argv: list[str]) -> int:
    """Export, say what was written, return the exit code."""
    asked = parse(Export, argv, "export")
    if asked.weights is not None and asked.format != "gguf":
        raise ConfigError(
            f"--weights is {asked.weights} and --format {asked.format}, which keeps F32",
            remedy="leave --weights out or use --format gguf",
        )
    from topograd.convert.export import export_model

    found = export_model(asked.folder, asked.out, asked.format, asked.weights or "F32")
    if asked.json:
        print_json(found)
    else:
        out().print(f"{found['out']}: {', '.join(found['files'])}", soft_wrap=True)
    return 0
