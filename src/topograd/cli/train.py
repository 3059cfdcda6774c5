"""`topograd train`: train a model, or continue a run."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from topograd.cli.console import Json, ReadPath, check_flags, note, out, parse, print_json
from topograd.cli.flags import flags_of, resumes
from topograd.cli.train_images import read_image_flags
from topograd.errors import ConfigError, TopogradError
from topograd.files import read_toml
from topograd.limits import REPEATS, check_numbers
from topograd.nn.config import EncoderConfig
from topograd.parallel.settings import (
    ParallelConfig,
    is_first_local_rank,
    started_processes,
    wait_for_first_rank,
)
from topograd.runs.config import PRESETS, TrainConfig, preset, tuning

if TYPE_CHECKING:
    from topograd.training.runs import RunTrainer


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a model, or continue a run with --resume. The preset sets every default below.

    A --config file (topograd config schema) has every setting, and any topology as [topology]; flags
    win over it. Networks on images have flags of their own: topograd train --task images --help.
    """

    COMMON: ClassVar[tuple[str, ...]] = (
        "--task", "--preset", "--config", "--out", "--resume", "--stop-after", "--json", "--data", "--init",
        "--partition", "--stage-heads", "--grad-scale", "--steps", "--batch", "--seed", "--device", "--bf16",
        "--model.layers", "--model.width", "--model.heads", "--model.context", "--optimizer.name",
        "--eval-every", "--save-every", "--lora-rank", "--parallel",
        "--lora-directions", "--old-text", "--max-forgetting",
    )  # fmt: skip
    """What --help shows; --help-all shows every flag."""

    task: Literal["text", "masked", "images"] = "text"
    """What is learned: the next token of a text, its hidden tokens (an encoder), or the class of an image."""
    preset: Literal["tiny", "small", "base"] = "small"
    """tiny takes seconds, small about four minutes, base 14 hours on two cores."""
    config: Annotated[ReadPath, tyro.conf.arg(metavar="FILE.toml")] = None
    """Settings to lay over the preset, table by table; flags win over them."""
    out: Path | None = None
    """The run's folder; by default a new one in runs/."""
    resume: Path | None = None
    """Continue the run in this folder; its settings stay as they are."""
    from_: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """With --resume: the checkpoint to continue from, instead of the newest; later ones are given up."""
    stop_after: int | None = None
    """Stop and save after this step of the schedule; --resume continues from there."""
    parallel: Annotated[str | None, tyro.conf.arg(metavar="stages=P[,replicas=R]")] = None
    """Spread the stages over the ranks that torchrun started; see docs/how-to/several-machines.md."""
    json: Json = False
    settings: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        check_numbers(self, stop_after=REPEATS)


def run(argv: list[str]) -> int:
    try:
        args = _read(argv)
        spread = None if args.parallel is None else ParallelConfig.parse(args.parallel)
        if spread is not None and args.resume is None and args.out is None:
            raise ConfigError("--parallel needs --out DIR, so that a job that is started again finds its run")
        if spread is None and started_processes() > 1:
            raise ConfigError(
                f"{started_processes()} processes were started, and --parallel is not given",
                setting="parallel",
                remedy="add --parallel stages=P[,replicas=R], or start one process",
            )
    except ConfigError:
        if started_processes() == 1 or is_first_local_rank():
            raise
        wait_for_first_rank()
        return 2
    if spread is not None:
        from topograd.cli.train_on_ranks import train_on_ranks

        return train_on_ranks(args, spread)
    from topograd.training.runs import resume, start

    if args.resume is not None:
        found = finished(args)
        if found is not None:
            show(args, *found)
            return 0
        trainer = resume(args.resume, args.from_)
    else:
        kind = args.settings.model.kind
        name = args.preset if kind in ("gpt", "encoder") else getattr(args.settings.model, "network", kind)
        name = name.replace(":", ".")
        trainer = start(args.settings, args.out or fresh_folder(name, args.settings))
    return train(args, trainer)


def _read(argv: list[str]) -> Train:
    """The flags, with the defaults of the preset and of the file that they name."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--preset", nargs="?")
    first.add_argument("--config", nargs="?")
    first.add_argument("--init", nargs="?")
    first.add_argument("--task", nargs="?")
    first.add_argument("--out", nargs="?")
    first.add_argument("--device", nargs="?")
    first.add_argument("--lora-directions", "--lora_directions", nargs="?")
    known = first.parse_known_args(argv)[0]
    flags = [word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")]
    if not resumes(argv, "--from", "--stop-after", "--parallel") and "--from" in flags:
        raise ConfigError("--from names a checkpoint of the run to --resume", remedy="give that run too")
    if known.task == "images":
        args, settings = read_image_flags(argv)
        return Train(
            task="images", out=args.out, stop_after=args.stop_after, json=args.json, settings=settings
        )
    if known.preset not in (None, *PRESETS):
        check_flags(flags_of(Train), argv, "topograd train")
    settings = preset(known.preset or Train.preset)
    if known.task == "masked":
        settings = replace(settings, model=EncoderConfig(**vars(settings.model)))
    if known.init is not None and known.init.strip():
        _check_before_converting(argv, flags, known)
        small = bool({"--lora-rank", "--frozen"}.intersection(flags))
        held = known.lora_directions in ("random", "dead", "safe")
        settings = _shaped_like(settings, known.init, small, held)
    base = Train(settings=settings)
    if known.config is None or not known.config.strip():  # an empty word is refused with the other flags
        return parse(Train, argv, "train", base)
    return _overlaid(argv, base, Path(known.config))


def _check_before_converting(argv: list[str], flags: list[str], known: argparse.Namespace) -> None:
    """What can be said of the flags without the model, whose conversion may take minutes."""
    from topograd.runs.device import usable_device
    from topograd.runs.folder import Run

    if not any(flag.startswith("--model.") for flag in flags):  # those depend on the model's kind
        check_flags(flags_of(Train), argv, "topograd train")
    if known.device:
        usable_device(known.device)
    if known.out and Path(known.out).exists() and "--parallel" not in flags:  # with it, a run is continued
        Run.create(known.out)


def _overlaid(argv: list[str], base: Train, file: Path) -> Train:
    """The file over the base and the flags over both; what fits only beside the flags is laid under them."""
    values = read_toml(file, ConfigError, "correct it, or give another to --config")
    try:
        settings = base.settings.overlaid(values)
    except TopogradError as error:
        try:
            args = parse(Train, argv, "train", base)
            return replace(args, settings=args.settings.overlaid(_not_typed(argv, values)))
        except TopogradError:
            raise ConfigError(f"--config {file}: {error}") from None
    return parse(Train, argv, "train", replace(base, settings=settings))


def _not_typed(argv: list[str], values: dict[str, Any]) -> dict[str, Any]:
    """The settings of a file without those that a flag sets."""
    flags = flags_of(Train)
    words = [word.partition("=")[0].replace("_", "-").replace("no-", "", 1) for word in argv]
    typed = {flags[word].field for word in words if word in flags}
    kept: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            kept[name] = {key: v for key, v in value.items() if f"settings.{name}.{key}" not in typed}
        elif f"settings.{name}" not in typed:
            kept[name] = value
    return kept


def _shaped_like(config: TrainConfig, model: str, small: bool, held: bool) -> TrainConfig:
    """The settings with the shape and the tokenizer of the model to begin with; its topology is not taken.

    A model from outside gets the gentle rates of `tuning`; higher ones where a `small` part of it learns.
    """
    from topograd.convert.model_argument import resolve_model
    from topograd.runs.folder import Run

    base = TrainConfig.from_dict(Run.open(resolve_model(model)).read_config())
    if base.model.task != config.model.task:
        raise ConfigError(
            f"init is {model}, a run on {base.model.task}",
            setting="init",
            given=model,
            remedy=f"give one on {config.model.task}",
        )
    config = replace(config, model=base.model, tokenizer=base.tokenizer)
    config = replace(config, init=model, data=config.data or base.data)
    return tuning(config, small, held) if base.brings_tokenizer else config


def fresh_folder(name: str, config: TrainConfig) -> Path:
    """A folder in runs/ that does not exist yet, named after the run."""
    stages = config.build_topology().stages
    parts = "-".join(str(stage.stop - stage.start) for stage in stages)
    base = f"{name}-{parts if len(parts) <= 60 else f'{len(stages)}-stages'}-s{config.seed}"
    numbered = (Path("runs") / (base if number == 1 else f"{base}-{number}") for number in count(1))
    return next(folder for folder in numbered if not folder.exists())


def finished(args: Train) -> tuple[TrainConfig, dict[str, Any]] | None:
    """Settings and results of a run that has nothing left to train; None if there is something to do."""
    from topograd.cli.results import stored_results
    from topograd.runs.folder import Run
    from topograd.runs.session import open_run

    assert args.resume is not None
    folder = Run.open(args.resume)
    results = stored_results(folder) if args.from_ is None else None
    if results is None or not results.get("finished"):
        return None
    session = open_run(args.resume)  # says so if the weights that the results speak of are damaged
    return session.config, results


def train(args: Train, trainer: RunTrainer) -> int:
    """Train with a progress bar, print the results, return the exit code."""
    from topograd.cli.progress import counted, say_how_to_resume, training_progress
    from topograd.convert.card import write_card

    task, config = trainer.task, trainer.task.config
    for reason in task.data.skipped:
        note(f"not read: {reason}")
    units, began = config.accumulate * task.source.units, trainer.step
    with training_progress(task.run.folder.name, units, task.source.unit) as on_step:
        results = trainer.train(args.stop_after, on_step, counted("states of frozen layers, rows"))
    write_card(task.run)
    show(args, task.config, results)
    if "halted" in results:
        stages = ", ".join(map(str, results["halted"]))
        note(f"stage {stages} broke and was halted; the others went on: see {task.run.metrics_file}")
    again = f"topograd train --resume {shlex.quote(str(task.run.folder))}"
    return say_how_to_resume(results, config.steps, again, args.stop_after, began)


def show(args: Train, config: TrainConfig, results: dict[str, Any]) -> None:
    """Print results as JSON or as a table."""
    from topograd.cli.results import readings_table

    if args.json:
        print_json(results)
    else:
        out().print(readings_table(config, results))
        if "forgotten" in results:
            learned, forgotten = results["learned"], results["forgotten"]
            out().print(
                f"bits per byte: {learned:.4f} learned of the new text, {forgotten:.4f} forgotten of the old"
            )
