"""One task for each core: factorising a matrix of some hundred sides gains little from a second thread."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


def on_each_core(task: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """The results in the order of the items, as many at a time as torch has threads, one thread for each.

    An item is taken when there is room for it, so that few exist at a time.

    >>> list(on_each_core(lambda x: x**2, range(4)))
    [0, 1, 4, 9]
    """
    cores = torch.get_num_threads()
    if cores == 1:
        yield from map(task, items)
        return
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(task, item))
                if len(waiting) > cores:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            torch.set_num_threads(cores)
