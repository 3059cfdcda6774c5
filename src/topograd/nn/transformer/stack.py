"""The `Transformer` stack: the GPT that is trained here, Llama, Mistral, Qwen, GPT-2, Gemma.

    x0 = E[token] (+ E'[previous token], the smear)       normed or scaled where the model does
    h ← h + s x0;   h ← h + W_o Attn(norm(h));   h ← h + W_down (act(W_gate x) ⊙ W_up x),  x = norm(h)
    z = cap((W + W_k) norm(h)),   norm(x) = x / sqrt(mean(x²) + ε) ⊙ gain

Each is one set of traits of the same block (`block.py`, `attention.py`). What the GPT (nanochat's class) has
beyond a Llama: smear, x0 blending, value embeddings, ReLU², norms without a gain, queries and keys normed
behind the rotation, and other mixers than attention in some or all layers. Two things stay apart, because
merging them would change the last bits of trained models: the direction and form of the rotation, and where
shared keys and values are repeated.

"LLaMA" (Touvron et al. 2023) §2.2, "Qwen3 Technical Report" (2025) §2, GPT-2 (Radford et al. 2019) §2.3,
"Gemma 2" (2024) §2, "Gemma 3" (2025) §2. No dropout. For decoding see `decode.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from topograd.errors import StackError
from topograd.nn.heads import Head, HeadedStack
from topograd.nn.stack import LayerContext, Stack
from topograd.nn.transformer.attention import Tables, check_reach, rope_frequencies, rotary_tables
from topograd.nn.transformer.block import layer_of, make_identity, table
from topograd.nn.transformer.config import BlockConfig
from topograd.nn.transformer.decode import DecodingTransformer
from topograd.nn.transformer.parts import initialize, norm, norm_of


class Transformer(HeadedStack):
    """The stack, with random weights. It may be built on the meta device."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        scratch = config.traits.scratch
        make_table = nn.Embedding if scratch else table
        self.embedding = make_table(config.vocab, config.width)
        self.previous = nn.Embedding(config.vocab, config.width) if config.smear else None
        if scratch:
            for each in (self.embedding, self.previous):
                if each is not None:
                    nn.init.normal_(each.weight, std=1.0 if not config.tied else config.width**-0.5)
        self.layers = nn.ModuleList(layer_of(config, i) for i in range(config.layers))
        self.norm = norm_of(config, config.width)
        weight = self.embedding.weight
        if scratch:  # drawn even where it is not used: seeds mean what they meant
            own = nn.Parameter(config.head_std * torch.randn(config.vocab, config.width))
            weight = weight if config.tied else own
        elif not config.tied:
            weight = table(config.vocab, config.width).weight
        self.head = Head(weight, rank=config.head_rank, softcap=config.softcap)
        if not scratch:
            self.apply(initialize)
        # Not buffers: converting the stack to half precision must not round them.
        self.frequencies = rope_frequencies(config)
        self.local_frequencies = None if config.local_rope_base is None else rope_frequencies(config, True)

    def embed(self, inputs: Tensor, previous: Tensor | None = None) -> Tensor:
        x = self.embedding(inputs)
        if self.previous is not None:
            before = self.previous(inputs[:, :-1])
            first = torch.zeros_like(x[:, :1]) if previous is None else self.previous(previous[:, None])
            x = x + torch.cat((first, before), dim=1)
        if self.config.traits.scaled_embedding:
            x = x * x.new_full((), self.config.width**0.5)
        return norm(x) if self.config.traits.normed_embedding else x

    def layer_context(self, x0: Tensor, inputs: Tensor, offset: int | Tensor = 0) -> LayerContext:
        positions = super().layer_context(x0, inputs, offset).positions
        if self.config.traits.learned_positions:
            check_reach(self.config, inputs, offset)
            return LayerContext(x0, inputs, positions)
        tables = self.rotations(positions, x0)
        return LayerContext(x0, inputs, positions, tables["rotary"], tables.get("local"))

    def rotations(self, positions: Tensor, like: Tensor) -> Mapping[str, Tables]:
        """cos and sin of some positions: `rotary`, and `local` where layers with a window have their own."""
        halves = self.config.traits.half_tables
        tables = {"rotary": rotary_tables(self.frequencies, positions, like, halves)}
        if self.local_frequencies is not None:
            tables["local"] = rotary_tables(self.local_frequencies, positions, like, halves)
        return tables

    def normalize(self, h: Tensor) -> Tensor:
        return self.norm(h)

    def for_decoding(self) -> Stack:
        attends = all(self.config.mixer(i) == "attention" for i in range(len(self.layers)))
        if attends and self.embedding.weight.dtype in (torch.float32, torch.float64):
            return DecodingTransformer(self)
        return super().for_decoding()

    def append_layers(self, count: int, index: int | None = None) -> None:
        """Add layers behind the last one; they are the identity until they learn.

        `index` is what the first new one counts as, where that is not its place: specialists that stand
        beside one another all count from their base's end.
        """
        self.config = self.config.grown(len(self.layers) + count)
        like = self.embedding.weight
        first_new = len(self.layers) if index is None else index
        for i in range(first_new, first_new + count):
            layer = layer_of(self.config, i).to(like.device, like.dtype)
            if not self.config.traits.scratch:
                layer.apply(initialize)
            make_identity(layer)
            self.layers.append(layer)

    def draft_layer(self) -> nn.Module:
        """One more layer of attention, the identity at first, as a draft stage has it."""
        if self.config.mixer(len(self.layers) - 1) != "attention":
            problem = "a draft stage has attention"
            raise StackError(problem, setting="base", remedy="this model's last layer has none")
        layer = layer_of(*self.config.draft_layer())
        make_identity(layer)
        return layer

    def draft_norm(self, gain: float) -> nn.Module:
        """The last norm with its gain times `gain`; one without a gain as it is."""
        own = norm_of(self.config, self.width)
        for mine, its in zip(own.parameters(), self.norm.parameters(), strict=True):
            mine.data = gain * its.detach().clone()
        return own

    def with_one_layer(self, layer: nn.Module, last_norm: nn.Module, head: Head) -> Transformer:
        """This model's embedding and positions around one layer, a norm and a head; weights are shared."""
        stack = Transformer.__new__(Transformer)  # drawing weights, even on meta, imports a compiler: 4 s
        vars(stack).update(vars(self))
        vars(stack)["_modules"] = dict(self._modules)
        stack.config = self.config.draft_layer()[0]
        stack.layers, stack.head = nn.ModuleList([layer]), head
        stack.norm = last_norm  # type: ignore[assignment]
        return stack

    @property
    def width(self) -> int:
        return self.config.width

    @property
    def context(self) -> int:
        return self.config.context
