"""Modes for rows of many requests: each depth one mode, each row its own sampling.

`depth/modes.py` makes a mode for one sampling and counts rows from 0. Here a mode is made once for a depth
and used for whichever rows have it now; before each step it is told whose rows they are.

    full, prefix, path, branches    one lane a depth; every row draws by its own settings
    speculate, wand                 one lane a depth and sampling, since their drafts and exits depend on it;
                                    one lane a text where a drafter remembers its text (lookup, draft stages)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from topograd.decode.drafters import MOST_DRAFT, PrefixDrafter
from topograd.decode.engine import AnyCache, Chooser, Composed, Emitted, Engine, Mode, Prefix, check_finite
from topograd.decode.log_op import compose
from topograd.decode.modes import mode_of
from topograd.decode.rows import OneRow, Rows
from topograd.decode.sampling import Sampling, draw, probabilities
from topograd.decode.speculation import Speculate
from topograd.decode.wand import Wand
from topograd.errors import ConfigError
from topograd.runs.session import Session
from topograd.serve.jobs import Job
from topograd.specialists.model import SpecialistPool

MOST_LANES = 64
"""Lanes that are kept; others are made again when they are asked for."""
SCORED_AT_ONCE = 64
"""Positions whose logits exist at the same time while a prompt is scored."""


class RowChooser(Chooser):
    """A token for each row of logits, by the row's own sampling and random stream."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs

    def choose(self, logits: Tensor, active: Sequence[bool]) -> list[int]:
        best, tokens = logits.max(-1)
        check_finite(best.tolist())
        found: list[int] = tokens.tolist()
        for row, (job, on) in enumerate(zip(self.jobs, active, strict=True)):
            if on and not job.sampling.greedy:
                found[row] = draw(probabilities(logits[row], job.sampling), job.generator)
        return found


class Lane:
    """A mode, and how it is asked for rows of jobs."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.engine: Engine = mode.engine
        self.first = self._first()
        """The stages that a step is sure to run."""
        self.reads = self._needed(self._last())
        """The stages that have to run a prompt."""

    def _last(self) -> list[int]:
        if isinstance(self.mode, Prefix):
            return [self.mode.stage]
        return list(self.mode.ends) if isinstance(self.mode, Composed) else [self.engine.exits[-1]]

    def _first(self) -> list[int]:
        mode = self.mode
        if isinstance(mode, Speculate):
            return self._needed([mode.drafter.stage]) if isinstance(mode.drafter, PrefixDrafter) else []
        if isinstance(mode, Wand):
            return (
                self._needed([self.engine.exits[mode.exits[0][0]]])
                if mode.exits
                else self._needed(self._last())
            )
        return self._needed(self._last())

    def _needed(self, exits: Sequence[int]) -> list[int]:
        """The stages that predictions after `exits` read, and all that they hear, in order."""
        plan = self.engine.plan
        read = {stage for exit_ in exits for stage, _ in plan.prediction.after(exit_)}
        return sorted({planned.index for stage in read for planned in plan.needed(stage)})

    @torch.inference_mode()
    def advance(self, jobs: Sequence[Job], rows: Sequence[OneRow]) -> list[list[Emitted]]:
        """At least one token in each row."""
        mode = self.mode
        if isinstance(mode, Wand):  # it writes one row at a time
            return [self._wand(mode, job, row) for job, row in zip(jobs, rows, strict=True)]
        if isinstance(mode, Speculate):
            mode.generators = [job.generator for job in jobs]
            written = mode.advance(Rows(rows), [True] * len(rows))
            for job, drafted, row in zip(jobs, mode.drafted, written, strict=True):
                job.timings.drafted += drafted
                job.timings.accepted += sum(bool(token.drafter) for token in row)
            return written
        assert isinstance(mode, Prefix | Composed)
        mode.chooser = RowChooser(jobs)
        return mode.advance(Rows(rows), [True] * len(rows))

    def _wand(self, mode: Wand, job: Job, row: OneRow) -> list[Emitted]:
        mode.chooser = RowChooser([job])
        return mode.advance(row, [True])[0]

    @torch.inference_mode()
    def logits(self, row: OneRow | _Before, count: int, exit_: int | None = None) -> Tensor:
        """What this depth predicts behind the last `count` positions that ran: (count, vocab).

        For an exit, or as the depth itself predicts a text that is given.
        """
        if exit_ is None and isinstance(self.mode, Composed):
            each = [self.engine.logits(row, end, [count])[0] for end in self.mode.ends]  # type: ignore[arg-type]
            return each[0] if len(each) == 1 else compose(each, self.mode.weights)
        stage = self._last()[0] if exit_ is None else self.engine.exits[exit_]
        return self.engine.logits(row, stage, [count])[0]  # type: ignore[arg-type]

    @torch.inference_mode()
    def span(self, row: OneRow, start: int, stop: int, exit_: int | None = None) -> Tensor:
        """The same from `start` to `stop` positions before the end: (start - stop, vocab)."""
        return self.logits(_Before(row, stop), start - stop, exit_)

    @cached_property
    def layers(self) -> int:
        """How many layers a token of this lane runs at most."""
        return sum(len(self.engine.plan.stages[stage].layers) for stage in self.reads)

    def near_end(self, row: OneRow) -> bool:
        """Whether drafts could pass the end of the context; then full depth goes on, and writes the same."""
        if not isinstance(self.mode, Speculate):
            return False
        drafter = self.mode.drafter
        longest = drafter.rule.longest if isinstance(drafter, PrefixDrafter) else MOST_DRAFT
        return len(row.tokens[0]) + longest >= self.engine.context

    @property
    def remembers(self) -> bool:
        """Whether its drafter keeps something of its text, so that another text needs another one."""
        return isinstance(self.mode, Speculate) and not isinstance(self.mode.drafter, PrefixDrafter)

    @property
    def leaves_early(self) -> bool:
        """Whether a token's exit is its own choice, so that its probability is that exit's."""
        return isinstance(self.mode, Wand)

    @torch.inference_mode()
    def run(self, cache: AnyCache, stages: Sequence[int]) -> None:
        for stage in stages:
            cache.run(stage)


class _Before:
    """A row as it was `back` positions ago, to read hidden states from."""

    def __init__(self, row: OneRow, back: int) -> None:
        self.row, self.back = row, back

    def hidden(self, stage: int, counts: Sequence[int]) -> Tensor:
        """The outputs at the last positions before that."""
        hidden = self.row.hidden(stage, [counts[0] + self.back])
        return hidden[:, : counts[0]]


class Lanes:
    """The lanes of a model, made when a depth is first asked for."""

    def __init__(self, session: Session, engine: Engine, specialists: SpecialistPool | None = None) -> None:
        self.session, self.engine, self.specialists = session, engine, specialists
        self._made: OrderedDict[object, Lane] = OrderedDict()

    def of(self, depth: str, sampling: Sampling, active: tuple[tuple[str, float], ...] = ()) -> Lane:
        """The lane of a depth and active specialists; ConfigError or RunError where there is none such."""
        alone = depth.startswith(("speculate", "wand"))
        key = (
            (depth, active, sampling.temperature, sampling.top_k, sampling.top_p)
            if alone
            else (depth, active)
        )
        if key not in self._made:
            lane = Lane(self._composed(depth, active) if active else self._mode(depth, sampling))
            if lane.remembers:
                return lane
            self._made[key] = lane
        self._made.move_to_end(key)
        while len(self._made) > MOST_LANES:
            self._made.popitem(last=False)
        return self._made[key]

    def _mode(self, depth: str, sampling: Sampling) -> Mode:
        return mode_of(depth, self.session, self.engine, sampling)

    def _composed(self, depth: str, active: tuple[tuple[str, float], ...]) -> Mode:
        """The base with specialists, at full depth: exits and calibrations are the base's alone."""
        if self.specialists is None:
            raise ConfigError("this server has no specialists; leave them out")
        if depth != "full":
            raise ConfigError(
                f"specialists write at full depth and {depth} is asked for; leave one of them out"
            )
        return Prefix(self.specialists.model(dict(active)).engine)

    def full(self) -> Lane:
        """Full depth."""
        return self.of("full", Sampling())

    def shared(self, lane: Lane) -> bool:
        """Whether a lane's rows are those of the model's own plan."""
        return lane.engine.plan is self.engine.plan
