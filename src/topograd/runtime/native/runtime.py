"""The native backend: a chain of stages is one call of a C++ function, and so is a head.

Weights are packed (`packing.py`) when a layer or a head first runs, in one block of memory for all layers. A
run takes as many threads as torch had when the runtime was made. Sums have one order, whatever the number of
threads and of rows: the same text in any company is the same bits.

Equal to torch to rounding in float32; in bfloat16 for weights that are bfloat16 numbers, else they are
rounded. With int8 and int4 weights the model is another one, and what is exact is exact for that one:

    int8    d q, 32 weights a scale, times activations in blocks of 16-bit integers
    int4    d q + m, times activations in blocks of 8-bit integers
    either  a matrix of a K-quant as it is: d q + m for 16 weights, times 16-bit integers

Limits: transformer blocks (`nn/transformer/block.py`), whose mixer is attention, Mamba-2 or Mamba-3, in
float32 on a CPU, x86-64 with AVX2. A recurrent mixer runs a prompt step by step, where torch has a chunked
scan. Weights are read when they are packed: make another runtime when they change.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p, pointer
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from topograd.errors import ConfigError
from topograd.runtime import operators
from topograd.runtime.native import library
from topograd.runtime.native.cache import ChainedStageCache, NativeStageCache
from topograd.runtime.native.library import Layer, Matrix, Norm, Readout, default_threads
from topograd.runtime.native.packing import (
    Memory,
    gate_order,
    grid_of,
    halved,
    ordered,
    ordered_blocks,
    pack_blocks,
    pack_floats,
    pack_grid,
    packed_size,
    padded,
    pointers,
    quantize_half,
)
from topograd.runtime.operators import OperatorRuntime
from topograd.runtime.quantize import LEAST, Precision, Quantized
from topograd.topology.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor

    from topograd.exec.stage_cache import StageCache
    from topograd.nn.slots import Spans
    from topograd.nn.stack import Stack
    from topograd.nn.transformer import parts
    from topograd.nn.transformer.block import Block, MixerBlock

GELUS = {"gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh"}


def unsupported_reason(stack: Stack) -> str | None:
    """Why the kernels cannot run this model here; None where they can."""
    return library.missing_reason() or operators.unsupported_reason(stack, recurrent=True)


class Head:
    """A packed head and the norm before it; what the kernels read of it is filled once."""

    def __init__(
        self, matrix: Matrix, norm: Norm, memory: Memory | None, softcap: float, threads: int
    ) -> None:
        self.matrix, self.norm, self.memory = matrix, norm, memory
        self._readout = Readout(0, matrix.inputs, threads, pointer(matrix), pointer(norm))
        self._readout.softcap = softcap

    def __call__(self, h: NDArray[Any]) -> NDArray[np.float32]:
        """Logits (rows, vocab) of h (rows, width)."""
        h, readout = np.ascontiguousarray(h, np.float32), self._readout
        logits = np.empty((len(h), self.matrix.outputs), np.float32)  # anew: the caller may keep it
        readout.rows, readout.h, readout.logits = len(h), h.ctypes.data, logits.ctypes.data
        library.run_readout(readout)
        return logits


def normed_linear(weight: Tensor, precision: Precision, threads: int) -> Head:
    """x ↦ W x / rms(x), rms(x)² = mean(x²) + ε, of rows x, with W packed as the weights of a stage are."""
    values = weight.detach().float().contiguous().numpy()
    outputs, inputs = values.shape
    if precision in ("float32", "bfloat16") or inputs < LEAST:
        form = "bfloat16" if precision == "bfloat16" else "float32"
        memory = Memory(packed_size(outputs, inputs, form))
        matrix = pack_floats([values], form, memory)
    else:
        memory = Memory(packed_size(outputs, inputs, "int8"))
        matrix = pack_blocks(quantize_half(values, 8 if precision == "int8" else 4), inputs, memory)
    return Head(matrix, Norm(library.RMS, None, None, operators.EPSILON), memory, 0.0, threads)


class NativeRuntime(OperatorRuntime):
    """Packed weights of a stack."""

    name = "native"
    stage_cache: type[NativeStageCache] = ChainedStageCache
    relays = True
    """Whether stages may pass on something else than their hidden states: its stack knows how."""

    def __init__(
        self,
        stack: Stack,
        precision: Precision = "float32",
        made: dict[str, Quantized] | None = None,
        threads: int | None = None,
    ) -> None:
        if (reason := unsupported_reason(stack)) is not None:
            problem = f"the runtime native cannot run this: {reason}"
            raise ConfigError(problem, setting="runtime", remedy="leave --runtime out")
        super().__init__(stack, {name: halved(each) for name, each in (made or {}).items()})
        self.precision, self.threads = precision, threads or default_threads()
        self.softcap = self.stack.head.softcap or 0.0
        self.kept: list[NDArray[Any]] = []
        """Memory that the kernels read."""
        self.memory: Memory | None = None
        """What the layers are packed in."""
        self._layers: dict[int, Layer] = {}
        self._heads: dict[int, Head] = {}
        self.start()

    def start(self) -> None:
        """Nothing has run yet."""
        self._turns: dict[str, NDArray[np.float32]] = {}
        self._turned: tuple[ctypes.Array[c_void_p], ctypes.Array[c_void_p]] | None = None
        self._reach = 0
        self._rows: tuple[Spans | None, ctypes.Array[c_int64]] = None, (c_int64 * 0)()

    @property
    def width(self) -> int:
        """Of the residual stream."""
        return int(self.tables[0].shape[1])

    # Stages

    def stage_caches(self, plan: Plan, capacity: int) -> Sequence[StageCache]:
        return [self.stage_cache(self, planned, capacity) for planned in plan.stages]

    def turned(self, reach: int) -> tuple[ctypes.Array[c_void_p], ctypes.Array[c_void_p]]:
        """Addresses of cosines and of sines, of each kind of rotation, with at least `reach` positions."""
        if self._turned is None or reach > self._reach:
            self._turns, self._reach = self.rotations(reach), reach
            kinds = ("rotary", "local")
            cosine, sine = ([self._turns.get(f"{turn}.{kind}") for kind in kinds] for turn in ("cos", "sin"))
            self._turned = pointers(cosine), pointers(sine)
        return self._turned

    def rows_of(self, spans: Spans) -> ctypes.Array[c_int64]:
        """What the kernels read of each new position (library.ROW), made once for all stages."""
        if self._rows[0] is not spans:
            self._check_stop(max(group.stop for group in spans.groups))
            assert spans.tokens is not None
            rooms = {room: i for i, room in enumerate(dict.fromkeys(group.room for group in spans.groups))}
            tokens, rows = iter(spans.tokens), list[int]()
            each = zip(spans.places, spans.starts, spans.counts, strict=True)
            for index, (place, start, count) in enumerate(each):
                where = place.slot, place.room, rooms[place.room], index
                for position in range(start, start + count):
                    rows += (next(tokens), position, *where, position == start)
            self._rows = spans, (c_int64 * len(rows))(*rows)
        return self._rows[1]

    def layer(self, index: int) -> Layer:
        """A layer's weights and sizes, packed at first use."""
        if index not in self._layers:
            from topograd.nn.transformer.block import Block, MixerBlock

            if self.memory is None:
                self.memory = Memory(sum(self._size(layer) for layer in self.stack.layers))
            block, name = self.stack.layers[index], f"layers.{index}"
            if isinstance(block, Block):
                self._layers[index] = self._packed(name, block, self.memory)
            else:
                assert isinstance(block, MixerBlock)
                self._layers[index] = self._packed_mixer(name, block, self.memory)
        return self._layers[index]

    def _packed_mixer(self, name: str, block: MixerBlock, memory: Memory) -> Layer:
        """A layer with a recurrent mixer (`csrc/mamba.h`)."""
        from topograd.nn.mamba.mamba2 import Mamba2Mixer

        m: Any = block.mixer
        layer = Layer(library.MAMBA2 if isinstance(m, Mamba2Mixer) else library.MAMBA3)
        layer.qkv = self._matrix(f"{name}.in_proj", [m.in_proj], memory)
        layer.output = self._matrix(f"{name}.out_proj", [m.out_proj], memory)
        layer.attention_norm = Norm(library.RMS, None, None, operators.EPSILON)
        layer.heads, layer.head_width, layer.state, layer.groups = m.heads, m.head_dim, m.state, m.groups
        layer.x0_scale = 0.0 if block.x0_scale is None else block.x0_scale.item()
        layer.dt_bias, layer.skip = self._keep(m.dt_bias), self._keep(m.D)
        if layer.kind == library.MAMBA2:
            layer.taps, layer.taps_bias = self._keep(m.conv.weight[:, 0]), self._keep(m.conv.bias)
            layer.rate = self._keep(-m.A_log.exp())
            layer.gated_norm = Norm(library.RMS, self._keep(m.norm.weight), None, 1e-5)
            return layer
        layer.angles = m.angles
        layer.B_bias, layer.C_bias = self._keep(m.B_bias), self._keep(m.C_bias)
        for kind, norm in (("B_norm", m.B_norm), ("C_norm", m.C_norm)):
            setattr(layer, kind, Norm(library.RMS, self._keep(norm.weight), None, norm.eps))
        return layer

    def _packed(self, name: str, block: Block, memory: Memory) -> Layer:
        from topograd.nn.transformer.parts import matrix_of

        a, mlp, layer = block.attention, block.mlp, Layer()
        layer.qkv = self._matrix(f"{name}.qkv", [a.query, a.key, a.value] if a.rotary else [a.qkv], memory)
        layer.output = self._matrix(f"{name}.output", [a.output], memory)
        if mlp.gate is None:
            layer.hidden = self._matrix(f"{name}.up", [mlp.up], memory)
        else:
            order = gate_order(len(matrix_of(mlp.up)))
            layer.hidden = self._matrix(f"{name}.gate_up", [mlp.gate, mlp.up], memory, order)
        layer.down = self._matrix(f"{name}.down", [mlp.down], memory)
        for kind, norm in (
            *(("attention_norm", block.attention_norm), ("mlp_norm", block.mlp_norm)),
            *(("attention_post", block.attention_post_norm), ("mlp_post", block.mlp_post_norm)),
            *(("query_norm", a.query_norm), ("key_norm", a.key_norm)),
        ):
            setattr(layer, kind, self._norm(norm))
        self._describe(layer, block)
        return layer

    def _describe(self, layer: Layer, block: Block) -> None:
        """Everything of a layer that is neither a matrix nor a norm."""
        from topograd.nn.transformer.parts import activation_name

        a, activation = block.attention, activation_name(block.mlp.activation)
        if block.positions is not None:
            layer.positions = self._keep(block.positions.weight)
            layer.position_rows = len(block.positions.weight)
        if a.value_embedding is not None:
            layer.values = self._keep(a.value_gate.detach() * a.value_embedding.weight.detach())
        layer.heads, layer.kv_heads, layer.head_width = a.heads, a.kv_heads, a.head_width
        layer.window, layer.softcap = a.window, a.softcap or 0.0
        layer.rotation = (1 if a.local else 0) if a.rotary else -1
        layer.norm_behind_rotation = a.traits.norm_behind_rotation
        layer.gated = block.mlp.gate is not None
        layer.activation = library.ACTIVATIONS.index(GELUS.get(activation, activation))
        layer.x0_scale = 0.0 if block.x0_scale is None else block.x0_scale.item()
        layer.scale = a.head_width**-0.5 if a.scale is None else a.scale

    def _form(self, inputs: int) -> str:
        """The format that a matrix of so many inputs is packed in, or more exactly reserved for."""
        if self.precision in ("float32", "bfloat16"):
            return self.precision
        return "float32" if inputs < LEAST else "grid"

    def _size(self, block: Any) -> int:
        from topograd.nn.transformer import parts
        from topograd.nn.transformer.parts import matrix_of

        linears = [each for each in block.modules() if isinstance(each, parts.Linear)]
        shapes = [matrix_of(each).shape for each in linears]
        # a panel more of each: gate and up are padded by themselves, queries, keys and values together
        return sum(packed_size(out + 8, inputs, self._form(inputs)) for out, inputs in shapes)

    def _matrix(
        self, name: str, maps: Sequence[Any], memory: Memory, order: NDArray[np.int64] | None = None
    ) -> Matrix:
        """Some linear maps as one, their rows in an order if that is given."""
        import torch

        from topograd.nn.transformer.parts import matrix_of

        matrix = self._pack(name, [matrix_of(each) for each in maps], memory, order)
        biases = [each.bias.detach() for each in maps if each.bias is not None]
        if biases:
            bias = torch.cat(biases).float().numpy()
            matrix.bias = self._bias(bias if order is None else ordered(bias, order))
        return matrix

    def _pack(
        self, name: str, weights: Sequence[Tensor], memory: Memory, order: NDArray[np.int64] | None = None
    ) -> Matrix:
        values = [each.detach().float().contiguous().numpy() for each in weights]
        inputs = values[0].shape[1]
        form = self._form(inputs)
        if form in ("float32", "bfloat16"):
            return pack_floats(values, form, memory, order)
        if name not in self.made:
            joined = np.concatenate(values)
            grid = grid_of(joined if order is None else ordered(joined, order))
            if grid is not None:
                return pack_grid(grid, memory)
            self.made[name] = quantize_half(joined, 8 if self.precision == "int8" else 4)
        blocks = self.made[name]
        return pack_blocks(blocks if order is None else ordered_blocks(blocks, order), inputs, memory)

    def _bias(self, bias: NDArray[np.float32]) -> int:
        """Its address; whole panels of it are read."""
        import torch

        full = np.zeros(padded(len(bias)), np.float32)
        full[: len(bias)] = bias
        return self._keep(torch.from_numpy(full))

    def _norm(self, norm: parts.Norm | None) -> Norm:
        import torch

        from topograd.nn.transformer.parts import epsilon_of, gain_of

        if norm is None:
            return Norm(library.NO_NORM, None, None, 0.0)
        gain, shift = gain_of(norm)
        kind = library.LAYER if isinstance(norm, torch.nn.LayerNorm) else library.RMS
        address = [None if each is None else self._keep(each) for each in (gain, shift)]
        return Norm(kind, *address, epsilon_of(norm))

    def _keep(self, tensor: Tensor) -> int:
        """The address of a tensor's numbers, which live as long as the runtime."""
        self.kept.append(tensor.detach().float().contiguous().numpy())
        return int(self.kept[-1].ctypes.data)

    # Heads

    def _product(self, flat: Tensor, which: int) -> Tensor:
        import torch

        return torch.from_numpy(self.head(which)(flat.numpy()))

    def readout_array(self, h: NDArray[Any], stage: int) -> NDArray[Any]:
        which, factors = self._read_by(stage)
        return self.head(which)(h) if factors is None else super().readout_array(h, stage)

    def head(self, which: int) -> Head:
        """A head, packed at first use."""
        if which not in self._heads:
            head = self.stack.head
            weight = head.matrix(which).detach()
            vocab, width = weight.shape
            memory = Memory(packed_size(vocab, width, self._form(width)))
            matrix = self._pack(self._head_name(which), [weight], memory)
            if head.bias is not None:
                matrix.bias = self._bias(head.bias.detach().float().numpy())
            norm = self._norm(self.stack.norm)
            self._heads[which] = Head(matrix, norm, memory, self.softcap, self.threads)
        return self._heads[which]
