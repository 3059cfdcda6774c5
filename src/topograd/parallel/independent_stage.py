"""Independent training of one stage of a run, in a process of its own.

Statement. Where stages share no parameter that learns, stage k needs nothing of the others but the output of
stage k - 1 on the same batches ("Product of Experts" §§4.4, 8.5). So every stage is a process of its own,
with its own folder, log and checkpoints, and one link to each neighbour (`link.py`):

    a stage dies       those before it train on and keep the last `buffer` steps of activations; those
                       behind it wait, or replay the last `buffer` steps that they received ("lost")
    it returns         from its own checkpoint, and is given the steps since then that are still kept
    a stage is added   by starting one more behind the last: those before it are not affected, bit for bit

With lost = "wait" and a buffer that covers the outage, every stage's losses are those of a run without a
fault, bit for bit. A stage that was away longer continues with the oldest kept step, and logs the gap.

What must hold, else ConfigError is raised: a chain without gradient between stages; a head of its own for
every stage (heads = "own"); an embedding that only the first stage reads and trains (bus = "detached", and no
x0 blended in by later layers). That nothing else is read is tried: the stage runs on an x0 of NaN."""

import json
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from topograd.errors import ConfigError, DivergenceError, ParallelError
from topograd.exec.objectives import objectives_of, uses_prior
from topograd.exec.thin import Key
from topograd.exec.train_step import output_port
from topograd.files import dump_json
from topograd.nn.relays import BoundedRelay
from topograd.nn.stack import Stack
from topograd.parallel.checkpoint_set import IndependentStageStore
from topograd.parallel.layout import Layout, keep_own
from topograd.parallel.link import Address, Arrived, Receiver, Sender
from topograd.parallel.rank_task import check_one_process, check_whole, hand_over
from topograd.parallel.settings import ParallelConfig
from topograd.reading import flat_settings
from topograd.runs.checkpoint import CheckpointStore
from topograd.runs.config import TrainConfig
from topograd.runs.folder import Run
from topograd.topology.dag import EMBEDDING
from topograd.topology.plan import EdgeOutput, Plan
from topograd.training.optimizers import make_optimizers, stage_parameters
from topograd.training.runs import RunTask
from topograd.training.sources import Data
from topograd.training.step_runner import Batch, Step, StepRunner
from topograd.training.trainer import Reading, StepRecord


class TcpTransport:
    """The `Transport` of an independent stage: inputs that arrived, outputs to its sender."""

    def __init__(self, plan: Plan, stage: int, sender: Sender | None) -> None:
        self.stages: Collection[int] = (stage,)
        self.sender = sender
        self.step = 0
        self.quiet = False
        """Whether outputs are not sent, as in a replay."""
        self.waiting: deque[Tensor] = deque()
        self._input = plan.stages[stage].inputs[0][0]
        self._output = output_port(plan.stages[stage])

    def incoming(self, stage: int) -> list[EdgeOutput]:
        return [self._input] if stage == self._input.source else []

    def receive(self, port: EdgeOutput) -> Tensor:
        return self.waiting.popleft()

    def send(self, port: EdgeOutput, value: Tensor) -> None:
        if port == self._output and self.sender is not None and not self.quiet:
            self.sender.put(self.step, value)

    def send_back(self, stage: int, number: int, gradient: Tensor, key: Key) -> None:
        raise AssertionError("no gradient leaves an independent stage (check_alone)")

    def receive_back(self, stage: int, number: int) -> Tensor:
        raise AssertionError("no gradient comes to an independent stage (check_alone)")


@dataclass(kw_only=True)
class IndependentStageLoop(StepRunner):
    """The loop of one stage; the others count as halted."""

    transport: TcpTransport
    stage: int

    def step(self, plan: Plan, batches: Sequence[Batch], number: int = 1) -> Step:
        inputs = list(self.transport.waiting)
        newly: tuple[int, ...] = ()
        if self.stage not in self.halted:
            try:
                return super().step(plan, batches, number)
            except DivergenceError:  # it still sends its outputs, and learns no more
                self.halted.add(self.stage)
                newly = (self.stage,)
                self.transport.waiting.extend(inputs)
        quiet = self.transport.quiet
        self.transport.quiet = quiet or bool(newly)  # then its outputs are sent already
        self._gradients(plan.halted([self.stage]), batches, len(batches))
        self.transport.quiet = quiet
        return Step(torch.full((len(plan.stages),), float("nan")), (), newly)

    def _parts(self, plan: Plan) -> list[list[nn.Parameter]]:
        """The stage's own, and the embedding with it: clipped as in one process, each by itself."""
        own = {id(p) for p in stage_parameters(self.stack, plan, [self.stage])}
        learning = [p for p in self.stack.parameters() if p.grad is not None]
        return [[p for p in learning if id(p) in own], [p for p in learning if id(p) not in own]]


class IndependentStageRun(Run):
    """The folder of one stage: a run whose checkpoints hold that stage alone."""

    @property
    def store(self) -> CheckpointStore:
        return IndependentStageStore(self.checkpoints)


class IndependentStageTask(RunTask):
    """Trains stage `parallel.stage` of a run."""

    loop: StepRunner

    def __init__(self, run: Run, config: TrainConfig, data: Data, parallel: ParallelConfig) -> None:
        check_whole(config)
        super().__init__(IndependentStageRun(run.folder), config, data)
        assert parallel.stage is not None
        self.parallel, self.index = parallel, parallel.stage - 1
        check_alone(self.stack, self.plan, parallel)
        check_one_process(self)
        if any(map(uses_prior, objectives_of(self.plan, self.loop.objectives))):
            raise ConfigError(
                "an objective reads the stages before it, so no stage can train alone",
                setting="objective",
                given=self.config.topology.objective,
            )
        self.plan = self.plan.halted(k for k in range(len(self.plan.stages)) if k != self.index)
        self.missed = self.replayed = 0
        self._receiver: Receiver | None = None
        self._sender: Sender | None = None
        self._arrived: Arrived | None = None
        self._recent: deque[tuple[list[Batch], list[Tensor]]] = deque(maxlen=parallel.buffer)
        self._spread()

    def _spread(self) -> None:
        keep_own(self.stack, Layout.of(self.plan, len(self.plan.stages), stack=self.stack), self.index)
        whole = self.loop
        optimizers = make_optimizers(self.stack, self.config.optimizer, self.plan)
        hand_over(whole.optimizers, optimizers)
        given = {f.name: getattr(whole, f.name) for f in fields(whole)} | {"optimizers": optimizers}
        given["transport"] = TcpTransport(self.plan, self.index, None)
        self.loop = IndependentStageLoop(**given, stage=self.index)

    # The links

    @contextmanager
    def running(self, step: int) -> Iterator[None]:
        self._finished, expected = False, self.index + 1 < self.parallel.stages
        self._link(step)
        try:
            if self._sender is not None and expected:
                self._sender.wait_for_listener(self.parallel.timeout)
            yield
        finally:
            if self._sender is not None:
                patient = self._finished and (expected or self._sender.joins)
                # an interrupted stage does not wait: the receiver asks again
                self._sender.close(self.parallel.timeout if patient else 0.0)
            if self._receiver is not None:
                self._receiver.close()

    def _link(self, step: int) -> None:
        """The links to the neighbours, for step `step + 1`."""
        assert isinstance(self.loop, IndependentStageLoop)
        links, batches = addresses(self.parallel), self.config.accumulate
        facts, timeout = facts_of(self.config, self.data), self.parallel.timeout
        if self.index < len(links):
            made = Sender(links[self.index], facts, self.parallel.buffer, batches, timeout)
            self._sender = self.loop.transport.sender = made
        if self.index > 0:
            self._receiver = Receiver(links[self.index - 1], facts, step + 1, batches, timeout)

    def before_save(self, step: int) -> None:
        """Hand over what the checkpoint will not send again: a kill behind it then loses no step."""
        super().before_save(step)
        if self._sender is not None:
            self._sender.flush(self.parallel.timeout)

    def end(self, results: dict[str, Any]) -> None:
        super().end(results)
        self._finished = results["finished"]

    def summary(self, checkpoint: str) -> dict[str, Any]:
        counts = {"stage": self.index + 1, "missed": self.missed, "replayed": self.replayed}
        return super().summary(checkpoint) | counts

    def wait_for_inputs(self, step: int, interrupted: Callable[[], bool]) -> int | None:
        """Wait for the next step's activations; meanwhile replay, if that is the setting."""
        since = time.monotonic()
        while self._arrived is None:
            if interrupted() or self._receiver is None:
                return None if interrupted() else 0
            replaying = self.parallel.lost == "replay" and self._recent and self._receiver.lost > 0
            self._arrived = self._receiver.take(0.05 if replaying and not self._receiver.connected else 1.0)
            if self._receiver.problem:
                raise ParallelError(f"stage {self.index + 1} does not fit the run: {self._receiver.problem}")
            if self._arrived is None and self._receiver.ended:
                return None
            if self._arrived is None and replaying and not self._receiver.connected:
                self._replay(step)
            if time.monotonic() - since > self.parallel.patience:
                raise ParallelError(
                    f"stage {self.index} sent nothing to stage {self.index + 1} for "
                    f"{self.parallel.patience:g} s",
                    remedy="start it again, then resume this one",
                )
        gap = max(self._arrived.step - step - 1, 0)  # steps that were missed, and their batches
        if gap:
            self.missed += gap
            self.run.log({"kind": "missed", "step": step, "until": step + gap + 1})
            for _ in range(gap):
                super().batches()
        return gap

    def step(self, step: int) -> StepRecord:
        assert isinstance(self.loop, IndependentStageLoop)
        self.loop.transport.step = step + 1
        return super().step(step)

    def batches(self) -> list[Batch]:
        """The batches of the step that arrived, with what the stage before made of them."""
        assert isinstance(self.loop, IndependentStageLoop)
        batches = super().batches()
        if self._arrived is not None:
            self.loop.transport.waiting.extend(self._arrived.values)
            self._recent.append((batches, self._arrived.values))
            self._arrived = None
        return batches

    def _replay(self, step: int) -> None:
        """One more step on earlier inputs; the schedule does not advance."""
        assert isinstance(self.loop, IndependentStageLoop)
        batches, values = random.Random(self.replayed).choice(list(self._recent))
        self.loop.transport.waiting.extend(values)
        self.loop.transport.quiet = True
        self.loop.optimizers.set_rates(step, self.config.steps)
        done = self.loop.step(self.plan, batches, step + 1)
        self.loop.transport.quiet = False
        self.replayed += 1
        self.run.log({"kind": "replay", "step": step, "loss": [done.losses[self.index].item()]})

    def logged_stages(self, plan: Plan) -> list[int]:
        return [self.index]

    def evaluate(self, step: int) -> Reading | None:
        return None


def addresses(parallel: ParallelConfig) -> list[Address]:
    """Where each stage listens for the one behind it, the last one too: a stage may be added there."""
    given = [Address.parse(text) for text in parallel.links.split("+")]
    if len(given) == 1:
        return [Address(given[0].host, given[0].port + k) for k in range(parallel.stages)]
    if len(given) not in (parallel.stages - 1, parallel.stages):
        raise ConfigError(
            setting="links",
            given=parallel.links,
            allowed=f"one for each of {parallel.stages} stages, or that of stage 1",
        )
    return given


def facts_of(config: TrainConfig, data: Data) -> dict[str, Any]:
    """What two neighbours must have alike; the number of stages may differ, since stages can be added."""
    shape = {name: value for name, value in config.model.to_dict().items() if name != "layers"}
    facts = {
        "version": version("topograd"),
        "corpus": data.digest,
        "seed": config.seed,
        "steps": config.steps,
        "batch": config.batch,
        "accumulate": config.accumulate,
        **flat_settings(shape, "model."),
    }
    return dict(json.loads(dump_json(facts)))  # as the other end reads it


def check_alone(stack: Stack, plan: Plan, parallel: ParallelConfig) -> None:
    """Refuse a stage that needs more of the others than the output of the one before it."""
    stages, index = len(plan.stages), (parallel.stage or 1) - 1
    if not index < stages:
        raise ConfigError(
            setting="stage", given=index + 1, allowed=f"at most {stages}, the stages of the topology"
        )
    if parallel.stages > stages:
        raise ConfigError(
            setting="stages", given=parallel.stages, allowed=f"at most {stages}, the stages of the topology"
        )
    remedy = "train with --stage-heads own --bus detached --model.no-x0-blend, or all stages as one job"
    planned = plan.stages[index]
    before = index - 1 if index else EMBEDDING
    if [port.source for port, _ in planned.inputs] != [before] or any(
        lam for p, lam in planned.inputs if p.source >= 0
    ):
        raise ConfigError(
            f"stage {index + 1} reads more than the stage before it, or sends it gradient",
            setting="stage",
            given=index + 1,
            remedy=remedy,
        )
    if isinstance(stack.relay(planned.inputs[0][0].relay), BoundedRelay):
        raise ConfigError(
            "stages that are joined by bounded interfaces train together",
            setting="interface",
            remedy="use one job",
        )
    if not plan.topology.own_heads and stages > 1:
        raise ConfigError(
            "stages share a head that learns, so no stage can train alone", setting="heads", remedy=remedy
        )
    if index and planned.live_bus:
        raise ConfigError(
            f"stage {index + 1} trains the embedding through x0", setting="bus", given="live", remedy=remedy
        )
    layout = Layout.of(plan, stages, stack=stack)
    if any(layout.readers[name] != (0,) for name in layout.embedding):
        raise ConfigError(
            f"the layers of stage {index + 1} read x0, which the first stage changes",
            setting="model.x0_blend",
            remedy=remedy,
        )
