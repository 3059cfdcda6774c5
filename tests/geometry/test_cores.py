"""Tasks on cores: order, room, and what a task raises."""

from collections.abc import Iterator

import pytest
import torch

from topograd.geometry.cores import on_each_core


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_results_come_in_order_few_items_exist_and_threads_are_put_back() -> None:
    taken: list[int] = []
    done: list[int] = []

    def items() -> Iterator[int]:
        for i in range(20):
            taken.append(i)
            assert len(taken) - len(done) <= 5, "there is room for one more than there are threads"
            yield i

    for found, threads in on_each_core(lambda i: (i, torch.get_num_threads()), items()):
        done.append(found)
        assert threads == 1
    assert done == list(range(20))
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_what_a_task_raises_is_raised_here() -> None:
    with pytest.raises(ZeroDivisionError):
        list(on_each_core(lambda i: 1 // i, [1, 0, 1]))
    assert torch.get_num_threads() == 3
