"""ONNX Runtime backend: a session for the layers of each stage, and one for each head.

A session belongs to an interval of layers, so that paths through the stages share them, and is made when a
plan first asks for it. All sessions share one pool of threads, as many as torch had when the first was made:
pools of their own would spin against each other. The rest, relays and queues, is what torch runs too.

Equal to torch to rounding in float32 (`tests/runtime`); with int8 and int4 weights the model is another one,
and everything that is exact (speculation) is exact for that one.

Limits: float32 on a CPU, layers of `layers.WRITERS`; other providers of onnxruntime run the same graphs, but
are handed memory of the CPU. Weights are read when a session is made: make another runtime when they change.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import Tensor

from topograd.errors import ConfigError
from topograd.exec.stage_cache import StageCache
from topograd.nn.stack import Stack
from topograd.runtime import operators
from topograd.runtime.graph import Graph, Session, Settings
from topograd.runtime.layers import BOOL, FLOAT, INT, LONG, WRITERS, Stream
from topograd.runtime.onnx_cache import Frames, OnnxStageCache
from topograd.runtime.operators import OperatorRuntime
from topograd.runtime.quantize import Precision, Quantized
from topograd.topology.plan import Plan, PlannedStage

HEAD_MULTIPLE = 16
"""What GroupQueryAttention wants a head's width to be a multiple of."""
MAX_BOUND = 32
"""Numbers of positions for which a head stays bound."""
_pool: int | None = None


def shared_settings(provider: str = "cpu") -> Settings:
    """Settings of sessions that share one pool of threads, for a provider by its short name."""
    global _pool
    wanted = provider.lower()
    available = onnxruntime.get_available_providers()
    names = {name.removesuffix("ExecutionProvider").lower(): name for name in available}
    if wanted not in names:
        problem = f"onnxruntime has no provider {provider!r} here"
        remedy = f"it has {', '.join(sorted(names))}: install the onnxruntime that has it"
        raise ConfigError(problem, setting="provider", given=provider, remedy=remedy)
    threads = torch.get_num_threads()
    if _pool is None:
        try:
            onnxruntime.set_global_thread_pool_sizes(threads, 1)
            _pool = threads
        except Exception:  # this process has sessions already: the pool is as it is
            _pool = 0
    return Settings(names[wanted], None if _pool else threads)  # beside a shared pool there can be no other


def unsupported_reason(stack: Stack) -> str | None:
    """Why onnxruntime cannot run this model; None where it can."""
    return operators.unsupported_reason(stack)


@dataclass(frozen=True)
class Fixed:
    """What no run changes."""

    values: dict[str, Any]
    """Tables of rotations."""
    windows: Sequence[int]
    most: int
    """The last position that a rotation is known for."""
    check: Callable[[int], None]
    """Raises where a model does not reach so many positions."""


class HeadSession:
    """A head's session, with its input bound for each number of positions that was run."""

    def __init__(self, session: Session, width: int) -> None:
        self.session, self.inputs, self.width, self.run = session, width, session.width, session.run
        self._bound: dict[int, tuple[Any, NDArray[np.float32]]] = {}

    def rows(self, count: int) -> tuple[Any, NDArray[np.float32]]:
        """A binding for `count` rows, and its input."""
        if count not in self._bound:
            if len(self._bound) >= MAX_BOUND:
                self._bound.clear()
            h = np.zeros((count, self.inputs), np.float32)
            binding = self.session.binding()
            binding.bind_ortvalue_input("h", onnxruntime.OrtValue.ortvalue_from_numpy(h))
            self._bound[count] = binding, h
        return self._bound[count]


class OnnxRuntime(OperatorRuntime):
    """Sessions over a stack's weights."""

    name = "onnx"

    def __init__(
        self,
        stack: Stack,
        precision: Precision = "float32",
        provider: str = "cpu",
        made: dict[str, Quantized] | None = None,
    ) -> None:
        problem = unsupported_reason(stack)
        if problem is not None:
            instead = "use --runtime torch" if precision == "float32" else "leave --weights out"
            setting = "runtime" if precision == "float32" else "weights"
            raise ConfigError(f"{problem}, so onnxruntime cannot run it", setting=setting, remedy=instead)
        super().__init__(stack, made)
        self.precision = precision
        self.settings = shared_settings(provider)
        self._sessions: dict[tuple[int, int, tuple[int, ...], bool], Session] = {}
        self._heads: dict[int, HeadSession] = {}
        self._reach = 0
        self._fixed: Fixed | None = None

    # Stages

    def stage_caches(self, plan: Plan, capacity: int) -> Sequence[StageCache]:
        frames: Frames = {}
        return [
            OnnxStageCache(self, planned, capacity, frames)
            if planned.layers
            else StageCache(self.stack, planned, capacity)  # a head alone has nothing to run
            for planned in plan.stages
        ]

    def session(self, planned: PlannedStage, grouped: bool = False) -> Session | None:
        """The session of a stage's layers in a layout; None where it cannot be grouped."""
        if grouped and self._head_width() % HEAD_MULTIPLE:
            return None
        # stages alike in their layers, and in what is wanted of them, share sessions
        key = planned.stage.start, planned.stage.stop, tuple(planned.taps), grouped
        if key not in self._sessions:
            self._sessions[key] = self.graph(planned, grouped).session(self.settings)
        return self._sessions[key]

    def graph(self, planned: PlannedStage, grouped: bool = False) -> Graph:
        """A stage's layers as operators, packed or grouped (`layers.py`)."""
        graph, width = Graph(self.precision, self.made, grouped), self.stack.width
        for name in ("h", "x0"):
            graph.input(name, FLOAT, "rows", "columns", width)
        for name in ("tokens", "positions"):
            graph.input(name, LONG, "rows", "columns")
        half = self._head_width() // 2
        local = ["local"] * (self.stack.config.local_rope_base is not None)
        for kind in ("rotary", *local):  # learned positions have none, but their graphs take the tables
            for turn in ("cos", "sin"):
                graph.input(f"{turn}.{kind}", FLOAT, "reach", half)
        if grouped:
            graph.input("last", INT, "rows")
            graph.input("total", INT, 1)
        else:
            heads = self.shapes(planned)[planned.layers[0]][0]
            graph.input("scatter", LONG, "columns", heads, 3)
            graph.input("unpack", LONG, "slots", "wide")
            graph.input("pack", LONG, "columns")
            for window in self.windows(planned.layers):
                graph.input(f"mask.{window}", BOOL, "slots", 1, "wide", "room")
        stream, taps = Stream(graph, "h"), planned.taps
        for index in planned.layers:
            layer = self.stack.layers[index]
            WRITERS[type(layer)](graph, stream, index, layer)
            if index + 1 in taps:
                graph.output(stream.sum(), f"h.{index + 1}", FLOAT, "rows", "columns", width)
        return graph

    def windows(self, layers: Iterable[int] | None = None) -> list[int]:
        """The spans of attention that there are, in some layers or all."""
        chosen = range(len(self.stack.layers)) if layers is None else layers
        each: list[Any] = [self.stack.layers[i] for i in chosen]
        return sorted({layer.attention.window for layer in each})

    def positions(self, reach: int) -> Fixed:
        """Rotations of the first `reach` positions, and what else no run changes."""
        if self._fixed is None or reach > self._reach:
            self._reach = reach
            tables = self.rotations(reach).items()
            values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(table) for name, table in tables}
            most = min(reach, self.stack.config.positions) - 1 if self.learned else reach - 1
            self._fixed = Fixed(values, self.windows(), most, self._check_stop)
        return self._fixed

    # Heads

    def _product(self, flat: Tensor, which: int) -> Tensor:
        """Logits by the matrix of a stage, or by the one (-1) that stages without their own share."""
        if which not in self._heads:
            self._heads[which] = HeadSession(self.head_graph(which).session(self.settings), self.stack.width)
        session = self._heads[which]
        logits = np.empty((len(flat), session.width), np.float32)  # anew: the caller may keep it
        binding, h = session.rows(len(flat))
        h[:] = flat.numpy()
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        session.run(binding)
        return torch.from_numpy(logits)

    def head_graph(self, stage: int) -> Graph:
        """A head as operators."""
        graph = Graph(self.precision, self.made)
        width = self.stack.width
        graph.input("h", FLOAT, "rows", width)
        stream = Stream(graph, "h")
        x, head = stream.norm(self.stack.norm, width), self.stack.head
        z = graph.linear(x, self._head_name(stage), head.matrix(stage), head.bias)
        if head.softcap is not None:
            bound = graph.constant(np.float32(head.softcap))
            z = graph.op("Mul", graph.op("Tanh", graph.op("Div", z, bound)), bound)
        graph.output(z, "logits", FLOAT, "rows", len(head.weight))
        return graph
