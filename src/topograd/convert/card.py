"""A model card: what a run is, where it comes from, what it was trained on and what was measured of it.

    origin.json     of an imported run: what it was made of and under which licence, as the source says it
    README.md       the card, for people and for model hubs; nothing reads it back

A licence is never guessed: it is what the source names (`general.license` of a GGUF file, `license` in the
head of a folder's README.md), or the card says that it must be looked up.
"""

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from topograd.errors import TopogradError
from topograd.files import dump_json, read_json, write_atomic
from topograd.runs.config import TrainConfig
from topograd.runs.folder import Run

ORIGIN = "origin.json"
CARD = "README.md"
LONGEST = 80
"""Characters of a licence's name, or a model's, that are kept."""
_LICENCE = re.compile(r"^license:[ \t]*[\"']?([A-Za-z0-9._+ -]+?)[\"']?[ \t]*$", re.MULTILINE)


def source_name(source: Path) -> str:
    """What the model in a file or folder is called; one in huggingface_hub's cache lies in a folder that is
    called after a commit: models--ORG--NAME/snapshots/COMMIT."""
    if source.suffix == ".gguf":
        return source.stem
    source = source.absolute()
    if source.parent.name == "snapshots" and source.parents[1].name.startswith("models--"):
        return source.parents[1].name.rpartition("--")[2]
    return source.name


def origin_of_folder(folder: Path) -> dict[str, str | None]:
    """What a Hugging Face folder says of itself."""
    licence = None
    if (folder / CARD).is_file():
        with open(folder / CARD, encoding="utf-8", errors="replace") as file:
            head = file.read(10_000)
        parts = head.split("---")
        found = _LICENCE.search(parts[1]) if head.startswith("---") and len(parts) > 2 else None
        licence = found[1][:LONGEST] if found else None
    return {"name": source_name(folder)[:LONGEST], "licence": licence}


def origin_of_gguf(
    file: Path, metadata: Mapping[str, Any], kinds: Collection[str] = ()
) -> dict[str, str | None]:
    """What a GGUF file says of itself; `kinds` are those of its matrices."""

    def text(key: str) -> str | None:
        value = metadata.get(key)
        plain = isinstance(value, str) and value.isprintable() and value.strip()
        return str(value)[:LONGEST] if plain else None

    name = text("general.name") or source_name(file)[:LONGEST]
    said = {"name": name, "licence": text("general.license")}
    return said | {"kinds": " ".join(sorted(kinds))} if kinds else said


def write_origin(run: Run, origin: Mapping[str, Any]) -> None:
    """Keep where an imported run comes from."""
    run.manifest.bind(ORIGIN, dump_json(dict(origin), indent=1) + "\n")


def read_origin(run: Run, config: TrainConfig, deepest: int = 8) -> dict[str, Any]:
    """Where a run comes from: its own origin, or that of the run that it began with; nothing if unknown."""
    try:
        run.manifest.verify(ORIGIN)
        if (run.folder / ORIGIN).is_file():
            found = read_json(run.folder / ORIGIN)
            return found if isinstance(found, dict) else {}
        if config.init is not None and deepest:
            base = Run.open(config.init)
            return read_origin(base, TrainConfig.from_dict(base.read_config()), deepest - 1)
    except TopogradError:  # of a base that is gone: the card only knows less
        pass
    return {}


def write_card(run: Run) -> None:
    """Write the card of a run into its folder; a folder that cannot be written goes without."""
    with suppress(OSError):
        write_atomic(run.folder / CARD, card(run, run.folder.name))


def card(run: Run, name: str) -> str:
    """The card of a run under this name."""
    config = TrainConfig.from_dict(run.read_config())
    origin = read_origin(run, config)
    licence = origin.get("licence")
    head = ["---", "library_name: topograd", *([f"license: {dump_json(licence)}"] if licence else [])]
    head += [f"base_model: {dump_json(origin['name'])}"] if origin.get("name") else []
    lines = [*head, "tags: [topograd]", "---", "", f"# {name}", "", _shape(config), ""]
    if origin:
        lines += [f"It comes from {origin.get('name')}. {_licence(licence)}", ""]
    elif config.brings_tokenizer:
        lines += [_licence(None), ""]
    if config.init is not None:
        lines += [_learned(config), ""]
    lines += [_data(config), "", *_measured(run)]
    return "\n".join(lines) + "\n"


def _shape(config: TrainConfig) -> str:
    model = config.model
    kind = getattr(model, "family", "GPT" if model.kind == "gpt" else model.kind)
    stages = config.topology.partition if config.topology.graph == "chain" else config.topology.graph
    return (
        f"A {kind} of {model.layers} layers, width {model.width}, vocabulary {model.vocab}, in stages "
        f"{'of one' if stages == 'L' else stages}; it sees {model.context} tokens."
    )


def _licence(licence: str | None) -> str:
    if licence is None:
        return "Its licence is that of the model it comes from: look it up before you pass it on."
    return f"Its licence is that of the model it comes from: {licence}."


def _learned(config: TrainConfig) -> str:
    tune = config.tune
    if tune.frozen:
        how = f"heads of rank {tune.exit_rank} at the exits learned; full depth is the base's, bit for bit"
    elif tune.lora_rank:
        how = f"corrections of rank {tune.lora_rank} to its layers learned (LoRA, {tune.lora_directions})"
    elif tune.only_stage:
        how = f"stage {tune.only_stage} alone learned"
    else:
        how = "all of it learned"
    behind = f" from layer {tune.first_layer} on" if tune.first_layer else ""
    return f"It began with another model, of which {how}{behind}, in {config.steps} steps."


def _data(config: TrainConfig) -> str:
    if config.brings_tokenizer and config.init is None:
        return "What it was trained on is said by whoever trained it."
    text = "the text of Python's standard library" if config.data is None else Path(config.data).name
    return f"Trained here on {text}."


def _measured(run: Run) -> list[str]:
    """A table of bits per byte by prefix, if they were measured of these weights."""
    results = run.read_results()
    names = run.store.names()
    if results is None or "bpb" not in results or not names:
        return ["Nothing was measured of it yet: `topograd eval` does."]
    if results.get("weights") not in (None, run.store.weights(names[-1])):
        return ["What was measured of it was measured with other weights: `topograd eval` does it again."]
    prefix = results["bpb"]["prefix"]
    lines = [
        f"Bits per byte on {results.get('bytes', 'some')} held-out bytes:",
        "",
        "| prediction | bits per byte |",
        "|---|---|",
    ]
    return lines + [
        f"| first {k} of {len(prefix)} stages | {value:.4f} |" for k, value in enumerate(prefix, 1)
    ]
