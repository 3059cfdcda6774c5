"""Hugging Face's Llama in our engine: its logits and gradients, decoding, and what is refused."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import topograd
from topograd.depth.engine import Engine, Prefix, generate_batch
from topograd.errors import StackError
from topograd.nn.adapt import adapt
from topograd.nn.llama import Llama, norm
from topograd.nn.preparation import prepare
from topograd.topology.configuration import Configuration
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan
from topograd.training.forward import StageStates, stage_outputs

Make = Callable[..., Any]

VARIANTS: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": 1},
    {"attention_bias": True, "mlp_bias": True},
    {"tie_word_embeddings": True},
    {"head_dim": 6, "rope_theta": 50.0},
    {"rms_norm_eps": 0.1, "pad_token_id": 3},
]


@pytest.fixture
def make(models: dict[str, Make], monkeypatch: pytest.MonkeyPatch) -> Make:
    """Llamas in float64 with noise on every parameter.

    Norms and rotary tables, which Hugging Face rounds to float32, are written out in float64.
    """
    theirs = pytest.importorskip("transformers.models.llama.modeling_llama")

    def norm_in_float64(self: Any, x: Tensor) -> Tensor:
        return self.weight * x / (x.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt()

    def tables_in_float64(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = (position_ids[..., None] * self.inv_freq.double()).repeat(1, 1, 2)
        return angles.cos(), angles.sin()

    monkeypatch.setattr(theirs.LlamaRMSNorm, "forward", norm_in_float64)
    monkeypatch.setattr(theirs.LlamaRotaryEmbedding, "forward", tables_in_float64)

    def build(**settings: Any) -> Any:
        torch.manual_seed(0)
        return disturbed(models["llama"](**settings).double().eval())

    return build


@pytest.fixture
def stack(make: Make) -> Llama:
    return Llama.of(make())


def disturbed(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def tokens(rows: int = 2, time: int = 9, seed: int = 1) -> Tensor:
    return torch.randint(23, (rows, time), generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Every gradient, by name; they are taken away."""
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return found


def same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        close(found[name], expected[name], 1e-11)


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_logits_and_gradients_are_hugging_faces(make: Make, settings: dict[str, Any]) -> None:
    model = make(**settings)
    stack, inputs, targets = Llama.of(model), tokens(), tokens(seed=2).flatten()
    expected = model(inputs).logits
    F.cross_entropy(expected.flatten(0, 1), targets).backward()
    theirs = gradients(model)
    assert theirs.keys() == dict(model.named_parameters()).keys()
    logits = stack(inputs)
    close(logits, expected)
    F.cross_entropy(logits.flatten(0, 1), targets).backward()
    same_gradients(gradients(model), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_of_the_untouched_model(models: dict[str, Make], dtype: torch.dtype) -> None:
    """Up to rounding: some hundred operations, each off by half a unit in the last place."""
    torch.manual_seed(0)
    model = disturbed(models["llama"]()).to(dtype).eval()
    with torch.no_grad():
        logits = Llama.of(model)(tokens())
        assert logits.dtype == dtype
        close(logits, model(tokens()).logits, 16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_the_parameters_are_the_models_own(make: Make, settings: dict[str, Any]) -> None:
    model = make(**settings)
    before = names(model)
    stack = Llama.of(model)
    assert {id(p) for p in stack.parameters()} == {id(p) for p in model.parameters()}
    assert len(list(stack.parameters())) == len(list(model.parameters()))
    stack.add_heads(range(2))
    assert names(model) == before
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
        close(stack(tokens()), model(tokens()).logits)


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def test_converted_later_it_is_the_same(models: dict[str, Make]) -> None:
    torch.manual_seed(0)
    model = models["llama"](rms_norm_eps=0.1).eval()
    stack = Llama.of(model).double()
    with torch.no_grad():
        close(stack(tokens()), Llama.of(model)(tokens()), 1e-14)


@torch.no_grad()
def decode(stack: Llama, inputs: Tensor, pieces: Sequence[int], capacity: int = 9) -> Tensor:
    """Logits at all positions, decoded piece by piece."""
    plan = Plan.of(Topology.chain("2,2"), 4)
    states = StageStates(stack, plan, len(inputs), capacity)
    steps = [
        stage_outputs(stack, plan, part, [1], states=states)[1] for part in inputs.split(list(pieces), dim=1)
    ]
    return stack.readout(torch.cat(steps, dim=1), 0)


@pytest.mark.parametrize("pieces", [(1,) * 9, (9,), (3, 1, 4, 1), (1, 8)], ids=str)
@pytest.mark.parametrize("settings", VARIANTS[:4], ids=str)
def test_decoding_in_pieces_is_the_whole_forward(
    make: Make, settings: dict[str, Any], pieces: tuple[int, ...]
) -> None:
    model = make(**settings)
    with torch.no_grad():
        close(decode(Llama.of(model), tokens(), pieces), model(tokens()).logits)


@torch.no_grad()
def run(stack: Llama, inputs: Tensor, positions: Tensor, states: list[Any]) -> Tensor:
    """Logits of inputs (batch, time) at these positions (batch, time)."""
    h = stack.embed(inputs)
    bus = stack.bus(h, inputs, positions)
    for layer, state in zip(stack.layers, states, strict=True):
        h = layer(h, bus, state)
    return stack.readout(h, 0)


@pytest.mark.parametrize("piece", [1, 2])
@pytest.mark.parametrize("settings", VARIANTS[:3], ids=str)
def test_ragged_rows_in_one_batch(make: Make, settings: dict[str, Any], piece: int) -> None:
    """Prompts of 5, 1 and 3 tokens, padded to 5, then four more tokens for each, some at a time."""
    model = make(**settings)
    stack, inputs, lengths = Llama.of(model), tokens(rows=3), torch.tensor([5, 1, 3])
    states = [layer.new_state(3, 9) for layer in stack.layers]  # type: ignore[operator]
    first = run(stack, inputs[:, :5], torch.arange(5).expand(3, 5), states)
    steps = []
    for start in range(0, 4, piece):
        positions = lengths[:, None] + torch.arange(start, start + piece)
        steps.append(run(stack, inputs.gather(1, positions), positions, states))
    for r, length in enumerate(lengths.tolist()):
        with torch.no_grad():
            alone = model(inputs[r : r + 1, : length + 4]).logits[0]
        close(first[r, :length], alone[:length])
        close(torch.cat([step[r] for step in steps]), alone[length:])


def test_greedy_tokens_are_hugging_faces(make: Make) -> None:
    model, prompt = make(), [4, 7, 1]
    for _ in range(12):
        with torch.no_grad():
            prompt.append(int(model(torch.tensor([prompt])).logits[0, -1].argmax()))
    engine = Engine(Llama.of(model), Plan.of(Topology.chain("2,2"), 4), context=20)
    [written] = generate_batch(Prefix(engine), [prompt[:3]], 12)
    assert [emitted.token for emitted in written] == prompt[3:]
    assert len(set(prompt)) > 4


@pytest.mark.parametrize("heads", ["shared", "per-stage"])
@pytest.mark.parametrize("partition", ["4", "1,1,2"])
def test_a_training_step_is_that_of_the_adapted_model(make: Make, partition: str, heads: str) -> None:
    model = make(attention_bias=True)
    topology = Topology.chain(Configuration.parse(partition, heads=heads))
    stacks = [Llama.of(model), adapt(model, layers="model.layers", norm="model.norm", head="lm_head")]
    losses, found = [], []
    for stack in stacks:
        prepare(stack, topology)
        losses.append(topograd.train_step(stack, topology, tokens(), tokens(seed=2)))
        deltas = [p.grad for k in range(3) for p in stack.head_parameters(k) if p.grad is not None]
        found.append(gradients(model) | {f"delta {k}": delta for k, delta in enumerate(deltas)})
    assert len(found[0]) == len(list(model.parameters())) + (heads == "per-stage") * len(partition.split(","))
    close(losses[0], losses[1])
    same_gradients(found[0], found[1])


def test_projection_is_the_readout_on_any_shape(stack: Llama) -> None:
    stack.add_heads(range(2))
    disturbed(stack)
    h = torch.randn(2, 3, 16, dtype=torch.float64)
    projection = stack.projection(1)
    logits = stack.readout(h, 1)
    close(F.linear(projection.normalize(h), projection.weight), logits)
    close(stack.readout(h[1, 2], 1), logits[1, 2])
    close(stack.readout(h, 1, torch.tensor([5, 2])), logits[..., [5, 2]])
    assert not torch.allclose(stack.readout(h, 0), logits)


def test_norm_has_its_epsilon_and_a_gradient_at_zero() -> None:
    epsilon = torch.full((1,), 0.25, dtype=torch.float64)
    gain = torch.tensor([1.0, 2.0], dtype=torch.float64)
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    y = norm(x, gain, epsilon)
    expected = torch.tensor([[3.0, 8.0], [0.0, 0.0]], dtype=torch.float64) / 12.75**0.5
    close(y, expected)
    (gradient,) = torch.autograd.grad(y[1].sum(), x)
    assert torch.equal(gradient, torch.tensor([[0.0, 0.0], [2.0, 4.0]], dtype=torch.float64))


def test_norm_in_half_precision_is_reduced_in_float32() -> None:
    """Rounded once, at the end; a mean kept in bfloat16 would be off by up to 1/256 for a whole row."""
    x, epsilon = torch.randn(64, 300).bfloat16(), torch.full((1,), 1e-6)
    found = norm(x, torch.ones(300).bfloat16(), epsilon)
    exact = norm(x.float(), torch.ones(300), epsilon)
    assert torch.equal(found, exact.bfloat16())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rope": (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        "rope_type 'linear' and Llama.of takes 'default'; use topograd.adapt, which does not decode",
    ),
    "activation": (
        {"hidden_act": "gelu"},
        "LlamaForCausalLM has hidden_act 'gelu' and Llama.of takes 'silu'",
    ),
    "dropout": ({"attention_dropout": 0.1}, "attention_dropout 0.1 and Llama.of takes 0"),
    "slices": ({"pretraining_tp": 2}, "pretraining_tp 2 and Llama.of takes 1"),
}


@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_settings_that_are_refused(models: dict[str, Make], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(StackError, match=message):
        Llama.of(models["llama"](**settings))


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_other_models_are_refused(models: dict[str, Make], kind: str) -> None:
    with pytest.raises(StackError, match=f"has model_type '{kind}' and Llama.of takes 'llama'"):
        Llama.of(models[kind]())


def test_what_is_no_model_is_refused(models: dict[str, Make]) -> None:
    with pytest.raises(StackError, match=r"Linear has model_type None and Llama\.of takes 'llama'"):
        Llama.of(nn.Linear(2, 2))
    with pytest.raises(StackError, match="LlamaModel is not built as a LlamaForCausalLM: 'LlamaModel'"):
        Llama.of(models["llama"]().model)


def test_changed_parts_are_refused(models: dict[str, Make]) -> None:
    class Adapter(nn.Linear):
        pass

    model = models["llama"]()
    model.model.layers[1].mlp.up_proj = Adapter(16, 24)
    with pytest.raises(StackError, match=r"mlp\.up_proj is a Adapter, not an nn.Linear; merge adapters"):
        Llama.of(model)
    model = models["llama"]()
    model.model.layers[2].input_layernorm.variance_epsilon = 0.5
    with pytest.raises(StackError, match=r"input_layernorm has ε 0\.5 and the config 1e-06; make them equal"):
        Llama.of(model)
