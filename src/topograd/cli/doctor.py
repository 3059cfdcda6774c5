"""`topograd doctor`: what is installed here, what each extra would add, and whether the parts work.

Required packages are imported, since one that is there may still be broken; those of extras are only looked
up, so that none of them can break this. What is required comes from the package's own metadata, read with
`packaging`, which matplotlib brings. The exit code is 2 only where something essential does not work: Python,
a required package, or the model that comes with the package.
"""

import importlib
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from rich.table import Table

from topograd.cli.console import DASH, Json, note, pairs, parse, show
from topograd.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")
PACKAGE = "topograd"
ADDS: Mapping[str, str] = {
    "hf": "Hugging Face models: one to adapt in Python, `inspect` of a checkpoint",
    "search": "`search pareto`",
    "studies": "studies of a sentence encoder and of scikit-learn's digits",
    "dev": "what tests and checks of the package need",
}
"""What an extra is for; one that is not here is explained by its packages."""


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Say what is installed, what each extra would add, and whether everything essential works."""

    json: Json = False


@dataclass(frozen=True)
class Requirement:
    """A package that is needed, and what is known of it."""

    name: str
    wanted: str
    """The versions that are allowed, as >=2."""
    extra: str | None
    """The extra that needs it; None if everything does."""
    version: str | None
    """None if it is not installed."""
    fits: bool


def run(argv: list[str]) -> int:
    args = parse(Doctor, argv, "doctor")
    found = examine()
    show(args.json, found, doctor_table)
    for problem in found["problems"]:
        note(problem)
    return 2 if found["problems"] else 0


def examine() -> dict[str, Any]:
    """Everything that the verb says, as plain values; `problems` are those that are essential."""
    needed = requirements()
    required = [need for need in needed if need.extra is None]
    problems = [problem for need in required if (problem := _problem(need)) is not None]
    disk = _or_none(shutil.disk_usage, ".")
    return {
        "topograd": _or_none(importlib.metadata.version, PACKAGE),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "torch": _torch(problems),
        "runtime": _or_none(_runtime),
        "native": _or_none(_native),
        "packages": {need.name: need.version for need in required},
        "extras": _extras(needed),
        "cache": _cache(),
        "reference": _reference(problems),
        "disk": {"folder": _or_none(os.getcwd), "free_bytes": None if disk is None else disk.free},
        "problems": problems,
    }


def requirements() -> list[Requirement]:
    """Every package that this one names, as its metadata says; none if it is not installed as a package."""
    found = []
    for parsed in _parsed():
        if parsed.name != PACKAGE:
            extra = next((name for name in _extra_names() if _belongs(parsed, name)), None)
            version = _or_none(importlib.metadata.version, parsed.name)
            fits = bool(_or_none(parsed.specifier.contains, version, True)) if version else False
            found.append(Requirement(parsed.name, str(parsed.specifier), extra, version, fits))
    return found


def _parsed() -> list[Any]:
    try:
        from packaging.requirements import Requirement as Parsed
    except ImportError:
        raise ConfigError(
            "packaging, which matplotlib brings, is not installed", remedy="pip install matplotlib"
        ) from None
    lines = _or_none(importlib.metadata.requires, PACKAGE) or []
    return [Parsed(line) for line in lines]


def _extra_names() -> list[str]:
    metadata = _or_none(importlib.metadata.metadata, PACKAGE)
    return [] if metadata is None else metadata.get_all("Provides-Extra") or []


def _belongs(parsed: Any, extra: str) -> bool:
    """Whether an extra, and nothing less, needs this."""
    marker = parsed.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


def _extras(needed: list[Requirement]) -> list[dict[str, Any]]:
    """Each extra: whether it is whole, what it lacks, and what it adds."""
    contained = [parsed for parsed in _parsed() if parsed.name == PACKAGE]  # extras within extras
    found = []
    for extra in _extra_names():
        parts = {extra}.union(*(parsed.extras for parsed in contained if _belongs(parsed, extra)))
        own = [need for need in needed if need.extra in parts]
        missing = [f"{need.name}{need.wanted}" for need in own if not need.fits]
        adds = ADDS.get(extra) or ", ".join(need.name for need in own)
        found.append({"name": extra, "installed": not missing, "missing": missing, "adds": adds})
    return found


def _problem(need: Requirement) -> str | None:
    """What is wrong with a required package, if anything."""
    remedy = f"install it with: pip install '{need.name}{need.wanted}'"
    if need.version is None:
        return f"{need.name} is not installed; {remedy}"
    if not need.fits:
        return f"{need.name} is {need.version}, and {need.wanted} is needed; {remedy}"
    try:
        importlib.import_module(need.name.replace("-", "_"))
    except Exception as problem:  # whatever a broken install raises
        return f"{need.name} {need.version} cannot be imported ({_said(problem)}); {remedy}"
    return None


def _torch(problems: list[str]) -> dict[str, Any] | None:
    """Threads and devices, as torch sees them."""
    try:
        import torch

        return {
            "version": torch.__version__,
            "threads": torch.get_num_threads(),
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
            "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
            "mps": torch.backends.mps.is_available(),
        }
    except Exception as problem:
        if not problems:
            problems.append(f"torch does not work ({_said(problem)}); install it again")
        return None


def _runtime() -> str:
    """What `generate` and `serve` run a model with, where it can and nothing else is asked for."""
    from topograd.runtime.choice import preferred

    return preferred()


def _native() -> dict[str, Any]:
    """The kernels: their instruction set, or why there are none."""
    from topograd.runtime.native.library import LEVELS, level, missing_reason

    reason = missing_reason()
    return {"instructions": None if reason else LEVELS[level()], "missing": reason}


def _cache() -> dict[str, Any] | None:
    """Where prepared corpora lie, how many there are, and whether there can be more."""
    try:
        from topograd.data.cache import cache_size, default_cache

        folder = default_cache()
        entries, size = cache_size(folder)
    except Exception:  # torch is broken, or there is no home: said elsewhere, and nothing stops for it
        return None
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return {
        "folder": str(folder),
        "entries": entries,
        "bytes": size,
        "writable": os.access(there, os.W_OK),
    }


def _reference(problems: list[str]) -> dict[str, Any]:
    """Whether the model that comes with the package opens: its weights are compared with their SHA-256."""
    try:
        from topograd.pretrained import REFERENCE
        from topograd.runs.session import open_session

        return {"opens": True, "step": open_session(REFERENCE).step}
    except Exception as problem:
        if not problems:
            problems.append(f"the model that comes with the package does not open ({_said(problem)})")
        return {"opens": False, "step": None}


def _or_none(ask: Callable[P, T], *args: P.args, **more: P.kwargs) -> T | None:
    """What a question gives, or None whatever goes wrong: metadata on a disk may be anything."""
    try:
        return ask(*args, **more)
    except Exception:
        return None


def _said(problem: Exception) -> str:
    """An error on one line, and short."""
    return " ".join(f"{type(problem).__name__}: {problem}".split())[:200]


def doctor_table(found: Mapping[str, Any]) -> Table:
    """What was found, for a person."""
    table = pairs([])
    torch, cache, disk = found["torch"], found["cache"], found["disk"]
    table.add_row("topograd", found["topograd"] or "not installed as a package")
    table.add_row("python", found["python"])
    table.add_row("platform", f"{found['platform']}, {found['cpus']} cores")
    for name, version in found["packages"].items():
        table.add_row(name, version or "missing")
    if torch is not None:
        devices = ["cpu", *(f"cuda:{i}" for i in range(torch["cuda"])), *(["mps"] if torch["mps"] else [])]
        table.add_row("threads", str(torch["threads"]))
        table.add_row("devices", ", ".join(devices))
    table.add_row("runtime", f"{found['runtime'] or DASH}, unless --runtime or the model says otherwise")
    if (native := found["native"]) is not None:
        table.add_row("native kernels", native["instructions"] or f"missing: {native['missing']}")
    table.add_section()
    for extra in found["extras"]:
        lacks = f"not installed, lacks {', '.join(extra['missing'])}" if extra["missing"] else "installed"
        table.add_row(f"extra {extra['name']}", f"{lacks}; adds: {extra['adds']}")
    table.add_section()
    if cache is not None:
        size = f"{cache['entries']} entries, {cache['bytes'] / 2**20:.1f} MiB"
        table.add_row("cache", f"{cache['folder']}: {size}{'' if cache['writable'] else ', read-only'}")
    table.add_row("reference model", "opens" if found["reference"]["opens"] else "DOES NOT OPEN")
    free = DASH if disk["free_bytes"] is None else f"{disk['free_bytes'] / 2**30:.1f} GiB"
    table.add_row("free disk here", free)
    return table
