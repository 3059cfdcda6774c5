"""A specialist carried to the next version of its base, beside retraining and beside nothing.

    python benchmarks/alignment.py RUN --out FOLDER [--steps 80] [--few 10] [--json]

RUN is an imported model such as SmolLM2, and version 1. Version 2 comes twice:

    minor     RUN trained on for a while on the embedded corpus, all weights (`topograd train --init RUN`)
    major     the minor one in other coordinates: gains of the norms go into the matrices behind them, the
              head is untied, and every stream is turned by a random rotation. It computes what the minor one
              does, and no weight of it is where it was (needs transformers)

A specialist of version 1 learns facts from chats (`papers/product_of_experts/facts.py`). On each version 2 it
is put as it is, and carried over by aligned heads (`specialists/align.py`), without training and with a few
steps, beside one that begins anew with as few steps. Read are nats a token of some chats, and recall of the
facts in a wording that was never taught. Everything is kept in FOLDER: a run that was ended goes on where it
was.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor

import clone  # noqa: F401  (for what is not installed)
from papers.kept import Kept, Row
from papers.product_of_experts.fact_readings import recall
from papers.product_of_experts.facts import World
from papers.product_of_experts.specialist_facts import UNSEEN
from topograd.convert.export import export_model
from topograd.convert.importing import import_model
from topograd.runs.adapter import Adapter, BaseIdentity
from topograd.runs.session import LoadedTextRun, open_session
from topograd.specialists.align import carry, versions
from topograd.specialists.attach import attach, new_specialist, open_specialist
from topograd.specialists.finetune import NAME, FineTuning
from topograd.specialists.interference import token_losses
from topograd.specialists.model import SpecialistPool
from topograd.specialists.records import rows_of
from topograd.specialists.settings import FineTune

CONTEXT = 64
ROWS = 24
"""Of the chats that are read."""


@dataclass(frozen=True)
class Settings:
    """Which base, where to, and for how long."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    out: Path
    steps: int = 80
    """Of the specialist."""
    few: int = 10
    """Steps behind the carrying, and of the one that begins anew."""
    tuned: int = 10
    """Steps from version 1 to version 2."""
    json: bool = False


class Comparison:
    """Everything that is made and read, each once."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.out = settings, settings.out
        self.out.mkdir(parents=True, exist_ok=True)
        sizes = {name: getattr(settings, name) for name in ("steps", "few", "tuned")}
        self.kept = Kept(self.out / "rows.jsonl", sizes)
        self.world, self.chats = World.make(6), self.out / "chat.jsonl"
        self.chats.write_text("".join(json.dumps(record) + "\n" for record in self.world.records()))
        self.old = open_session(settings.run)

    def rows(self) -> list[Row]:
        """What each way comes to on each version."""
        specialist = self._folder("specialist", self._specialist)
        adapter = open_specialist(specialist)
        before = self.kept.row({"version": "old"}, lambda: self._read(self.old, adapter))
        rows: list[Row] = [{"version": "old", "way": "trained", "steps": self.settings.steps, **before}]
        self._folder("minor", self._tune)
        self._folder("major", self._turn)
        for steps, ways in (
            (0, ("anew", "nothing done", "aligned")),
            (self.settings.few, ("anew", "aligned")),
        ):
            for version, way in itertools.product(("minor", "major"), ways):
                rows.append(self._way(version, way, steps))
        return rows

    def _way(self, version: str, way: str, steps: int) -> Row:
        """One way; anew without a step is the base alone."""

        def made() -> Row:
            new, folder = open_session(self.out / version), self.out / "work"
            shutil.rmtree(folder, ignore_errors=True)
            if way == "anew":
                new_specialist(folder, new, layers=2)
            elif way == "aligned":
                carry(open_specialist(self.out / "specialist"), self.old, new, folder)
            else:
                as_it_is = open_specialist(self.out / "specialist")
                return self._read(new, replace(as_it_is, base=BaseIdentity.of(new)))
            if steps:
                self._train(folder, steps)
            apart = versions(self.old, new) if way == "anew" and not steps else {}
            return {**self._read(new, open_specialist(folder)), **apart}

        key = {"version": version, "way": way, "way_steps": steps}
        return {"version": version, "way": way, "steps": steps, **self.kept.row(key, made)}

    def _folder(self, name: str, make: Callable[[Path], None]) -> Path:
        """A folder of `out`, made where it is not there yet; half a one is made again."""
        folder, half = self.out / name, self.out / f"{name}.half"
        if not folder.exists():
            shutil.rmtree(half, ignore_errors=True)
            make(half)
            half.rename(folder)
        return folder

    def _specialist(self, folder: Path) -> None:
        new_specialist(folder, self.old, layers=2)
        self._train(folder, self.settings.steps)

    def _train(self, folder: Path, steps: int) -> None:
        usual = FineTune()
        asked = FineTune(
            data=str(self.chats),
            steps=steps,
            context=CONTEXT,
            save_every=steps,
            rate=3 * usual.rate,  # the steps are few
            head_rate=3 * usual.head_rate,
        )
        FineTuning.start(folder, asked).train()

    def _tune(self, folder: Path) -> None:
        words = ["train", "--init", self.settings.run, "--partition", len(self.old.stack.layers)]
        words += ["--steps", self.settings.tuned, "--seq-len", 128, "--eval-bytes", 10_000, "--out", folder]
        subprocess.run([sys.executable, "-m", "topograd", *map(str, words), "--json"], check=True)

    def _turn(self, folder: Path) -> None:
        """The minor version in other coordinates, by way of transformers."""
        from transformers import AutoModelForCausalLM

        place = self.out / "hf"
        shutil.rmtree(place, ignore_errors=True)
        export_model(self.out / "minor", place, "hf")
        model = AutoModelForCausalLM.from_pretrained(place)
        turn(model)
        turned = self.out / "hf-turned"
        shutil.rmtree(turned, ignore_errors=True)
        unlike = shutil.ignore_patterns("*.safetensors*", "config.json")
        shutil.copytree(
            place, turned, ignore=unlike
        )  # the tokenizer's files as they are: its digest is compared
        model.save_pretrained(turned)
        import_model(turned, folder, partition=str(len(self.old.stack.layers)))

    def _read(self, base: LoadedTextRun, adapter: Adapter) -> Row:
        """Nats of some chats and recall of the facts, of a base with a specialist."""
        on, attached = {NAME: 1.0}, attach(base, {NAME: adapter})
        inputs, targets = (t[:ROWS] for t in rows_of(self.chats, attached, CONTEXT))
        losses = token_losses(attached, [on], inputs, targets)
        recalled = recall(SpecialistPool(attached), on, self.world.facts, UNSEEN)
        return {"nats": float(losses.double().sum() / (targets != -100).sum()), "recall": recalled}


@torch.no_grad()
def turn(model: Any, seed: int = 0) -> None:
    """A Llama of transformers, in place: the same function with its stream turned by a random rotation."""
    width = model.config.hidden_size
    normal = torch.randn(width, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    rotation = torch.linalg.qr(normal).Q
    head = model.model.embed_tokens.weight.detach().clone()
    if not model.config.tie_word_embeddings:
        head = model.lm_head.weight.detach().clone()
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(_reads(head, model.model.norm, rotation))
    model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight.double() @ rotation)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        readers = {
            layer.input_layernorm: (attention.q_proj, attention.k_proj, attention.v_proj),
            layer.post_attention_layernorm: (mlp.gate_proj, mlp.up_proj),
        }
        for norm, maps in readers.items():
            for linear in maps:
                linear.weight.copy_(_reads(linear.weight, norm, rotation))
            norm.weight.fill_(1.0)
        for linear in (attention.o_proj, mlp.down_proj):
            linear.weight.copy_(rotation.T @ linear.weight.double())
    model.model.norm.weight.fill_(1.0)


def _reads(weight: Tensor, norm: Any, rotation: Tensor) -> Tensor:
    """W diag(gain) Q: what reads a turned stream behind a norm without a gain."""
    return (weight.double() * norm.weight.double() @ rotation).to(weight.dtype)


def main() -> None:
    settings = tyro.cli(Settings)
    rows = Comparison(settings).rows()
    if settings.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(
            f"{row['version']:6} {row['way']:14} {row['steps']:3} steps  nats {row['nats']:.3f}  "
            f"recall {row['recall']:.2f}"
        )


if __name__ == "__main__":
    main()
