"""PEFT adapters: LoRA corrections as peft keeps them, written and read.

    adapter_config.json          peft's LoraConfig: rank, α, the modules
    adapter_model.safetensors    base_model.model.MODULE.lora_A.weight (r, inputs), lora_B.weight (outputs, r)

Written is what a run of LoRA learned, under the names that transformers gives its modules, so that
`peft.PeftModel.from_pretrained(base, folder)` computes what the run does. A correction that began at PiSSA is
B A - B₀ A₀ and is written as one of twice the rank. Heads of exits have no place there and are left out.

Read are LoRA, rsLoRA (scale α / √r) and DoRA (rows of W + ΔW scaled to the norms that were learned), each
module with a rank and an α of its own if it has them. They are merged into the base: the result is a model
like any other. What else an adapter may hold (biases, whole modules, embeddings, other methods) raises
CheckpointError. No pickle is read.

Source: "LoRA" (Hu et al. 2021), "rsLoRA" (Kalajdzievski 2023), "DoRA" (Liu et al. 2024) eq. 5; the files are
those of peft 0.19 to 0.21.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from topograd.convert.families import family_config
from topograd.convert.huggingface import HUB, PEFT
from topograd.convert.tensor_names import tensor_names
from topograd.errors import CheckpointError, ConfigError
from topograd.files import dump_json, read_json, reading_tensors, saving_tensors, write_atomic
from topograd.nn.lora import is_transposed, sides
from topograd.nn.stack import Stack
from topograd.runs.delta_store import DeltaStore
from topograd.runs.session import LoadedTextRun

TENSORS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
_PART = re.compile(r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_magnitude_vector)(\.weight)?")
_CHANGES = (
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "kasa_config",
    "monteclora_config",
    "arrow_config",
    "megatron_config",
)
"""Settings of a LoraConfig under which the tensors mean something else."""
_BEGUN = (None, True, False, "gaussian", "eva", "orthogonal")
"""How a correction may have begun; the other ways (pissa, olora, ...) took something out of the base."""

_MAMBAS = ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")
"""Model types whose `out_proj` peft does not correct: their kernels read its weight past the module."""


@dataclass(frozen=True)
class Correction:
    """What is added to one module: scale · B A, and of DoRA the norms of the rows that come out."""

    a: Tensor
    b: Tensor
    scale: float
    norms: Tensor | None = None

    def applied(self, weight: Tensor) -> Tensor:
        """The matrix (outputs, inputs) with it."""
        changed = weight + self.scale * (self.b.to(weight) @ self.a.to(weight))
        if self.norms is None:
            return changed
        return changed * (self.norms.to(weight).flatten() / changed.norm(dim=1))[:, None]


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter that was read."""

    folder: Path
    base: str | None
    """What it says that it belongs to."""
    corrections: dict[str, Correction]
    """By the name of the module."""


def read_peft(folder: Path) -> PeftAdapter:
    """The adapter in a folder."""
    settings = read_json(folder / PEFT, CheckpointError)
    if (kind := settings.get("peft_type") if isinstance(settings, dict) else None) != "LORA":
        raise _unread(folder, f"its peft_type is {kind!r}")
    if changed := [name for name in _CHANGES if settings.get(name)]:
        raise _unread(folder, f"it has {changed[0]}")
    if (begun := settings.get("init_lora_weights")) not in _BEGUN:
        raise _unread(folder, f"its init_lora_weights is {begun!r}, which changes the base")
    if not (folder / TENSORS).exists() and (folder / PICKLE).exists():
        raise _unread(folder, f"{PICKLE} is a pickle")
    with reading_tensors(folder / TENSORS, CheckpointError):
        tensors = load_file(folder / TENSORS)
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _PART.fullmatch(name.removeprefix(PREFIX))
        if match is None:
            raise _unread(folder, f"it holds {name!r}")
        parts.setdefault(match["module"], {})[match["part"]] = tensor
    base = settings.get("base_model_name_or_path")
    try:
        corrections = {module: _correction(module, part, settings) for module, part in parts.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise CheckpointError(f"{folder} is damaged ({problem})", remedy="restore it") from None
    return PeftAdapter(folder, base if isinstance(base, str) and base.strip() else None, corrections)


def _unread(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{folder} is an adapter of which nothing is read: {what}",
        setting="adapter",
        given=str(folder),
        allowed="LoRA, rsLoRA and DoRA of linear maps",
        remedy="merge it with peft (merge_and_unload, save_pretrained) and give that folder",
    )


def _correction(module: str, part: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Correction:
    a, b = part["lora_A"], part["lora_B"]
    rank = len(a)
    if b.shape[1] != rank:
        raise ValueError(f"{module} has A {tuple(a.shape)} and B {tuple(b.shape)}")
    patterns = settings.get("alpha_pattern") or {}
    own = [value for key, value in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", module)]
    alpha = float(own[0] if own else settings["lora_alpha"])
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    norms = part["lora_magnitude_vector"] if settings.get("use_dora") else None
    return Correction(a, b, scale, norms)


def base_of(adapter: PeftAdapter) -> str:
    """The model that an adapter says it belongs to: a path, or the name of one on the hub."""
    if adapter.base is None:
        raise CheckpointError(
            f"{adapter.folder} does not say which model it belongs to",
            setting="base",
            remedy=f"run: topograd import {adapter.folder} --base MODEL --out RUN",
        )
    is_path = adapter.base.count("/") != 1 or adapter.base.startswith((".", "/", "~"))
    return adapter.base if is_path or Path(adapter.base).exists() else HUB + adapter.base


@torch.no_grad()
def merge_peft(stack: Stack, adapter: PeftAdapter) -> None:
    """Add an adapter to the model that it was made for."""
    own = {there: name for name, there in module_names(stack).items()}
    for module, correction in adapter.corrections.items():
        where: Any = stack.get_submodule(own[module]) if module in own else None
        found = None if where is None else sides(where)
        given = correction.a.shape[1], len(correction.b)
        if found != given:
            has = "none of that name" if found is None else f"one of {found[0]} and {found[1]}"
            raise CheckpointError(
                f"{adapter.folder} corrects {module!r}, a map of {given[0]} inputs and {given[1]} outputs, "
                f"and the model has {has}",
                setting="base",
                remedy="give the base that it was made for",
            )
        weight = where.weight.T if is_transposed(where) else where.weight
        weight = correction.applied(weight.float())
        where.weight = nn.Parameter((weight.T if is_transposed(where) else weight).contiguous())


def module_names(stack: Stack) -> dict[str, str]:
    """For each of our linear maps in the layers, what transformers calls the module."""
    if not hasattr(stack, "config"):  # one that transformers runs has its names, behind `model.`
        names = {name: name.removeprefix("model.") for name, _ in stack.named_modules()}
        return {name: there for name, there in names.items() if there != name}
    parameters = tensor_names(family_config(stack))  # type: ignore[arg-type]
    return {
        name.removesuffix(".weight"): there.name.removesuffix(".weight")
        for name, there in parameters.items()
        if name.startswith("layers.") and name.endswith(".weight")
    }


def write_peft(folder: Path, session: LoadedTextRun) -> dict[str, Any]:
    """Write what a run of LoRA learned; says how many modules, of which rank, and what was left out."""
    store, tune = session.run.store, session.config.tune
    if not tune.lora_rank or not isinstance(store, DeltaStore):
        raise ConfigError(
            f"{session.run.folder} has no LoRA",
            setting="format",
            given="peft",
            remedy="use format hf, or train with --lora-rank",
        )
    own = store.own_tensors(store.names()[-1])
    names = module_names(session.stack)
    scale = (tune.lora_alpha or 2 * tune.lora_rank) / tune.lora_rank
    tensors: dict[str, Tensor] = {}
    modules = sorted({name.rpartition(".")[0] for name in own if name.endswith(".lora_a")})
    for module in modules:
        a, b = own[f"{module}.lora_a"], own[f"{module}.lora_b"]
        if f"{module}.lora_a0" in own:
            a, b = torch.cat([a, own[f"{module}.lora_a0"]]), torch.cat([b, -own[f"{module}.lora_b0"]], 1)
        there = f"{PREFIX}{names[module]}"
        tensors |= {f"{there}.lora_A.weight": a.contiguous(), f"{there}.lora_B.weight": b.contiguous()}
    kind = getattr(getattr(getattr(session.stack, "model", None), "config", None), "model_type", None)
    if kind in _MAMBAS and any(name.endswith(".out_proj") for name in modules):
        problem = f"{session.run.folder} corrects out_proj of a {kind}, which peft refuses to read"
        raise ConfigError(problem, setting="format", given="peft", remedy="keep the run's folder")
    rank = len(tensors[f"{PREFIX}{names[modules[0]]}.lora_A.weight"])
    transposed = is_transposed(session.stack.get_submodule(modules[0]))
    targets = _targets([names[module] for module in modules], list(names.values()))
    base = base_name(store)
    write_atomic(folder / PEFT, dump_json(_settings(base, rank, scale, targets, transposed), indent=2) + "\n")
    with saving_tensors(file := folder / TENSORS):
        save_file(tensors, file, metadata={"format": "pt"})
    left = sorted(name for name in own if ".lora_" not in name)
    return {"modules": len(modules), "rank": rank, "base": base, "left_out": left}


def _settings(base: str, rank: int, scale: float, targets: list[str], transposed: bool) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": scale * rank,
        "target_modules": targets,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "init_lora_weights": True,
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }


def _targets(modules: list[str], all_modules: list[str]) -> list[str]:
    """What peft finds these modules by: the ends of their names, where no other module ends so."""
    ends = sorted({re.split(r"\.\d+\.", name, maxsplit=1)[-1] for name in modules})
    found = [name for name in all_modules if name.endswith(tuple(f".{end}" for end in ends))]
    return ends if sorted(found) == sorted(modules) else sorted(modules)


def base_name(store: DeltaStore) -> str:
    """Where transformers would find the base: its folder, else where it was converted from, else its run."""
    base = store.open_base()
    weights = base.run.folder / "weights.json"
    if weights.is_file():
        return str(Path(read_json(weights)["files"][0]["path"]).parent)
    return store.source or str(base.run.folder)
