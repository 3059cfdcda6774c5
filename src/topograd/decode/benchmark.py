"""Decoding benchmark: speed of every strategy against full depth, and agreement with it.

Everything is measured in one process with one engine: in each round every strategy continues the same
held-out prompts, in an order that rotates, and a speedup is the median over rounds of the time at full depth
over the strategy's (`timing.py`). Full depth is decoded with the same cache and kernels as the rest. Only
decoding is timed: every prompt has been read when the clock starts (but not in the comparison of batches).

    agreement    teacher-forced: share of held-out tokens where the strategy's token is full depth's;
                 calibrated on the even windows, measured on the odd ones
    identical    share of prompts whose free-running text is full depth's
    ties         texts under speculation that leave full depth's where its two best logits are closer than
                 rounding between batch shapes (`agreement.py`); all other differences are mismatches
    distinct     share of distinct 4-grams in the texts: greedy text of a small model loops, which flatters
                 acceptance, so the teacher-forced acceptance stands beside it

    rows         seconds of several positions at once over one position's
    bandwidth    bytes of the matrices that a token reads, times tokens a second, over a plain read's best

Limits: a few prompts, a noisy machine. Read the quartiles.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from topograd.data.windows import Text
from topograd.decode.agreement import differences, distinct, identical, mean_exit
from topograd.decode.calibration.measure import Calibration, Readings, heldout_readings
from topograd.decode.calibration.policy import judged, thresholds
from topograd.decode.calibration.tune import Tuning, record, replay, tune
from topograd.decode.depths import PRUNING_VOCAB, engine_of, speculation_of
from topograd.decode.drafters import DraftRule
from topograd.decode.engine import Emitted, Engine, check_exits
from topograd.decode.retrofitted import has_retrofit, open_retrofit
from topograd.decode.sampling import Sampling
from topograd.decode.sequence import Tally
from topograd.decode.settings import DecodeSettings
from topograd.decode.speculation import Speculate
from topograd.decode.strategies import DecodeStrategy, FixedDepth, continue_tokens, generate_batch
from topograd.decode.wand import Wand
from topograd.errors import ConfigError
from topograd.nn.stack import Stack
from topograd.runs.session import LoadedTextRun, heldout_text
from topograd.runtime.native import library
from topograd.runtime.native.packing import Memory
from topograd.timing import ratio, read_in_turns, take_turns

BITS = {"float32": 32, "bfloat16": 16, "int8": 9, "int4": 6}
NATIVE_BITS = {**BITS, "int8": 8.5, "int4": 5}
"""Bits of a weight as each precision keeps it: int8 with a scale for 32 of them, int4 with two numbers; of 16
bits in the native runtime, else of 32."""
READ_BYTES = 2**28
WANTED_AGREEMENT = 0.999
EPS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02)
WARM = 0.8
"""The temperature of the sampled comparison."""


def bench_decode(
    session: LoadedTextRun, settings: DecodeSettings, runtime: str | None = None, weights: str = "float32"
) -> dict[str, Any]:
    """Every reading of this module, as plain numbers; full depth is that of the runtime and its weights."""
    check_exits(session.plan)
    engine = engine_of(session, runtime, weights)
    text = heldout_text(session, None, settings.bytes)
    seen, unseen = heldout_readings(session, text, engine=engine).split()
    if not len(seen) or not len(unseen):
        allowed = "enough for two windows of held-out text"
        raise ConfigError(setting="bytes", given=settings.bytes, allowed=allowed)
    calibration = Calibration.of(seen, session.step)
    tuning = tune(engine, text, open_retrofit(session) if has_retrofit(session) else None)
    prompts = heldout_prompts(text, settings.prompts, settings.prompt_tokens)
    strategies = _strategies(session, engine, calibration, tuning)
    written = {
        name: continued(strategy, prompts, settings.tokens, _sampling(name))
        for name, strategy in strategies.items()
    }
    seconds = in_turns(strategies, prompts, settings)
    speed = {name: ratio(seconds, "full", name).as_dict() for name in strategies}
    tokens = settings.tokens * len(prompts)
    rate = {name: tokens / sorted(times)[len(times) // 2] for name, times in seconds.items()}
    results = {
        "run": str(session.run.folder),
        "runtime": engine.runtime.name,
        "weights": engine.runtime.precision,
        "threads": torch.get_num_threads(),
        "tokens_per_second": rate["full"],
        "settings": vars(settings),
        "full": {"tokens_per_second": rate["full"], "distinct_4grams": distinct(written["full"].texts)},
        "prefix": [
            {
                "stages": exit_ + 1,
                "tokens_per_second": rate[f"prefix:{exit_ + 1}"],
                "speedup": speed[f"prefix:{exit_ + 1}"]["median"],
                "spread": speed[f"prefix:{exit_ + 1}"],
                "agreement": (unseen.top[exit_] == unseen.top[-1]).double().mean().item(),
            }
            for exit_ in range(engine.last)
        ],
        "wand": _wand(strategies, unseen, speed, written),
        "speculate": _speculation(strategies["speculate"], text, tuning, prompts, speed, rate, written),
        "sampled": _sampled(written, seconds, rate),
        "batch": _batched(strategies["speculate"], text, settings),
        "row_costs": tuning.costs.as_dict(),
        "rows": {str(m): s / tuning.costs.full for m, s in tuning.costs.verify.items()},
        "bandwidth_share": matrix_bytes(engine, session.stack) * rate["full"] / read_bandwidth(),
    }
    return {**results, "ways": ways(results)}


def ways(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The results as records of a table, one for each way of running; None where a column has no sense."""
    wand, draft, warm, batch = (results[name] for name in ("wand", "speculate", "sampled", "batch"))
    full, stages = results["full"]["tokens_per_second"], len(results["prefix"]) + 1
    columns = ("way", "tokens_per_second", "speedup", "agreement", "identical", "mean_stage", "acceptance")

    def way(name: str, rate: float, values: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        known = {"speedup": 1.0, "agreement": 1.0, **values, **more, "way": name, "tokens_per_second": rate}
        return {column: known.get(column) for column in columns}

    def plain(name: str, rate: float, **more: Any) -> dict[str, Any]:
        return way(name, rate, {}, mean_stage=stages, **more)

    together, rate = f"{batch['rows']} rows", batch["full_tokens_per_second"]
    faster = batch["speculate_speedup"]
    return [
        plain("full", full, identical=1.0),
        *(
            way(f"prefix:{p['stages']}", p["tokens_per_second"], p, mean_stage=p["stages"])
            for p in results["prefix"]
        ),
        way(f"wand:{wand['rule']}", full * wand["speedup"], wand),
        way("speculate" if draft["on"] else "speculate (off)", draft["tokens_per_second"], draft),
        plain(f"full, temperature {WARM}", warm["full_tokens_per_second"]),
        way(f"speculate, temperature {WARM}", warm["tokens_per_second"], warm),
        plain(f"full, {together}", rate),
        way(f"speculate, {together}", rate * faster, {"speedup": faster}),
    ]


@dataclass(frozen=True)
class Continued:
    """What a strategy wrote after each prompt, how long that took, and the share of its drafts accepted."""

    texts: list[list[Emitted]]
    seconds: float
    acceptance: float | None


def continued(
    strategy: DecodeStrategy, prompts: Sequence[Sequence[int]], tokens: int, sampling: Sampling | None = None
) -> Continued:
    """Continue each prompt by itself. Reading the prompt, at full depth for every strategy, is not timed."""
    texts, seconds, tally = [], 0.0, Tally()
    for prompt in prompts:
        batch = strategy.engine.start([prompt], sampling)
        with torch.inference_mode():
            strategy.engine.run(batch, strategy.engine.exits[-1])
        began = time.perf_counter()
        texts.append([emitted for _, emitted in continue_tokens(strategy, batch, tokens)])
        seconds += time.perf_counter() - began
        tally.add(batch[0].tally)
    return Continued(texts, seconds, tally.acceptance if tally.drafted else None)


def in_turns(
    strategies: Mapping[str, DecodeStrategy], prompts: Sequence[Sequence[int]], settings: DecodeSettings
) -> dict[str, list[float]]:
    """Seconds of each strategy in each round, in an order that rotates."""

    def clock(name: str) -> float:
        return continued(strategies[name], prompts, settings.tokens, _sampling(name)).seconds

    return read_in_turns({name: partial(clock, name) for name in strategies}, settings.rounds, warmup=0)


def _sampling(name: str) -> Sampling:
    return Sampling(temperature=WARM) if name.endswith(", sampled") else Sampling()


def heldout_prompts(text: Text, count: int, tokens: int) -> list[list[int]]:
    """The beginnings of held-out windows, spaced evenly over those that calibration does not see."""
    rows = range(1, len(text.inputs), 2)
    count = min(count, len(rows))
    chosen = [rows[i * len(rows) // count] for i in range(count)]
    return [text.inputs[row][text.targets[row] != -100][:tokens].tolist() for row in chosen]


def _strategies(
    session: LoadedTextRun, engine: Engine, calibration: Calibration, tuning: Tuning
) -> dict[str, DecodeStrategy]:
    bounds = calibration.gain.max if engine.vocab >= PRUNING_VOCAB else None
    made: dict[str, DecodeStrategy] = {"full": FixedDepth(engine)}
    for exit_ in range(engine.last):
        made[f"prefix:{exit_ + 1}"] = FixedDepth(engine, exit_)
    for rule in ("sum-of-bounds", "rival-gain"):
        made[f"wand:{rule}"] = Wand(engine, thresholds(calibration, rule), bounds)
    for eps in EPS:
        limits = thresholds(calibration, "flip-rate", eps=eps)
        made[f"wand:flip-rate:{eps}"] = Wand(engine, limits, bounds)
    made["speculate"] = speculation_of(session, engine, tuning)
    made["full, sampled"] = FixedDepth(engine)
    made["speculate, sampled"] = speculation_of(session, engine, tuning, greedy=False)
    return made


def _wand(
    strategies: Mapping[str, DecodeStrategy],
    unseen: Readings,
    speed: Mapping[str, Any],
    written: Mapping[str, Continued],
) -> dict[str, Any]:
    """Every rule's point of the curve; the headline is the fastest with the agreement that is wanted."""
    curve = []
    for name, strategy in strategies.items():
        if not isinstance(strategy, Wand):
            continue
        curve.append(
            {
                "rule": name.removeprefix("wand:"),
                "speedup": speed[name]["median"],
                "spread": speed[name],
                **judged(unseen, strategy.thresholds),
                "identical": identical(written[name].texts, written["full"].texts),
                "free_running_mean_stage": mean_exit(written[name].texts),
            }
        )
    good = [point for point in curve if point["agreement"] >= WANTED_AGREEMENT]
    best = max(good or curve, key=lambda point: point["speedup"] if good else point["agreement"])
    return {**best, "curve": curve}


def _speculation(
    strategy: DecodeStrategy,
    text: Text,
    tuning: Tuning,
    prompts: Sequence[Sequence[int]],
    speed: Mapping[str, Any],
    rate: Mapping[str, float],
    written: Mapping[str, Continued],
) -> dict[str, Any]:
    texts, full = written["speculate"].texts, written["full"].texts
    selection = tuning.greedy
    answer: dict[str, Any] = {
        "on": selection is not None,
        "speedup": speed["speculate"]["median"],
        "spread": speed["speculate"],
        "tokens_per_second": rate["speculate"],
        "predicted_speedup": 1.0 if selection is None else selection.predicted,
        "acceptance": written["speculate"].acceptance,
        "identical": identical(texts, full),
        **differences(strategy.engine, prompts, texts, full),
        "distinct_4grams": distinct(texts),
        "mean_stage": mean_exit(texts),
    }
    if selection is not None and isinstance(strategy, Speculate):
        unseen = heldout_prompts(text, len(prompts), strategy.engine.context)
        known = record(strategy.engine, unseen, 1, strategy.drafter.drafters)
        answer["drafters"] = list(selection.drafters)
        answer["teacher_forced"] = vars(replay(known, selection.policy, selection.drafters))
    return answer


def _sampled(
    written: Mapping[str, Continued], seconds: Mapping[str, list[float]], rate: Mapping[str, float]
) -> dict[str, Any]:
    """Drafting at a temperature, against full depth at the same temperature."""
    speedup = ratio(seconds, "full, sampled", "speculate, sampled").as_dict()
    return {
        "temperature": WARM,
        "full_tokens_per_second": rate["full, sampled"],
        "tokens_per_second": rate["speculate, sampled"],
        "speedup": speedup["median"],
        "spread": speedup,
        "acceptance": written["speculate, sampled"].acceptance,
        "distinct_4grams": distinct(written["full, sampled"].texts),
    }


def _batched(strategy: DecodeStrategy, text: Text, settings: DecodeSettings) -> dict[str, Any]:
    """Several prompts at once, at full depth and with drafts, of the first stage where no drafter pays."""
    prompts, engine = heldout_prompts(text, settings.rows, settings.prompt_tokens), strategy.engine
    drafts = strategy if isinstance(strategy, Speculate) else Speculate(engine, DraftRule(0.0, 4))
    both: dict[str, DecodeStrategy] = {"full": FixedDepth(engine), "speculate": drafts}
    turns = {name: partial(generate_batch, one, prompts, settings.tokens) for name, one in both.items()}
    seconds = take_turns(turns, settings.rounds, warmup=1)
    speedup = ratio(seconds, "full", "speculate").as_dict()
    middle = sorted(seconds["full"])[len(seconds["full"]) // 2]
    return {
        "rows": len(prompts),
        "full_tokens_per_second": settings.tokens * len(prompts) / middle,
        "speculate_speedup": speedup["median"],
        "spread": speedup,
        "pays": speedup["median"] > 1,
    }


def read_bandwidth(rounds: int = 7) -> float:
    """Bytes a second that as many threads as torch has read together, at best, of large pages."""
    memory = Memory(READ_BYTES).take(READ_BYTES)
    memory[:] = 1
    numbers = torch.from_numpy(memory.view(np.float32))
    ways: dict[str, Callable[[], object]] = {"torch": numbers.sum}
    if library.missing_reason() is None:
        ways["native"] = partial(
            library.read_plainly, numbers.data_ptr(), READ_BYTES, torch.get_num_threads()
        )
    return READ_BYTES / min(min(each) for each in take_turns(ways, rounds).values())


def matrix_bytes(engine: Engine, stack: Stack) -> float:
    """Bytes of the matrices that one token reads at full depth; `stack` as it was trained."""
    needed = {p.index for stage, _ in engine.plan.prediction.full for p in engine.plan.needed(stage)}
    used = {i for k in needed for i in engine.plan.stages[k].layers}
    count = 0
    for i in used:
        tables = {id(m.weight) for m in stack.layers[i].modules() if isinstance(m, nn.Embedding)}
        count += sum(p.numel() for p in stack.layers[i].parameters() if p.dim() == 2 and id(p) not in tables)
    for stage, _ in engine.plan.prediction.full:
        head = stack.projection(engine.plan.stages[stage].head)
        count += 0 if head is None else head.weight.numel()
    bits = NATIVE_BITS if engine.runtime.name == "native" else BITS
    return count * bits[engine.runtime.precision] / 8
