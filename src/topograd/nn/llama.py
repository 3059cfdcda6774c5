"""A Llama as a stack that decodes, made of a Hugging Face `LlamaForCausalLM`, whose parameters it shares.

    h ← h + W_o Attn(norm(h));   h ← h + W_down (silu(W_gate x) ⊙ W_up x),  x = norm(h)      per layer
    z = (W + W_k) norm(h),       norm(x) = x / sqrt(mean(x²) + ε) ⊙ gain

with rotary positions, grouped keys and values, and biases where the model has them. "LLaMA" (Touvron et al.
2023), section 2.2. The rotation of a head of width d at position p, "RoFormer" (Su et al. 2021), eq. 34:

    (x_i, x_{i+d/2}) ← (x_i c_i - x_{i+d/2} s_i,  x_{i+d/2} c_i + x_i s_i),   c, s = cos, sin of p θ^(-2i/d)

The layer is written for one token per call, where the number of operations is the cost, not their size. Then
the rotation is a product with one matrix (d, d); the query heads that share a key are so many queries of one
head; ε is a tensor on the bus, as a Python number costs an operation more; and a layer holds its matrices
itself, as the call of an nn.Linear costs as much as a small product.

Hugging Face computes norms and rotary tables in float32; here they are in float64 if the stack is. Otherwise
logits agree up to rounding. Limits: `rope_type` 'default', SiLU, no dropout. For half precision convert the
model before it becomes a stack: converting the stack would round its frequencies too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.errors import StackError
from topograd.nn.attention import attention_mask, rotate
from topograd.nn.heads import Head
from topograd.nn.layer_state import KVState
from topograd.nn.llama_decoding import DecodingLlama
from topograd.nn.stack import Bus, Projection, Stack

_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "attention_dropout": (0, None),
    "pretraining_tp": (1, None),
    "rope_type": ("default",),
}
"""What a setting of the model's config may be."""


def norm(x: Tensor, gain: Tensor, epsilon: Tensor) -> Tensor:
    """RMSNorm over the last dimension; `epsilon` has one element. Half precision is widened to float32."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    unit = wide * torch.addcmul(epsilon, size, size, value=1 / x.shape[-1]).rsqrt()
    return (unit if wide is x else unit.to(x.dtype)) * gain


def one_element(value: float, like: Tensor) -> Tensor:
    """`value` as a tensor beside `like`, in float32 or better."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.full((1,), value, dtype=dtype, device=like.device)


def parts(linear: nn.Module, name: str) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Matrix and bias of a plain linear map."""
    if type(linear) is not nn.Linear:  # a subclass, or an adapter around one, may compute something else
        raise StackError(
            f"{name} is a {type(linear).__name__}, not an nn.Linear; merge adapters, undo quantization"
        )
    return linear.weight, linear.bias  # type: ignore[return-value]


def gain_of(module: Any, name: str, epsilon: float) -> nn.Parameter:
    """The gain of an RMSNorm, whose ε is that of all the others."""
    if module.variance_epsilon != epsilon:
        raise StackError(f"{name} has ε {module.variance_epsilon} and the config {epsilon}; make them equal")
    return module.weight


class LlamaLayer(nn.Module):
    """One layer, of the model's own parameters: matrices (out, in), their biases or None, and gains."""

    def __init__(self, layer: Any, head_width: int, epsilon: float) -> None:
        super().__init__()
        for name, path in {
            "query": "self_attn.q_proj",
            "key": "self_attn.k_proj",
            "value": "self_attn.v_proj",
            "output": "self_attn.o_proj",
            "gate": "mlp.gate_proj",
            "up": "mlp.up_proj",
            "down": "mlp.down_proj",
        }.items():
            weight, bias = parts(layer.get_submodule(path), path)
            self.register_parameter(name, weight)
            self.register_parameter(f"{name}_bias", bias)
        self.attention_gain = gain_of(layer.input_layernorm, "input_layernorm", epsilon)
        self.mlp_gain = gain_of(layer.post_attention_layernorm, "post_attention_layernorm", epsilon)
        self.head_width = head_width
        self.kv_heads = self.get_parameter("key").shape[0] // head_width
        self.share = self.get_parameter("query").shape[0] // head_width // self.kv_heads
        """How many heads of queries hear one head of keys."""

    def forward(self, h: Tensor, bus: Bus, state: KVState | None = None) -> Tensor:
        own: dict[str, Any] = self._parameters  # much faster than attributes
        batch, time, width = h.shape
        rows, epsilon = h.reshape(-1, width), bus.extras["epsilon"]  # a product of matrices costs least
        x = norm(rows, own["attention_gain"], epsilon)
        q = F.linear(x, own["query"], own["query_bias"])
        k = F.linear(x, own["key"], own["key_bias"])
        v = F.linear(x, own["value"], own["value_bias"])
        attend = self._attend_once if time == 1 else self._attend
        y = attend(q, k, v, batch, bus, state)
        rows = rows + F.linear(y, own["output"], own["output_bias"])
        x = norm(rows, own["mlp_gain"], epsilon)
        y = F.silu(F.linear(x, own["gate"], own["gate_bias"])) * F.linear(x, own["up"], own["up_bias"])
        return (rows + F.linear(y, own["down"], own["down_bias"])).view(batch, time, width)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, batch: int, bus: Bus, state: KVState | None) -> Tensor:
        """What the queries find, (batch · time, heads · head width) like q."""
        cos, sin = bus.extras["rotary"]
        split = (batch, len(q) // batch, -1, self.head_width)
        heads, keys = (rotate(x.view(split).transpose(1, 2), cos, sin) for x in (q, k))
        values = v.view(split).transpose(1, 2)
        if state is not None:
            keys, values = state.append(keys, values, bus.positions)
        mask = attention_mask(bus.positions, keys.shape[2])
        causal, grouped = mask is None, self.share > 1
        y = F.scaled_dot_product_attention(
            heads, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=grouped
        )
        return y.transpose(1, 2).reshape(q.shape)

    def _attend_once(
        self, q: Tensor, k: Tensor, v: Tensor, batch: int, bus: Bus, state: KVState | None
    ) -> Tensor:
        """The same for one position, where the query heads that share a key are queries of one head."""
        turn, groups, width = bus.extras["turn"], self.kv_heads, self.head_width
        if turn.dim() == 2:
            q, k = q.view(-1, width) @ turn, k.view(-1, width) @ turn
        else:
            q, k = q.view(batch, -1, width) @ turn, k.view(batch, -1, width) @ turn
        heads, keys = q.view(batch, groups, self.share, width), k.view(batch, groups, 1, width)
        values = v.view(batch, groups, 1, width)
        if state is not None:
            keys, values = state.append(keys, values, bus.positions)
        mask = attention_mask(bus.positions, keys.shape[2])
        return F.scaled_dot_product_attention(heads, keys, values, attn_mask=mask).reshape(batch, -1)

    def new_state(self, batch: int, capacity: int) -> KVState:
        like = self.get_parameter("key")
        return KVState(batch, self.kv_heads, capacity, self.head_width, like.device, like.dtype)


class Llama(Stack):
    """The stack; `Llama.of(model)` makes it."""

    frequencies: Tensor
    straight: Tensor
    across: Tensor

    def __init__(
        self,
        embedding: nn.Module,
        layers: list[LlamaLayer],
        gain: nn.Parameter,
        head: Head,
        *,
        epsilon: float,
        theta: float,
    ) -> None:
        super().__init__()
        self.embedding, self.layers, self.gain, self.head = embedding, nn.ModuleList(layers), gain, head
        self.epsilon = epsilon
        width = layers[0].head_width
        # Rounded to float32, as they were when the model learned; then at least as precise as the weights.
        frequencies = 1 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
        across = torch.kron(torch.tensor([[0.0, 1.0], [-1.0, 0.0]]), torch.eye(width // 2))
        like, shape = one_element(epsilon, gain), (width, 2, width // 2)
        self.register_buffer("frequencies", frequencies.to(like), persistent=False)
        self.register_buffer("straight", torch.eye(width).view(shape).to(like), persistent=False)
        self.register_buffer("across", across.view(shape).to(like), persistent=False)

    @classmethod
    def of(cls, model: Any) -> Llama:
        """A stack of a `LlamaForCausalLM`; it has the model's own parameters, not copies."""
        kind, config = type(model).__name__, getattr(model, "config", None)
        rope: Any = getattr(config, "rope_parameters", None) or {}
        found = {name: getattr(config, name, None) for name in _SUPPORTED}
        found["rope_type"] = rope.get("rope_type")
        for name, allowed in _SUPPORTED.items():
            if found[name] not in allowed:
                raise StackError(
                    f"{kind} has {name} {found[name]!r} and Llama.of takes {allowed[0]!r}; "
                    "use topograd.adapt, which does not decode"
                )
        try:
            inner, width, epsilon = model.model, model.config.head_dim, model.config.rms_norm_eps
            layers = [LlamaLayer(layer, width, epsilon) for layer in inner.layers]
            head = Head(*parts(model.lm_head, "lm_head"))
            gain = gain_of(inner.norm, "norm", epsilon)
            return cls(inner.embed_tokens, layers, gain, head, epsilon=epsilon, theta=rope["rope_theta"])
        except AttributeError as error:
            raise StackError(f"{kind} is not built as a LlamaForCausalLM: {error}") from None

    def embed(self, inputs: Tensor, previous: Tensor | None = None) -> Tensor:
        return self.embedding(inputs)

    def bus(self, x0: Tensor, inputs: Tensor, offset: int | Tensor = 0) -> Bus:
        positions = super().bus(x0, inputs, offset).positions
        angles = positions[..., None] * self.frequencies  # in the buffer's own precision
        if angles.dim() == 3:
            angles = angles[:, None]  # one for all heads
        cos, sin = angles.cos(), angles.sin()
        extras: dict[str, Any] = {"epsilon": one_element(self.epsilon, x0)}
        if positions.shape[-1] == 1:
            extras["turn"] = torch.addcmul(self.straight * cos, self.across, sin).flatten(-2).to(x0)
        else:
            extras["rotary"] = cos.to(x0), -sin.to(x0)  # `rotate` turns the other way
        return Bus(x0, inputs, positions, extras)

    def readout(self, h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
        return self.head(self._normalize(h), stage, rows)

    def projection(self, stage: int) -> Projection:
        return Projection(self._normalize, self.head.matrix(stage), self.head.bias)

    def _normalize(self, h: Tensor) -> Tensor:
        return norm(h, self.gain, one_element(self.epsilon, h))

    def for_decoding(self) -> Stack:
        return (
            DecodingLlama(self)
            if self.gain.dtype in (torch.float32, torch.float64)
            else super().for_decoding()
        )

    def add_heads(self, stages: Iterable[int], rank: int | None = None) -> bool:
        return self.head.add(stages, rank)

    def has_head(self, stage: int) -> bool:
        return self.head.has_delta(stage)

    @property
    def width(self) -> int:
        return self.head.weight.shape[1]

    def head_parameters(self, stage: int) -> list[nn.Parameter]:
        return self.head.own_parameters(stage)

    @property
    def last_stage(self) -> int:
        return self.head.last_stage
