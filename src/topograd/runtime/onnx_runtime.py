"""ONNX Runtime backend: a session for the layers of each stage, and one for each head.

A session belongs to an interval of layers, so that paths through the stages share them, and is made when a
plan first asks for it. All sessions share one pool of threads, as many as torch had when the first was made:
pools of their own would spin against each other. The rest, relays and queues, is what torch runs too.

Equal to torch to rounding in float32 (`tests/runtime`); with int8 and int4 weights the model is another one,
and everything that is exact (speculation) is exact for that one.

Limits: float32 on a CPU, layers of `layers.WRITERS`; other providers of onnxruntime run the same graphs, but
are handed memory of the CPU. Weights are read when a session is made: make another runtime when they change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import onnxruntime
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from topograd.errors import ConfigError
from topograd.exec.stage_cache import StageCache
from topograd.nn.capabilities import operator_form
from topograd.nn.heads import cap
from topograd.nn.stack import LayerContext, Stack
from topograd.nn.transformer.attention import check_reach
from topograd.runtime.graph import Graph, Session, Settings
from topograd.runtime.layers import BOOL, EPSILON, FLOAT, INT, LONG, WRITERS, Stream
from topograd.runtime.onnx_cache import Array, Frames, OnnxStageCache, taps_of
from topograd.runtime.quantize import Precision, Quantized, dequantize
from topograd.topology.plan import Plan, PlannedStage

if TYPE_CHECKING:
    from topograd.nn.transformer.stack import Transformer

HEAD_MULTIPLE = 16
"""What GroupQueryAttention wants a head's width to be a multiple of."""
MAX_BOUND = 32
"""Numbers of positions for which a head stays bound."""
_pool: int | None = None


def shared_settings(provider: str = "cpu") -> Settings:
    """Settings of sessions that share one pool of threads, for a provider by its short name."""
    global _pool
    wanted = provider.lower()
    names = {name.removesuffix("ExecutionProvider").lower(): name for name in available_providers()}
    if wanted not in names:
        raise ConfigError(
            f"onnxruntime has no provider {provider!r} here",
            setting="provider",
            given=provider,
            remedy=f"it has {', '.join(sorted(names))}: install the onnxruntime that has it",
        )
    threads = torch.get_num_threads()
    if _pool is None:
        try:
            onnxruntime.set_global_thread_pool_sizes(threads, 1)
            _pool = threads
        except Exception:  # this process has sessions already: the pool is as it is
            _pool = 0
    return Settings(names[wanted], None if _pool else threads)  # beside a shared pool there can be no other


def available_providers() -> list[str]:
    return list(onnxruntime.get_available_providers())


def unsupported_reason(stack: Stack) -> str | None:
    """Why onnxruntime cannot run this model; None where it can."""
    form = operator_form(stack)
    if form is None:
        return f"a stack of the kind {type(stack).__name__} is not written as ONNX operators"
    for layer in form.layers:
        if type(layer) not in WRITERS:
            kind = type(getattr(layer, "mixer", layer)).__name__
            return f"{kind} layers are not written as ONNX operators"
    weight = form.embedding.weight
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        kind = str(weight.dtype).removeprefix("torch.")
        return f"the weights are {kind} on {weight.device}, not float32 on a CPU"
    return None


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


class OnnxRuntime:
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
        self.stack, self.precision = cast("Transformer", stack), precision
        self.settings = shared_settings(provider)
        self.made = {} if made is None else made
        """Matrices that are quantised, by name."""
        self._normed = self.stack.config.traits.normed_embedding
        tables = (self.stack.embedding, self.stack.previous)
        self._tables = [table.weight.detach().numpy() for table in tables if table is not None]
        self._sessions: dict[tuple[int, int, tuple[int, ...], bool], Session] = {}
        self._heads: dict[int, HeadSession] = {}
        self._reach = 0
        self._fixed: Fixed | None = None

    # Stages

    def embed(self, inputs: Tensor, previous: Tensor | None = None) -> Tensor:
        return self.stack.embed(inputs, previous)

    def embed_array(self, tokens: Sequence[int], previous: Sequence[int]) -> Array:
        """In fewer steps than torch takes for the few tokens of a round."""
        if not self._normed:
            return self.stack.embed(torch.tensor([tokens]))[0].numpy()
        x = self._tables[0][tokens]
        if len(self._tables) > 1:
            before = np.asarray(previous)
            known = before >= 0
            x[known] += self._tables[1][before[known]]
        x /= np.sqrt(np.einsum("nw,nw->n", x, x)[:, None] / x.shape[-1] + np.float32(EPSILON))
        return x

    def layer_context(self, x0: Tensor, inputs: Tensor, offset: int | Tensor = 0) -> LayerContext:
        if self._learned():
            check_reach(self.stack.config, inputs, offset)
        return Stack.layer_context(self.stack, x0, inputs, offset)

    def stage_caches(self, plan: Plan, capacity: int) -> Sequence[StageCache]:
        frames: Frames = {}
        return [OnnxStageCache(self, planned, capacity, frames) for planned in plan.stages]

    def session(self, planned: PlannedStage, grouped: bool = False) -> Session | None:
        """The session of a stage's layers in a layout; None where it cannot be grouped."""
        if grouped and self._head_width() % HEAD_MULTIPLE:
            return None
        # stages alike in their layers, and in what is wanted of them, share sessions
        key = planned.stage.start, planned.stage.stop, tuple(taps_of(planned)), grouped
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
        for kind in self._rotations():
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
            for window in sorted({self._window(i) for i in planned.layers}):
                graph.input(f"mask.{window}", BOOL, "slots", 1, "wide", "room")
        stream, taps = Stream(graph, "h"), taps_of(planned)
        for index in planned.layers:
            layer = self.stack.layers[index]
            WRITERS[type(layer)](graph, stream, index, layer)
            if index + 1 in taps:
                graph.output(stream.sum(), f"h.{index + 1}", FLOAT, "rows", "columns", width)
        return graph

    def shapes(self, planned: PlannedStage) -> dict[int, tuple[int, int]]:
        """By layer, how many heads of keys and values a stage caches, and how wide they are."""
        each: list[tuple[int, Any]] = [(i, self.stack.layers[i].attention) for i in planned.layers]
        return {i: (a.kv_heads, a.head_width) for i, a in each}

    def _window(self, index: int) -> int:
        a: Any = self.stack.layers[index].attention
        window: int = a.window
        return window

    def _head_width(self) -> int:
        a: Any = self.stack.layers[0].attention
        width: int = a.head_width
        return width

    def _rotations(self) -> list[str]:
        """Kinds of rotation; learned positions have none, but their graphs take the tables all the same."""
        local = self.stack.config.local_rope_base is not None
        return ["rotary", "local"] if local else ["rotary"]

    def windows(self) -> list[int]:
        """The spans of attention that there are."""
        return sorted({self._window(i) for i in range(len(self.stack.layers))})

    def rotations(self, reach: int) -> dict[str, NDArray[np.float32]]:
        """Cosines and sines of the first `reach` positions, for each kind of rotation."""
        half = self._head_width() // 2
        sign = -1 if self.stack.config.traits.half_tables else 1  # those turn the other way
        tables = self.stack.rotations(torch.arange(reach), torch.empty(0))
        each = {kind: (cos[:, :half], sign * sin[:, :half]) for kind, (cos, sin) in tables.items()}
        return {
            f"{turn}.{kind}": table.float().contiguous().numpy()
            for kind, both in each.items()
            for turn, table in zip(("cos", "sin"), both, strict=True)
        }

    def positions(self, reach: int) -> Fixed:
        """Rotations of the first `reach` positions, and what else no run changes."""
        if self._fixed is None or reach > self._reach:
            self._reach = reach
            tables = self.rotations(reach).items()
            values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(table) for name, table in tables}
            most = min(reach, self.stack.config.positions) - 1 if self._learned() else reach - 1
            self._fixed = Fixed(values, self.windows(), most, self._check_stop)
        return self._fixed

    def _learned(self) -> bool:
        return self.stack.config.traits.learned_positions

    def _check_stop(self, stop: int) -> None:
        if self._learned() and stop > self.stack.config.positions:
            check_reach(self.stack.config, torch.zeros(1, stop), 0)

    # Heads

    def readout(self, h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
        flat = h.reshape(-1, h.shape[-1])
        logits = self._logits(flat, stage) if rows is None else self._some(flat, stage, rows)
        return logits.view(*h.shape[:-1], -1)

    def _logits(self, flat: Tensor, stage: int) -> Tensor:
        if (factors := self._factors(stage)) is not None:  # W x + U (V x): all of them share W
            up, down = factors
            x = self.stack.normalize(flat)
            return self._product(flat, -1).addmm_(F.linear(x, down), up.t())
        return self._product(flat, stage if self.stack.has_head(stage) else -1)

    def _factors(self, stage: int) -> tuple[Tensor, Tensor] | None:
        """(U, V) of a stage that reads the shared matrix and adds to it; None where its matrix is its own."""
        head = self.stack.head
        return None if head.softcap is not None else head.low_rank(stage)

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

    def _head_name(self, stage: int) -> str:
        return f"head.{stage}" if self.stack.has_head(stage) else "head"

    def _some(self, flat: Tensor, stage: int, rows: Tensor) -> Tensor:
        """Logits of some tokens: their rows of the matrix alone are read."""
        factors = self._factors(stage)
        packed = self.made.get("head" if factors is not None else self._head_name(stage))
        if packed is None:
            return self.stack.readout(flat, stage, rows)
        head, x = self.stack.head, self.stack.normalize(flat)
        matrix = torch.from_numpy(dequantize(packed.rows(rows.numpy()), flat.shape[-1]))
        z = F.linear(x, matrix, None if head.bias is None else head.bias[rows])
        if factors is not None:
            up, down = factors
            z = z + F.linear(F.linear(x, down), up[rows])
        return cap(z, head.softcap)
