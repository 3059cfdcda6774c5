"""Transformer layers as ONNX operators: attention over a cache, and the MLP.

Keys and values lie in buffers (slots, kv heads, C, head width) that a layer writes in place (an input that is
bound as output too). So going back is a matter of smaller positions: what lies behind is not seen until it is
overwritten. A graph is written in one of two layouts, whose small inputs are prepared once for a run, outside
of it (`onnx_cache.py`):

*Grouped*: hidden states (rows, S, width). A layer's rotation, cache and attention are one operator,
GroupQueryAttention. It takes several new positions of one row only, or one of each of several rows, and heads
whose width is a multiple of 16.

    last (rows,), total ()    the position of each row's last new column; how many positions the longest has

*Packed*: hidden states (1, N, width), the new positions of any sequences concatenated, so that
matrices see no padding. Only attention unpacks them, into a rectangle of S columns a row.

    positions (1, N)          for a rotation
    scatter (N, kv heads, 3)  where each new key goes: slot, head, position
    unpack (rows, S)          which of the N columns stands where in the rectangle; any where there is none
    pack (N,)                 which of the rows · S places each column is at
    mask.W (rows, 1, S, C)    what each place sees, for each span W (0: all before it)

Sums and norms are one operator (SkipSimplifiedLayerNormalization); queries, keys and values are one matrix.
Tested against `nn/`: float32, so to rounding. Sources as in `nn/transformer/stack.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from onnx import TensorProto
from torch import Tensor, nn

from topograd.nn.transformer.block import MLP, Block
from topograd.nn.transformer.parts import Linear, Norm, activation_name, epsilon_of, gain_of, matrix_of
from topograd.runtime.graph import Graph

FLOAT, LONG, INT, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL
GELUS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}


class Stream:
    """The hidden state, and what is to be added to it: the sum is made together with the next norm."""

    def __init__(self, graph: Graph, value: str) -> None:
        self.graph, self.value, self.added = graph, value, ""

    def add(self, x: str) -> None:
        self.sum()
        self.added = x

    def sum(self) -> str:
        """The hidden state itself."""
        if self.added:
            self.value, self.added = self.graph.op("Add", self.value, self.added), ""
        return self.value

    def unit(self, gain: Tensor, epsilon: float) -> str:
        """x / sqrt(mean(x²) + ε) ⊙ gain."""
        if not self.added:
            return rms_norm(self.graph, self.value, gain, epsilon)
        normed, total = self.graph.name("normed"), self.graph.name("sum")
        self.graph.node(
            "SkipSimplifiedLayerNormalization",
            [self.value, self.added, self.graph.tensor(gain)],
            [normed, "", "", total],
            epsilon=epsilon,
        )
        self.value, self.added = total, ""
        return normed

    def norm(self, norm: Norm, width: int) -> str:
        """A block's norm of it, over `width` numbers."""
        gain, shift = gain_of(norm)
        if shift is None:
            return self.unit(torch.ones(width) if gain is None else gain, epsilon_of(norm))
        assert gain is not None
        assert isinstance(norm, nn.LayerNorm)
        return self.graph.op(
            "LayerNormalization",
            self.sum(),
            self.graph.tensor(gain),
            self.graph.tensor(shift),
            axis=-1,
            epsilon=norm.eps,
        )


def rms_norm(graph: Graph, x: str, gain: Tensor, epsilon: float) -> str:
    return graph.op(
        "SimplifiedLayerNormalization",
        x,
        graph.tensor(gain),
        axis=-1,
        epsilon=epsilon,
        stash_type=1,
    )


def linear(graph: Graph, x: str, name: str, module: Linear) -> str:
    return graph.linear(x, name, matrix_of(module), module.bias)


class Heads:
    """Attention of one layer over its cache; heads (rows, columns, heads, head width)."""

    def __init__(self, graph: Graph, index: int, attention: Any) -> None:
        self.graph, self.index, self.window = graph, index, attention.window
        self.heads, self.kv_heads = attention.heads, attention.kv_heads
        self.head_width = attention.head_width

    def split(self, qkv: str) -> tuple[str, str]:
        """Queries with keys, and values, from rows of all three."""
        g, count = self.graph, self.heads + 2 * self.kv_heads
        x = g.op("Reshape", qkv, g.constant([0, 0, count, self.head_width]))
        counts = g.constant([self.heads + self.kv_heads, self.kv_heads])
        qk, v = g.ops("Split", 2, x, counts, axis=2)
        return qk, v

    def gain(self, query: Tensor, key: Tensor) -> str:
        """Gains (head width,) of queries and keys, one for each head of both."""
        return self.graph.tensor(torch.cat([query.expand(self.heads, -1), key.expand(self.kv_heads, -1)]))

    def embedded(self, v: str, table: Tensor) -> str:
        """Values with the rows of a table (vocab, kv heads · head width) that the tokens name."""
        g = self.graph
        extra = g.op("Gather", g.tensor(table.view(-1, self.kv_heads, self.head_width)), "tokens")
        return g.op("Add", v, extra)

    def joined(self, qk: str, v: str) -> str:
        """Rows of queries, keys and values again."""
        g, count = self.graph, self.heads + 2 * self.kv_heads
        return g.op("Reshape", g.op("Concat", qk, v, axis=2), g.constant([0, 0, count * self.head_width]))

    def grouped(self, qkv: str, scale: float, rotation: str, softcap: float = 0.0) -> str:
        """What the queries find, (rows, S, heads · head width), in one operator."""
        g = self.graph
        names = [self._buffer(kind) for kind in ("keys", "values")]
        turns = [f"cos.{rotation}", f"sin.{rotation}"] if rotation else []
        out = g.name("attended")
        new = [f"{name}.new" for name in names]
        g.node(
            "GroupQueryAttention",
            [qkv, "", "", *names, "last", "total", *turns],
            [out, *new],
            num_heads=self.heads,
            kv_num_heads=self.kv_heads,
            do_rotary=int(bool(rotation)),
            local_window_size=self.window or -1,
            scale=scale,
            softcap=softcap,
        )
        for name in new:
            g.output(name, name, FLOAT, *self._shape())
        return out

    def attend(self, qk: str, v: str, scale: float, rotation: str, softcap: float = 0.0) -> str:
        """What the queries find, (rows, columns, heads · head width)."""
        g = self.graph
        if g.grouped:
            return self.grouped(self.joined(qk, v), scale, rotation, softcap)
        if rotation:
            # each column as a row of its own: no sequence may be longer than the tables
            count = self.heads + self.kv_heads
            qk = g.op("Reshape", qk, g.constant([-1, count, 1, self.head_width]))
            where = g.op("Reshape", "positions", g.constant([-1, 1]))
            qk = g.op("RotaryEmbedding", qk, f"cos.{rotation}", f"sin.{rotation}", where)
            qk = g.op("Reshape", qk, g.constant([1, -1, count, self.head_width]))
        q, k = g.ops("Split", 2, qk, g.constant([self.heads, self.kv_heads]), axis=2)
        keys, values = self._cached("keys", k), self._cached("values", v)
        q = g.op("Reshape", q, g.constant([-1, self.heads, self.head_width]))
        q = g.op("Transpose", g.op("Gather", q, "unpack", axis=0), perm=[0, 2, 1, 3])
        y = g.op("Attention", q, keys, values, f"mask.{self.window}", scale=scale, softcap=softcap)
        y = g.op("Transpose", y, perm=[0, 2, 1, 3])
        y = g.op("Reshape", y, g.constant([-1, self.heads * self.head_width]))
        y = g.op("Gather", y, "pack", axis=0)
        return g.op("Reshape", y, g.constant([1, -1, self.heads * self.head_width]))

    def _cached(self, kind: str, new: str) -> str:
        name, g = self._buffer(kind), self.graph
        new = g.op("Reshape", new, g.constant([-1, self.kv_heads, self.head_width]))
        out = g.op("ScatterND", name, "scatter", new, to=f"{name}.new")
        g.output(out, out, FLOAT, *self._shape())
        return out

    def _buffer(self, kind: str) -> str:
        return self.graph.input(f"{kind}.{self.index}", FLOAT, *self._shape())

    def _shape(self) -> tuple[str, int, str, int]:
        return "slots", self.kv_heads, "room", self.head_width


def joined(graph: Graph, x: str, name: str, maps: Sequence[Linear]) -> str:
    """Several linear maps of x as one matrix."""
    biases = [m.bias.detach() for m in maps if m.bias is not None]
    weight, bias = torch.cat([matrix_of(m) for m in maps]), torch.cat(biases) if biases else None
    return graph.linear(x, name, weight, bias)


def block(graph: Graph, stream: Stream, index: int, layer: Block) -> None:
    """A transformer's block (`nn/transformer/block.py`)."""
    a, name = layer.attention, f"layers.{index}"
    width = len(matrix_of(a.output))
    if layer.positions is not None:
        stream.add(graph.op("Gather", graph.tensor(layer.positions.weight), "positions"))
    if layer.x0_scale is not None:
        stream.add(graph.op("Mul", "x0", graph.constant(np.float32(layer.x0_scale.item()))))
    maps = [a.query, a.key, a.value] if a.rotary else [a.qkv]
    qkv = joined(graph, stream.norm(layer.attention_norm, width), f"{name}.qkv", maps)
    y = linear(graph, _attended(graph, index, qkv, a), f"{name}.output", a.output)
    stream.add(_posted(graph, y, layer.attention_post_norm, width))
    x = stream.norm(layer.mlp_norm, width)
    stream.add(_posted(graph, _mlp(graph, x, name, layer.mlp), layer.mlp_post_norm, width))


def _attended(graph: Graph, index: int, qkv: str, a: Any) -> str:
    heads, softcap = Heads(graph, index, a), a.softcap or 0.0
    scale = a.head_width**-0.5 if a.scale is None else a.scale
    rotation = ("local" if a.local else "rotary") if a.rotary else ""
    normed = a.query_norm is not None
    if graph.grouped and not normed and a.value_embedding is None:
        return heads.grouped(qkv, scale, rotation, softcap)
    qk, v = heads.split(qkv)
    if normed:  # a rotation keeps the length, so a norm without a gain may come before it too
        qk = rms_norm(graph, qk, torch.ones(a.head_width), epsilon_of(a.query_norm))
        query, key = (gain_of(norm)[0] for norm in (a.query_norm, a.key_norm))
        if query is not None and key is not None:
            qk = graph.op("Mul", qk, heads.gain(query, key))
    if a.value_embedding is not None:
        v = heads.embedded(v, a.value_gate.detach() * a.value_embedding.weight.detach())
    return heads.attend(qk, v, scale, rotation, softcap)


def _posted(graph: Graph, y: str, norm: Norm | None, width: int) -> str:
    return y if norm is None else Stream(graph, y).norm(norm, width)


def _mlp(graph: Graph, x: str, name: str, mlp: MLP) -> str:
    kind = activation_name(mlp.activation)
    if mlp.gate is None:
        x = activation(graph, linear(graph, x, f"{name}.up", mlp.up), kind)
    else:
        if graph.precision == "float32":  # by the model's own memory
            gate, up = (linear(graph, x, f"{name}.{n}", m) for n, m in (("gate", mlp.gate), ("up", mlp.up)))
        else:
            wide, both = len(matrix_of(mlp.up)), joined(graph, x, f"{name}.gate_up", [mlp.gate, mlp.up])
            gate, up = graph.ops("Split", 2, both, graph.constant([wide, wide]), axis=-1)
        x = graph.op("Mul", activation(graph, gate, kind), up)
    return linear(graph, x, f"{name}.down", mlp.down)


def activation(graph: Graph, x: str, kind: str) -> str:
    """A nonlinearity by its published name."""
    if kind == "silu":
        return graph.op("QuickGelu", x, alpha=1.0)
    if kind in ("relu", "relu2"):
        x = graph.op("Relu", x)
        return x if kind == "relu" else graph.op("Mul", x, x)
    return graph.op("Gelu", x, approximate=GELUS[kind])


Writer = Callable[[Graph, Stream, int, Any], None]
WRITERS: dict[type[nn.Module], Writer] = {Block: block}
"""Layers that can be written as operators; other kinds run in torch."""
