"""Speedup of a depth over full depth in a server with several clients.

Each client continues stretches of source code, which repeats itself as code does, one text at a time. The
scheduler of the server runs them without sockets, so that the model's own speed is measured. Depths take
turns; a speedup is the median over rounds of the seconds at full depth over those at the depth (`timing.py`),
prompts included.

    mismatches    texts that leave full depth's elsewhere than where its two best logits are closer than
                  rounding between batch shapes; those are `ties` (`decode/agreement.py`). Greedy text.
"""

import argparse
import ast
import bisect
import calendar
import contextlib
import copy
import csv
import difflib
import functools
import heapq
import inspect
import textwrap
import time
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

from topograd.data.tokenizer import Tokenizer
from topograd.decode.agreement import differences
from topograd.decode.engine import Emitted, Engine
from topograd.decode.sampling import Sampling
from topograd.decode.text import TextStream
from topograd.errors import ConfigError
from topograd.runs.session import LoadedTextRun
from topograd.serve.jobs import Job, Progress
from topograd.serve.metrics import Counters
from topograd.serve.scheduler import Scheduler
from topograd.serve.settings import Limits, ServeSettings
from topograd.timing import ratio, read_in_turns

SOURCES: Sequence[ModuleType] = (
    argparse, ast, bisect, calendar, contextlib, copy, csv, difflib, functools, heapq, inspect, textwrap,
)  # fmt: skip
"""Modules of the standard library whose source is continued."""


def bench_serve(session: LoadedTextRun, engine: Engine, settings: ServeSettings) -> dict[str, Any]:
    """Tokens a second, the speedup over full depth, and texts that are not full depth's."""
    context = session.config.model.context
    length = min(settings.prompt_tokens, context // 2)
    tokens = min(96, context - length) if settings.tokens is None else settings.tokens
    if length + tokens > context:
        allowed = f"at most {context - length} behind {length} prompt tokens"
        raise ConfigError(setting="tokens", given=tokens, allowed=allowed)
    prompts = code_prompts(session.tokenizer, settings.clients, length)
    scheduler = Scheduler(session, engine, Limits(rows=settings.clients), Counters())
    if settings.depth != "full" and scheduler.strategy(settings.depth).engine.plan is not engine.plan:
        raise ConfigError(setting="depth", given=settings.depth, allowed="full, a prefix or speculate")
    written = {depth: _write(scheduler, prompts, depth, tokens) for depth in ("full", settings.depth)}

    def clock(depth: str) -> float:
        began = time.perf_counter()
        _write(scheduler, prompts, depth, tokens)
        return time.perf_counter() - began

    seconds = read_in_turns({depth: partial(clock, depth) for depth in written}, settings.rounds, warmup=0)
    made = sum(map(len, written[settings.depth][0]))
    middle = sorted(seconds[settings.depth])[settings.rounds // 2]
    speedup = ratio(seconds, "full", settings.depth).as_dict()
    drafted, accepted = written[settings.depth][1]
    return {
        "run": str(session.run.folder),
        "runtime": engine.runtime.name,
        "weights": engine.runtime.precision,
        "settings": vars(settings) | {"tokens": tokens},
        "tokens_per_second": made / middle,
        "full_tokens_per_second": made / sorted(seconds["full"])[settings.rounds // 2],
        "speedup_over_full": speedup["median"],
        "spread": speedup,
        "acceptance": accepted / drafted if drafted else None,
        **differences(engine, prompts, written[settings.depth][0], written["full"][0]),
    }


def code_prompts(tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
    """Stretches of source code of so many tokens, none of them twice."""
    prompts: list[list[int]] = []
    place = 0
    while len(prompts) < count:
        for module in SOURCES:
            source = inspect.getsource(module)
            lines = source.splitlines(keepends=True)
            text = "".join(lines[40 * (place + 1) % len(lines) :])
            prompt = tokenizer.encode(text[: 16 * length], "prompt")[:length]
            if len(prompt) == length and len(prompts) < count:
                prompts.append(prompt)
        place += 1
    return prompts


def _write(
    scheduler: Scheduler, prompts: Sequence[list[int]], depth: str, tokens: int
) -> tuple[list[list[Emitted]], tuple[int, int]]:
    """What each prompt is continued by, and tokens drafted and accepted."""
    texts: list[list[Emitted]] = [[] for _ in prompts]
    tokenizer = scheduler.session.tokenizer
    jobs = []
    for text, prompt in zip(texts, prompts, strict=True):

        def collect(progress: Progress, text: list[Emitted] = text) -> None:
            if progress.finish == "error":
                raise ConfigError(progress.error)
            text.extend(Emitted(token.token, token.exit) for token in progress.written)

        jobs.append(Job(prompt, tokens, depth, Sampling(), TextStream(tokenizer), collect))
    for job in jobs:
        scheduler.add([job])
    while scheduler.step():
        pass
    scheduler.forget()  # each turn reads its prompts
    return texts, (sum(j.timings.drafted for j in jobs), sum(j.timings.accepted for j in jobs))
