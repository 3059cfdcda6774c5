"""Training a specialist: its own stage and head on new text, the base frozen, and proof that it did not move.

    tuning = FineTuning.start("runs/chat", FineTune(data="chat.jsonl", steps=200))     # or FineTuning.resume
    tuning.train()["base_max_abs_logit_delta"]                                         # 0.0

Rates are shares of the base's own ("Product of Experts" §6.2, §6.5.2, appendix D.1): 0.2 for the layers, 0.25
for the dual head, weight decay 0.1, warmup over 5 % and warmdown over 50 % of the steps. The loop and the
executor are those of every training here. What the base computes does not depend on the specialist, so its
last hidden states are computed once and kept (`training/hidden_states.py`) where that pays: an epoch then
costs the specialist alone.

A specialist's folder while it is trained, beside the sidecar that is written at every checkpoint:

    training/finetune.json      the settings, and the digest of the text
    training/checkpoints/       weights, optimizers, averages, position in the text: resumed bit for bit
    training/metrics.jsonl      a record for each step, and for each checkpoint what the base still is
    training/hidden-states/     the base's states; removed when the training is done

With `average` the sidecar gets an exponential average of the weights ("Polyak", §6.6.1), which a resumed
training continues. Limits: bases whose stages are joined by relays, and forests, run at every step.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from topograd.errors import RunError
from topograd.files import dump_json, hold_lock, read_json, write_json
from topograd.runs import checkpoint
from topograd.runs.sidecar import Sidecar, update_sidecar
from topograd.specialists.attach import Attached, Shape, SpecialistPart, attach, card, open_specialist
from topograd.specialists.composition import composed
from topograd.specialists.preservation import Preservation, Reading
from topograd.specialists.records import rows_of
from topograd.specialists.settings import FineTune
from topograd.specialists.zero_shot import ZeroShot
from topograd.training.hidden_states import PlainRows, RowStore, StateLoader, compute_states
from topograd.training.loop import TrainingLoop
from topograd.training.optimizers import make_optimizers

OnStep = Callable[[int, int, float], None]
"""Called after each step with (step, steps, loss)."""
NAME = "specialist"


class Trained(nn.Module):
    """What a checkpoint keeps: the specialist, and the average of its weights where there is one."""

    def __init__(self, part: SpecialistPart, average: float) -> None:
        super().__init__()
        self.part = part
        self.average = copy.deepcopy(part).requires_grad_(False) if average else None
        self.decay = average

    @torch.no_grad()
    def update_average(self) -> None:
        if self.average is not None:
            for kept, now in zip(self.average.parameters(), self.part.parameters(), strict=True):
                kept.lerp_(now, 1 - self.decay)

    def tensors(self) -> dict[str, Tensor]:
        """What the sidecar gets."""
        return (self.part if self.average is None else self.average).tensors()


class FineTuning:
    """A specialist being trained."""

    def __init__(self, sidecar: Sidecar, settings: FineTune, base: Path | None = None) -> None:
        self.sidecar, self.settings = sidecar, settings
        self.session = sidecar.open_base(base)
        self.attached: Attached = attach(self.session, {NAME: sidecar})
        self.folder = sidecar.folder / "training"
        self.inputs, self.targets = self._rows()
        self.digest = hashlib.sha256(
            self.inputs.numpy().tobytes() + self.targets.numpy().tobytes()
        ).hexdigest()
        self.stack = self.attached.stack.train()
        self.trained = Trained(self.attached.part(NAME), settings.average)
        self.loop = TrainingLoop(
            self.stack,
            make_optimizers(self.stack, settings.optimizer(self.session.config.optimizer)),
            clip=settings.optimizer(self.session.config.optimizer).clip,
        )
        asked = settings.tasks
        tasks = None if asked is None else ZeroShot(self.session, asked, settings.task_items)
        self.preservation = Preservation(self.session, tasks)
        self.step = 0
        self.position: dict[str, int] | None = None

    @classmethod
    def start(cls, folder: Path | str, settings: FineTune, base: Path | None = None) -> FineTuning:
        """A new training of the specialist in `folder`, from the weights that it has."""
        sidecar = open_specialist(folder)
        begun = sidecar.folder / "training"
        if (begun / "finetune.json").is_file():
            saved = read_json(begun / "finetune.json")
            done = checkpoint.latest(begun / "checkpoints")
            if done is None or int(done.name.rpartition("-")[2]) < saved["settings"]["steps"]:
                raise RunError(
                    f"{folder} has a training that is not finished; continue it with --resume, or delete "
                    f"{begun} to give it up"
                )
        tuning = cls(sidecar, settings, base)
        if begun.exists():
            shutil.rmtree(begun)  # of a training that is done: what it learned is in the sidecar
        begun.mkdir()
        settings = replace(settings, data=str(Path(settings.data).absolute()))
        if settings.tasks is not None:
            settings = replace(settings, tasks=str(Path(settings.tasks).absolute()))
        write_json(begun / "finetune.json", {"settings": asdict(settings), "data": tuning.digest})
        return tuning

    @classmethod
    def resume(cls, folder: Path | str, base: Path | None = None) -> FineTuning:
        """The training in `folder`, from its last checkpoint, or from its beginning if there is none."""
        sidecar = open_specialist(folder)
        path = sidecar.folder / "training" / "finetune.json"
        if not path.is_file():
            raise RunError(f"{folder} has no training to resume; give --data to start one")
        saved = read_json(path)
        try:
            settings = FineTune(**saved["settings"])
        except (TypeError, KeyError):
            raise RunError(f"{path} is damaged; restore it, or delete {path.parent} to give up") from None
        tuning = cls(sidecar, settings, base)
        if tuning.digest != saved["data"]:
            raise RunError(
                f"{saved['settings']['data']} has changed since {folder} was trained on it, so it cannot be "
                "continued exactly; restore it, or start again"
            )
        found = checkpoint.latest(tuning.folder / "checkpoints")
        if found is not None:
            loaded = checkpoint.load(found, tuning.trained, tuning.loop.optimizers.optimizers)
            tuning.step, tuning.position = loaded.step, loaded.extra["position"]
        return tuning

    def _rows(self) -> tuple[Tensor, Tensor]:
        settings, template = self.settings, self.sidecar.settings.get("chat_template")
        return rows_of(settings.data, self.attached, settings.context, settings.seed, template)

    def train(
        self,
        stop_after: int | None = None,
        on_step: OnStep | None = None,
        on_rows: Callable[[int, int], None] | None = None,
    ) -> dict[str, Any]:
        """Train to the end, or to step `stop_after`, and return what was found."""
        last = min(self.settings.steps, stop_after or self.settings.steps)
        with hold_lock(self.sidecar.folder / "lock"):
            store = self._store(on_rows)
            batch = min(self.settings.batch, len(store))  # the same row twice in a step teaches nothing
            loader = StateLoader(store, batch, self.settings.seed)
            if self.position is not None:
                loader.seek(self.position)
            self._drop_later_records()
            began, first = time.perf_counter(), self.step
            if self.step == 0:
                self._save(loader)  # the reading before anything is learned
            while self.step < last:
                loss = self._one_step(loader)
                if on_step is not None:
                    on_step(self.step, self.settings.steps, loss)
                if self.step % self.settings.save_every == 0 or self.step == last:
                    self._save(loader)
            seconds = time.perf_counter() - began
            if self.step == self.settings.steps:
                shutil.rmtree(self.folder / "hidden-states", ignore_errors=True)
        return self._result(seconds, self.step - first, not isinstance(store, PlainRows))

    def _store(self, on_rows: Callable[[int, int], None] | None) -> RowStore:
        """The rows with the base's states, or without them where keeping them does not pay."""
        keep = self.settings.keep_states
        if keep is None:
            keep = self.settings.steps * self.settings.batch > 1.5 * len(self.inputs)
        if not keep or not self.attached.base_is_chain():
            return PlainRows(self.inputs, self.targets)
        return compute_states(
            self.folder / "hidden-states",
            self.stack,
            self.inputs,
            self.targets,
            base=f"{self.session.weights}+{self.attached.vocabulary.size}",
            layers=[len(self.session.stack.layers)],
            batch=self.settings.batch,
            on_rows=on_rows,
        )

    def _one_step(self, loader: StateLoader) -> float:
        self.loop.optimizers.set_rates(self.step, self.settings.steps)
        done = self.loop.step(self.attached.plan, [next(loader)], self.step + 1)
        self.step += 1
        self.trained.update_average()
        loss = float(done.losses[self.attached.stages[NAME]])
        self._log({"kind": "train", "step": self.step, "loss": loss, "grad_norm": done.norm})
        return loss

    def _save(self, loader: StateLoader) -> None:
        """A reading of the base, the sidecar as it is now, and a checkpoint.

        The checkpoint comes last: whoever resumes from it finds the reading of its step.
        """
        self.position = loader.position
        reading = self._read()
        self._log({"kind": "preservation", "step": self.step, **reading.as_dict()})
        shape = Shape.of(self.sidecar)
        settings = dict(self.sidecar.settings) | {"steps": self.step, "data": self.digest}
        lines = [
            f"Trained for {self.step} steps. The base's logits on the probe set differ by at most "
            f"{reading.base_max_abs_logit_delta} from those before."
        ]
        text = card(self.sidecar.folder.resolve().name, self.session, shape, lines)
        self.sidecar = update_sidecar(self.sidecar, self.trained.tensors(), settings, text)
        checkpoint.save(
            self.folder / "checkpoints",
            step=self.step,
            model=self.trained,
            optimizers=self.loop.optimizers.optimizers,
            extra={"position": self.position},
        )

    def _read(self) -> Reading:
        self.stack.eval()
        off, on = (composed(self.attached, weights) for weights in ({}, {NAME: 1.0}))
        reading = self.preservation.read(self.stack, off, on)
        self.stack.train()
        return reading

    def _log(self, record: Mapping[str, Any]) -> None:
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(dump_json(dict(record)) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """What was logged, in order."""
        return training_records(self.sidecar.folder)

    def _drop_later_records(self) -> None:
        """Records of steps that are about to be done again go."""
        kept = [r for r in self.records() if r["step"] <= self.step and self.step]
        text = "".join(dump_json(record) + "\n" for record in kept)
        (self.folder / "metrics.jsonl").write_text(text, encoding="utf-8")

    def _result(self, seconds: float, steps: int, kept: bool) -> dict[str, Any]:
        tokens = int((self.targets != -100).sum())
        records = self.records()
        losses = [r["loss"] for r in records if r["kind"] == "train"]
        table = [{k: v for k, v in r.items() if k != "kind"} for r in records if r["kind"] == "preservation"]
        return {
            "specialist": str(self.sidecar.folder),
            "base": str(self.session.run.folder),
            "steps": self.step,
            "finished": self.step >= self.settings.steps,
            "loss": losses[-1] if losses else None,
            **{key: value for key, value in table[-1].items() if key != "step"},
            "rows": len(self.inputs),
            "tokens": tokens,
            "states_kept": kept,
            "parameters": sum(t.numel() for t in self.sidecar.tensors.values()),
            "seconds": seconds,
            "seconds_per_step": seconds / steps if steps else None,
            "preservation": table,
        }


def training_records(folder: Path | str) -> list[dict[str, Any]]:
    """What a specialist's training logged, in order; half a last line, as a kill leaves it, is skipped."""
    path = Path(folder) / "training" / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
    return [json.loads(line) for line in lines]
