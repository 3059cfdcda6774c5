"""Modules of one's own as stacks: toys that keep the rules of `adapt`, and toys that break them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raising import refused
from topograd.errors import StackError
from topograd.exec.train_step import train_step
from topograd.nn.adapted.adapt import Adapted, adapt
from topograd.nn.preparation import prepare
from topograd.topology.configuration import Configuration
from topograd.topology.dag import Topology


def tokens() -> Tensor:
    return torch.randint(23, (2, 9), generator=torch.Generator().manual_seed(1))


class Layer(nn.Module):
    """A layer that may be given all sorts of things, and does nothing with most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, h: Tensor, scale: Any = 1.0, **given: Any) -> Any:
        scale = scale if isinstance(scale, float | Tensor) else 1.0
        return h + scale * torch.tanh(self.linear(h))


class Toy(nn.Module):
    """Embedding, three layers, norm, head; `run` is how the layers are called."""

    def __init__(self, run: Callable[["Toy", Tensor], Tensor], head: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(23, 6)
        self.blocks = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.LayerNorm(6)
        self.out = head or nn.Linear(6, 23)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.run = run

    def forward(self, inputs: Tensor) -> Tensor:
        return self.run(self, self.table(inputs))


def plainly(toy: Toy, h: Tensor) -> Tensor:
    for block in toy.blocks:
        h = block(h)
    return toy.out(toy.norm(h))


def toy_stack(run: Callable[[Toy, Tensor], Tensor] = plainly, **options: Any) -> Adapted:
    return adapt(Toy(run), **{"layers": "blocks", "norm": "norm", "head": "out"} | options)


def by_keyword(toy: Toy, h: Tensor) -> Tensor:
    for i, block in enumerate(toy.blocks):
        h = block(scale=torch.tensor(float(i)), h=h)
    return toy.out(toy.norm(h))


def by_position(toy: Toy, h: Tensor) -> Tensor:
    for i, block in enumerate(toy.blocks):
        h = block(h, 0.1 * i, name="x", pair=(1, (torch.ones(2), None)))
    return toy.out(toy.norm(h).view(h.shape))


@pytest.mark.parametrize("run", [plainly, by_keyword, by_position])
def test_however_the_layers_are_called(run: Callable[[Toy, Tensor], Tensor]) -> None:
    stack = toy_stack(run)
    stack.verify(tokens())
    with torch.no_grad():
        assert torch.equal(stack(tokens()), stack.model(tokens()))


class PairLayer(Layer):
    def forward(self, h: Tensor, scale: Any = 1.0, **given: Any) -> Any:
        return super().forward(h, scale), "weights"


@pytest.mark.parametrize("unpack", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_layers_that_return_a_tuple(unpack: bool, batch: int) -> None:
    def run(toy: Toy, h: Tensor) -> Tensor:
        h = F.dropout(h, 0.3)
        for block in toy.blocks:
            if unpack:
                h, _ = block(h)
            else:
                h = block(h)[0]
        return toy.out(toy.norm(h))

    toy = Toy(run)
    toy.blocks = nn.ModuleList(PairLayer() for _ in range(3))
    adapt(toy, layers="blocks", norm="norm", head="out").verify(tokens()[:1].repeat(batch, 1))


def test_without_a_norm() -> None:
    def run(toy: Toy, h: Tensor) -> Tensor:
        for block in toy.blocks:
            h = block(h)
        return toy.out(h[:, 0:])

    stack = toy_stack(run, norm=None)
    stack.verify(tokens())
    train_step(stack, Topology.chain("1,2"), tokens(), tokens())
    assert stack.model.get_parameter("out.weight").grad is not None


def test_a_linear_head_with_a_bias() -> None:
    stack = toy_stack(head_rank=2)
    projection = stack.projection(0)
    assert projection is not None
    assert projection.bias is stack.model.get_parameter("out.bias")
    assert stack.add_heads(range(2))
    stack.verify(tokens())
    with torch.no_grad():
        for parameter in stack.head_parameters(1):
            parameter.add_(1.0)
        assert not torch.equal(stack(tokens()), stack.model(tokens()))
    stack.verify(tokens())  # which looks at the shared head


def test_any_other_head_is_called_as_it_is() -> None:
    head = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 23))
    stack = adapt(Toy(plainly, head), layers="blocks", norm="norm", head="out")
    stack.verify(tokens())
    assert stack.projection(0) is None
    h, rows = torch.randn(4, 6), torch.tensor([3, 3, 1])
    assert torch.equal(stack.readout(h, 0, rows), stack.readout(h, 0)[:, rows])
    with refused(StackError, setting="heads", given="per-stage"):
        prepare(stack, Topology.chain(Configuration.parse("1,2", heads="per-stage")))
    train_step(stack, Topology.chain("1,2"), tokens(), tokens())
    assert stack.head_parameters(0) == []
    assert all(p.grad is not None for n, p in stack.named_parameters() if "gain" not in n)
    with refused(StackError, setting="head_rank", given=2):
        adapt(Toy(plainly, head), layers="blocks", norm="norm", head="out", head_rank=2)


def test_a_copy_is_a_stack_of_its_own() -> None:
    stack = toy_stack()
    twin = copy.deepcopy(stack)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(0.1)
    twin.verify(tokens())
    stack.verify(tokens())
    assert not {id(p) for p in twin.layers.parameters()} & {id(p) for p in stack.layers.parameters()}


def test_modes_and_dtypes_reach_the_model() -> None:
    stack = toy_stack().double().eval()
    assert not any(m.training for m in stack.model.modules())
    assert stack(tokens()).dtype == torch.float64


def test_verify_names_the_first_difference() -> None:
    class Forgetful(Layer):
        def forward(self, h: Tensor, scale: Any = 1.0, **given: Any) -> Any:
            self.times = getattr(self, "times", 0) + 1
            return super().forward(h) + self.times

    toy = Toy(plainly)
    toy.blocks[1] = Forgetful()
    stack = adapt(toy, layers="blocks", norm="norm", head="out")
    with refused(StackError, setting="model", given="Toy") as caught:
        stack.verify(tokens())
    assert "first in what blocks.2 is given, by 1" in caught.value.problem


# What is refused


def change_between(toy: Toy, h: Tensor) -> Tensor:
    for block in toy.blocks:
        h = block(h) + 1
    return toy.out(toy.norm(h))


def change_in_place(toy: Toy, h: Tensor) -> Tensor:
    for i, block in enumerate(toy.blocks):
        h = block(h)
        if i == 1:
            h.mul_(2)
    return toy.out(toy.norm(h))


def change_before_norm(toy: Toy, h: Tensor) -> Tensor:
    for block in toy.blocks:
        h = block(h)
    return toy.out(toy.norm(2 * h))


def change_before_head(toy: Toy, h: Tensor) -> Tensor:
    for block in toy.blocks:
        h = block(h)
    return toy.out(toy.norm(h)[:, -1:])


def other_order(toy: Toy, h: Tensor) -> Tensor:
    return toy.out(toy.norm(toy.blocks[1](toy.blocks[2](toy.blocks[0](h)))))


def leave_one_out(toy: Toy, h: Tensor) -> Tensor:
    return toy.out(toy.norm(toy.blocks[1](toy.blocks[0](h))))


def one_twice(toy: Toy, h: Tensor) -> Tensor:
    return toy.out(toy.norm(toy.blocks[1](toy.blocks[0](toy.blocks[0](h)))))


def no_head(toy: Toy, h: Tensor) -> Tensor:
    for block in toy.blocks:
        h = block(h)
    return F.linear(toy.norm(h), toy.table.weight)


def crash(toy: Toy, h: Tensor) -> Tensor:
    toy.blocks[0](h)
    raise RuntimeError("out of\ncoffee")


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (change_between, "blocks.1 is not given what blocks.0 returned, unchanged"),
        (change_in_place, "blocks.2 is not given what blocks.1 returned, unchanged"),
        (change_before_norm, "norm is not given what blocks.2 returned, unchanged"),
        (change_before_head, "out is not given what norm returned, unchanged"),
        (other_order, "it runs blocks.2 where blocks.1 should run"),
        (leave_one_out, "it runs norm where blocks.2 should run"),
        (one_twice, "it runs blocks.0 where blocks.1 should run"),
        (no_head, "its forward ends without running out"),
        (crash, "after blocks.0 its forward fails (out of coffee)"),
    ],
)
def test_a_model_that_is_no_stack(run: Callable[[Toy, Tensor], Tensor], reason: str) -> None:
    stack = toy_stack(run)
    with torch.no_grad(), refused(StackError, setting="model", given="Toy") as caught:
        stack(tokens())
    assert caught.value.problem.endswith(reason)
    assert not any("forward" in vars(module) for module in stack.model.modules())


def test_an_error_of_the_model_before_its_layers_is_its_own() -> None:
    with pytest.raises(IndexError):
        toy_stack()(tokens() + 23)


def test_a_forgotten_norm_is_noticed() -> None:
    with refused(StackError, setting="model", given="Toy"):
        toy_stack(norm=None)(tokens())


def given(value: Callable[[Toy], Any]) -> Callable[[Toy, Tensor], Tensor]:
    """A run that gives every layer this."""

    def run(toy: Toy, h: Tensor) -> Tensor:
        for block in toy.blocks:
            h = block(h, scale=value(toy))
        return toy.out(toy.norm(h))

    return run


def test_arguments_with_gradient_are_refused_in_training() -> None:
    stack = toy_stack(given(lambda toy: 2 * toy.gain))
    with refused(StackError, setting="scale", given="blocks.0"):
        train_step(stack, Topology.chain("1,2"), tokens(), tokens())
    stack.verify(tokens())  # without gradients it is right
    stack.model.gain.requires_grad_(False)
    train_step(stack, Topology.chain("1,2"), tokens(), tokens())


@pytest.mark.parametrize("value", [{}, [], (1, {}), object()], ids=["dict", "list", "tuple", "object"])
def test_arguments_that_could_remember_are_refused(value: Any) -> None:
    stack = toy_stack(given(lambda toy: value))
    with refused(StackError, setting="scale", given="blocks.0"):
        stack(tokens())


def test_decoding_from_the_middle_is_refused() -> None:
    stack = toy_stack()
    x0 = stack.embed(tokens())
    with refused(StackError, setting="offset", given=3):
        stack.layer_context(x0, tokens(), offset=3)


@pytest.mark.parametrize(
    ("paths", "setting"),
    [
        ({"layers": "model.blocks"}, "layers"),
        ({"layers": "blocks.7"}, "layers"),
        ({"norm": "norm.scale"}, "norm"),
        ({"head": "gain"}, "head"),
        ({"layers": "norm"}, "layers"),
        ({"layers": "empty"}, "layers"),
        ({"head_rank": 7}, "head_rank"),
    ],
)
def test_bad_paths(paths: dict[str, Any], setting: str) -> None:
    toy = Toy(plainly)
    if paths.get("layers") == "empty":
        toy.empty = nn.ModuleList()
    with refused(StackError, setting=setting, given=paths[setting]):
        adapt(toy, **{"layers": "blocks", "norm": "norm", "head": "out"} | paths)
