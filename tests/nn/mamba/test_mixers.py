"""A mixer of somebody else's: named by its address, it builds, trains, and decodes as the whole sequence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pieces import Decoded
from raising import refused
from topograd.decode.cache import Cache
from topograd.errors import ConfigError, StackError
from topograd.exec.forward import stage_outputs
from topograd.exec.train_step import train_step
from topograd.nn.config import MIXERS, GPTConfig
from topograd.nn.gpt import GPT
from topograd.nn.preparation import prepare
from topograd.nn.transformer.block import MixerBlock
from topograd.runs.config import TrainConfig
from topograd.runs.folder import Run
from topograd.runs.session import open_session
from topograd.topology.configuration import Configuration
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan
from topograd.training.runs import resume, start

MODULE = '''
"""A decaying mean of the past, channel by channel."""

import torch
from torch import nn


class Memory:
    """The sum so far, at every position that was seen."""

    def __init__(self, batch, width, like):
        self.sums = [torch.zeros(batch, width, dtype=like.dtype, device=like.device)]

    def truncate(self, length):
        del self.sums[length + 1:]
        return len(self.sums) - 1

    def copy(self):
        twin = Memory.__new__(Memory)
        twin.sums = list(self.sums)
        return twin


class Decay(nn.Module):
    """y_t = W s_t, s_t = a s_{t-1} + V x_t."""

    def __init__(self, config, index):
        super().__init__()
        self.index = index
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)
        self.rate = nn.Parameter(torch.zeros(config.width))
        nn.init.zeros_(self.output.weight)

    def new_state(self, batch, capacity):
        return Memory(batch, self.value.out_features, self.value.weight)

    def forward(self, x, ctx, state=None):
        state = self.new_state(len(x), 0) if state is None else state
        v, a = self.value(x), torch.sigmoid(self.rate)
        first = len(state.sums)
        for t in range(x.shape[1]):
            state.sums.append(a * state.sums[-1] + v[:, t])
        return self.output(torch.stack(state.sums[first:], dim=1))


class Alone(Decay):
    with_mlp = False


def halved(config, index):
    """A function makes one too."""
    return Decay(config, index) if index % 2 else Alone(config, index)
'''
SIZES: dict[str, Any] = {"layers": 3, "width": 16, "heads": 2, "vocab": 23, "context": 9}


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The name of a module outside the package."""
    folder = tmp_path_factory.mktemp("mixers")
    (folder / "somebodys_mixers.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield "somebodys_mixers"


def made(address: str, **settings: Any) -> GPT:
    torch.manual_seed(0)
    model = GPT(architecture=address, **SIZES | settings).double()
    prepare(model, Topology.chain(Configuration.parse("1,2", heads="per-stage")))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture(params=["Decay", "Alone", "halved"])
def model(request: pytest.FixtureRequest, module: str) -> GPT:
    return made(f"{module}:{request.param}")


def test_it_builds_every_layer(module: str) -> None:
    layers = made(f"{module}:halved").layers
    assert all(isinstance(layer, MixerBlock) for layer in layers)
    assert [layer.get_submodule("mixer").index for layer in layers] == [0, 1, 2]
    assert ["mlp.up.weight" in dict(layer.named_parameters()) for layer in layers] == [False, True, False]


def test_a_new_layer_starts_as_x0_alone(module: str) -> None:
    fresh = GPT(architecture=f"{module}:Decay", x0_blend=False, **SIZES)
    inputs = torch.randint(23, (2, 9))
    x0 = fresh.embed(inputs)
    assert torch.equal(fresh.layers[0](x0, fresh.layer_context(x0, inputs)), x0)


def test_it_is_causal(model: GPT) -> None:
    inputs = torch.randint(23, (2, 9))
    changed = inputs.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 23
    before, after = model(inputs), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 7], after[:, 7])


@pytest.mark.parametrize("parts", [[9], [4, 1, 1, 3], [1] * 9])
def test_it_decodes_what_the_whole_sequence_gives(model: GPT, parts: list[int]) -> None:
    plan = Plan.of("1,2", 3)
    inputs = torch.randint(23, (2, 9))
    whole = stage_outputs(model, plan, inputs, [0, 1])
    states = Decoded(model, plan, rows=2, capacity=9)
    steps = [states.outputs(part, [0, 1]) for part in inputs.split(parts, 1)]
    for k in range(2):
        torch.testing.assert_close(torch.cat([s[k] for s in steps], 1), whole[k], rtol=1e-11, atol=1e-11)


def test_it_goes_back_and_on(model: GPT) -> None:
    plan = Plan.of("1,2", 3)
    inputs = torch.randint(23, (1, 9))
    whole = stage_outputs(model, plan, inputs, [1])[1]
    decoded = Decoded(model, plan, rows=1, capacity=9)
    decoded.outputs(inputs[:, :7], [1])
    decoded.truncate(4)
    assert decoded.batch[0].marks == [4, 4]
    again = decoded.outputs(inputs[:, 4:], [1])[1]
    torch.testing.assert_close(again, whole[:, 4:], rtol=1e-11, atol=1e-11)


def test_chosen_positions_are_those_of_all(model: GPT) -> None:
    """It does not take rows itself, so its layer does."""
    inputs, rows = torch.randint(23, (2, 9)), torch.tensor([1, 4, 8])
    x0 = model.embed(inputs)
    ctx = model.layer_context(x0, inputs)
    for layer in model.layers:
        torch.testing.assert_close(layer(x0, ctx, rows=rows), layer(x0, ctx)[:, rows], rtol=1e-12, atol=1e-12)


def test_it_learns_in_stages(model: GPT) -> None:
    inputs = torch.randint(23, (4, 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses: list[Tensor] = []
    for _ in range(30):
        optimizer.zero_grad()
        losses.append(train_step(model, "1,2", inputs, inputs.roll(-1, 1)))
        optimizer.step()
    assert (losses[-1] < losses[0] - 0.5).all()
    for layer in model.layers:
        gradient = layer.get_parameter("mixer.rate").grad
        assert gradient is not None
        assert gradient.any()


def test_a_run_of_it_trains_resumes_and_opens(module: str, config: TrainConfig, tmp_path: Path) -> None:
    shape = config.model.changed(architecture=f"{module}:Decay")
    chosen = replace(config, steps=6, save_every=3, eval_every=0, model=shape)
    start(chosen, tmp_path / "whole").train()
    start(chosen, tmp_path / "parts").train(stop_after=4)
    resume(tmp_path / "parts").train()
    ends = [Run.open(tmp_path / name).store.weights("step-00000006") for name in ("whole", "parts")]
    assert ends[0] == ends[1]
    session = open_session(tmp_path / "parts")
    assert session.config.gpt.architecture == f"{module}:Decay"
    assert all(isinstance(layer, MixerBlock) for layer in session.stack.layers)


def test_a_mixer_may_be_given_a_name(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    entries = dict(MIXERS._entries)
    monkeypatch.setattr(MIXERS, "_entries", entries)
    MIXERS.register("decay", MIXERS[f"{module}:Decay"])
    assert torch.equal(
        made("decay")(torch.zeros(1, 9, dtype=torch.long)),
        made(f"{module}:Decay")(torch.zeros(1, 9, dtype=torch.long)),
    )
    with refused(ConfigError, setting="name", given="decay"):
        MIXERS.register("decay", MIXERS[f"{module}:Decay"])


@pytest.mark.parametrize(
    ("address", "error", "setting"),
    [
        ("decay2", StackError, "architecture"),
        ("nowhere:mixer", ConfigError, "mixer"),
        ("math:mixer", ConfigError, "mixer"),
    ],
)
def test_a_mixer_that_is_not_there_is_one_line(address: str, error: type[Exception], setting: str) -> None:
    with refused(error, setting=setting, given=address):
        GPT(architecture=address, **SIZES)


def test_a_mixer_alone_is_an_architecture() -> None:
    assert [GPTConfig(architecture="attention", layers=3).mixer(i) for i in range(3)] == ["attention"] * 3
    assert isinstance(MIXERS["mamba2"], type)


def test_its_sequences_are_run_one_by_one_and_forked(module: str) -> None:
    """Of unlike lengths, one of them begun as another; each has a state of its own."""
    model, inputs = made(f"{module}:Decay"), torch.randint(23, (2, 9)).tolist()
    plan = Plan.of("1,2", 3)
    with torch.inference_mode():
        cache = Cache(model, plan, 9)
        batch = [cache.new(), cache.new()]
        cache.push(batch, [inputs[0][:5], inputs[1][:2]])
        cache.run(batch, 1)
        twin = cache.fork(batch[0], 3)
        assert twin.marks == [3, 3], "a list of sums is cut anywhere"
        batch.append(twin)
        cache.push(batch, [inputs[0][5:], inputs[1][2:], inputs[1][3:]])
        cache.run(batch, 1)
        result = cache.hidden(batch, 1, [4, 7, 6]).split([4, 7, 6])
    texts = [*inputs, inputs[0][:3] + inputs[1][3:]]
    for text, h in zip(texts, result, strict=True):
        whole = stage_outputs(model, plan, torch.tensor([text]), [1])[1][0]
        torch.testing.assert_close(h, whole[-len(h) :], rtol=1e-11, atol=1e-11)
