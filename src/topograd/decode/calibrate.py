"""Calibrating a run: what its stages do on held-out text, what rows cost on this machine, and which draft
rule follows. Kept in the run's folder as `calibration.json`.

The even documents' windows of the held-out text calibrate; the odd ones are left for measuring agreement
(`heldout_readings`, `Readings.split`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from topograd.data.windows import Text
from topograd.decode.autotune import DraftRule, RowCosts, choose, low, simulate
from topograd.decode.cache import Cache
from topograd.decode.calibration import Calibration, Sample
from topograd.decode.engine import Engine
from topograd.decode.readings import Readings, join, read
from topograd.decode.retrofitted import exits_digest, open_exits
from topograd.decode.strategies import FixedDepth, generate_batch
from topograd.decode.tune_drafters import Choice
from topograd.errors import ConfigError, RunError
from topograd.exec.forward import predict, stage_outputs
from topograd.files import dump_json, read_json
from topograd.nn.stack import Stack
from topograd.nn.translator import TranslatedReader, Translator
from topograd.runs.session import LoadedTextRun
from topograd.runtime.protocol import Runtime, single_threaded_torch
from topograd.topology.plan import Plan

SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Rows for which the deep stages are timed."""
ROUNDS = 9
OWN_ROWS, OWN_TOKENS = 24, 64
"""Texts that the model writes to be tuned on. Longer ones would mostly repeat themselves."""
OWN_PROMPT = 128
"""What they go on from is no longer than this."""
CALIBRATION = "calibration"
"""What an open run remembers it by."""


@dataclass(frozen=True)
class Tuning:
    """The draft stage and the rules that pay best on this host; a rule is None where none does."""

    stage: int
    rule: DraftRule | None
    """For greedy text, from a replay of the model's own."""
    predicted: float
    """Speedup over full depth in that replay; 1 without a rule."""
    sampled: DraftRule | None
    """For sampled text, which is more like text that people wrote, from a replay of that."""
    costs: RowCosts
    drafting: Choice | None = None
    """Who drafts for greedy text, if not the stage above; None where nobody else pays more."""
    sampled_drafting: Choice | None = None


def heldout_readings(
    session: LoadedTextRun,
    text: Text,
    batch: int = 4,
    on_batch: Callable[[int, int], None] | None = None,
    engine: Engine | None = None,
) -> Readings:
    """The readings of every exit on held-out text, a window a sequence; of an engine's quantised weights.

    Exits that a retrofit gave the run are read as it reads them.
    """
    quantised = engine is not None and engine.runtime.precision != "float32"
    runtime = engine.runtime if engine is not None and quantised else None
    exits = open_exits(session) if engine is None else engine.translators()
    return exit_readings(session.stack, session.plan, text, batch, on_batch, runtime, exits)


@torch.no_grad()
def exit_readings(
    stack: Stack,
    plan: Plan,
    text: Text,
    batch: int = 4,
    on_batch: Callable[[int, int], None] | None = None,
    runtime: Runtime | None = None,
    translators: Mapping[int, Translator] | None = None,
) -> Readings:
    """The readings of what each exit of a plan predicts, a row of text a sequence; in a runtime, or torch."""
    stages = plan.predicting()
    reader = TranslatedReader(
        stack if runtime is None else runtime, lambda: translators or {}, plan.stages[plan.last].head
    )
    device = next(stack.parameters()).device
    parts = []
    for start in range(0, len(text.inputs), batch):
        inputs = text.inputs[start : start + batch].to(device)
        counted = (text.targets[start : start + batch] != -100).to(device)
        if runtime is None:
            outputs = stage_outputs(stack, plan, inputs, stages)
        else:
            outputs = cached_outputs(runtime, plan, inputs, stages)
        rows = torch.arange(start, start + len(inputs), device=device)[:, None].expand_as(inputs)
        flat = {k: h[counted] for k, h in outputs.items()}
        logits = [predict(reader, plan, flat, plan.prediction.after(k)) for k in stages]
        parts.append(read(logits, rows[counted]))
        if on_batch is not None:
            on_batch(min(start + batch, len(text.inputs)), len(text.inputs))
    return join(parts)


@torch.inference_mode()
def cached_outputs(runtime: Runtime, plan: Plan, inputs: Tensor, stages: list[int]) -> dict[int, Tensor]:
    """The last hidden state of each of `stages` at every position, as a runtime decodes them."""
    cache = Cache(runtime, plan, inputs.shape[1])
    batch = [cache.new() for _ in inputs]
    cache.push(batch, inputs.tolist())
    counts = [inputs.shape[1]] * len(batch)
    found = {}
    for stage in stages:
        cache.run(batch, stage)
        found[stage] = cache.hidden(batch, stage, counts).unflatten(0, tuple(inputs.shape))
    return found


@torch.inference_mode()
def measure_costs(engine: Engine, stage: int) -> RowCosts:
    """Seconds on this host, in a half-full context, with `stage` drafting: lower quartiles of whole rounds.

    The first draft behind the deep stages is slower, since they have pushed its weights out of the
    processor's caches. What a round takes beyond its drafts, at the pace of the later ones, counts as deep.
    """
    length = max(engine.context // 2 - 1, 1)
    sizes = [size for size in SIZES if size <= engine.context - length]
    if len(sizes) < 2:
        raise ConfigError(
            f"a context of {engine.context} tokens has no room for drafts", remedy="use at least 3"
        )
    batch, full, drafting = engine.start([[0] * length]), engine.exits[-1], engine.stage_of(stage)
    cache = batch[0].cache
    engine.run(batch, full)
    drafts: list[float] = []
    rounds: dict[int, list[float]] = {size: [] for size in (0, *sizes)}  # 0: one token at full depth

    def read(last: int, rows: int) -> None:
        engine.run(batch, last)
        engine.logits(batch, last, [rows]).topk(2).values.tolist()

    for _, size in itertools.product(range(ROUNDS), rounds):
        with single_threaded_torch(engine.runtime):
            began = time.perf_counter()
            for row in range(size):
                here = time.perf_counter()
                cache.push(batch, [[0]])
                read(drafting, 1)
                if row:
                    drafts.append(time.perf_counter() - here)
            if not size:
                cache.push(batch, [[0]])
            read(full, max(size, 1))
            cache.truncate(batch, [length])
            rounds[size].append(time.perf_counter() - began)
    draft = low(drafts)
    deep, least = {}, draft
    for size in sizes:  # more rows never cost less
        deep[size] = least = max(least, low(rounds[size]) - size * draft)
    return RowCosts(draft, deep, low(rounds[0]))


def own_rows(engine: Engine, text: Text) -> tuple[list[list[int]], int]:
    """The model's own greedy text behind the beginnings of some held-out windows, and how long those are."""
    start = max(min(engine.context // 4, OWN_PROMPT), 1)
    rows = text.inputs[::2]
    spread = [rows[i * len(rows) // OWN_ROWS] for i in range(OWN_ROWS)] if len(rows) > OWN_ROWS else rows
    prompts = [row[:start].tolist() for row in spread]
    count = min(OWN_TOKENS, engine.context - start)
    written = generate_batch(FixedDepth(engine), prompts, count)
    return [prompt + [e.token for e in row] for prompt, row in zip(prompts, written, strict=True)], start


def own_text(session: LoadedTextRun, engine: Engine, text: Text) -> Sample:
    """What each stage says on the model's own greedy text."""
    inputs, start = own_rows(engine, text)
    targets = torch.tensor([[*row[1:], -100] for row in inputs])
    targets[:, : start - 1] = -100
    return Sample.of(heldout_readings(session, Text(torch.tensor(inputs), targets, 0), engine=engine))


def tune(engine: Engine, text: Sample, own: Sample) -> Tuning:
    """The best draft stage and rules by replay of people's text and the model's own; off where they lose."""
    found = []
    for stage in range(engine.last):
        costs = measure_costs(engine, stage)
        rule = choose(own.margins[stage], own.agrees[stage], own.lengths, costs)
        speedup = 1.0
        if rule is not None:
            speedup = simulate(own.margins[stage], own.agrees[stage], own.lengths, rule, costs).speedup
        sampled = choose(text.margins[stage], text.agrees[stage], text.lengths, costs)
        found.append(Tuning(stage, rule, speedup, sampled, costs))
    return max(found, key=lambda tuning: tuning.predicted)


def store(session: LoadedTextRun, calibration: Calibration, tuning: Tuning) -> None:
    """Keep a calibration with its run, whole or not at all, with the weights that it is of."""
    values = {
        "calibration": calibration.as_dict(),
        "tuning": _tuning_dict(tuning),
        "weights": session.weights,
        "exits": exits_digest(session),
    }
    session.run.manifest.bind(session.run.calibration_file.name, dump_json(values))
    session.remembered.pop(CALIBRATION, None)


def load(session: LoadedTextRun) -> tuple[Calibration, Tuning]:
    """The run's calibration; one of other weights, or none, is refused with what to do.

    The file is read once for an open run.
    """
    again = f"run: topograd calibrate {session.run.folder}"
    if not session.run.calibration_file.exists():
        raise RunError(f"{session.run.folder} is not calibrated", remedy=again)
    values, calibration, tuning = session.once(CALIBRATION, lambda: _read(session, again))
    exits = len(session.plan.predicting())
    if calibration.step != session.step or calibration.stages != exits:
        raise RunError(
            f"the calibration of {session.run.folder} is of step {calibration.step} and "
            f"{calibration.stages} stages, the weights are of step {session.step} and {exits}",
            remedy=again,
        )
    if values.get("weights", session.weights) != session.weights:  # versions before 0.2 did not keep them
        raise RunError(f"the calibration of {session.run.folder} is of other weights", remedy=again)
    if values.get("exits") != exits_digest(session):
        raise RunError(f"the calibration of {session.run.folder} is of other exits (draft/)", remedy=again)
    return calibration, tuning


def _read(session: LoadedTextRun, again: str) -> tuple[dict[str, Any], Calibration, Tuning]:
    """The file's values, and what they say."""
    file = session.run.calibration_file
    session.run.manifest.verify(file.name)
    try:
        values = read_json(file)
        if not isinstance(values, dict):
            raise RunError("it is no JSON object")
        return values, Calibration.from_dict(values.get("calibration")), _tuning_of(values["tuning"])
    except (RunError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as problem:
        raise RunError(f"{file} is damaged ({problem})", remedy=again) from None


def _tuning_dict(tuning: Tuning) -> dict[str, Any]:
    return {
        "stage": tuning.stage,
        "rule": None if tuning.rule is None else asdict(tuning.rule),
        "predicted": tuning.predicted,
        "sampled": None if tuning.sampled is None else asdict(tuning.sampled),
        "costs": tuning.costs.as_dict(),
        "drafting": None if tuning.drafting is None else tuning.drafting.as_dict(),
        "sampled_drafting": None if tuning.sampled_drafting is None else tuning.sampled_drafting.as_dict(),
    }


def _tuning_of(values: Any) -> Tuning:
    rules = [
        None if rule is None else DraftRule(float(rule["threshold"]), int(rule["longest"]))
        for rule in (values["rule"], values["sampled"])
    ]
    return Tuning(
        int(values["stage"]),
        rules[0],
        float(values["predicted"]),
        rules[1],
        RowCosts.from_dict(values["costs"]),
        *(
            Choice.from_dict(values[name]) if values.get(name) is not None else None
            for name in ("drafting", "sampled_drafting")
        ),
    )
