"""Continuous batching: texts join and leave between steps, each with its own decode strategy.

A step:

    1. jobs that were cancelled or are too late leave; waiting ones take free slots
    2. some more prompt tokens are pushed: `chunk` of them in all, so that a long prompt delays no other text
    3. every stage that several texts need runs once for all of them, prompts and texts together
    4. each strategy (`decode/strategies.py`) writes at least one token in each of its texts, in one pass for
       all of them: drafts of many requests are verified together. A strategy of a third of the layers writes
       three times, so that a shallow text does not go at the pace of a deep one

Order. A request's k-th text has the tag v + k, where v is the tag of the text that was admitted last; the
least tag goes first. So a request with many texts does not keep out those that come later, and no text
starves. Of the prompt tokens of a step, half go to the text that was admitted first and the rest to those
with the fewest tokens left.

Greedy texts do not depend on the rest of the batch: exactly in float64, but for ties in float32.
"""

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from topograd.decode.calibration.measure import PositionCosts, measure_positions, measure_uneven
from topograd.decode.depths import strategy_of
from topograd.decode.engine import Emitted, Engine
from topograd.decode.sequence import common_prefix
from topograd.decode.strategies import DecodeStrategy, FixedDepth
from topograd.errors import ConfigError, TopogradError
from topograd.runs.session import LoadedTextRun
from topograd.runtime.protocol import single_threaded_torch
from topograd.serve.disk_cache import PromptCache
from topograd.serve.embeddings import pooled
from topograd.serve.jobs import Finish, Job, Progress, Scored, Written
from topograd.serve.metrics import Counters
from topograd.serve.pool import Pool, Slot
from topograd.serve.settings import Limits
from topograd.specialists.model import SpecialistPool

TOO_LATE = Progress(
    finish="error",
    error="the request took longer than the server allows; ask for fewer tokens, or try again later",
    status=504,
)
CANCELLED = Progress(finish="cancelled")
INTERNAL = "the model failed on this text; the reason is in the server's log"


SCORED_AT_ONCE = 64
"""Positions whose logits exist at the same time while a prompt is scored."""
MAX_STRATEGIES = 64
"""Cached strategies; others are made again when a request names them."""


@dataclass(eq=False)
class Active:
    """A job in its slot."""

    job: Job
    slot: Slot
    strategy: DecodeStrategy
    pool: Pool

    @property
    def unread(self) -> int:
        return len(self.job.prompt) - self.job.prompt_pos


class Scheduler:
    """All texts of one model; used from one thread."""

    def __init__(
        self,
        session: LoadedTextRun,
        engine: Engine,
        limits: Limits,
        counters: Counters,
        specialists: SpecialistPool | None = None,
        disk: PromptCache | None = None,
    ) -> None:
        self.session, self.engine, self.specialists = session, engine, specialists
        self.limits, self.counters = limits, counters
        self.active: list[Active] = []
        self._waiting: list[tuple[float, int, Job, DecodeStrategy]] = []
        self._tag = 0.0
        self._costs: PositionCosts | None = None
        self._strategies: OrderedDict[object, DecodeStrategy] = OrderedDict()
        self._pools: dict[int, Pool] = {}
        """By the plan of the sequences; the model's own is always there."""
        self.base = self._pools[id(engine.plan)] = Pool(engine, disk)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, jobs: Sequence[Job]) -> None:
        """Queue the texts of one request."""
        for place, job in enumerate(jobs):
            try:
                strategy = self.strategy(job.depth, job.sampling.greedy, job.specialists)
            except TopogradError as error:
                message = str(error).replace(str(self.session.run.folder), "RUN")  # a path is not theirs
                job.on_progress(Progress(finish="error", error=message, status=400, param="depth"))
                continue
            job.on_progress(Progress())  # it can be done
            heapq.heappush(self._waiting, (self._tag + place, job.number, job, strategy))

    def strategy(
        self, depth: str, greedy: bool = True, active: tuple[tuple[str, float], ...] = ()
    ) -> DecodeStrategy:
        """The strategy of a depth and active specialists; ConfigError or RunError where there is none."""
        key = depth, greedy or not depth.startswith("speculate"), active
        if key not in self._strategies:
            if active:
                self._strategies[key] = self._composed(depth, active)
            else:
                self._strategies[key] = strategy_of(
                    depth, self.session, self.engine, greedy, costs=self._position_costs
                )
        self._strategies.move_to_end(key)
        while len(self._strategies) > MAX_STRATEGIES:
            self._strategies.popitem(last=False)
        return self._strategies[key]

    def _position_costs(self) -> PositionCosts:
        """What positions cost on this host, measured when drafts are first asked for without a calibration:
        whether a draft pays depends on how many texts there are."""
        if self._costs is None:
            uneven = measure_uneven(self.engine)
            self._costs = replace(measure_positions(self.engine, rounds=3), uneven=uneven)
        return self._costs

    def _composed(self, depth: str, active: tuple[tuple[str, float], ...]) -> DecodeStrategy:
        """The base with specialists, at full depth: exits and calibrations are the base's alone."""
        if self.specialists is None:
            raise ConfigError(
                "this server has no specialists", setting="specialists", remedy="leave them out"
            )
        if depth != "full":
            raise ConfigError(setting="depth", given=depth, allowed="full where specialists are active")
        return FixedDepth(self.specialists.model(dict(active)).engine)

    def step(self) -> bool:
        """Advance every text; False if there was nothing to do."""
        with single_threaded_torch(self.engine.runtime):
            return self._step()

    def _step(self) -> bool:
        self._leave()
        self._admit()
        if not self.active:
            return False
        began = time.perf_counter()
        reading = self._read()
        writing = [a for a in self.active if not a.unread]
        self._together([*reading, *writing])
        for active in [*reading, *writing]:
            self._guarded([active], self._score_prompt)
        together: dict[int, list[Active]] = {}
        for active in writing:
            if active in self.active:
                together.setdefault(id(active.strategy), []).append(active)
        deepest = max((members[0].strategy.layers for members in together.values()), default=0)
        for members in together.values():
            for _ in range(max(deepest // max(members[0].strategy.layers, 1), 1)):
                self._guarded([active for active in members if active in self.active], self._write)
        self.counters.step(time.perf_counter() - began, len(writing))
        return True

    def stop(self) -> None:
        """End every text, running or waiting."""
        for active in list(self.active):
            self._finish(active, CANCELLED)
        for _, _, job, _ in self._waiting:
            self._dismiss(job, CANCELLED)
        self._waiting.clear()

    def forget(self) -> None:
        """Free the caches of ended texts."""
        for pool in self._pools.values():
            for slot in [slot for slot in pool.slots if not slot.busy]:
                pool.drop(slot)

    def _leave(self) -> None:
        now = time.perf_counter()
        for active in list(self.active):
            if active.job.cancelled:
                self._finish(active, CANCELLED)
            elif now > active.job.deadline:
                self._finish(active, TOO_LATE)
        retained = []
        for entry in self._waiting:
            job = entry[2]
            if job.cancelled:
                self._dismiss(job, CANCELLED)
            elif now > job.deadline:
                self._dismiss(job, TOO_LATE)
            else:
                retained.append(entry)
        if len(retained) < len(self._waiting):
            heapq.heapify(retained)
            self._waiting = retained

    def _dismiss(self, job: Job, progress: Progress) -> None:
        """End a text that had no slot yet; it counts like any other."""
        assert progress.finish is not None
        self.counters.finished(progress.finish, 0, 0)
        job.on_progress(progress)

    def _admit(self) -> None:
        while self._waiting and len(self.active) < self.limits.rows:
            if self._follows(self._waiting[0][2], self._waiting[0][3]):
                return
            tag, _, job, strategy = heapq.heappop(self._waiting)
            self._tag = max(self._tag, tag)
            pool, grow = self._pool(strategy)
            slot, have = pool.take(job.prompt, strategy.prompt_stages, job.sampling, grow, job.tenant)
            job.prompt_pos = job.timings.cached = have
            job.timings.admitted = time.perf_counter()
            self.counters.admitted(len(job.prompt), have)
            self.active.append(Active(job, slot, strategy, pool))

    def _follows(self, job: Job, strategy: DecodeStrategy) -> bool:
        """Whether a text had better wait, because one that begins like it is being read."""
        for active in self.active:
            same = active.strategy.engine.plan is strategy.engine.plan and active.job.tenant == job.tenant
            if same and active.unread > self.limits.chunk:
                common = common_prefix(active.job.prompt, job.prompt)
                if common > active.job.prompt_pos + self.limits.chunk:
                    return True
        return False

    def _pool(self, strategy: DecodeStrategy) -> tuple[Pool, bool]:
        """The sequences of a plan, and whether there may be one more; for that, those of other plans go."""
        plan = strategy.engine.plan
        pool = self._pools.get(id(plan))
        if pool is None:
            pool = self._pools[id(plan)] = Pool(strategy.engine)
        pools = list(self._pools.values())
        while sum(len(each.slots) for each in pools) >= self.limits.rows and not any(
            not slot.busy for slot in pool.slots
        ):
            free = [(slot.used, each, slot) for each in pools for slot in each.slots if not slot.busy]
            _, owner, oldest = min(free, key=lambda entry: entry[0])
            owner.drop(oldest)
        for key, each in list(self._pools.items()):
            if not each.slots and each not in (pool, self.base):
                del self._pools[key]
        return pool, sum(len(each.slots) for each in pools) < self.limits.rows

    def _read(self) -> list[Active]:
        """Push prompt tokens; the texts that got some and have more to read."""
        reading = [a for a in self.active if a.unread]
        if not reading:
            return []
        left = self.limits.chunk
        shares = {id(reading[0]): min(reading[0].unread, (left + 1) // 2)}
        left -= shares[id(reading[0])]
        for active in [*sorted(reading[1:], key=lambda a: a.unread), reading[0]]:
            more = min(active.unread - shares.get(id(active), 0), left)
            shares[id(active)] = shares.get(id(active), 0) + more
            left -= more
        with torch.inference_mode():
            for active in reading:
                if count := shares[id(active)]:
                    job = active.job
                    new = job.prompt[job.prompt_pos : job.prompt_pos + count]
                    active.pool.cache.push([active.slot.sequence], [new])
                    job.prompt_pos += count
        return [a for a in reading if shares[id(a)] and a.unread]

    def _together(self, members: Sequence[Active]) -> None:
        """Run each stage that texts are sure to need for all of them at once."""
        plans: dict[int, list[Active]] = {}
        for active in members:
            plans.setdefault(id(active.pool), []).append(active)
        for some in plans.values():
            wanted = [
                set(a.strategy.prompt_stages if a.unread or a.job.score_prompt else a.strategy.sure_stages)
                for a in some
            ]
            for stage in sorted(set().union(*wanted)):
                need = [a for a, stages in zip(some, wanted, strict=True) if stage in stages]
                self._guarded(need, partial(self._run, stage=stage))

    @staticmethod
    @torch.inference_mode()
    def _run(members: Sequence[Active], stage: int) -> None:
        members[0].pool.cache.run([a.slot.sequence for a in members], stage)

    def _guarded(self, members: Sequence[Active], act: Callable[[Sequence[Active]], None]) -> None:
        """Do something for some texts; what fails ends them, and no others."""
        try:
            act(members)
        except Exception as error:
            message = str(error) if isinstance(error, TopogradError) else INTERNAL
            if not isinstance(error, TopogradError):
                self.counters.failed(error)
            for active in members:
                if active in self.active:
                    self._finish(active, Progress(finish="error", error=message))
                    active.pool.drop(active.slot)

    @torch.inference_mode()
    def _score_prompt(self, members: Sequence[Active]) -> None:
        (active,) = members
        job, sequence = active.job, active.slot.sequence
        if job.candidates is not None:
            if not active.unread:
                self._candidates(active)
            return
        if job.embed is not None and not active.unread:
            self._embed(active)
        if not job.score_prompt:
            return
        for stage in active.strategy.prompt_stages:
            active.pool.cache.run([sequence], stage)
        job.scores += self._prompt_scores(active, len(job.scores), job.logprobs or 0, None)
        if len(job.scores) == len(job.prompt):
            job.score_prompt = False
            job.on_progress(Progress(prompt=tuple(job.scores)))
            if not job.remaining:
                self._finish(active, Progress(finish="length"))

    def _prompt_scores(self, active: Active, known: int, top: int, exit_: int | None) -> list[Scored]:
        """Scores of the prompt's tokens from `known` on, as far as they are read."""
        tokens = active.job.prompt[known : active.job.prompt_pos]
        count, results = len(tokens) + 1, list[Scored]()
        for start in range(0, len(tokens), SCORED_AT_ONCE):
            stop = min(start + SCORED_AT_ONCE, len(tokens))
            logits = self._logits(active, count - start, exit_, count - stop)
            results += scores(logits, tokens[start:stop], top)
        return results

    @staticmethod
    @torch.inference_mode()
    def _logits(active: Active, count: int, exit_: int | None, skip: int = 0) -> Tensor:
        """What an exit, or the depth itself, predicts behind the last positions but `skip`: (n, vocab)."""
        batch, strategy = [active.slot.sequence], active.strategy
        if exit_ is None:
            logits = strategy.predictions(batch, [count])
        else:
            logits = strategy.engine.logits(batch, strategy.engine.exits[exit_], [count])
        return logits[: count - skip]

    def _candidates(self, active: Active) -> None:
        engine, job = active.strategy.engine, active.job
        for stage in engine.exits:
            engine.run([active.slot.sequence], stage)
        each = [self._prompt_scores(active, 1, job.candidates or 0, k) for k in range(len(engine.exits))]
        job.on_progress(Progress(candidates=tuple(tuple(row) for row in each)))
        self._finish(active, Progress(finish="length"))

    def _embed(self, active: Active) -> None:
        strategy, sequence = active.strategy, active.slot.sequence
        (stage,) = strategy.last_stages()
        strategy.engine.run([sequence], stage)
        states = active.pool.cache.hidden([sequence], stage, [len(sequence)])
        active.job.on_progress(Progress(embedding=pooled(states, active.job.embed or "mean")))
        self._finish(active, Progress(finish="length"))

    def _write(self, members: Sequence[Active]) -> None:
        for active in members:
            if not active.job.remaining:
                self._finish(active, Progress(finish="length"))
        fresh = [a for a in members if a.job.remaining]
        if not fresh:
            return
        before = [(a.slot.sequence.tally.drafted, a.slot.sequence.tally.accepted) for a in fresh]
        emitted = fresh[0].strategy.step([a.slot.sequence for a in fresh])
        for active, tokens, (drafted, accepted) in zip(fresh, emitted, before, strict=True):
            tally = active.slot.sequence.tally
            active.job.timings.drafted += tally.drafted - drafted
            active.job.timings.accepted += tally.accepted - accepted
            self._deliver(active, tokens)

    def _deliver(self, active: Active, made: Sequence[Emitted]) -> None:
        job, problem = active.job, active.slot.sequence.problem
        if problem is not None:  # of its grammar, so no other text's
            ended = Progress(finish="error", error=str(problem), status=400, param="grammar")
            self._finish(active, ended)
            return
        tokens = made[: job.remaining]
        known = (
            [None] * len(tokens) if job.logprobs is None else self._token_scores(active, tokens, len(made))
        )
        written: list[Written] = []
        finish: Finish | None = None
        for token, score in zip(tokens, known, strict=True):
            job.remaining -= 1
            end = token.token in job.stop_ids
            text = "" if end else job.stream.feed(token.token)
            job.exits.append(token.exit)
            written.append(Written(token.token, text, token.exit, bool(token.drafter), score, end))
            if end or job.stream.stopped:
                finish = "stop"
                break
        if finish is None and len(written) == len(made) and active.slot.sequence.ends():
            finish = "stop"
        if finish is None and not job.remaining:
            finish = "length"
        unused = sum(bool(token.drafter) for token in made[len(written) :])
        job.timings.drafted -= unused  # beyond the end of the text
        job.timings.accepted -= unused
        if job.timings.first is None:
            job.timings.first, job.timings.at_first = time.perf_counter(), len(written)
            self.counters.first(job.timings.first - job.timings.received)
            active.pool.keep(active.slot, len(job.prompt), active.strategy.prompt_stages)
        self.counters.written(len(written))
        progress = Progress(tuple(written), finish=finish)
        if finish is None:
            job.on_progress(progress)
        else:
            self._finish(active, progress)

    def _token_scores(self, active: Active, tokens: Sequence[Emitted], made: int) -> Sequence[Scored | None]:
        """Under the exit that each token left after where it left early, else under the depth itself."""
        top = active.job.logprobs or 0
        left = tokens[0].exit if active.strategy.exits_early else None
        logits = self._logits(active, made, left)[: len(tokens)]
        return scores(logits, [token.token for token in tokens], top)

    def _finish(self, active: Active, progress: Progress) -> None:
        """End a text, with what is new of it."""
        job = active.job
        assert progress.finish is not None
        self.active.remove(active)
        active.slot.busy = False
        job.timings.finished = time.perf_counter()
        self.counters.finished(progress.finish, job.timings.drafted, job.timings.accepted)
        rest = job.stream.finish() if progress.finish in ("stop", "length") else ""
        job.on_progress(replace(progress, rest=rest))


def scores(logits: Tensor, tokens: Sequence[int], top: int) -> list[Scored]:
    """log p of each of n tokens, and of the `top` likeliest: log softmax of n rows of logits, temperature 1.

    They are what `score` gives for the same model, and what `echo` with `logprobs` returns.
    """
    logp = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    logp = logp.log_softmax(-1)
    chosen = logp[torch.arange(len(tokens)), torch.tensor(list(tokens), dtype=torch.long)].tolist()
    if not top:
        return [Scored(value) for value in chosen]
    best = logp.topk(min(top, logp.shape[-1]))
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    likeliest = [tuple(zip(ids, values, strict=True)) for ids, values in rows]
    return [Scored(value, pairs) for value, pairs in zip(chosen, likeliest, strict=True)]
