"""What bounded interfaces keep of depth, with a positive control, the right shallow one and tuned rates.

Statement. Six layers dense, the last region of two alone (shallow), and regions 2,2,2 that are joined by

    residual, r       r directions of the hidden state at every position: random, learned, or the leading
                      ones of a dense copy's hidden states or adjoints; r = width is the dense model, the
                      positive control that tells "carries little" from "was not learned"
    segments          causal states of segments, S = 8 and one for every position (S = T)
    published         the authors' own module, which reads the whole sequence

in nats a byte of held-out text, and of hidden bytes where the model is an encoder. An arm keeps

    share = (CE(shallow) - CE(arm)) / (CE(shallow) - CE(dense))

of what depth is worth, with its own recipe's controls and seed by seed. The published interface sees the
future in a language model: its CE is also read from prefixes alone (`honest`), at the last quarter of the
positions too (`late`), where a pool over a prefix is most like the pools of training, and of a model that was
trained on prefixes of random lengths, for which no prefix is strange.

Recipes. `ours` is Muon and AdamW as `train` has them; `AdamW` is one AdamW for everything, at 6e-4 with
gradients of norm 1 at most, as published. Tuned: the rates of each arm are found one after the other on a
seed that is not judged, after a quarter of the steps: a rate is moved until both of its neighbours are worse,
so that none lies at the end of a grid. Arms with the same parameters and task share them (`Arm.tuned_as`).
`AdamW 6e-4` is not tuned: that is the paper's own. Its controls have the same rate, and those of random
prefixes see as many bytes.

The trainings come in the order of what they decide: three seeds of encoders, where nothing is leaked and the
paper's theorem holds literally, then language models, then the other seeds and arms (`order`). With what is
there at any moment `python -m papers run interface-verdict --judge` gives tables and verdicts.

The claims are in `_claims` and were set before the first run. Source: "LBI: Parallel Scan Backpropagation via
Latent Bounded Interfaces" Table 2 and §4; the controls are ours. Cost: `presets.py`. Limits: width 48, a
megabyte of text, 1600 steps; the paper has 60M to 90M parameters and 20M tokens.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from papers.fit import fit, trajectory
from papers.kept import NotMeasured
from papers.latent_bounded_interfaces.interfaces import position_losses, prefix_losses
from papers.outcome import Asked, Result, ResultTable, Row, check_seeds
from papers.staged_runs import bytes_config
from papers.verdicts import Claim, Interval, above, percent, within
from topograd.data import Loader, windows
from topograd.data.masked import hide
from topograd.interfaces.ablation import silenced
from topograd.interfaces.analysis import message_spread
from topograd.interfaces.regions import Regions
from topograd.nn.config import Architecture
from topograd.nn.gpt import GPT, Encoder
from topograd.nn.interface_config import parse_interface
from topograd.nn.preparation import prepare
from topograd.nn.stack import Stack
from topograd.runs.config import OptimizerConfig, TrainConfig
from topograd.runs.session import load_data
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan
from topograd.training.interface_directions import STEPS as DIRECTION_STEPS
from topograd.training.interface_directions import begin_interfaces

REGIONS = "2,2,2"
TUNING_SEED = 1000
SAMPLE_ROWS = 64
"""Windows that are also predicted byte by byte, from prefixes."""
ADAMW_RATE = 6e-4
"""Of the paper."""
SAME = 0.02
"""How far from all of depth the positive control may be, as a share."""

Recipe = Literal["ours", "AdamW"]


@dataclass(frozen=True)
class Arm:
    """One model of the study; {d} in an interface is the width, {d/2} half of it, {T} the context."""

    name: str
    interface: str | None = None
    shallow: bool = False
    recipe: Recipe = "ours"
    tuned: bool = True
    task: Literal["text", "hidden"] = "text"
    prefixes: bool = False
    """Trained on prefixes of random lengths."""
    architecture: Architecture = "transformer"
    tuned_as: str | None = None
    """The arm whose rates it takes, where it has no grid of its own."""

    @property
    def family(self) -> tuple[str, bool, str, bool, str]:
        """What its controls share with it."""
        return self.recipe, self.tuned, self.task, self.prefixes, self.architecture

    def words(self, width: int, context: int) -> str | None:
        sizes = {"d": width, "d/2": width // 2, "d/4": width // 4, "T": context, "r": min(16, width)}
        return self.interface and self.interface.format(**sizes)


CORE = (
    Arm("dense"),
    Arm("shallow", shallow=True),
    Arm("residual, r = d/2", "residual:r={d/2}", tuned_as="dense"),
    Arm("residual, r = d/4", "residual:r={d/4}", tuned_as="dense"),
    Arm("published", "published:r={r}"),
)
SEGMENTS = (Arm("segments, S = T", "S={T},r={r}"),)
LEARNED = (
    Arm("residual, learned, r = d/4", "residual:r={d/4},basis=learned"),
    Arm("residual, hidden, r = d/4", "residual:r={d/4},basis=hidden", tuned_as="dense"),
    Arm("residual, adjoints, r = d/4", "residual:r={d/4},basis=adjoints", tuned_as="dense"),
)
PREFIXES = (
    Arm("dense, random prefixes", prefixes=True, tuned_as="dense"),
    Arm("shallow, random prefixes", shallow=True, prefixes=True, tuned_as="shallow"),
    Arm("published, random prefixes", "published:r={r}", prefixes=True, tuned_as="published"),
)
AUTHORS = (
    Arm("dense, AdamW", recipe="AdamW"),
    Arm("shallow, AdamW", shallow=True, recipe="AdamW"),
    Arm("published, AdamW", "published:r={r}", recipe="AdamW"),
    Arm("dense, AdamW 6e-4", recipe="AdamW", tuned=False),
    Arm("shallow, AdamW 6e-4", shallow=True, recipe="AdamW", tuned=False),
    Arm("published, AdamW 6e-4", "published:r={r}", recipe="AdamW", tuned=False),
)
ENCODERS = (
    Arm("encoder, dense", task="hidden"),
    Arm("encoder, shallow", shallow=True, task="hidden"),
    Arm("encoder, published", "published:r={r}", task="hidden"),
    Arm("encoder, residual, r = d/2", "residual:r={d/2}", task="hidden", tuned_as="encoder, dense"),
)
ONCE = (Arm("residual, r = d", "residual:r={d}", tuned_as="dense"),)
"""With one seed: the positive control, which tests pin to rounding."""
HYBRIDS = (
    Arm("hybrid, dense", architecture="hybrid", tuned_as="dense"),
    Arm("hybrid, shallow", shallow=True, architecture="hybrid", tuned_as="shallow"),
    Arm("hybrid, published", "published:r={r}", architecture="hybrid", tuned_as="published"),
)
"""Of the preset long. The last two layers of six of a hybrid are Mamba-3: the shallow control is these, not
the first two."""
PARTS = (ENCODERS, CORE, PREFIXES, AUTHORS, LEARNED)
"""Of the preset small, what decides most first."""
EARLY = 3
"""Seeds of encoders that come before the language models."""
ARMS = {arm.name: arm for part in (*PARTS, SEGMENTS, HYBRIDS, ONCE) for arm in part}


def order(seeds: int, preset: str) -> list[tuple[Arm, int]]:
    """Arms and seeds, so that what was measured at any moment makes a table: the controls of a seed first."""
    if preset == "tiny":
        chosen = [ARMS[name] for name in ("dense", "shallow", "residual, r = d", "published")]
        return [(arm, seed) for seed in range(seeds) for arm in chosen]
    every = range(seeds)
    first, *others = PARTS
    parts = [(first, every[:EARLY]), (others[0], every), (first, every[EARLY:])]
    parts += [(part, every) for part in others[1:]]
    if preset == "long":
        parts += [(SEGMENTS, every), (HYBRIDS, every), (ONCE, every[:1])]
    return [(arm, seed) for arms, some in parts for seed in some for arm in arms]


def run(args: Asked) -> Result:
    """Every arm with every seed, or those that are there where nothing is measured; tables and claims."""
    check_seeds(args.seeds)
    todo, rows = order(args.seeds, args.preset), list[Row]()
    for arm, seed in todo:
        key = {"arm": arm.name, "seed": seed}
        with suppress(NotMeasured):
            rows.append(key | args.kept.row(key, partial(_trained, args, arm, seed)))
        args.on_more(len(rows), len(todo))
    if not rows:
        raise NotMeasured(setting="judge", given=args.study, remedy="run it without --judge first")
    config = _config(args, 0)
    return Result(
        setting=(
            f"Six layers of width {config.model.width} in regions {REGIONS}, context {config.model.context}, "
            f"{config.steps} steps of {config.batch} rows of bytes; rates of each arm from a grid."
        ),
        rows=rows,
        tables=(_table(rows), _honest_table(rows)),
        findings=(f"{len(rows)} of {len(todo)} trainings.", *_findings(rows)),
        claims=tuple(_claims(rows)),
        seeds=args.seeds,
    )


def _trained(args: Asked, arm: Arm, seed: int) -> Row:
    return measure(arm, _config(args, seed), tuned(args, arm))


def _config(args: Asked, seed: int) -> TrainConfig:
    return bytes_config(args, seed, batch=8, tiny_batch=2, eval_bytes=60_000)


def first_rates(arm: Arm) -> OptimizerConfig:
    """Where the search for an arm's rates begins; those of an arm that is not tuned."""
    if arm.recipe == "AdamW":
        return _adamw(ADAMW_RATE * (3 if arm.tuned else 1))
    return OptimizerConfig(lr_matrix=0.02, lr_relay=0.01 if _learns_relays(arm) else 0.001)


def _learns_relays(arm: Arm) -> bool:
    words = arm.interface or "residual"
    return not words.startswith("residual") or "learned" in words


def _moves(arm: Arm) -> list[tuple[str, float]]:
    """The rates that an arm may choose and by how much one is moved; AdamW has one rate for everything."""
    if arm.recipe == "AdamW":
        return [("all", 3)]
    return [*([("lr_relay", 3.0)] if _learns_relays(arm) else []), ("lr_matrix", 2)]


def _moved(rates: OptimizerConfig, which: str, factor: float) -> OptimizerConfig:
    before: float = getattr(rates, "lr_matrix" if which == "all" else which)
    after = float(f"{before * factor:.3g}")
    changes: dict[str, Any] = {which: after}
    return _adamw(after) if which == "all" else replace(rates, **changes)


def _adamw(rate: float) -> OptimizerConfig:
    """One AdamW for everything, as the authors have it."""
    return OptimizerConfig(
        name="adamw",
        lr_matrix=rate,
        lr_embedding=rate,
        lr_head=rate,
        lr_scalar=rate,
        lr_relay=rate,
        betas=(0.9, 0.95),
        clip=1.0,
    )


def tuned(args: Asked, arm: Arm) -> OptimizerConfig:
    """The rates whose neighbours are worse after a quarter of the steps, on a seed that is not judged."""
    if arm.tuned_as is not None:
        return tuned(args, ARMS[arm.tuned_as])
    best = first_rates(arm)
    if not arm.tuned or args.preset == "tiny":
        return best
    config = replace(_config(args, TUNING_SEED), steps=args.steps // 4)

    def loss(rates: OptimizerConfig) -> float:
        key = {"arm": arm.name, "tuning": [rates.lr_matrix, rates.lr_relay]}
        return float(args.kept.row(key, partial(measure, arm, config, rates))[_judged(arm)])

    for which, factor in _moves(arm):
        best = climb(best, loss, partial(_moved, which=which), factor)
    return best


def climb(
    best: OptimizerConfig,
    loss: Callable[[OptimizerConfig], float],
    moved: Callable[..., OptimizerConfig],
    factor: float,
) -> OptimizerConfig:
    """Rates that are better than both neighbours: up as long as that helps, else down."""
    start = best
    for step in (factor, 1 / factor):
        while loss(near := moved(best, factor=step)) < loss(best):
            best = near
        if best != start:
            break
    return best


def _judged(arm: Arm) -> str:
    """What rates are chosen by: a language model that sees the future is read from prefixes."""
    leaks = arm.task == "text" and (arm.interface or "").startswith("published")
    return "honest" if leaks else "ce"


def measure(arm: Arm, config: TrainConfig, optimizer: OptimizerConfig) -> Row:
    """Train a model; its loss, from prefixes too, and with another row's messages."""
    config, data = load_data(config)
    context = config.model.context
    stack, plan = build(arm, config)
    draw = torch.Generator().manual_seed(config.seed)
    batches: Iterator[tuple[Tensor, Tensor]] = Loader(data.train, context, config.batch, config.seed)
    if arm.task == "hidden":
        batches = (hide(inputs, config.model.vocab, draw) for inputs, _ in batches)
    if arm.prefixes:
        batches = (_cut(inputs, targets, draw) for inputs, targets in batches)
    first = Loader(data.train, context, config.batch, config.seed)
    begin_interfaces(stack, plan, optimizer, first, min(DIRECTION_STEPS, config.steps))
    losses = fit(stack, plan, batches, config.steps, optimizer)
    inputs, targets, _ = windows(data.heldout, data.tokenizer, context, config.eval_bytes)
    if arm.task == "hidden":
        inputs, targets = hide(inputs, config.model.vocab, torch.Generator().manual_seed(0))
    result = position_losses(stack, plan, inputs, targets)
    row: Row = {
        "ce": result.nanmean().item(),
        "late": result[:, -context // 4 :].nanmean().item(),
        "parameters": sum(p.numel() for p in stack.parameters()),
        "rates": [optimizer.name, optimizer.lr_matrix, optimizer.lr_relay],
        "trajectory": trajectory(losses),
    }
    if arm.interface is not None:
        with silenced(stack, "shuffled"):
            row["shuffled"] = position_losses(stack, plan, inputs, targets).nanmean().item()
        row["spread"] = message_spreads(stack, plan, inputs[:SAMPLE_ROWS])
    sample = slice(0, SAMPLE_ROWS)
    alone = result[sample]
    row["sample"], row["sample_late"] = alone.nanmean().item(), alone[:, -context // 4 :].nanmean().item()
    if _judged(arm) == "honest":
        alone = prefix_losses(stack, plan, inputs[sample], targets[sample])
    row["honest"], row["honest_late"] = alone.nanmean().item(), alone[:, -context // 4 :].nanmean().item()
    return row


@torch.no_grad()
def message_spreads(stack: Stack, plan: Plan, inputs: Tensor) -> list[float]:
    """The spread of each boundary's messages over these rows."""
    x0 = stack.embed(inputs)
    told = Regions.of(stack, plan).told(x0, stack.layer_context(x0, inputs))
    return [message_spread(message).item() for message in told]


def _cut(inputs: Tensor, targets: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """A batch's first positions, as many as are drawn."""
    length = int(torch.randint(1, inputs.shape[1] + 1, (), generator=draw))
    return inputs[:, :length], targets[:, :length]


def build(arm: Arm, config: TrainConfig) -> tuple[GPT, Plan]:
    """The model before its training; all of a seed have the same layers at first, shallow the last ones."""
    torch.manual_seed(config.seed)
    settings = config.gpt.changed(architecture=arm.architecture)
    hidden = arm.task == "hidden"
    kind = Encoder if hidden else GPT
    stack = kind(settings.changed(vocab=settings.vocab + 1) if hidden else settings)
    if arm.shallow:
        last = int(REGIONS.rpartition(",")[2])
        stack.layers = nn.ModuleList(list(stack.layers)[-last:])
    words = arm.words(settings.width, settings.context)
    if words is None:
        return stack, prepare(stack, Topology.chain(str(len(stack.layers))))
    first = parse_interface(words).first_region
    return stack, prepare(stack, Topology.regions(REGIONS, words, first_region=first))


def of(rows: Sequence[Row], name: str, key: str = "ce") -> dict[int, float]:
    """A reading of an arm by seed."""
    return {row["seed"]: row[key] for row in rows if row["arm"] == name}


def controls(arm: Arm) -> tuple[str, str]:
    """The names of the dense and the shallow model that an arm is compared with."""
    alike = [one for one in ARMS.values() if one.family == arm.family and one.interface is None]
    return next(a.name for a in alike if not a.shallow), next(a.name for a in alike if a.shallow)


def kept(rows: Sequence[Row], name: str, key: str = "ce") -> list[float]:
    """The share of what depth is worth that an arm keeps, for each seed that has all three.

    With a reading of a sample (`honest`), the controls are read on the same sample.
    """
    dense, shallow = (of(rows, control, key) for control in controls(ARMS[name]))
    own = of(rows, name, key)
    return [
        (shallow[seed] - own[seed]) / (shallow[seed] - dense[seed])
        for seed in sorted(own)
        if seed in dense and seed in shallow
    ]


def _reading(name: str) -> str:
    return _judged(ARMS[name])


def _minus(rows: Sequence[Row], name: str, base: str, key: str = "ce") -> list[float]:
    own, other = of(rows, name, key), of(rows, base, key)
    return [own[seed] - other[seed] for seed in sorted(own) if seed in other]


def _claims(rows: Sequence[Row]) -> list[Claim]:
    """Those whose arms were measured. Shares are of what depth is worth; nats a byte elsewhere."""
    claims = []

    def share(title: str, prediction: str, arm: str, least: float) -> None:
        if shares := kept(rows, arm, _reading(arm)) if of(rows, arm) else []:
            effect = f"the share of depth that {arm} keeps"
            claims.append(above(title, prediction, effect, shares, least))

    for dense, shallow in dict.fromkeys(map(controls, ARMS.values())):
        if worth := _minus(rows, shallow, dense):
            effect = f"CE of {shallow} minus that of {dense}"
            claims.append(above(f"depth is worth something: {dense}", "six layers beat two", effect, worth))
    if whole := kept(rows, "residual, r = d"):
        effect = "the share of depth that residual, r = d, keeps, minus 1,"
        prediction = "at r = width the residual interface is the dense model"
        claims.append(within("positive control", prediction, effect, [one - 1 for one in whole], SAME))
    half = "half of the directions carry at least half of depth"
    share("residual, r = d/2, keeps half", half, "residual, r = d/2", 0.5)
    share("residual, r = d/4, keeps some", "a quarter carries depth", "residual, r = d/4", 0.0)
    for how in ("learned", "hidden", "adjoints"):
        if gains := _minus(rows, "residual, r = d/4", f"residual, {how}, r = d/4"):
            effect = f"CE of residual, r = d/4, minus that of residual, {how}"
            claims.append(above(f"directions: {how}", "they beat random ones", effect, gains))
    share("encoder: residual, r = d/2, keeps half", half, "encoder, residual, r = d/2", 0.5)
    some = "the interface beats the last region alone, each byte predicted from those before it"
    for arm in ("published", "published, AdamW", "published, AdamW 6e-4", "published, random prefixes"):
        share(f"{arm} beats shallow", some, arm, 0.0)
    for arm in ("encoder, published", "hybrid, published", "segments, S = T"):
        share(f"{arm} beats shallow", "the interface beats the last region alone", arm, 0.0)
    claims += _reading_claims(rows)
    return claims


def _reading_claims(rows: Sequence[Row]) -> list[Claim]:
    """That the published interface is flattered by the future, and that its messages are used."""
    claims = []
    for arm in ("published", "published, AdamW", "published, random prefixes"):
        if own := of(rows, arm):
            gap = [of(rows, arm, "honest")[seed] - of(rows, arm, "sample")[seed] for seed in own]
            effect = f"CE of {arm} from prefixes minus that with the future in sight"
            claims.append(above(f"{arm} is flattered", "the future helps it", effect, gap))
    for arm in ("published", "encoder, published", "segments, S = T", "residual, r = d/2"):
        if own := of(rows, arm):
            cost = [of(rows, arm, "shuffled")[seed] - own[seed] for seed in own]
            effect = f"CE of {arm} with the messages of another row minus its own"
            claims.append(above(f"{arm}: messages are used", "they say something", effect, cost))
    return claims


def _table(rows: Sequence[Row]) -> ResultTable:
    cells = []
    for name in dict.fromkeys(row["arm"] for row in rows):
        own = of(rows, name)
        values = list(own.values())
        shares = kept(rows, name, _reading(name)) if ARMS[name].interface else []
        rates = next(row["rates"] for row in rows if row["arm"] == name)
        cells.append(
            (
                name,
                str(len(values)),
                f"{statistics.fmean(values):.4f}",
                f"{statistics.stdev(values):.4f}" if len(values) > 1 else "–",
                percent(shares) if shares else "–",
                f"{rates[1]:g}, {rates[2]:g}",
                f"{next(row['parameters'] for row in rows if row['arm'] == name):,}",
            )
        )
    header = ("arm", "seeds", "CE", "±", "share of depth kept, 90 %", "rates", "parameters")
    caption = "Nats per byte; shares of the published interface are read from prefixes"
    return ResultTable(caption, header, tuple(cells))


def _honest_table(rows: Sequence[Row]) -> ResultTable:
    cells = []
    for name in dict.fromkeys(row["arm"] for row in rows):
        if _reading(name) == "honest":
            keys = ("sample", "honest", "sample_late", "honest_late", "shuffled")
            cells.append((name, *(f"{statistics.fmean(of(rows, name, key).values()):.4f}" for key in keys)))
    header = ("arm", "with the future", "from prefixes", "the same, late", "", "another row's messages")
    return ResultTable("The published interface in a language model", header, tuple(cells))


def _findings(rows: Sequence[Row]) -> list[str]:
    found = []
    for dense, shallow in dict.fromkeys(map(controls, ARMS.values())):
        if worth := _minus(rows, shallow, dense):
            found.append(f"{dense}: depth is worth {Interval.of(worth)} nats.")
    return found
