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
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

import clone  # noqa: F401  (for what is not installed)
from papers.product_of_experts.controls import LORA_RATE
from papers.product_of_experts.fact_readings import ANSWER_TOKENS, recall
from papers.product_of_experts.facts import POOLS, World, first_named
from papers.product_of_experts.specialist_facts import UNSEEN
from topograd.decode.model import Model
from topograd.exec.train_step import train_step
from topograd.nn.preparation import prepare
from topograd.nn.stack import Stack
from topograd.runs.session import open_session
from topograd.specialists.attach import attach, new_specialist
from topograd.specialists.finetune import NAME, FineTuning
from topograd.specialists.model import SpecialistPool
from topograd.specialists.records import spelled
from topograd.specialists.settings import FineTune
from topograd.timing import Spread, ratio, take_turns
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan
from topograd.training.activation_cache import CachedActivationLoader, PlainSequences, layer_states

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
    steps: int = 80
    every: int = 40
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
    """A specialist and a LoRA on every linear map of the base, trained on the same rows, `every` steps in
    turns: what each recalls, what it does to the base, and the seconds of a step."""
    world, chat = World.make(6), place / "chat.jsonl"
    chat.write_text("".join(json.dumps(record) + "\n" for record in world.records()))
    base = open_session(settings.run)
    new_specialist(place / "s", base, layers=2)
    asked_for = FineTune(
        data=str(chat),
        steps=settings.steps,
        context=64,
        save_every=settings.every,
        rate=3 * FineTune().rate,  # as in the study: the steps are few
        head_rate=3 * FineTune().head_rate,
        keep_states=True,
    )
    trainer = FineTuning.start(place / "s", asked_for)
    tuning = trainer.task
    peer = PeftTraining(settings.run, place / "hf", tuning)
    laps: dict[str, list[float]] = {"specialist": [], "LoRA": []}
    readings, recalled = [peer.read(None)], []
    stops = sorted({*range(settings.every, settings.steps, settings.every), settings.steps})
    for stop in stops:
        clock = Laps()
        found = trainer.train(stop_after=stop, on_step=clock)
        laps["specialist"] += clock.seconds
        clock = Laps()
        readings.append(peer.read(peer.train(stop, clock)))
        laps["LoRA"] += clock.seconds
        recalled.append({"step": stop, **_recall(tuning, peer.lora, world)})
    with torch.no_grad(), peer.lora.disable_adapter():
        now = peer.lora(tuning.preservation.sentences).logits
    step = {name: Spread.of(seconds).as_dict() for name, seconds in laps.items()}
    return {
        "specialist": {key: found[key] for key in ("parameters", "loss", "preservation")},
        "LoRA": {
            "parameters": peer.parameters,
            "rank": peer.rank,
            "preservation": readings,
            "max_abs_logit_delta_off": tuning.preservation.moved(now),
        },
        "recall": recalled,
        "seconds of a step": step,
        "a step of LoRA over one of the specialist": step["LoRA"]["median"] / step["specialist"]["median"],
    }


class Laps:
    """Seconds between calls."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.last: float | None = None

    def __call__(self, *_: object) -> None:
        now = time.perf_counter()
        if self.last is not None:
            self.seconds.append(now - self.last)
        self.last = now


class PeftTraining:
    """A LoRA by peft of as many parameters as a specialist has, on the rows that it sees, in its order: AdamW
    at the usual 2e-4 with the specialist's schedule."""

    def __init__(self, run: Path, folder: Path, tuning: FineTuning) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        from topograd.convert.export import export_model

        export_model(run, folder, "hf")
        theirs = AutoModelForCausalLM.from_pretrained(folder)
        numbers = sum(t.numel() for t in tuning.adapter.tensors.values())
        per_rank = sum(sum(m.weight.shape) for n, m in theirs.named_modules() if n.endswith("_proj"))
        self.rank = max(round(numbers / per_rank), 1)
        config = LoraConfig(r=self.rank, lora_alpha=2 * self.rank, target_modules="all-linear")
        self.lora: Any = get_peft_model(theirs, config)
        learning = [p for p in self.lora.parameters() if p.requires_grad]
        self.parameters = sum(p.numel() for p in learning)
        self.optimizer = torch.optim.AdamW(learning, lr=LORA_RATE, weight_decay=0.0)
        self.settings, self.before = tuning.settings, tuning.preservation
        self.schedule = self.settings.optimizer(tuning.session.config.optimizer)
        rows = PlainSequences(tuning.inputs, tuning.targets)
        self.loader = CachedActivationLoader(rows, self.settings.batch, self.settings.seed)
        self.step = 0

    def train(self, stop: int, on_step: Laps) -> float:
        """To a step; the last loss."""
        while self.step < stop:
            batch = next(self.loader)
            for group in self.optimizer.param_groups:
                group["lr"] = LORA_RATE * self.schedule.multiplier(self.step, self.settings.steps)
            logits = self.lora(batch.inputs).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.lora.parameters(), self.schedule.clip or torch.inf)
            self.optimizer.step()
            self.step += 1
            on_step()
        return loss.item()

    @torch.no_grad()
    def read(self, loss: float | None) -> dict[str, Any]:
        """What the base does with the adapter on, as `Preservation` reads it."""
        before = self.before
        now = self.lora(before.sentences).logits
        asked = self.lora(before.choice_inputs).logits[before.choice_targets != -100]
        return {
            "step": self.step,
            "loss": loss,
            "base_max_abs_logit_delta": before.moved(now),
            "base_bpb": before.bpb_of(now),
            "base_choices": before.answered(asked),
        }


@torch.no_grad()
def _recall(tuning: FineTuning, lora: Any, world: World) -> dict[str, float]:
    """Share of the facts that each names in a wording that was never taught, in a free answer."""
    tuning.stack.eval()
    vocabulary, wording = tuning.attached.vocabulary, UNSEEN[0]
    named = []
    for fact, text in zip(
        world.facts, spelled(vocabulary, [fact.question(wording) for fact in world.facts]), strict=True
    ):
        ids = torch.tensor([vocabulary.encode_chat(text)])
        written = lora.generate(ids, max_new_tokens=ANSWER_TOKENS, do_sample=False)[0, ids.shape[1] :]
        answer = vocabulary.tokenizer.decode(written.tolist())
        named.append(first_named(answer, POOLS[fact.relation]) == fact.answer)
    specialist = recall(SpecialistPool(tuning.attached), {NAME: 1.0}, world.facts, [wording])
    found = {"specialist": specialist, "LoRA": sum(named) / len(named)}
    tuning.stack.train()
    return found


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
