"""Rotary embedding, causal masks and the attention layer of all transformers here.

Rotation of a head of width d at position p, "RoFormer" (Su et al. 2021) eq. 34:

    (x_i, x_{i+d/2}) ← (x_i c_i - x_{i+d/2} s_i,  x_{i+d/2} c_i + x_i s_i),   c, s = cos, sin of p ω_i

The frequencies ω of a head are θ^(-2i/d), or, stretched for a longer context: divided by a factor ("linear"),
or only where a wavelength 2π/ω is long against the context that the model first learned with, in between by
interpolation ("llama3"). They are rounded to float32, as they were when the model learned, whatever the
precision of the stack. The GPT of this package turns the other way (sin is negated), by tables of d/2: its
trained weights depend on the direction, and its last bits on the form.

Shapes: q (batch, heads, time, d), k and v (batch, kv heads, slots, d). Positions are (time,) where all
sequences of a batch are equally long and (batch, time) where they are not. A query at position p sees the
slots 0..p of its sequence, or the last `window` of them. Slots beyond a sequence's length may hold anything:
no query of it sees them, and the next token at such a position overwrites them.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.errors import StackError
from topograd.nn.host_numbers import largest, to_device
from topograd.nn.layer_state import KVState
from topograd.nn.stack import LayerContext
from topograd.nn.transformer.config import BlockConfig
from topograd.nn.transformer.parts import linear_of, norm_of

Tables = tuple[Tensor, Tensor]
"""cos and sin."""


def rope_frequencies(config: BlockConfig, local: bool = False) -> Tensor:
    """ω (head width / 2,) in float32, on the CPU; `local` for the layers with a window."""
    width, base = config.head_width, config.rope_base
    if config.traits.half_tables:
        half = width // 2
        return base ** (-torch.arange(half, device="cpu") / half)
    if local and config.local_rope_base is not None:
        base = config.local_rope_base
    plain = 1.0 / (base ** (torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width))
    if config.rope_scaling == "none" or (local and config.local_rope_base is not None):
        return plain
    if config.rope_scaling == "linear":
        return plain / config.rope_factor
    low, high, context = config.rope_low_factor, config.rope_high_factor, config.rope_original_context
    length = 2 * math.pi / plain
    stretched = torch.where(length > context / low, plain / config.rope_factor, plain)
    share = (context / length - low) / (high - low)
    between = (1 - share) * stretched / config.rope_factor + share * stretched
    return torch.where((length >= context / high) & (length <= context / low), between, stretched)


def rotary_tables(frequencies: Tensor, positions: Tensor, like: Tensor, halves: bool) -> Tables:
    """cos and sin (time, d) of every position, (batch, 1, time, d) for ragged batches; d/2 with `halves`."""
    wide = torch.promote_types(like.dtype, torch.float32)
    angles = positions[..., None].to(wide) * to_device(frequencies, like.device).to(wide)
    if not halves:
        angles = torch.cat((angles, angles), dim=-1)
    if angles.dim() == 3:
        angles = angles[:, None]  # one for all heads
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads with their pairs (x_i, x_{i + half}) rotated; the memory keeps x's order, which fused attention's
    last bits depend on."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same rotation backwards, by tables of half the width."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)


def attention_mask(positions: Tensor, total: int, window: int = 0) -> Tensor | None:
    """Which of `total` slots each query may see; None where plain causality or no mask is enough.

    (time, total) for equally long sequences, whose queries are the last slots; else (batch, 1, time, total).
    """
    time = positions.shape[-1]
    windowed = 0 < window < total
    if positions.dim() == 1 and not windowed and time in (1, total):
        return None
    if positions.dim() == 1:
        positions = torch.arange(total - time, total, device=positions.device)
    else:
        positions = positions[:, None]
    behind = positions[..., None] - torch.arange(total, device=positions.device)
    allowed = behind >= 0
    return allowed & (behind < window) if windowed else allowed


def causal_mask(ctx: LayerContext, total: int, window: int, whole_window: bool) -> Tensor | None:
    """Which of `total` slots each query may see, made once for all layers; None is plain causality.

    With `whole_window`, a window as long as the text masks nothing more but makes a mask, as in transformers.
    """
    if ctx.mask is not None:
        return ctx.mask
    masks = ctx.masks
    if (total, window) not in masks:
        mask = attention_mask(ctx.positions, total, window)
        if mask is None and whole_window and window == total > 1:
            mask = ctx.positions[:, None] >= torch.arange(total, device=ctx.positions.device)
        masks[total, window] = mask
    return masks[total, window]


def repeat_kv(x: Tensor, share: int) -> Tensor:
    """Keys or values (batch, kv heads, ...) once for each query head that uses them."""
    if share == 1:
        return x
    batch, heads, *rest = x.shape
    return x[:, :, None].expand(batch, heads, share, *rest).reshape(batch, heads * share, *rest)


def capped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """softmax(c tanh(q kᵀ s / c)) v, (batch, heads, time, head width), where `mask` or causality allows."""
    share = q.shape[1] // k.shape[1]
    k, v = repeat_kv(k, share), repeat_kv(v, share)
    scores = torch.matmul(q, k.transpose(2, 3)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None and q.shape[2] > 1:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    wide = torch.promote_types(q.dtype, torch.float32)
    return torch.matmul(F.softmax(scores, dim=-1, dtype=wide).to(q.dtype), v)


def check_reach(config: BlockConfig, inputs: Tensor, offset: int | Tensor) -> None:
    """Raise StackError for positions that a table of learned positions does not have."""
    stop = largest(offset) + 1 if isinstance(offset, Tensor) else offset + inputs.shape[1]
    if stop > config.positions:
        problem = f"{stop} positions are more than the {config.positions} that this {config.kind} has learned"
        raise StackError(problem, setting="inputs", given=stop, remedy="give it a shorter text")


class Attention(nn.Module):
    """Causal attention over the whole past or a window of it."""

    takes_rows = True

    def __init__(self, config: BlockConfig, index: int) -> None:
        super().__init__()
        traits = config.traits
        self.traits = traits
        self.heads, self.kv_heads = config.heads, config.num_kv_heads
        self.head_width = config.head_width
        self.window, self.scale = config.window(index), config.attention_scale
        self.local = self.window > 0 and config.local_rope_base is not None
        self.rotary = not traits.learned_positions
        self.softcap = config.attention_softcap
        queries, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        if traits.learned_positions:
            self.qkv = linear_of(config, config.width, queries + 2 * keys, config.qkv_bias)
        else:
            self.query = linear_of(config, config.width, queries, config.qkv_bias)
            self.key = linear_of(config, config.width, keys, config.qkv_bias)
            self.value = linear_of(config, config.width, keys, config.qkv_bias)
        self.output = linear_of(config, queries, config.width, config.output_bias, scale=0.0)
        self.query_norm = norm_of(config, self.head_width) if config.qk_norm else None
        self.key_norm = norm_of(config, self.head_width) if config.qk_norm else None
        self.value_embedding: nn.Embedding | None = None
        if config.has_value_embedding(index):
            self.value_embedding = nn.Embedding(config.vocab, keys)
            nn.init.uniform_(self.value_embedding.weight, -(3**0.5) / keys**0.5, 3**0.5 / keys**0.5)
            self.value_gate = nn.Parameter(torch.tensor(0.5))

    def forward(
        self, x: Tensor, ctx: LayerContext, state: KVState | None = None, rows: Tensor | None = None
    ) -> Tensor:
        """(batch, time, width), or only the positions in `rows` (E,): (batch, E, width)."""
        q, k, v = self._project(x, ctx, rows)
        q, k = self._rotate(q, k, ctx, rows)
        if state is not None:
            k, v = state.append(k, v)
        if rows is None or ctx.mask is not None:
            mask = causal_mask(ctx, k.shape[2], self.window, self.traits.whole_window)
        else:
            mask = attention_mask(rows[None], k.shape[2], self.window)
        y = self._attend(q, k, v, mask)
        return self.output(y.transpose(1, 2).reshape(len(x), y.shape[2], self.heads * self.head_width))

    def _project(self, x: Tensor, ctx: LayerContext, rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (batch, heads, time, head width)."""
        split = (*x.shape[:2], self.kv_heads, self.head_width)
        if self.rotary:
            queried = x if rows is None else x[:, rows]
            q = self.query(queried).view(*queried.shape[:2], self.heads, self.head_width)
            k, v = self.key(x).view(split), self.value(x)
            if self.value_embedding is not None:
                v = v + self.value_gate * self.value_embedding(ctx.inputs)
            v = v.view(split)
        else:
            q, k, v = (part.view(split) for part in self.qkv(x).chunk(3, dim=-1))
            q = q if rows is None else q[:, rows]
        if not self.traits.norm_behind_rotation and self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _rotate(self, q: Tensor, k: Tensor, ctx: LayerContext, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        if not self.rotary:
            return q, k
        rotate = rotate_halves if self.traits.half_tables else apply_rotary
        cos, sin = ctx.local_rotary if self.local else ctx.rotary
        k = rotate(k, cos, sin)
        q = rotate(q, cos, sin) if rows is None else rotate(q, cos[rows], sin[rows])
        if self.traits.norm_behind_rotation and self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        return q, k

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if self.traits.softcapped_attention:
            assert self.scale is not None
            return capped_attention(q, k, v, mask, self.scale, self.softcap)
        share = self.heads // self.kv_heads
        # Published families repeat keys and values where transformers does: the last bits depend on it.
        grouped = share > 1 and (self.traits.always_grouped or (mask is None and self.head_width <= 256))
        if not grouped:
            k, v = repeat_kv(k, share), repeat_kv(v, share)
        causal = mask is None and q.shape[2] > 1
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=self.scale, is_causal=causal, enable_gqa=grouped
        )

    def new_state(self, batch: int, capacity: int) -> KVState:
        like = self.output.weight
        return KVState(batch, self.kv_heads, capacity, self.head_width, like.device, like.dtype)
