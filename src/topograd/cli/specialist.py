"""`topograd specialist`: adapters that add a stage and a head to a frozen model.

attach      make one, which changes nothing yet        finetune    train it, and check the frozen base
compose     measure several alone and together         route       learn which one a text needs
align       move one to another version of its base
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.table import Table

from topograd.cli.console import (
    Json,
    ModelArgument,
    ReadPath,
    grid,
    note,
    number,
    parse_one_of,
    printed,
    show,
)
from topograd.cli.progress import counted, say_how_to_resume, training_progress
from topograd.errors import ConfigError, RunError
from topograd.limits import DEPTH, REPEATS, SEED, SIZE, check_numbers
from topograd.specialists.settings import FineTune

if TYPE_CHECKING:
    from torch import Tensor

    from topograd.specialists.attach import Attached


@dataclass(frozen=True, kw_only=True)
class Attach:
    """Add a stage and a head of its own behind a frozen model. It changes nothing until it is trained."""

    base: ModelArgument
    out: Path
    """The specialist's folder, new or empty."""
    layers: int = 1
    """Layers of the new stage; 0 is a head alone."""
    rank: Annotated[int | None, tyro.conf.arg(metavar="R")] = None
    """Rank of its own head; by default whole for a small vocabulary, 16 for one of 8192 tokens or more."""
    whole_head: tyro.conf.FlagCreatePairsOff[bool] = False
    """A whole head, however large the vocabulary."""
    token: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="NEW=WORD")] = ()
    """A new special token, begun from a related word, as "<|user|>=User"; may be given again."""
    seed: int = 0
    """Draws what does not start at zero."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, layers=(0, DEPTH[1]), rank=SIZE, seed=SEED)
        if self.rank is not None and self.whole_head:
            raise ConfigError("--rank and --whole-head are both given", remedy="give one of them")


def _attach(args: Attach) -> int:
    """Attach, say what came of it, return the exit code."""
    from topograd.convert.model_argument import resolve_model
    from topograd.runs.session import open_session
    from topograd.specialists.attach import attach, new_specialist
    from topograd.specialists.composition import composed
    from topograd.specialists.preservation import Preservation
    from topograd.specialists.tokens import NewToken

    base = open_session(resolve_model(args.base))
    adapter = new_specialist(
        args.out,
        base,
        layers=args.layers,
        head_rank=args.rank,
        whole_head=args.whole_head,
        tokens=[NewToken.parse(words) for words in args.token],
        seed=args.seed,
    )
    attached = attach(base, {"new": adapter})
    read = Preservation(base).read(attached.stack, composed(attached, {"new": 1.0}))
    numbers = sum(tensor.numel() for tensor in adapter.tensors.values())
    answer = {
        "specialist": str(args.out),
        "base": str(base.run.folder),
        "base_weights": base.weights,
        "layers": args.layers,
        "first_layer": adapter.settings["first_layer"],
        "head_rank": adapter.settings["head_rank"],
        "parameters": numbers,
        "bytes": sum(path.stat().st_size for path in args.out.iterdir()),
        "identity": read.base_max_abs_logit_delta,
    }
    head = "a whole head" if answer["head_rank"] is None else f"a head of rank {answer['head_rank']}"
    words = (
        f"{args.out}: {args.layers} layers behind layer {answer['first_layer']} of {args.base} and {head}, "
        f"{numbers / 1e6:.2f} M parameters; logits changed by {answer['identity']}"
    )
    show(args.json, answer, lambda _: words)
    if not args.json:
        note(f"train it with: topograd specialist finetune {args.out} --data CHAT.jsonl")
    return 0


@dataclass(frozen=True, kw_only=True)
class Finetune:
    """Train a specialist's own stage and head. Its base is frozen; after every checkpoint that is checked."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SPEC")]
    """The specialist's folder, made by `topograd specialist attach`."""
    settings: Annotated[FineTune, tyro.conf.arg(name="")] = field(default_factory=FineTune)
    resume: tyro.conf.FlagCreatePairsOff[bool] = False
    """Continue a training that was stopped, with the settings that it began with."""
    stop_after: Annotated[int | None, tyro.conf.arg(metavar="STEP")] = None
    """Stop at this step, as if it were interrupted."""
    base: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Where the base is now, if it was moved."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, stop_after=REPEATS)


def _finetune(args: Finetune) -> int:
    """Train, print what was found, return the exit code: 1 if the base moved."""
    _check_finetune(args)
    from topograd.specialists.finetune import FineTuning

    base = _moved(args.base)
    if args.resume:
        trainer = FineTuning.resume(args.folder, base)
    else:
        trainer = FineTuning.start(args.folder, args.settings, base)
    began = trainer.step
    with training_progress(args.folder.name) as on_step:
        result = trainer.train(args.stop_after, on_step, counted("rows of the base's hidden states"))
    show(args.json, result, _preserved)
    if not result["base_bit_identical"]:
        return 1
    again = f"topograd specialist finetune {shlex.quote(str(args.folder))} --resume"
    return say_how_to_resume(result, trainer.task.schedule.steps, again, args.stop_after, began)


def _moved(base: Path | None) -> Path | None:
    """The run of a base that was moved, if it was."""
    from topograd.convert.model_argument import resolve_model

    return None if base is None else resolve_model(base)


def _check_finetune(args: Finetune) -> None:
    changed = [
        f.name for f in fields(FineTune) if getattr(args.settings, f.name) != getattr(FineTune(), f.name)
    ]
    if args.resume and changed:
        raise ConfigError(
            "--resume continues with the settings that the training began with",
            remedy=f"leave out --{changed[0].replace('_', '-')}",
        )
    if not args.resume and not args.settings.data:
        raise ConfigError("--data is not given", remedy="give chat records (.jsonl) or a text, or --resume")


def _preserved(result: Mapping[str, Any]) -> Table:
    """The base and the specialist at every checkpoint."""
    from topograd.report.specialist import checkpoints  # brings matplotlib

    note(f"{result['specialist']}: step {result['steps']}, loss {number(result['loss'], 3)}")
    return printed(checkpoints(result["preservation"]))


@dataclass(frozen=True, kw_only=True)
class OnTexts:
    """What commands have in common that read texts with several specialists."""

    folder: ModelArgument
    specialists: Annotated[str, tyro.conf.arg(metavar="A,B")]
    """Folders of specialists, as A,B or A*0.7,B*0.3."""
    data: Annotated[tyro.conf.UseAppendAction[tuple[Path, ...]], tyro.conf.arg(metavar="FILE")] = ()
    """Chat records or text to read; may be given again."""
    context: int | None = None
    """Tokens in a row; by default 256, or as many as the base sees."""
    rows: int = 64
    """Rows of each text that are read."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, context=SIZE, rows=SIZE)

    def texts(self, attached: Attached) -> dict[str, tuple[Tensor, Tensor]]:
        """Inputs and targets of each file."""
        from topograd.specialists.records import rows_of

        found = {str(path): rows_of(path, attached, self.context) for path in self.data}
        return {name: (i[: self.rows], t[: self.rows]) for name, (i, t) in found.items()}


@dataclass(frozen=True, kw_only=True)
class Compose(OnTexts):
    """How well a base predicts some texts, with each specialist and with all of them. Less is better."""

    pool: Literal["deltas", "sum"] = "deltas"
    """What is added up: what each specialist changes, or all their logits (a product of experts)."""


def _compose(args: Compose) -> int:
    """Measure, print, return the exit code."""
    if not args.data:
        raise ConfigError("--data is not given", remedy="give chat records (.jsonl) or a text to measure on")
    from topograd.specialists.interference import default_compositions, interference
    from topograd.specialists.model import open_composed

    model = open_composed(args.folder, args.specialists, args.pool)
    attached = model.pool.attached
    found = interference(
        attached, args.texts(attached), default_compositions(attached, model.weights), args.pool
    )
    answer = {"run": str(args.folder), "specialists": model.weights, "pool": args.pool, "texts": found}
    show(args.json, answer, compositions_table)
    return 0


def compositions_table(answer: Mapping[str, Any]) -> Table:
    """A row for each text, a column for each composition."""
    table = grid("nats a token", "text", *answer["texts"][0]["nats"], overflow="fold")
    for row in answer["texts"]:
        table.add_row(row["text"], *(number(value) for value in row["nats"].values()))
    return table


@dataclass(frozen=True, kw_only=True)
class Route(OnTexts):
    """Train a router on held-out texts and write it to --out; or ask one that is there about --prompt."""

    out: Path
    """The router's folder: new to train one, there already to ask it."""
    prompt: str | None = None
    """Ask the router which specialist this text wants."""
    seed: int = 0
    """Draws the router's first weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, seed=SEED)


def _route(args: Route) -> int:
    """Train or ask, print, return the exit code."""
    if (args.prompt is None) == (not args.data):
        raise ConfigError("give --data to train a router, or --prompt to ask one that is there, not both")
    from topograd.specialists.model import SpecialistPool, open_named
    from topograd.specialists.router import open_router, save_router, train_router

    adapters, _ = open_named(args.specialists)
    pool = SpecialistPool.open(args.folder, adapters)
    answer: dict[str, Any] = {"run": str(args.folder), "router": str(args.out)}
    if args.prompt is not None:
        router = open_router(args.out, pool.attached, adapters)
        chosen = router.choose(pool.attached, pool.model().encode(args.prompt))
        answer |= {"prompt": args.prompt, "specialists": dict(chosen)}
    else:
        if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):  # before long work
            problem, remedy = f"{args.out} is taken", "give an empty folder, or a new one"
            raise RunError(problem, setting="out", given=args.out, remedy=remedy)
        texts = list(args.texts(pool.attached).values())
        work = args.out.with_name(f"{args.out.name}.work")
        router, found = train_router(pool.attached, texts, args.seed, work)
        save_router(args.out, pool.attached, adapters, router, found)
        shutil.rmtree(work)
        answer |= {"specialists": list(adapters), **found}
    if args.prompt is not None and not args.json:
        print(", ".join(answer["specialists"]) or "base")
    else:
        show(args.json, answer, regret_table)
    return 0


def regret_table(answer: Mapping[str, Any]) -> Table:
    """The router beside the oracle and beside always the same choice."""
    table = grid(f"nats a token on {answer['rows']} rows that were not trained on", "choice", "nats")
    table.add_row("oracle", number(answer["oracle"]))
    table.add_row("router", number(answer["router"]))
    for name, value in answer["always"].items():
        table.add_row(f"always {name}", number(value))
    return table


@dataclass(frozen=True, kw_only=True)
class Align:
    """Make a specialist of one base one of another version of it, or of a wider base, by aligning the two."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SPEC")]
    """The specialist's folder."""
    to: Annotated[Path, tyro.conf.arg(metavar="BASE")]
    """The model that it shall belong to: the same tokenizer and as many layers, as wide or wider."""
    out: Path
    """The new specialist's folder."""
    data: Annotated[ReadPath, tyro.conf.arg(metavar="FILE")] = None
    """What it was trained on: aligned by, measured before and after, and trained on for --steps."""
    steps: int = 0
    """Steps of training behind the alignment, on --data, and as many of a specialist that begins anew."""
    context: int | None = None
    """Tokens in a row of --data."""
    base: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Where the specialist's own base is now, if it was moved."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, steps=(0, 10**9))


def _align(args: Align) -> int:
    """Carry over, measure if there is text, return the exit code."""
    if args.steps and args.data is None:
        raise ConfigError("--steps is given and --data is not", remedy="give the text to train on")
    from topograd.convert.model_argument import resolve_model
    from topograd.runs.session import open_session
    from topograd.specialists.align import carry, compared, text_to_fit, trained_on, versions
    from topograd.specialists.attach import open_specialist

    adapter = open_specialist(args.folder)
    old, new = adapter.open_base(_moved(args.base)), open_session(resolve_model(args.to))
    inputs = None if args.data is None else text_to_fit(args.data, old, new, args.context)
    carried = carry(adapter, old, new, args.out, inputs)
    answer: dict[str, Any] = {"specialist": str(args.out), "base": str(args.to), **versions(old, new)}
    answer["fitted_on_tokens"] = 0 if inputs is None else inputs.numel()
    if args.data is not None:
        answer["nats"] = compared(args.data, adapter, carried, old, new, args.context)
        if args.steps:
            answer["nats"] |= trained_on(args.data, carried, new, args.steps, args.context)
    words = [
        f"{args.out}: carried to {args.to}, a {answer['kind']} version apart; the heads differ by "
        f"{answer['residual']:.3f} behind the alignment"
    ]
    words += [f"  {name}: {value:.4f} nats a token" for name, value in answer.get("nats", {}).items()]
    show(args.json, answer, lambda _: "\n".join(words))
    if not args.json and inputs is None and answer["kind"] == "major":
        note("where the base was trained anew, --data with enough text reads far better than heads alone")
    return 0


_COMMANDS: dict[type, Callable[[Any], int]] = {
    Attach: _attach,
    Finetune: _finetune,
    Compose: _compose,
    Route: _route,
    Align: _align,
}


def run(argv: list[str]) -> int:
    """Run one command of the group and return the exit code."""
    args: Any = parse_one_of({kind.__name__.lower(): kind for kind in _COMMANDS}, argv, "specialist")
    return _COMMANDS[type(args)](args)
