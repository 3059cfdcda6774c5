"""The GPT's attention against the written-out version, its rotary positions, its start and its errors."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from raising import refused
from tests.oracles.attention import attention_output, plain_attention, root_mean_square_norm, rotated
from topograd.errors import ConfigError, StackError, TopogradError
from topograd.nn.config import GPTConfig
from topograd.nn.gpt import GPT
from topograd.nn.transformer.attention import Attention, rotate_halves
from topograd.nn.transformer.parts import norm

pytestmark = pytest.mark.usefixtures("float64")

VARIANTS = [
    {},
    {"kv_heads": 1},
    {"kv_heads": 2, "value_embeddings": "all"},
    {"windows": (1,)},
    {"windows": (3,), "kv_heads": 2},
    {"windows": (8,)},
    {"windows": (50,)},
]


def attentions(model: GPT) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_attention_is_the_written_out_one(make_gpt: Callable[..., GPT], settings: dict[str, Any]) -> None:
    model = make_gpt(rope_base=100.0, **settings)
    attention = attentions(model)[-1]
    inputs = torch.randint(23, (2, 9))
    x = torch.randn(2, 9, 16, requires_grad=True)
    weights = torch.randn(2, 9, 16)
    wanted = [x, *attention.parameters()]
    fast = attention(x, model.layer_context(x, inputs))
    slow = attention_output(attention, x, inputs, base=100.0)
    torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad((fast * weights).sum(), wanted),
        torch.autograd.grad((slow * weights).sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_the_written_out_attention_on_numbers() -> None:
    """Two equal scores give the mean of the values; a window of one gives the value itself."""
    q, k = torch.zeros(1, 1, 3, 2), torch.ones(1, 1, 3, 2)
    v = torch.tensor([[1.0, 0.0], [3.0, 0.0], [8.0, 6.0]]).view(1, 1, 3, 2)
    expected = torch.tensor([[1.0, 0.0], [2.0, 0.0], [4.0, 2.0]])
    torch.testing.assert_close(plain_attention(q, k, v)[0, 0], expected)
    torch.testing.assert_close(plain_attention(q[:, :, 2:], k, v)[0, 0], expected[2:])
    assert torch.equal(plain_attention(q, k, v, window=1), v)
    torch.testing.assert_close(plain_attention(q, k, v, window=2)[0, 0, 2], torch.tensor([5.5, 3.0]))


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(8), torch.randn(8)
    model = GPT(layers=1, width=8, heads=1, vocab=5, context=64)
    ctx = model.layer_context(torch.zeros(1, 64, 8), torch.zeros(1, 64, dtype=torch.long), offset=100)
    cos, sin = ctx.rotary
    turned_q, turned_k = rotate_halves(q.expand(64, 8), cos, sin), rotate_halves(k.expand(64, 8), cos, sin)
    scores = turned_q @ turned_k.T
    for distance in (0, 1, 7):
        along = scores.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(scores[0, 0], scores[1, 0])
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(64))
    torch.testing.assert_close(turned_q, rotated(q.expand(64, 8), torch.arange(100, 164), base=10_000.0))


def test_norm() -> None:
    x = torch.randn(3, 7)
    torch.testing.assert_close(norm(x), root_mean_square_norm(x), rtol=1e-14, atol=0.0)
    torch.testing.assert_close(norm(x).square().mean(-1), torch.ones(3), rtol=1e-12, atol=0.0)


def test_a_new_model_predicts_almost_uniformly_and_its_layers_get_gradients_at_once() -> None:
    model = GPT(layers=3, width=8, heads=2, vocab=11, context=6)
    inputs, targets = torch.randint(11, (2, 6)), torch.randint(11, (2, 6))
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    assert loss.item() == pytest.approx(math.log(11), abs=1e-2)
    for layer in model.layers:
        gradient = layer.get_parameter("mlp.down.weight").grad
        assert gradient is not None
        assert gradient.any()


@pytest.mark.parametrize("settings", [{}, {"mlp": "swiglu", "softcap": 3.0}, {"smear": False}], ids=str)
def test_every_stage_first_predicts_the_uniform_distribution(settings: dict[str, Any]) -> None:
    model = GPT(layers=3, width=8, heads=2, vocab=11, context=6, head_std=0.0, **settings)
    model.add_heads(range(2))
    inputs, targets = torch.randint(11, (2, 6)), torch.randint(11, (2, 6))
    for stage in range(2):
        logits = model.readout(model.embed(inputs), stage)
        assert logits.count_nonzero() == 0
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        assert loss.item() == pytest.approx(math.log(11), abs=1e-14)
    h = model.embed(inputs)
    assert torch.equal(model.layers[0].get_submodule("mlp")(h), torch.zeros_like(h))


def test_the_previous_token_is_heard(make_gpt: Callable[..., GPT]) -> None:
    model = make_gpt()
    inputs = torch.randint(23, (2, 9))
    x0 = model.embed(inputs)
    assert torch.equal(model.embed(inputs[:, 4:], previous=inputs[:, 3]), x0[:, 4:])
    assert not torch.allclose(model.embed(inputs[:, 4:])[:, 0], x0[:, 4])
    alone = make_gpt(smear=False)
    assert torch.equal(alone.embed(inputs[:, 4:]), alone.embed(inputs)[:, 4:])


@pytest.mark.parametrize(
    ("choice", "valued"),
    [("none", []), ("alternate", [1, 3]), ("all", [0, 1, 2, 3])],
)
def test_value_embeddings(make_gpt: Callable[..., GPT], choice: str, valued: list[int]) -> None:
    model = make_gpt(value_embeddings=choice)
    assert [i for i, a in enumerate(attentions(model)) if a.value_embedding is not None] == valued


def test_windows_repeat_over_the_layers(make_gpt: Callable[..., GPT]) -> None:
    assert [a.window for a in attentions(make_gpt(windows=(3, 0, 5)))] == [3, 0, 5, 3]


def test_a_window_hides_what_lies_before_it() -> None:
    """One layer with a window of 3 hears the tokens t-2, t-1 and t, and through the smear t-3."""
    torch.manual_seed(0)
    model = GPT(layers=1, width=8, heads=2, vocab=23, context=9, windows=(3,), x0_blend=False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    inputs = torch.randint(23, (1, 9))
    before = model(inputs)[:, 8]
    for t, heard in ((8, True), (6, True), (5, True), (4, False), (0, False)):
        changed = inputs.clone()
        changed[:, t] = (changed[:, t] + 1) % 23
        assert torch.equal(model(changed)[:, 8], before) is not heard


def test_tied_head_is_the_embedding() -> None:
    model = GPT(layers=2, width=8, heads=2, vocab=11, context=6, tied=True)
    assert model.head.weight is model.embedding.weight
    assert sum(p.shape == (11, 8) for p in model.parameters()) == 3  # embedding, smear, values


def test_softcap_bounds_the_logits(make_gpt: Callable[..., GPT]) -> None:
    model = make_gpt(softcap=0.5)
    with torch.no_grad():
        model.head.weight.mul_(100.0)
        logits = model(torch.randint(23, (2, 9)))
    assert 0.49 < logits.abs().max() <= 0.5


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"layers": 0}, "layers"),
        ({"vocab": -3}, "vocab"),
        ({"width": 30, "heads": 4}, "width"),
        ({"width": 12, "heads": 4}, "width"),
        ({"heads": 4, "kv_heads": 3}, "kv_heads"),
        ({"heads": 4, "kv_heads": 0}, "kv_heads"),
        ({"heads": 4, "kv_heads": -2}, "kv_heads"),
        ({"mlp": "gelu"}, "mlp"),
        ({"mlp_ratio": 0.0}, "mlp_ratio"),
        ({"value_embeddings": "some"}, "value_embeddings"),
        ({"softcap": 0.0}, "softcap"),
        ({"windows": (4, -1)}, "windows"),
        ({"head_rank": 17}, "head_rank"),
    ],
)
def test_bad_settings(settings: dict[str, Any], setting: str) -> None:
    with refused(TopogradError, setting=setting, given=settings[setting]):
        GPT(**{"layers": 2, "width": 16, "heads": 2, "vocab": 23, "context": 8} | settings)


def test_settings_of_an_unknown_name_or_wrong_type() -> None:
    with refused(ConfigError, setting="vocabulary", given=10) as caught:
        GPT(vocabulary=10)
    assert "vocab," in caught.value.remedy
    with refused(ConfigError, setting="layers", given="6", allowed="a whole number"):
        GPT(layers="6")


def test_a_config_or_settings_but_not_both() -> None:
    config = GPTConfig(layers=1, width=8, heads=2, vocab=11, context=6)
    assert GPT(config).config is config
    with refused(StackError, setting="config"):
        GPT(config, layers=2)
