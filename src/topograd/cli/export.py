"""`topograd export`: write a run's model for transformers, llama.cpp, ONNX Runtime, or its LoRA for peft."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from topograd.cli.console import Json, ModelArgument, parse, show
from topograd.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a run's model: a folder for transformers, a GGUF file for llama.cpp, its stages as ONNX, or what
    LoRA learned as an adapter for peft."""

    model: ModelArgument
    out: Path
    """The new folder to write."""
    format: Literal["hf", "gguf", "onnx", "peft"] = "hf"
    """hf: config.json, safetensors, tokenizer.json; gguf: one file (extra `models`); onnx: a graph for each
    stage and a script that runs them (extra `runtime`); peft: an adapter, for a run of --lora-rank."""
    weights: Literal["F32", "F16", "Q8_0", "Q4_1", "Q4_0"] | None = None
    """How a GGUF file keeps matrices; by default F32, as the other formats always do."""
    json: Json = False


def run(argv: list[str]) -> int:
    args = parse(Export, argv, "export")
    if args.weights is not None and args.format != "gguf":
        raise ConfigError(
            f"--weights is {args.weights} and --format {args.format}, which keeps F32",
            remedy="leave --weights out or use --format gguf",
        )
    from topograd.convert.export import export_model

    found = export_model(args.model, args.out, args.format, args.weights or "F32")
    show(args.json, found, lambda f: f"{f['out']}: {', '.join(f['files'])}")
    return 0
