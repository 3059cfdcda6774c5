"""Training a run on several ranks: the task of one rank, and its view of the run's folder.

Every rank builds the run's model whole, from its seed or from a checkpoint of any number of ranks, and then
drops what is not its own. From then on it trains as one process does (`training/trainer.py`), with another
step. Rank 0 alone writes the log and the results, and holds the folder's lock; all ranks write checkpoints
(`checkpoint_set.py`), at steps alone and not by the clock, and must see the same folder.

Limits. The model must fit a host's memory once while it is built. For an evaluation its weights are gathered
on rank 0, which then holds a second, whole model; the other ranks wait.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from topograd.errors import ConfigError
from topograd.exec.gradient import StepGraph
from topograd.exec.objectives import objectives_of, uses_prior
from topograd.files import dump_json
from topograd.nn.stack import Stack
from topograd.parallel.checkpoint_set import DeltaSetStore, SetStore
from topograd.parallel.layout import Layout, keep_own, present
from topograd.parallel.ranks import Ranks
from topograd.parallel.region_scan import RegionScan
from topograd.parallel.sharding import ELEMENTWISE, cut_like, part_shards, shard_layers
from topograd.parallel.sharding import whole as whole_of
from topograd.parallel.stage_loop import StageLoop
from topograd.parallel.transport import MeshTransport
from topograd.runs.checkpoint import Checkpoint, CheckpointStore
from topograd.runs.config import TrainConfig
from topograd.runs.delta_store import DeltaStore
from topograd.runs.folder import Run
from topograd.runs.session import build_stack
from topograd.runs.topology_config import AVERAGE_TEACHER
from topograd.runs.tune_config import BASED
from topograd.training.activation_cache import OnRows
from topograd.training.optimizers import OptimizerSet, make_optimizers
from topograd.training.runs import RunTask, begin_from
from topograd.training.sources import Data
from topograd.training.trainer import Reading


@dataclass(frozen=True)
class RankRun(Run):
    """A run's folder as one rank of a job sees it: rank 0 writes, the others only add their checkpoints."""

    ranks: Ranks

    @property
    def store(self) -> CheckpointStore:
        if isinstance(super().store, DeltaStore):
            return DeltaSetStore(self.folder, self.ranks)
        return SetStore(self.checkpoints, self.ranks)

    def log(self, record: Mapping[str, Any]) -> None:
        if self.ranks.first:
            super().log(record)

    def write_results(self, results: Mapping[str, Any]) -> None:
        if self.ranks.first:
            super().write_results(results)

    def rewind_metrics(self, step: int) -> None:
        if self.ranks.first:
            super().rewind_metrics(step)

    def check_unmodified(self, known: Sequence[str]) -> None:
        """Rank 0 holds the folder and looks for all: what it tidies meanwhile is no other process's work."""
        if self.ranks.first:
            super().check_unmodified(known)

    @contextmanager
    def lock(self) -> Iterator[None]:
        if not self.ranks.first:
            yield
            return
        with super().lock():
            yield


@dataclass(frozen=True)
class Told:
    """A reading as the other ranks know it: what rank 0 told them. They neither log nor show it."""

    table: dict[str, Any]
    words: str = ""

    def as_dict(self) -> dict[str, Any]:
        return self.table

    @property
    def logged(self) -> dict[str, Any]:
        return {}


class RankTask(RunTask):
    """A run under way on one rank. The loop is exchanged when training begins."""

    def __init__(self, run: Run, config: TrainConfig, data: Data, ranks: Ranks) -> None:
        _check(config, ranks)
        if ranks.device.type == "cuda":
            config = replace(config, device=str(ranks.device))
        super().__init__(RankRun(run.folder, ranks), config, data)
        self.schedule = replace(self.schedule, save_seconds=0.0)  # clocks of ranks differ
        self.ranks = ranks
        check_one_process(self)
        objectives = objectives_of(self.plan, self.loop.objectives)
        prior = any(map(uses_prior, objectives))
        self.layout = Layout.of(
            self.plan,
            ranks.config.stages,
            with_prior=prior,
            stack=self.stack if config.model.task == "text" else None,
            crossing=config.topology.backward != "autograd",
        )
        if self.layout.back_edges or self.plan.late:
            _check_gradient(config, ranks)
        if self.layout.crossing:  # what it does not take is refused before a folder is made
            self._scan().begin(StepGraph(self.stack, self.plan))

    def _scan(self) -> RegionScan:
        table = self.config.topology
        carried = 0 if table.backward == "scan" else table.carried
        return RegionScan(
            table.jacobian,
            table.jacobian_chunk,
            carried=carried,
            ranks=self.ranks,
            owners=self.layout.owners,
        )

    @property
    def own_stages(self) -> list[int]:
        return self.layout.stages_of(self.ranks.place)

    def load_extra(self, loaded: Checkpoint) -> None:
        super().load_extra(loaded)
        late, replicas = self.loop.late, self.ranks.config.replicas
        late.batches = {key: b for key, b in late.batches.items() if key[1] % replicas == self.ranks.replica}

    def prepare(self, step: int, on_rows: OnRows | None) -> None:
        """What begins with the whole model, as new exits do, begins before it is spread."""
        super().prepare(step, on_rows)
        self.spread()

    def spread(self) -> None:
        """Keep the own stages and what all share, with the state of their optimizers."""
        if isinstance(self.loop, StageLoop):
            return
        whole = self.loop
        keep_own(self.stack, self.layout, self.ranks.place)
        sharded = self.ranks.config.shard
        before = shard_layers(self.stack, self.layout, self.ranks) if sharded else {}
        optimizers = make_optimizers(self.stack, self.config.optimizer, self.plan)
        part_shards(optimizers)
        hand_over(whole.optimizers, optimizers, before)
        given = {f.name: getattr(whole, f.name) for f in fields(whole)} | {"optimizers": optimizers}
        given["transport"] = MeshTransport(self.ranks, self.layout)
        if self.layout.crossing:
            given["gradient"] = self._scan()
        self.loop = StageLoop(**given, ranks=self.ranks, layout=self.layout)

    def should_stop(self, interrupted: Callable[[], bool]) -> bool:
        """Ranks stop together: what one was told, all learn at the next exchange."""
        assert isinstance(self.loop, StageLoop)
        self.loop.stop_here = interrupted()
        return self.loop.stop_everywhere

    def evaluate(self, step: int) -> Reading:
        store = self.run.store
        base = store if isinstance(store, DeltaStore) else None
        whole = gather_stack(self.stack, self.layout, self.config, self.ranks, base)
        name = f"evaluation/{step}"
        if whole is not None:
            with self.ranks.busy("evaluating"):
                reading = self.source.evaluate(whole, self.plan)
            self.ranks.tell(name, dump_json(reading.as_dict()))
            return reading
        return Told(json.loads(self.ranks.follow(name, 0, "waiting for the evaluation")))


def check_one_process(task: RunTask) -> None:
    """Refuse what needs the whole model in every process."""
    if task.loop.own_teacher or task.keeps_states:
        raise ConfigError(
            "a model that teaches itself, keeps hidden states or learns from conversations "
            "trains in one process",
            setting="parallel",
            remedy="leave it out; with frozen layers give --states none",
        )


def check_whole(config: TrainConfig) -> None:
    """Refuse what one stage alone cannot train: a part of another run has a store of its own."""
    part = [name for name in BASED if getattr(config.tune, name)]
    if part:
        raise ConfigError(
            setting=part[0], given=getattr(config.tune, part[0]), allowed="left out with stage=K"
        )
    _check_steady(config)


def _check_steady(config: TrainConfig) -> None:
    """Refuse what changes with the step, or needs the whole model at once."""
    for name, given in (
        ("grad_scale_schedule", config.topology.grad_scale_schedule is not None),
        ("batch_parts", config.batch_parts > 1),
        ("teacher average", config.topology.teacher == AVERAGE_TEACHER),
    ):
        if given:
            raise ConfigError(
                f"{name} is given, which trains in one process",
                setting=name,
                remedy="leave it out with --parallel",
            )


def _check(config: TrainConfig, ranks: Ranks) -> None:
    """What cannot be trained on several ranks is refused before a folder is made."""
    for setting, given, allowed in (
        ("search.kind", config.search.kind, "none"),
        ("geometry_every", config.geometry_every, 0),
        ("on_alarm", config.on_alarm, "none"),
    ):
        if given != allowed:
            raise ConfigError(setting=setting, given=given, allowed=f"{allowed} with --parallel")
    if config.tune.measures_forgetting:
        name = "lora_directions" if config.tune.old_text is None else "old_text"
        given = getattr(config.tune, name)
        raise ConfigError(
            f"{name} is {given}, for which old text is read in one process",
            setting=name,
            given=given,
            remedy="leave it out with --parallel",
        )
    _check_steady(config)
    replicas = ranks.config.replicas
    if config.accumulate % replicas and config.batch % replicas:
        raise ConfigError(
            setting="accumulate",
            given=config.accumulate,
            allowed=f"a multiple of {replicas} replicas, or else batch, of which each takes a part",
        )
    if ranks.config.shard:
        check_shards(config)
    ddc = any(name.startswith("ddc") for name in _optimizer_names(config))
    if ddc and config.topology.heads != "shared":
        raise ConfigError(
            setting="optimizer.name",
            given=config.optimizer.name,
            allowed="no ddc optimizer with --parallel and several heads",
        )


def _check_gradient(config: TrainConfig, ranks: Ranks) -> None:
    """What does not go with gradient between ranks, or with a late one, is refused."""
    if ranks.config.shard:
        allowed = "left out where gradient crosses ranks or comes late"
        raise ConfigError(setting="shard", given=True, allowed=allowed)
    if config.tune.layer_dropout:
        given = config.tune.layer_dropout
        raise ConfigError(setting="layer_dropout", given=given, allowed="0 where gradient crosses ranks")


def check_shards(config: TrainConfig) -> None:
    """What needs a whole tensor of a layer at once is refused."""
    others = sorted(_optimizer_names(config).difference(ELEMENTWISE))
    if others:
        raise ConfigError(
            setting="optimizer.name",
            given=others[0],
            allowed=f"{' or '.join(ELEMENTWISE)} with shard, which cuts matrices",
        )
    if config.topology.interface is not None:
        raise ConfigError(setting="shard", given=True, allowed="left out with bounded interfaces")


def _optimizer_names(config: TrainConfig) -> set[str]:
    own = config.optimizer
    return {own.name, *(stage.name or own.name for stage in own.stages)}


def hand_over(whole: OptimizerSet, mine: OptimizerSet, cut: Mapping[int, nn.Parameter] | None = None) -> None:
    """Give the optimizers of a rank the state that those of the whole model had; `cut` knows its shards."""
    for name, optimizer in mine.optimizers.items():
        before = whole.optimizers[name]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                was = (cut or {}).get(id(parameter), parameter)
                if was in before.state:
                    optimizer.state[parameter] = cut_like(before.state[was], parameter)


def gather_stack(
    stack: Stack, layout: Layout, config: TrainConfig, ranks: Ranks, base: DeltaStore | None = None
) -> Stack | None:
    """The whole model on rank 0; None on the others. Everybody must call it. What is the base's does not
    travel."""
    state = present(stack.state_dict())

    def travels(model: Stack, place: int) -> list[str]:
        own = None if base is None else {*base.own_names(model)}
        return [name for name in layout.names(model, place) if own is None or name in own]

    with ranks.within("gathering shards"):
        own = {name: whole_of(tensor) for name, tensor in state.items()}
    if ranks.replica > 0:
        return None
    if ranks.place > 0:
        for buffer in _packed([own[name] for name in travels(stack, ranks.place)]).values():
            what = "handing over weights"
            ranks.wait(ranks.begin(dist.isend, buffer, 0, what), what, 0)
        return None
    whole, _ = build_stack(config)
    if base is not None:
        begin_from(whole, base.open_base())
    state = whole.state_dict()
    with torch.no_grad():
        for name, tensor in own.items():
            state[name].copy_(tensor)
        for place in range(1, layout.ranks):
            names = travels(whole, place)
            for dtype, buffer in _packed([state[name] for name in names]).items():
                what = f"gathering the weights of rank {place}"
                ranks.wait(ranks.begin(dist.irecv, buffer, place, what), what, place)
                parts = [state[name] for name in names if state[name].dtype == dtype]
                for tensor, part in zip(parts, buffer.split([t.numel() for t in parts]), strict=True):
                    tensor.copy_(part.view_as(tensor))
    return whole


def _packed(tensors: list[Tensor]) -> dict[torch.dtype, Tensor]:
    """One flat tensor for each dtype, in the order of the first of its kind."""
    kinds = dict.fromkeys(tensor.dtype for tensor in tensors)
    return {kind: torch.cat([t.detach().flatten() for t in tensors if t.dtype == kind]) for kind in kinds}
