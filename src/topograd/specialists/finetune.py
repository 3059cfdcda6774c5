"""Fine-tuning of a specialist: its stage and head on new text, with the base frozen and verified.

    trainer = FineTuning.start("runs/chat", FineTune(data="chat.jsonl", steps=200))    # or FineTuning.resume
    trainer.train()["base_max_abs_logit_delta"]                                        # 0.0

Rates are shares of the base's own ("Product of Experts" §6.2, §6.5.2, appendix D.1): 0.2 for the layers, 0.25
for the dual head, weight decay 0.1, warmup over 5 % and warmdown over 50 % of the steps. Trainer, step and
executor are those of every training here. What the base computes does not depend on the specialist, so its
last hidden states are computed once and kept (`training/activation_cache.py`) where that pays: an epoch then
costs the specialist alone.

A specialist's folder while it is trained, beside the adapter that is written at every checkpoint:

    training/finetune.json      the settings, and the digest of the text
    training/checkpoints/       weights, optimizers, averages, position in the text: resumed bit for bit
    training/metrics.jsonl      a record for each step, and every `save_every` steps what the base still is
    training/hidden-states/     the base's states; removed when the training is done

With `average` the adapter gets an exponential average of the weights ("Polyak", §6.6.1), which a resumed
training continues. Limits: bases whose stages are joined by relays, and forests, run at every step.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from topograd.errors import RunError
from topograd.files import dump_json, read_json, write_json
from topograd.runs import checkpoint
from topograd.runs.adapter import Adapter, update_adapter
from topograd.runs.checkpoint import Checkpoint
from topograd.runs.workspace import Workspace
from topograd.specialists.attach import Attached, Shape, attach, card, open_specialist
from topograd.specialists.composition import composed
from topograd.specialists.preservation import Preservation, Reading
from topograd.specialists.records import rows_of
from topograd.specialists.settings import FineTune
from topograd.specialists.zero_shot import ZeroShot
from topograd.training.activation_cache import (
    CachedActivationLoader,
    OnRows,
    PlainSequences,
    SequenceStore,
    compute_states,
)
from topograd.training.averaged_weights import AveragedWeights
from topograd.training.optimizers import make_optimizers
from topograd.training.step_runner import StepRunner
from topograd.training.trainer import Schedule, StepRecord, Task, Trainer

NAME, SETTINGS = "specialist", "finetune.json"


class TrainingFolder(Workspace):
    """The folder `training/` of a specialist; the lock is the specialist's."""

    @property
    def lock_file(self) -> Path:
        return self.folder.parent / "lock"


class FineTuning(Task):
    """A specialist being trained."""

    kind = "preservation"

    def __init__(self, adapter: Adapter, settings: FineTune, base: Path | None = None) -> None:
        every = settings.save_every
        super().__init__(Schedule(settings.steps, every, eval_every=every, eval_first=True))
        self.adapter = adapter
        self.session = adapter.open_base(base)
        self.attached: Attached = attach(self.session, {NAME: adapter})
        self.workspace = TrainingFolder(adapter.folder / "training")
        template = adapter.settings.get("chat_template")
        self.inputs, self.targets = rows_of(
            settings.data, self.attached, settings.context, settings.seed, template
        )
        tokens = self.inputs.numpy().tobytes() + self.targets.numpy().tobytes()
        self.digest = hashlib.sha256(tokens).hexdigest()
        self.bind(settings)
        self.stack = self.attached.stack.train()
        self.plan = composed(self.attached, {NAME: 1.0})
        self.model = self.part = self.attached.part(NAME)
        chosen = settings.optimizer(self.session.config.optimizer)
        self.loop = StepRunner(self.stack, make_optimizers(self.stack, chosen), clip=chosen.clip)
        self.optimizers = self.loop.optimizers.optimizers
        self.average = AveragedWeights(self.part, settings.average) if settings.average else None
        if self.average is not None:
            self.optimizers["average"] = self.average
        folder = settings.tasks
        tasks = None if folder is None else ZeroShot(self.session, folder, settings.task_items)
        self.preservation = Preservation(self.session, tasks)
        self.reading: tuple[int, Reading] | None = None
        """The last reading of the base, and its step."""
        self.loader: CachedActivationLoader | None = None
        self._position: dict[str, int] | None = None

    def bind(self, settings: FineTune) -> None:
        """Train with these settings, which checkpoints then name."""
        self.settings = settings
        self.key = json.loads(dump_json({"settings": asdict(settings), "data": self.digest}))

    @classmethod
    def start(cls, folder: Path | str, settings: FineTune, base: Path | None = None) -> Trainer[FineTuning]:
        """A new training of the specialist in `folder`, from the weights that it has."""
        adapter = open_specialist(folder)
        begun = adapter.folder / "training"
        if (begun / SETTINGS).is_file():
            saved, _ = _read_settings(begun / SETTINGS)
            done = checkpoint.latest(begun / "checkpoints")
            if done is None or int(done.name.rpartition("-")[2]) < saved.steps:
                raise RunError(
                    f"{folder} has a training that is not finished",
                    remedy=f"continue it with --resume, or delete {begun} to give it up",
                )
        task = cls(adapter, settings, base)
        settings = replace(settings, data=str(Path(settings.data).absolute()))
        if settings.tasks is not None:
            settings = replace(settings, tasks=str(Path(settings.tasks).absolute()))
        task.bind(settings)
        if begun.exists():
            shutil.rmtree(begun)  # of a training that is done: what it learned is in the adapter
        begun.mkdir()
        write_json(begun / SETTINGS, task.key)
        return Trainer(task, task.workspace)

    @classmethod
    def resume(cls, folder: Path | str, base: Path | None = None) -> Trainer[FineTuning]:
        """The training in `folder`, from its last checkpoint, or from its beginning if there is none."""
        adapter = open_specialist(folder)
        path = adapter.folder / "training" / SETTINGS
        if not path.is_file():
            raise RunError(f"{folder} has no training to resume", remedy="give --data to start one")
        settings, data = _read_settings(path)
        task = cls(adapter, settings, base)
        if task.digest != data:
            raise RunError(
                f"{settings.data} has changed since {folder} was trained on it, so it cannot be "
                "continued exactly",
                setting="data",
                given=settings.data,
                remedy="restore it, or start again",
            )
        names = task.workspace.store.names()
        trainer = Trainer(task, task.workspace, names)
        if names:
            trainer.load(names[-1])
        return trainer

    def prepare(self, step: int, on_rows: OnRows | None) -> None:
        if self.loader is None:
            store = self._store(on_rows)
            batch = min(self.settings.batch, len(store))  # the same row twice in a step teaches nothing
            self.loader = CachedActivationLoader(store, batch, self.settings.seed)
            if self._position is not None:
                self.loader.seek(self._position)
        if self.average is not None:
            self.average.connect()

    def _store(self, on_rows: OnRows | None) -> SequenceStore:
        """The rows with the base's states, or without them where keeping them does not pay."""
        keep = self.settings.keep_states
        if keep is None:
            keep = self.settings.steps * self.settings.batch > 1.5 * len(self.inputs)
        if not keep or not self.attached.base_is_chain():
            return PlainSequences(self.inputs, self.targets)
        stages = self.session.plan.topology.stages
        # behind the stages that the base predicts with
        layers = sorted({stages[k].stop for k, _ in self.session.plan.prediction.full})
        return compute_states(
            self.workspace.folder / "hidden-states",
            self.stack,
            self.inputs,
            self.targets,
            base=f"{self.session.weights}+{self.attached.vocabulary.size}",
            layers=layers,
            batch=self.settings.batch,
            on_rows=on_rows,
        )

    def step(self, step: int) -> StepRecord:
        assert self.loader is not None, "`prepare` opens it"
        self.loop.optimizers.set_rates(step, self.settings.steps)
        done = self.loop.step(self.plan, [next(self.loader)], step + 1)
        return StepRecord([float(done.losses[self.attached.stages[NAME]])], {"grad_norm": done.norm})

    def evaluate(self, step: int) -> Reading:
        """What is left of the base, and what the specialist makes of the same text."""
        self.stack.eval()
        off, on = (composed(self.attached, weights) for weights in ({}, {NAME: 1.0}))
        reading = self.preservation.read(self.stack, off, on)
        self.stack.train()
        self.reading = step, reading
        return reading

    def after_save(self, step: int) -> None:
        """Write the adapter as it is now.

        Behind the checkpoint: a kill between the two would leave moved weights that no checkpoint knows, and
        a training begun again would start from them.
        """
        settings = dict(self.adapter.settings) | {"steps": step, "data": self.digest}
        lines = [f"Trained for {step} steps."]
        if self.reading is not None:
            lines[0] += (
                f" The base's logits on the probe set differ, at step {self.reading[0]}, by at most "
                f"{self.reading[1].base_max_abs_logit_delta} from those before."
            )
        text = card(self.adapter.folder.resolve().name, self.session, Shape.of(self.adapter), lines)
        part = self.part if self.average is None else self.average.averaged
        self.adapter = update_adapter(self.adapter, part.tensors(), settings, text)

    def extra_state(self) -> dict[str, Any]:
        return {"position": self._position if self.loader is None else self.loader.position}

    def load_extra(self, loaded: Checkpoint) -> None:
        self._position = loaded.extra["position"]

    def summary(self, checkpoint: str) -> dict[str, Any]:
        records = self.workspace.metrics()
        steps = [r for r in records if r["kind"] == "train"]
        readings = [r for r in records if r["kind"] == self.kind]
        return {
            "specialist": str(self.adapter.folder),
            "base": str(self.session.run.folder),
            "loss": _loss(steps[-1]) if steps else None,
            "rows": len(self.inputs),
            "tokens": int((self.targets != -100).sum()),
            "states_kept": self.loader is not None and not isinstance(self.loader.store, PlainSequences),
            "parameters": sum(t.numel() for t in self.adapter.tensors.values()),
            "seconds_per_step": steps[-1]["seconds"] / steps[-1]["step"] if steps else None,
            "preservation": [{k: v for k, v in r.items() if k not in ("kind", "seconds")} for r in readings],
        }

    def end(self, results: dict[str, Any]) -> None:
        if results["finished"]:
            shutil.rmtree(self.workspace.folder / "hidden-states", ignore_errors=True)


def _read_settings(path: Path) -> tuple[FineTune, str]:
    """The settings of a training, and the digest of its text."""
    saved = read_json(path)
    try:
        return FineTune(**saved["settings"]), str(saved["data"])
    except (TypeError, KeyError):
        raise RunError(
            f"{path} is damaged", remedy=f"restore it, or delete {path.parent} to give up"
        ) from None


def _loss(record: Mapping[str, Any]) -> float:
    loss = record["loss"]
    return float(loss[0] if isinstance(loss, list) else loss)  # one number before version 0.3


def training_records(folder: Path | str) -> list[dict[str, Any]]:
    """What a specialist's training logged, in order, with one loss for each step."""
    records = TrainingFolder(Path(folder) / "training").metrics()
    return [r | {"loss": _loss(r)} if r["kind"] == "train" else r for r in records]
