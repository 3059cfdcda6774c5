"""Specialists on a real base: the cost of a step, of decoding beside them, and a LoRA of equal size.

    python benchmarks/specialists.py step RUN      a step on kept hidden states against a full one of the base
    python benchmarks/specialists.py decode RUN    the base alone, with inactive specialists, mixed batches
    python benchmarks/specialists.py lora RUN      a LoRA by peft of as many parameters (needs peft)

RUN is an imported model, such as SmolLM2. Times are ratios of things that take turns in one process.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from topograd.depth.model import Model
from topograd.nn.preparation import prepare
from topograd.runs.session import open_session
from topograd.specialists.attach import Attached, attach, new_specialist
from topograd.specialists.composition import composed
from topograd.specialists.facts import World
from topograd.specialists.finetune import NAME, FineTuning
from topograd.specialists.model import SpecialistPool
from topograd.specialists.preservation import Preservation
from topograd.specialists.settings import FineTune
from topograd.timing import Spread, ratio, take_turns
from topograd.topology.dag import Topology
from topograd.training.executor import train_step
from topograd.training.hidden_states import PlainRows, StateLoader, layer_states


@dataclass(frozen=True)
class Settings:
    """What is measured, on which base."""

    what: Annotated[Literal["step", "decode", "lora"], tyro.conf.Positional]
    run: Annotated[Path, tyro.conf.Positional]
    layers: int = 2
    rows: int = 2
    context: int = 256
    learned: float = 1.0
    """Share of the positions that have a target."""
    tokens: int = 24
    rounds: int = 5
    steps: int = 40


def measure_step(settings: Settings, place: Path) -> dict[str, Any]:
    """A specialist's step on kept states against a forward and backward of the whole base."""
    base = open_session(settings.run)
    attached = attach(base, {NAME: new_specialist(place / "s", base, layers=settings.layers)})
    inputs = torch.randint(1000, (settings.rows, settings.context))
    targets = torch.where(torch.rand(inputs.shape) < settings.learned, inputs.roll(-1, 1), -100)
    states = layer_states(base.stack, inputs, [len(base.stack.layers)])
    whole = open_session(settings.run)
    plan = prepare(whole.stack, Topology.chain(str(len(whole.stack.layers))))
    whole.stack.requires_grad_(True)
    things = {
        "base, all of it": lambda: _cleared(whole.stack, plan, inputs, targets, None),
        "specialist, base run": lambda: _cleared(attached.stack, attached.plan, inputs, targets, None),
        "specialist, states kept": lambda: _cleared(attached.stack, attached.plan, inputs, targets, states),
    }
    seconds = take_turns(things, settings.rounds, warmup=1)
    full = "base, all of it"
    return {
        "tokens": inputs.numel(),
        "seconds": {name: Spread.of(values).as_dict() for name, values in seconds.items()},
        "gain of kept states": ratio(seconds, full, "specialist, states kept").as_dict(),
        "gain of a frozen base": ratio(seconds, full, "specialist, base run").as_dict(),
    }


def _cleared(stack: Any, plan: Any, inputs: torch.Tensor, targets: torch.Tensor, states: Any) -> None:
    train_step(stack, plan, inputs, targets, states=states)
    stack.zero_grad(set_to_none=True)


def measure_decode(settings: Settings, place: Path) -> dict[str, Any]:
    """Tokens of the base, with specialists attached and off, with one on, and a mixed batch against parts."""
    base = open_session(settings.run)
    pool = SpecialistPool.open(base, {n: new_specialist(place / n, base, layers=2) for n in ("a", "b", "c")})
    alone, off, on = Model(open_session(settings.run)), pool.model(), pool.model({"a": 1.0})
    prompt = base.tokenizer.encode("The capital of France is")
    count = settings.tokens
    rows: list[dict[str, float]] = [{}, {"a": 1.0}, {"b": 1.0}, {"c": 1.0}] * 2

    def parts() -> None:
        for weights in ({}, {"a": 1.0}, {"b": 1.0}, {"c": 1.0}):
            pool.generate([prompt] * 2, [weights] * 2, count)

    things = {
        "base": lambda: alone.generate(prompt, count, depth="full"),
        "three attached, off": lambda: off.generate(prompt, count, depth="full"),
        "one on": lambda: on.generate(prompt, count, depth="full"),
        "mixed batch of eight": lambda: pool.generate([prompt] * 8, rows, count),
        "four batches of two": parts,
    }
    seconds = take_turns(things, settings.rounds, warmup=1)
    return {
        "seconds": {name: Spread.of(values).as_dict() for name, values in seconds.items()},
        "speed with them off": ratio(seconds, "base", "three attached, off").as_dict(),
        "speed with one on": ratio(seconds, "base", "one on").as_dict(),
        "gain of one mixed batch": ratio(seconds, "four batches of two", "mixed batch of eight").as_dict(),
    }


def measure_lora(settings: Settings, place: Path) -> dict[str, Any]:
    """The same chats, rows and steps for a specialist and for a LoRA on every linear map of the base."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from topograd.models.export import export_model

    chat = place / "chat.jsonl"
    chat.write_text("".join(json.dumps(record) + "\n" for record in World.make(4).records()))
    base = open_session(settings.run)
    sidecar = new_specialist(place / "s", base, layers=settings.layers)
    asked = FineTune(data=str(chat), steps=settings.steps, context=64, batch=8, save_every=10**6)
    tuning = FineTuning.start(place / "s", asked)
    found = tuning.train()
    export_model(settings.run, place / "hf", "hf")
    theirs = AutoModelForCausalLM.from_pretrained(place / "hf")
    numbers = sum(t.numel() for t in sidecar.tensors.values())
    per_rank = sum(sum(m.weight.shape) for n, m in theirs.named_modules() if n.endswith("_proj"))
    lora = get_peft_model(
        theirs, LoraConfig(r=max(numbers // per_rank, 1), lora_alpha=32, target_modules="all-linear")
    )
    seconds, loss = _train_lora(lora, tuning, settings.steps)
    before = Preservation(base)
    with torch.no_grad():
        on = lora(before.sentences).logits
        with lora.disable_adapter():
            off = lora(before.sentences).logits
    return {
        "specialist": {key: found[key] for key in ("parameters", "loss", "seconds", "base_bpb", "bpb")},
        "lora": {
            "parameters": sum(p.numel() for p in lora.parameters() if p.requires_grad),
            "loss": loss,
            "seconds": seconds,
            "bpb": before.bpb_of(on),
            "max_abs_logit_delta_on": float((on - before.before).abs().max()),
            "max_abs_logit_delta_off": float((off - before.before).abs().max()),
        },
        "specialist_path_off": _off(tuning.attached, before),
    }


def _off(attached: Attached, before: Preservation) -> float:
    attached.stack.eval()
    return before.read(attached.stack, composed(attached, {})).base_max_abs_logit_delta


def _train_lora(lora: Any, tuning: FineTuning, steps: int) -> tuple[float, float]:
    """AdamW at peft's usual 2e-4 with the specialist's schedule, on the same rows in the same order."""
    loader = StateLoader(
        PlainRows(tuning.inputs, tuning.targets), tuning.settings.batch, tuning.settings.seed
    )
    optimizer = torch.optim.AdamW([p for p in lora.parameters() if p.requires_grad], lr=2e-4)
    schedule = tuning.settings.optimizer(tuning.session.config.optimizer)
    began, loss = time.perf_counter(), float("nan")
    lora.train()
    for step in range(steps):
        batch = next(loader)
        for group in optimizer.param_groups:
            group["lr"] = 2e-4 * schedule.multiplier(step, steps)
        logits = lora(batch.inputs).logits
        value = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        loss = float(value)
    lora.eval()
    return time.perf_counter() - began, loss


def main() -> None:
    settings = tyro.cli(Settings)
    measures = {"step": measure_step, "decode": measure_decode, "lora": measure_lora}
    with tempfile.TemporaryDirectory() as place:
        print(json.dumps(measures[settings.what](settings, Path(place)), indent=2))


if __name__ == "__main__":
    main()
