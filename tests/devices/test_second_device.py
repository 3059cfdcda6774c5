"""The second device of these tests behaves as CUDA does where it matters here: it must be able to fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from devices import DEVICE, DeviceMismatch, assert_same, host, on_both, second_device


def numbers(*shape: int, device: torch.device | str = "cuda") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device)


MIXED: dict[str, Callable[[Tensor], object]] = {
    "add": lambda x: x + torch.ones(3),
    "matmul": lambda x: x @ torch.ones(3, 3),
    "cat": lambda x: torch.cat((x, torch.ones(1, 3))),
    "stack of scalars": lambda x: torch.stack((x[0, 0], torch.ones(()))),
    "index_select": lambda x: x.index_select(0, torch.tensor([0])),
    "embedding": lambda x: F.embedding(torch.tensor([0]), x),
    "index of the CPU": lambda x: torch.ones(3)[torch.zeros(1, dtype=torch.long, device=x.device)],
    "cross-entropy": lambda x: F.cross_entropy(x, torch.zeros(3, dtype=torch.long)),
    "a CPU generator": lambda x: torch.randn(3, device=x.device, generator=torch.Generator()),
    "a CPU generator in place": lambda x: x.normal_(generator=torch.Generator()),
    "a generator of the device": lambda x: torch.randn(3, generator=torch.Generator(x.device)),
}


@pytest.mark.parametrize("operation", MIXED)
def test_devices_are_not_mixed(operation: str) -> None:
    with second_device():
        x = numbers(3, 3)
        with pytest.raises(DeviceMismatch):
            MIXED[operation](x)


def test_a_scalar_of_the_cpu_joins_elementwise_operations() -> None:
    with second_device() as transfers:
        x = numbers(3)
        transfers.clear()
        y = x * torch.tensor(2.0) + 1
        assert y.device == DEVICE
        assert transfers.seen == []


def test_arrays_of_the_device_are_refused() -> None:
    with second_device(), pytest.raises(TypeError, match="numpy"):
        numbers(3).numpy()


READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x[0]),
    "bool": lambda x: bool(x[0] > 0),
    "if any": lambda x: not (x > 0).any(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "tolist": lambda x: x.tolist(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "equal": lambda x: torch.equal(x, x),
    "unique": lambda x: x.unique(),
    "place in a tensor": lambda x: x[x.argmax()],
    "onto the CPU": lambda x: torch.zeros(3).copy_(x),
    "solve": lambda x: torch.linalg.solve(torch.eye(3, device=x.device), x),
    "eigenvalues": lambda x: torch.linalg.eigvalsh(torch.outer(x, x)),
}
WRITES: dict[str, Callable[[Tensor], object]] = {
    "tensor": lambda x: torch.tensor([1.0], device=x.device),
    "new_tensor": lambda x: x.new_tensor(1.0),
    "as_tensor": lambda x: torch.as_tensor([1.0], device=x.device),
    "to": lambda x: torch.ones(3).to(x.device),
    "to another": lambda x: torch.ones(3).to(x),
    "index of the CPU": lambda x: x[torch.tensor([0, 1])],
    "list": lambda x: x[[0, 1]],
    "from the CPU": lambda x: x.copy_(torch.ones(3)),
}
NEITHER: dict[str, Callable[[Tensor], object]] = {
    "new_full": lambda x: x.new_full((), 1.0),
    "arange": lambda x: torch.arange(3, device=x.device),
    "slice": lambda x: x[1:],
    "setitem": lambda x: x.__setitem__(0, 1.0),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "one_hot": lambda x: F.one_hot(x.argmax(), 3),
    "solve_ex": lambda x: torch.linalg.solve_ex(torch.eye(3, device=x.device), x),
    "norm": lambda x: torch.nn.utils.get_total_norm([x, x]),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference"])
@pytest.mark.parametrize(
    ("operation", "reads", "writes"),
    [
        *((one, 1, 0) for one in READS.values()),
        *((one, 0, 1) for one in WRITES.values()),
        *((one, 0, 0) for one in NEITHER.values()),
    ],
    ids=[*(f"read: {name}" for name in READS), *(f"write: {name}" for name in WRITES), *NEITHER],
)
def test_what_crosses_is_counted(
    operation: Callable[[Tensor], object], reads: int, writes: int, mode: Callable[[], torch.no_grad]
) -> None:
    with second_device() as transfers, mode():
        x = numbers(3)
        transfers.clear()
        operation(x)
        assert (transfers.reads, transfers.writes) == (reads, writes), transfers.seen


def test_a_copy_that_is_not_waited_for_is_counted_apart() -> None:
    with second_device() as transfers:
        torch.ones(3).to(DEVICE, non_blocking=True)
        assert (transfers.writes, transfers.async_writes) == (0, 1)


def test_values_and_gradients_are_those_of_the_cpu() -> None:
    def run(device: torch.device, begin: Callable[[], None]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Embedding(5, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 5)
        )
        model[4].weight = model[0].weight
        model.to(device)
        assert model[4].weight is model[0].weight, "what is tied stays tied"
        tokens = torch.randint(5, (4, 6)).to(device)
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        torch.optim.AdamW(model.parameters(), fused=True).step()
        return {name: p.detach() for name, p in model.named_parameters()}

    expected, result, _ = on_both(run)
    assert_same(result, expected)


def test_views_and_what_is_written_into_them() -> None:
    with second_device():
        x = torch.zeros(3, 3, device="cuda")
        x.T[0] = 5.0
        x[1:].add_(1)
        assert host(x).tolist() == [[5, 0, 0], [6, 1, 1], [6, 1, 1]]


def test_its_own_stream_of_random_numbers() -> None:
    with second_device(own_stream=True):
        torch.manual_seed(0)
        state = torch.cuda.get_rng_state(DEVICE)
        first = torch.rand(2, device="cuda")
        assert torch.rand(2).tolist() == torch.rand(2, generator=torch.Generator().manual_seed(0)).tolist()
        torch.cuda.set_rng_state(state, DEVICE)
        assert torch.equal(host(torch.rand(2, device="cuda")), host(first))
