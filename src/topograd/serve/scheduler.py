"""Continuous batching: texts join and leave between steps, each with its own depth.

A step:

    1. jobs that were cancelled or are too late leave; waiting ones take free rows
    2. some more prompt tokens are pushed: `chunk` of them in all, so that a long prompt stalls nobody
    3. every stage that several rows need runs once for all of them, prompts and texts together
    4. each lane (`lanes.py`) writes at least one token in each of its rows; one of a third of the layers
       writes three times, so that a shallow text does not go at the pace of a deep one

Order. A request's k-th text has the tag v + k, where v is the tag of the text that was admitted last; the
least tag goes first. So a request with many texts does not keep out those that come later, and nobody
starves. Of the prompt tokens of a step, half go to the text that was admitted first and the rest to those
with the fewest tokens left.

Greedy answers do not depend on who else is there, but for rounding: float64 exactly, float32 but for ties.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from topograd.decode.engine import Emitted
from topograd.decode.rows import Rows
from topograd.errors import TopogradError
from topograd.runtime.protocol import torch_beside
from topograd.serve.jobs import Finish, Job, Progress, Scored, Written
from topograd.serve.lanes import SCORED_AT_ONCE, Lane, Lanes
from topograd.serve.metrics import Counters
from topograd.serve.pool import Pool, Row
from topograd.serve.settings import Limits

LATE = "the request took longer than the server allows; ask for less, or when there is less to do"
INTERNAL = "the model could not go on with this text; the server's log says why"


@dataclass(eq=False)
class Active:
    """A job in its row."""

    job: Job
    row: Row
    lane: Lane
    pool: Pool

    @property
    def unread(self) -> int:
        return len(self.job.prompt) - self.job.read


class Scheduler:
    """All texts of one model; used from one thread."""

    def __init__(self, lanes: Lanes, limits: Limits, counters: Counters) -> None:
        self.lanes, self.limits, self.counters = lanes, limits, counters
        self.active: list[Active] = []
        self._waiting: list[tuple[float, int, Job, Lane]] = []
        self._tag = 0.0
        self._pools: dict[Lane, Pool] = {}
        self.base = Pool(lanes.engine)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, jobs: Sequence[Job]) -> None:
        """Queue the texts of one request."""
        for place, job in enumerate(jobs):
            try:
                lane = self.lanes.of(job.depth, job.sampling, job.specialists)
            except TopogradError as error:
                said = str(error).replace(str(self.lanes.session.run.folder), "RUN")  # a path is not theirs
                job.tell(Progress(finish="error", error=said, status=400))
                continue
            job.tell(Progress())  # it can be done
            heapq.heappush(self._waiting, (self._tag + place, job.number, job, lane))

    def step(self) -> bool:
        """Go on with everybody; False if there was nothing to do."""
        with torch_beside(self.lanes.engine.runtime):
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
        lanes: dict[int, list[Active]] = {}
        for active in writing:
            if active in self.active:
                lanes.setdefault(id(active.lane), []).append(active)
        deepest = max((members[0].lane.layers for members in lanes.values()), default=0)
        for members in lanes.values():
            for _ in range(max(deepest // max(members[0].lane.layers, 1), 1)):
                self._guarded([active for active in members if active in self.active], self._write)
        self.counters.step(time.perf_counter() - began, len(writing))
        return True

    def stop(self) -> None:
        """End every text, running or waiting."""
        for active in list(self.active):
            self._finish(active, "cancelled")
        for _, _, job, _ in self._waiting:
            self._dismiss(job, Progress(finish="cancelled"))
        self._waiting.clear()

    def _leave(self) -> None:
        now = time.perf_counter()
        for active in list(self.active):
            if active.job.cancelled:
                self._finish(active, "cancelled")
            elif now > active.job.deadline:
                self._finish(active, "error", LATE, status=504)
        kept = []
        for entry in self._waiting:
            job = entry[2]
            if job.cancelled:
                self._dismiss(job, Progress(finish="cancelled"))
            elif now > job.deadline:
                self._dismiss(job, Progress(finish="error", error=LATE, status=504))
            else:
                kept.append(entry)
        if len(kept) < len(self._waiting):
            heapq.heapify(kept)
            self._waiting = kept

    def _dismiss(self, job: Job, progress: Progress) -> None:
        """End a text that had no row yet; it counts like any other."""
        assert progress.finish is not None
        self.counters.finished(progress.finish, 0, 0)
        job.tell(progress)

    def _admit(self) -> None:
        while self._waiting and len(self.active) < self.limits.rows:
            if self._follows(self._waiting[0][2], self._waiting[0][3]):
                return
            tag, _, job, lane = heapq.heappop(self._waiting)
            self._tag = max(self._tag, tag)
            pool, grow = self._pool(lane)
            row, have = pool.take(job.prompt, lane.reads, grow)
            job.read = job.timings.cached = have
            job.timings.admitted = time.perf_counter()
            self.counters.admitted(len(job.prompt), have)
            self.active.append(Active(job, row, lane, pool))

    def _follows(self, job: Job, lane: Lane) -> bool:
        """Whether a text had better wait, because one that begins like it is being read."""
        for active in self.active:
            if active.unread > self.limits.chunk and active.lane.engine.plan is lane.engine.plan:
                theirs = active.job.prompt
                most = min(len(theirs), len(job.prompt))
                common = next((i for i in range(most) if theirs[i] != job.prompt[i]), most)
                if common > active.job.read + self.limits.chunk:
                    return True
        return False

    def _pool(self, lane: Lane) -> tuple[Pool, bool]:
        """The rows of a lane's plan, and whether there may be one more; for that, rows of other plans go."""
        pool = self.base if self.lanes.shared(lane) else self._pools.get(lane)
        if pool is None:
            pool = self._pools[lane] = Pool(lane.engine)
        pools = [self.base, *self._pools.values()]
        while sum(len(each.rows) for each in pools) >= self.limits.rows and not any(
            not row.busy for row in pool.rows
        ):
            free = [(row.used, each, row) for each in pools for row in each.rows if not row.busy]
            _, owner, oldest = min(free, key=lambda entry: entry[0])
            owner.drop(oldest)
        for key in [key for key, each in self._pools.items() if not each.rows and each is not pool]:
            del self._pools[key]
        return pool, sum(len(each.rows) for each in pools) < self.limits.rows

    def _read(self) -> list[Active]:
        """Push prompt tokens; the rows that got some and have more to read."""
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
                    active.row.cache.push([job.prompt[job.read : job.read + count]])
                    job.read += count
        return [a for a in reading if shares[id(a)] and a.unread]

    def _together(self, members: Sequence[Active]) -> None:
        """Run each stage that rows are sure to need for all of them at once."""
        plans: dict[int, list[Active]] = {}
        for active in members:
            plans.setdefault(id(active.pool), []).append(active)
        for rows in plans.values():
            wanted = [set(a.lane.reads if a.unread or a.job.score_prompt else a.lane.first) for a in rows]
            for stage in sorted(set().union(*wanted)):
                some = [a for a, stages in zip(rows, wanted, strict=True) if stage in stages]
                self._guarded(some, lambda some, stage=stage: self._run(some, stage))

    @staticmethod
    @torch.inference_mode()
    def _run(members: Sequence[Active], stage: int) -> None:
        Rows([a.row.cache for a in members]).run(stage)

    def _guarded(self, members: Sequence[Active], act: object) -> None:
        """Do something for some rows; what fails ends their texts, and nobody else's."""
        try:
            act(members)  # type: ignore[operator]
        except Exception as error:
            said = str(error) if isinstance(error, TopogradError) else INTERNAL
            if not isinstance(error, TopogradError):
                self.counters.failed(error)
            for active in members:
                if active in self.active:
                    self._finish(active, "error", said)
                    active.pool.drop(active.row)

    @torch.inference_mode()
    def _score_prompt(self, members: Sequence[Active]) -> None:
        (active,) = members
        job, cache = active.job, active.row.cache
        if job.candidates is not None:
            if not active.unread:
                self._candidates(active)
            return
        if not job.score_prompt:
            return
        active.lane.run(cache, active.lane.reads)
        job.scores += self._prompt_scores(active, len(job.scores), job.logprobs or 0, None)
        if len(job.scores) == len(job.prompt):
            job.score_prompt = False
            job.tell(Progress(prompt=tuple(job.scores)))
            if not job.left:
                self._finish(active, "length")

    def _prompt_scores(self, active: Active, known: int, top: int, exit_: int | None) -> list[Scored]:
        """Scores of the prompt's tokens from `known` on, as far as they are read."""
        tokens = active.job.prompt[known : active.job.read]
        count, found = len(tokens) + 1, []
        for start in range(0, len(tokens), SCORED_AT_ONCE):
            stop = min(start + SCORED_AT_ONCE, len(tokens))
            logits = active.lane.span(active.row.cache, count - start, count - stop, exit_)
            found += scores(logits, tokens[start:stop], top)
        return found

    def _candidates(self, active: Active) -> None:
        engine, job = active.lane.engine, active.job
        for stage in engine.exits:
            engine.run(active.row.cache, stage)
        each = [self._prompt_scores(active, 1, job.candidates or 0, k) for k in range(len(engine.exits))]
        job.tell(Progress(candidates=tuple(tuple(found) for found in each)))
        self._finish(active, "length")

    def _write(self, members: Sequence[Active]) -> None:
        if not members:
            return
        lane = members[0].lane
        fresh = [a for a in members if a.job.left]
        for active in members:
            if not active.job.left:
                self._finish(active, "length")
        if not fresh:
            return
        near = [a for a in fresh if lane.near_end(a.row.cache)]
        for some, by in ((near, self.lanes.full()), ([a for a in fresh if a not in near], lane)):
            if some:
                emitted = by.advance([a.job for a in some], [a.row.cache for a in some])
                for active, tokens in zip(some, emitted, strict=True):
                    self._deliver(active, tokens)

    def _deliver(self, active: Active, made: Sequence[Emitted]) -> None:
        job = active.job
        tokens = made[: job.left]
        known = (
            [None] * len(tokens) if job.logprobs is None else self._token_scores(active, tokens, len(made))
        )
        written: list[Written] = []
        finish = None
        for token, score in zip(tokens, known, strict=True):
            job.left -= 1
            end = token.token in job.ends
            text = "" if end else job.stream.feed(token.token)
            job.stages.append(token.stage)
            written.append(Written(token.token, text, token.stage, bool(token.drafter), score, end))
            if end or job.stream.stopped:
                finish = "stop"
                break
        if finish is None and not job.left:
            finish = "length"
        unused = sum(bool(token.drafter) for token in made[len(written) :])
        job.timings.drafted -= unused  # nobody asked for them
        job.timings.accepted -= unused
        if job.timings.first is None:
            job.timings.first, job.timings.at_first = time.perf_counter(), len(written)
            self.counters.first(job.timings.first - job.timings.asked)
        self.counters.written(len(written))
        if finish is None:
            job.tell(Progress(tuple(written)))
        else:
            self._finish(active, finish, written=written)  # type: ignore[arg-type]

    def _token_scores(self, active: Active, tokens: Sequence[Emitted], made: int) -> Sequence[Scored | None]:
        """Under the exit that each token left after where it left early, else under the depth itself."""
        top, lane = active.job.logprobs or 0, active.lane
        left = tokens[0].stage if lane.leaves_early else None
        logits = lane.logits(active.row.cache, made, left)[: len(tokens)]
        return scores(logits, [token.token for token in tokens], top)

    def _finish(
        self,
        active: Active,
        finish: Finish,
        error: str = "",
        written: Sequence[Written] = (),
        status: int = 500,
    ) -> None:
        job = active.job
        self.active.remove(active)
        active.row.busy = False
        job.timings.finished = time.perf_counter()
        self.counters.finished(finish, job.timings.drafted, job.timings.accepted)
        rest = job.stream.finish() if finish in ("stop", "length") else ""
        job.tell(Progress(tuple(written), rest, finish=finish, error=error, status=status))


def scores(logits: Tensor, tokens: Sequence[int], top: int) -> list[Scored]:
    """log p of each of n tokens, and of the `top` likeliest: log softmax of n rows of logits, temperature 1.

    They are what `score` gives for the same model, and what `echo` with `logprobs` answers.
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
