"""MODEL, one argument for every model: a run, a Hugging Face folder, a GGUF file, or a name on the hub.

    a folder with config.toml    a run: used as it is
    a folder with config.json    Hugging Face: converted; the weights stay there, by path and SHA-256
    a file                       GGUF: converted to float32
    one with adapter_config.json an adapter of peft's: merged into the model that it names
    hf:ORG/NAME                  downloaded by huggingface_hub into its own cache, then as a folder

    CACHE/models/KEY/NAME        the run that a conversion made, of one stage
    CACHE/models/KEY/lock        held by the process that converts; another one waits for it

KEY is a digest of the source's contents, and for a folder of its path too, since the run refers to weights
there. So a source that changes is converted again, and one that does not is converted once. A run appears
under its name whole. MAX_MODELS conversions of MAX_BYTES together are retained, those used last; one that a
process has open stays. `topograd import` makes a run with other stages or another context, outside the cache.

Cost of the second use: a stat of each large file (`data/digest_cache.py`) and a hash of the small ones.
"""

import hashlib
import logging
import os
import shutil
from pathlib import Path

from topograd.convert.card import source_name
from topograd.convert.huggingface import HUB, HUB_FILES, is_peft, local_model
from topograd.data.cache import InUse, default_cache, prune_entries
from topograd.data.digest_cache import remembered_sha256
from topograd.errors import RunError
from topograd.files import dump_json, lock_file, sha256
from topograd.runs.folder import Run, models_below

MAX_MODELS = 16
MAX_BYTES = 2**36
FORMAT = 1
"""Part of every key: a change of what a conversion writes changes it."""
SMALL = 2**20
_in_use: dict[Path, InUse] = {}
"""The entries that this process has opened: they are not pruned while it runs."""


def resolve_model(model: Path | str) -> Path:
    """The folder of the run that MODEL names, converted if it is none."""
    source = local_model(model)
    if (source / "config.toml").is_file():
        return source
    if (source / "config.json").is_file() or is_peft(source):
        return _converted(source)
    from topograd.runs.adapter import is_adapter  # brings torch

    if is_adapter(source):
        problem = f"{source} is an adapter and no model"
        remedy = "give its base, and this folder as --specialists, --draft or --router"
        raise RunError(problem, setting="model", given=str(source), remedy=remedy)
    what = "it has neither config.toml nor config.json" if source.is_dir() else "it does not exist"
    remedy = (
        models_below(source) or f"give a run's folder, a Hugging Face folder, a GGUF file or {HUB}ORG/NAME"
    )
    if source.is_file():
        with source.open("rb") as opened:
            if opened.read(4) == b"GGUF":
                return _converted(source)
        what = 'the file does not begin with "GGUF"'
        if any((source.parent / name).is_file() for name in ("config.toml", "config.json")):
            remedy = f"give its folder, {source.parent}"
    problem = f"there is no model at {source}: {what}"
    raise RunError(problem, setting="model", given=str(source), remedy=remedy)


def _converted(source: Path) -> Path:
    """The run in the cache that was made of a source, or is made now."""
    models = default_cache() / "models"
    entry = models / _key(source)
    _in_use[entry] = InUse(entry)  # makes the folder
    try:
        descriptor = os.open(entry / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as problem:
        message = f"{source} must be converted, and the cache {models} cannot be written ({problem.strerror})"
        remedy = f"set XDG_CACHE_HOME, or run: topograd import {source} --out DIR"
        raise RunError(message, remedy=remedy) from None
    try:
        lock_file(descriptor, wait=True)
        made = [path for path in entry.iterdir() if path.name[0] != "." and path.is_dir()]
        if made:
            return made[0]
        run = entry / source_name(source)
        logging.getLogger("topograd").warning("topograd: converting %s once, into %s", source, run)
        temporary = entry / f".{run.name}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
        try:
            from topograd.convert.importing import import_model  # brings torch: a second use needs none

            import_model(source, temporary)
            temporary.rename(run)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)
    prune_entries(models, MAX_MODELS, MAX_BYTES)
    return run


def _key(source: Path) -> str:
    files = [source]
    if source.is_dir():
        files = sorted({file for pattern in HUB_FILES for file in source.glob(pattern) if file.is_file()})
    digests = [sha256(file) if file.stat().st_size <= SMALL else remembered_sha256(file) for file in files]
    content: list[object] = [FORMAT, digests]
    if source.is_dir():
        content += [str(source.absolute()), [file.name for file in files]]
        if is_peft(source):
            from topograd.convert.peft_adapter import base_of, read_peft

            content.append(_base_key(local_model(base_of(read_peft(source)))))
    return hashlib.sha256(dump_json(content).encode()).hexdigest()[:24]


def _base_key(base: Path) -> str:
    """What an adapter's base is known by: of a run the weights of its newest checkpoint."""
    if not (base / "config.toml").is_file():
        return _key(base)
    store = Run.open(base).store
    return f"{base.absolute()} {store.weights(store.names()[-1])}"
