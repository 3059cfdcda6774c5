"""The catalogue of stacks. Every one of them must pass tests/nn/test_stack.py; add yours here."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from topograd.nn.adapted.adapt import Adapted, adapt
from topograd.nn.gpt import GPT
from topograd.nn.preparation import prepare
from topograd.nn.stack import LayerContext, Stack
from topograd.nn.transformer.config import Family, TransformerConfig
from topograd.nn.transformer.stack import Transformer
from topograd.topology.configuration import Configuration
from topograd.topology.dag import Topology

VOCAB, TIME, LAYERS = 23, 9, 4
LLAMA: dict[str, Any] = {"layers": "model.layers", "norm": "model.norm", "head": "lm_head"}
GPT2: dict[str, Any] = {"layers": "transformer.h", "norm": "transformer.ln_f", "head": "lm_head"}
EXAMPLES = Path(__file__).parents[2] / "examples"


def gpt(**settings: Any) -> GPT:
    return GPT(**{"layers": LAYERS, "width": 16, "heads": 4, "vocab": VOCAB, "context": TIME} | settings)


def llama(**settings: Any) -> Any:
    """A Hugging Face Llama with random weights."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | heads | settings))


def gpt2(**settings: Any) -> Any:
    """A Hugging Face GPT-2 with random weights, without dropout unless asked for."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": LAYERS, "n_head": 2, "n_positions": 16}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    dropout = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), settings.pop("dropout", 0.0))
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes | special | dropout | settings))


def qwen2(**settings: Any) -> Any:
    """A Hugging Face Qwen2 whose first half attends to everything and whose second half to a window."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    windows = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": LAYERS // 2}
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes | heads | windows | settings))


def transformer(family: Family, **settings: Any) -> Transformer:
    """A transformer of a published family, of our own making."""
    sizes = {"layers": LAYERS, "width": 16, "heads": 4, "kv_heads": 2, "head_width": 4, "mlp_width": 24}
    return Transformer(
        TransformerConfig(family=family, **{**sizes, "vocab": VOCAB, "context": TIME, **settings})
    )


class Halving(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(width, width, kernel_size=3, stride=2, padding=1)

    def forward(self, h: Tensor, ctx: LayerContext) -> Tensor:
        return self.convolution(h).relu()


class ConvStack(Stack):
    """The least that a stack may be; shapes change from layer to layer."""

    def __init__(self, layers: int = LAYERS, width: int = 4, classes: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(1, width, kernel_size=3, padding=1)
        self.layers = nn.ModuleList(Halving(width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def embed(self, inputs: Tensor, previous: Tensor | None = None) -> Tensor:
        return self.embedding(inputs)

    def readout(self, h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
        logits = self.head(h.mean((-2, -1)))
        return logits if rows is None else logits[..., rows]


def decay() -> Stack:
    spec = import_module("examples.own_stack").DecaySpec(layers=LAYERS, width=16, vocab=VOCAB, context=TIME)
    stack: Stack = spec.build(Topology.chain(str(LAYERS)))
    return stack


@dataclass(frozen=True)
class Case:
    """A stack as data: how to make it, and what it can do."""

    name: str
    make: Callable[[], Stack]
    tokens: bool = True
    """Its inputs are tokens (batch, time), and it must be causal."""
    decodes: bool = False
    own_heads: bool = True
    """It can have a head for each stage."""
    tolerance: float = 1e-12
    """Relative, for results that are the same in exact arithmetic."""

    def inputs(self, batch: int = 4) -> Tensor:
        if self.tokens:
            return torch.randint(VOCAB, (batch, TIME))
        return torch.randn(batch, 1, 8, 8, dtype=torch.float64)

    def targets(self, batch: int = 4) -> Tensor:
        return torch.randint(VOCAB, (batch, TIME)) if self.tokens else torch.randint(2, (batch,))

    @property
    def leading(self) -> int:
        """How many dimensions of a hidden state the readout keeps."""
        return 2 if self.tokens else 1


# Hugging Face's RMSNorms and rotary tables work in float32 whatever the model's dtype is.
ROUNDED = 1e-5

CASES = (
    Case("gpt", gpt, decodes=True),
    Case("gpt-swiglu-gqa", lambda: gpt(mlp="swiglu", kv_heads=2), decodes=True),
    Case("gpt-windows", lambda: gpt(windows=(3, 0), value_embeddings="all"), decodes=True),
    Case("gpt-tied-softcap", lambda: gpt(tied=True, softcap=4.0), decodes=True),
    Case(
        "gpt-plain-low-rank",
        lambda: gpt(smear=False, x0_blend=False, value_embeddings="none", head_rank=3),
        decodes=True,
    ),
    Case("mamba2", lambda: gpt(architecture="mamba2", ssm_state=4), decodes=True),
    Case("mamba3", lambda: gpt(architecture="mamba3", ssm_state=4), decodes=True),
    Case("hybrid", lambda: gpt(architecture="hybrid", ssm_state=4), decodes=True),
    Case("llama", lambda: adapt(llama(), **LLAMA), tolerance=ROUNDED),
    Case(
        "llama-tied", lambda: adapt(llama(tie_word_embeddings=True), **LLAMA, head_rank=3), tolerance=ROUNDED
    ),
    Case("gpt2", lambda: adapt(gpt2(), **GPT2)),
    Case("qwen2-windows", lambda: adapt(qwen2(), **LLAMA), tolerance=ROUNDED),
    Case("native-llama", lambda: transformer("llama"), decodes=True),
    Case(
        "native-gpt2",
        lambda: transformer("gpt2", kv_heads=4, qkv_bias=True, output_bias=True, mlp_bias=True, tied=True),
        decodes=True,
    ),
    Case("native-qwen3", lambda: transformer("qwen3", qk_norm=True, tied=True), decodes=True),
    Case(
        "native-gemma2",
        lambda: transformer("gemma2", windows=(3, 0), attention_softcap=5.0, softcap=4.0, tied=True),
        decodes=True,
    ),
    Case(
        "native-gemma3",
        lambda: transformer("gemma3_text", windows=(3, 0), local_rope_base=50.0, qk_norm=True),
        decodes=True,
    ),
    Case("own", decay, decodes=True),
    Case("own-images", ConvStack, tokens=False, own_heads=False),
)


def disturbed(stack: Stack) -> Stack:
    """The stack with noise on every parameter, so that nothing is hidden by zeros."""
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return stack


def build(case: Case, seed: int = 0) -> Stack:
    """The case's stack in float64, in evaluation mode, disturbed, with heads for three stages if it can."""
    torch.manual_seed(seed)
    stack = case.make().double().eval()
    if case.own_heads:
        prepare(stack, Topology.chain(Configuration.parse("1,1,2", heads="per-stage")))
    return disturbed(stack)


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture
def stack(case: Case) -> Stack:
    return build(case)


@pytest.fixture(params=[case for case in CASES if case.tokens], ids=lambda case: case.name)
def sequence(request: pytest.FixtureRequest) -> tuple[Case, Stack]:
    """A case that reads tokens, and its stack."""
    return request.param, build(request.param)


@pytest.fixture(params=[case for case in CASES if case.decodes], ids=lambda case: case.name)
def decoder(request: pytest.FixtureRequest) -> tuple[Case, Stack]:
    """A case that decodes, and its stack."""
    return request.param, build(request.param)


@pytest.fixture
def rebuild() -> Callable[[Case, int], Stack]:
    return build


@pytest.fixture
def make_gpt() -> Callable[..., GPT]:
    """GPTs in float64, disturbed."""

    def make(**settings: Any) -> GPT:
        torch.manual_seed(0)
        model = disturbed(gpt(**settings).double())
        assert isinstance(model, GPT)
        return model

    return make


@pytest.fixture(params=["llama", "llama-tied", "llama-eager", "gpt2", "qwen2"])
def foreign(request: pytest.FixtureRequest) -> tuple[Any, Adapted]:
    """A Hugging Face model in float32, as it comes (in evaluation mode), and the stack made of it."""
    torch.manual_seed(0)
    name, _, variant = request.param.partition("-")
    variants: dict[str, dict[str, Any]] = {
        "": {},
        "tied": {"tie_word_embeddings": True},
        "eager": {"attn_implementation": "eager"},
    }
    model = {"llama": llama, "gpt2": gpt2, "qwen2": qwen2}[name](**variants[variant]).eval()
    return model, adapt(model, **(GPT2 if name == "gpt2" else LLAMA))


@pytest.fixture
def models() -> dict[str, Callable[..., Any]]:
    """Makers of Hugging Face models, by name."""
    return {"llama": llama, "gpt2": gpt2, "qwen2": qwen2}


@pytest.fixture
def float64() -> Iterator[None]:
    """Tensors made in the test are float64 by default."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def examples() -> Path:
    return EXAMPLES
