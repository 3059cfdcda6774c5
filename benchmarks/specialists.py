"""Specialists on a real base: the cost of a step, of decoding beside them, and a LoRA of equal size.

    python benchmarks/specialists.py step RUN      a step on kept hidden states against a full one of the base
    python benchmarks/specialists.py decode RUN    the base alone, with specialists off, with one on
    python benchmarks/specialists.py mixed RUN     a mixed batch of eight rows against its four parts
    python benchmarks/specialists.py lora RUN      a LoRA by peft of as many parameters (needs peft)

RUN is an imported model, such as SmolLM2. Times are ratios of things that take turns in one process.
"""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from topograd.depth.model import Model
from topograd.nn.preparation import prepare
from topograd.nn.stack import Stack
from topograd.runs.session import open_session
from topograd.specialists.attach import attach, new_specialist
from topograd.specialists.controls import LORA_RATE
from topograd.specialists.facts import World
from topograd.specialists.finetune import NAME, FineTuning
from topograd.specialists.model import SpecialistPool
from topograd.specialists.preservation import Preservation
from topograd.specialists.settings import FineTune
from topograd.timing import Spread, ratio, take_turns
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan
from topograd.training.executor import train_step
from topograd.training.hidden_states import PlainRows, StateLoader, layer_states

CHAT = 0.16
"""Share of the positions that have a target, in chats of a question and an answer by SmolLM2's template."""


@dataclass(frozen=True)
class Settings:
    """What is measured, on which base."""

    what: Annotated[Literal["step", "decode", "mixed", "lora"], tyro.conf.Positional]
    run: Annotated[Path, tyro.conf.Positional]
    rows: int = 2
    context: int = 256
    tokens: int = 32
    rounds: int = 5
    steps: int = 20
    every: int = 5
    """Steps between two readings of the base."""


def measure_step(settings: Settings, place: Path) -> dict[str, Any]:
    """Gradients of a specialist on kept states against those of the whole base, of text and of chats."""
    base = open_session(settings.run)
    last = len(base.stack.layers)
    inputs = torch.randint(1000, (settings.rows, settings.context))
    states = layer_states(base.stack, inputs, [last])
    whole = open_session(settings.run)
    plan = prepare(whole.stack, Topology.chain(str(last)))
    whole.stack.requires_grad_(True)
    found: dict[str, Any] = {"tokens": inputs.numel()}
    specialists = {n: attach(base, {NAME: new_specialist(place / str(n), base, layers=n)}) for n in (1, 2)}
    for name, learned in (("text", 1.0), ("chats", CHAT)):
        targets = torch.where(torch.rand(inputs.shape) < learned, inputs.roll(-1, 1), -100)

        def cleared(stack: Stack, plan: Plan, states: Any = None, targets: torch.Tensor = targets) -> None:
            train_step(stack, plan, inputs, targets, states=states)
            stack.zero_grad(set_to_none=True)

        things = {"base": functools.partial(cleared, whole.stack, plan)}
        for layers, attached in specialists.items():
            own = functools.partial(cleared, attached.stack, attached.plan)
            things |= {f"{layers} layers, kept": functools.partial(own, states), f"{layers} layers": own}
        seconds = take_turns(things, settings.rounds, warmup=1)
        found[name] = {
            "seconds": {name: Spread.of(values).as_dict() for name, values in seconds.items()},
            "gain over the base": {n: ratio(seconds, "base", n).as_dict() for n in things if n != "base"},
        }
    return found


NAMES = ("a", "b", "c")


def measure_decode(settings: Settings, place: Path) -> dict[str, Any]:
    """Tokens of the base alone, with specialists attached and off, and with one on."""
    base = open_session(settings.run)
    pool = SpecialistPool.open(base, {n: new_specialist(place / n, base, layers=2) for n in NAMES})
    models = {"base": Model(base), "three attached, off": pool.model(), "one on": pool.model({"a": 1.0})}
    assert len({model.engine.runtime.name for model in models.values()}) == 1
    prompt = base.tokenizer.encode("The capital of France is")
    things = {
        name: functools.partial(model.generate, prompt, settings.tokens, depth="full")
        for name, model in models.items()
    }
    seconds = take_turns(things, settings.rounds, warmup=1)
    return {
        "runtime": models["base"].engine.runtime.name,
        "seconds": {name: Spread.of(values).as_dict() for name, values in seconds.items()},
        "speed": {name: ratio(seconds, "base", name).as_dict() for name in things if name != "base"},
    }


def measure_mixed(settings: Settings, place: Path) -> dict[str, Any]:
    """Eight rows of four compositions as one batch, and as four batches of two."""
    base = open_session(settings.run)
    pool = SpecialistPool.open(base, {n: new_specialist(place / n, base, layers=2) for n in NAMES})
    prompt = base.tokenizer.encode("The capital of France is")
    each: list[dict[str, float]] = [{}, *({name: 1.0} for name in NAMES)]

    def parts() -> None:
        for weights in each:
            pool.generate([prompt] * 2, [weights] * 2, settings.tokens)

    things = {
        "mixed batch of eight": lambda: pool.generate([prompt] * 8, each * 2, settings.tokens),
        "four batches of two": parts,
    }
    seconds = take_turns(things, settings.rounds, warmup=1)
    return {
        "runtime": pool.engine.runtime.name,
        "seconds": {name: Spread.of(values).as_dict() for name, values in seconds.items()},
        "gain of one mixed batch": ratio(seconds, "four batches of two", "mixed batch of eight").as_dict(),
    }


def measure_lora(settings: Settings, place: Path) -> dict[str, Any]:
    """The same chats, rows and steps for a specialist and for a LoRA on every linear map of the base."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from topograd.models.export import export_model

    chat = place / "chat.jsonl"
    chat.write_text("".join(json.dumps(record) + "\n" for record in World.make(6).records()))
    base = open_session(settings.run)
    sidecar = new_specialist(place / "s", base, layers=2)
    asked = FineTune(
        data=str(chat), steps=settings.steps, context=64, save_every=settings.every, rate=0.6, head_rate=0.75
    )
    tuning = FineTuning.start(place / "s", asked)
    found = tuning.train()
    export_model(settings.run, place / "hf", "hf")
    theirs = AutoModelForCausalLM.from_pretrained(place / "hf")
    numbers = sum(t.numel() for t in sidecar.tensors.values())
    per_rank = sum(sum(m.weight.shape) for n, m in theirs.named_modules() if n.endswith("_proj"))
    rank = max(numbers // per_rank, 1)
    lora = get_peft_model(theirs, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
    readings = _train_lora(lora, tuning, settings)
    with torch.no_grad(), lora.disable_adapter():
        off = float((lora(tuning.preservation.sentences).logits - tuning.preservation.before).abs().max())
    return {
        "specialist": {"parameters": numbers, "loss": found["loss"], "checkpoints": found["preservation"]},
        "lora": {
            "parameters": sum(p.numel() for p in lora.parameters() if p.requires_grad),
            "rank": rank,
            "checkpoints": readings,
            "max_abs_logit_delta_off": off,
        },
    }


def _train_lora(lora: Any, tuning: FineTuning, settings: Settings) -> list[dict[str, Any]]:
    """AdamW at peft's usual 2e-4 with the specialist's schedule, on the same rows in the same order."""
    loader = StateLoader(
        PlainRows(tuning.inputs, tuning.targets), tuning.settings.batch, tuning.settings.seed
    )
    optimizer = torch.optim.AdamW([p for p in lora.parameters() if p.requires_grad], lr=LORA_RATE)
    schedule = tuning.settings.optimizer(tuning.session.config.optimizer)
    readings = [_read(lora, tuning.preservation, 0, None)]
    for step in range(settings.steps):
        batch = next(loader)
        for group in optimizer.param_groups:
            group["lr"] = LORA_RATE * schedule.multiplier(step, settings.steps)
        logits = lora(batch.inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % settings.every == 0 or step + 1 == settings.steps:
            readings.append(_read(lora, tuning.preservation, step + 1, loss.item()))
    return readings


@torch.no_grad()
def _read(lora: Any, before: Preservation, step: int, loss: float | None) -> dict[str, Any]:
    """What the base does with the adapter on, as `Preservation` reads it."""
    now = lora(before.sentences).logits
    asked = lora(before.choice_inputs).logits[before.choice_targets != -100]
    return {
        "step": step,
        "loss": loss,
        "base_max_abs_logit_delta": float((now - before.before).abs().max()),
        "base_bpb": before.bpb_of(now),
        "base_choices": before.answered(asked),
    }


def main() -> None:
    settings = tyro.cli(Settings)
    measures = {
        "step": measure_step,
        "decode": measure_decode,
        "mixed": measure_mixed,
        "lora": measure_lora,
    }
    with tempfile.TemporaryDirectory() as place:
        print(json.dumps(measures[settings.what](settings, Path(place)), indent=2))


if __name__ == "__main__":
    main()
