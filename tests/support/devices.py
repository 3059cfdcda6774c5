"""A second device on a machine that has none: tensors that say they are on "cuda" and compute on the CPU.

A `DeviceTensor` holds a CPU tensor and answers `.device` with `DEVICE`. Inside `second_device()` every torch
operation on one is checked as CUDA would check it and then run on the CPU tensor, so the values are real and
code that reads them back takes the same branches as on the CPU. What is checked and counted:

    mixing        an operation on a device tensor and a CPU tensor raises `DeviceMismatch`. As on CUDA, a CPU
                  tensor without dimensions may join elementwise operations, and an index may be on the CPU
    generators    a CPU generator in an operation on the device raises, and the reverse
    arrays        `.numpy()` of a device tensor raises
    reads         device to host, each of which waits for all the work before it: item, bool, float, tolist,
                  cpu, nonzero, boolean masks and whatever else has a shape that depends on the data
    writes        host to device: torch.tensor(..., device=), .to(device), an index on the CPU

What it is not: no kernel, stream, memory, speed or autocast of a device: docs/reference/devices.md.

How. Inside C++ the tensors claim torch's unused device "lazy", whose dispatch key reaches
`__torch_dispatch__` first, with autograd in place; a function mode translates the name "cuda" at the door and
handles the few calls that never reach the dispatcher (tolist, numpy, torch.tensor).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import topograd

DEVICE = torch.device("cuda", 0)
"""What the tensors say."""
_INNER, _CPU = torch.device("lazy"), torch.device("cpu")
_SOURCES = str(Path(topograd.__file__).parent)
aten = torch.ops.aten

_READS = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.equal,
    aten._unique2,
    aten.unique_consecutive,
    aten.unique_dim,
    aten.repeat_interleave,
    aten.bincount,
    # These look at a status on the host: as an operation of its own, or inside the kernel.
    aten._linalg_check_errors,
    aten._linalg_eigh,
    aten._linalg_svd,
    aten.linalg_eig,
    aten.linalg_lstsq,
}
"""Operations whose shape, or whose Python result, is read back from the device."""
_INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}

_PLAIN = {
    aten._efficientzerotensor: aten.zeros.default,
    aten._conj: aten.conj_physical.default,
    aten._neg_view: aten.neg.default,
}
"""Operations that would leave a mark on the CPU tensor which its shell lacks, and the plain ones instead."""


class DeviceMismatch(RuntimeError):
    """Tensors or generators of two devices in one operation."""


@dataclass(frozen=True)
class Transfer:
    """Something that crossed between host and device."""

    kind: str
    """read, write, or async write: a copy to the device for which the host does not wait."""
    operation: str
    place: str
    """The innermost line of topograd, as package/file.py:function."""


@dataclass
class Transfers:
    """All that crossed since the beginning, or since `clear`."""

    seen: list[Transfer] = field(default_factory=list)

    @property
    def reads(self) -> int:
        return sum(one.kind == "read" for one in self.seen)

    @property
    def writes(self) -> int:
        return sum(one.kind == "write" for one in self.seen)

    @property
    def async_writes(self) -> int:
        return sum(one.kind == "async write" for one in self.seen)

    def places(self, kind: str) -> dict[str, int]:
        """How often each place did it."""
        return dict(Counter(f"{one.place} {one.operation}" for one in self.seen if one.kind == kind))

    def clear(self) -> None:
        self.seen.clear()

    def add(self, kind: str, operation: str) -> None:
        self.seen.append(Transfer(kind, operation, _place()))


_transfers = Transfers()
_stream: list[Tensor] = []
"""The state of the device's generator, where it is not the CPU's."""


def _place() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_SOURCES):
            return f"{name[len(_SOURCES) + 1 :]}:{frame.f_code.co_name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "outside"


class DeviceTensor(torch.Tensor):
    """A CPU tensor that says it is on the second device."""

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, raw: Tensor) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=_INNER,
        )
        made.raw = raw
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.raw})"

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceTensor:
        if id(self) not in memo:
            made = DeviceTensor(self.raw.detach().clone()).requires_grad_(self.requires_grad)
            made.__dict__.update({name: value for name, value in self.__dict__.items() if name != "raw"})
            memo[id(self)] = made
        return memo[id(self)]

    # A module's `.to` swaps its parameters in place where these two are there, so that tied ones stay tied.

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["raw"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> DeviceTensor:
        return DeviceTensor(inner["raw"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def host(value: Any) -> Any:
    """The CPU tensors of device tensors, anywhere in a structure; counts nothing."""
    return tree_map(lambda x: x.raw if isinstance(x, DeviceTensor) else x, value)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """One operation, on the CPU, with what it would be on the device: checked, counted, wrapped."""
    given = list(_leaves((args, *kwargs.values())))
    tensors = [x for x in given if isinstance(x, Tensor)]
    here = any(isinstance(x, DeviceTensor) for x in tensors)
    asked = next((x for x in given if isinstance(x, torch.device)), None)
    to_device = here if asked is None else asked.type in (_INNER.type, DEVICE.type)
    if not here and not to_device:
        return func(*args, **kwargs)
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        with _Dispatch():  # in inference mode composites come whole
            return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
    _check(func, args, kwargs, tensors, here, to_device)
    func = _PLAIN.get(func.overloadpacket, func)
    out = _on_cpu(func, args, kwargs, to_device)
    if torch.Tag.inplace_view in func.tags:  # the shell changes its shape too
        shell, raw = args[0], args[0].raw
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
        aten.as_strided_.default.redispatch(keys, shell, raw.shape, raw.stride(), raw.storage_offset())
    return _wrapped(func, out, tensors) if to_device else out


def _on_cpu(func: Any, args: Any, kwargs: Any, to_device: bool) -> Any:
    draws = to_device and torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
    with torch._C._DisableFuncTorch(), _own_stream() if draws and _stream else nullcontext():
        return func(*_mapped(_bare, args), **{name: _mapped(_bare, x) for name, x in kwargs.items()})


def _bare(x: Any) -> Any:
    return x.raw if isinstance(x, DeviceTensor) else _CPU if isinstance(x, torch.device) else x


def _wrapped(func: Any, out: Any, tensors: list[Tensor]) -> Any:
    """Results on the device. In inference mode new ones are inference tensors, views are as their base."""
    known = {id(x.raw): x for x in tensors if isinstance(x, DeviceTensor)}

    def wrap(x: Any) -> Any:  # what an operation in place returns is what it was given
        return (known[id(x)] if id(x) in known else DeviceTensor(x)) if isinstance(x, Tensor) else x

    if not torch.is_inference_mode_enabled():
        return _mapped(wrap, out)
    views = any(one.alias_info is not None for one in func._schema.returns)
    with torch.inference_mode(not views or tensors[0].is_inference()):
        return _mapped(wrap, out)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)([_mapped(change, one) for one in value])
    return change(value)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


def _check(func: Any, args: Any, kwargs: Any, tensors: list[Tensor], here: bool, to_device: bool) -> None:
    """Count what crosses, and refuse what may not meet."""
    packet = func.overloadpacket
    if packet is aten._to_copy:
        if here != to_device:
            _transfers.add("read" if here else "async write" if kwargs.get("non_blocking") else "write", "to")
    elif packet is aten.copy_:
        target, source = (isinstance(x, DeviceTensor) for x in args[:2])
        if target != source:
            _transfers.add("write" if target else "read", "copy_")
    elif here:
        _check_mixing(func, args, tensors)
        if packet in _READS:
            _transfers.add("read", func._schema.name.removeprefix("aten::"))
        for index in args[1] if packet in _INDEXED else ():
            if isinstance(index, DeviceTensor) and index.dtype in (torch.bool, torch.uint8):
                _transfers.add("read", "boolean index")


def _check_mixing(func: Any, args: Any, tensors: list[Tensor]) -> None:
    outside = [x for x in tensors if not isinstance(x, DeviceTensor)]
    if not outside:
        return
    values = all(isinstance(x, DeviceTensor) or x.dim() == 0 for x in args[2:3] if isinstance(x, Tensor))
    if func.overloadpacket in _INDEXED and isinstance(args[0], DeviceTensor) and values:
        _transfers.add("write", "index on the CPU")
        return
    elementwise = torch.Tag.pointwise in func.tags or "_foreach_" in func._schema.name
    if not elementwise or any(x.dim() for x in outside):
        shapes = [tuple(x.shape) for x in outside]
        raise DeviceMismatch(f"{func} has tensors on {DEVICE} and on the CPU, of shapes {shapes}")


class _Dispatch(TorchDispatchMode):
    """Sees what has no device tensor among its arguments: constructors, and what comes from the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Names(TorchFunctionMode):
    """Reads "cuda" as the second device, and does what never reaches the dispatcher."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if func in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor):
            return _made(func, args, kwargs)
        if isinstance(first, DeviceTensor):
            if func in (torch.Tensor.numpy, torch.Tensor.__array__):
                raise TypeError("a tensor of cuda:0 has no numpy array; use Tensor.cpu() first")
            if func is torch.Tensor.tolist:
                _transfers.add("read", "tolist")
                return first.raw.tolist()
            if func in (torch.Tensor.data_ptr, torch.Tensor.untyped_storage):
                return func(first.raw)
            if func is torch._C._nn.one_hot:  # on CUDA it does not look at its input
                return DeviceTensor(func(first.raw, *args[1:], **kwargs))
            if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
                args = (first, _index(args[1]), *args[2:])
        _check_generator(args, kwargs)
        return func(*(_translated(x) for x in args), **{k: _translated(v) for k, v in kwargs.items()})


def _made(func: Any, args: Any, kwargs: Any) -> Tensor:
    """torch.tensor and its like: numbers are laid out on the host, and copied."""
    device = kwargs.pop("device", None)
    if func is torch.as_tensor and isinstance(args[0], Tensor):
        dtype = kwargs.get("dtype", args[0].dtype)
        return args[0].to(dtype=dtype) if device is None else args[0].to(device, dtype)
    if func is torch.Tensor.new_tensor:
        device = args[0].device if device is None else device
        kwargs.setdefault("dtype", args[0].dtype)
        args = args[1:]
    wants_grad = kwargs.pop("requires_grad", False)
    with torch._C.DisableTorchFunction():
        made = torch.tensor(*args, **kwargs)
    if device is not None and torch.device(device).type == DEVICE.type:
        _transfers.add("write", func.__name__)
        made = DeviceTensor(made)
    return made.requires_grad_(wants_grad)


def _index(index: Any) -> Any:
    """Lists in an index as the CPU tensors that torch makes of them."""
    if isinstance(index, tuple):
        return tuple(_index(one) for one in index)
    return torch.tensor(index) if isinstance(index, list | np.ndarray) else index


def _check_generator(args: Any, kwargs: Any) -> None:
    generator = kwargs.get("generator")
    if generator is None:
        return
    asked, first = kwargs.get("device"), args[0] if args else None
    place = first.device if asked is None and isinstance(first, Tensor) else torch.device(asked or "cpu")
    if generator.device.type != place.type:
        raise DeviceMismatch(f"a generator on {generator.device} draws for {place}")


def _translated(value: Any) -> Any:
    """A device, or its name, as C++ is to see it."""
    if isinstance(value, torch.device) and value.type == DEVICE.type:
        return _INNER
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return _INNER
    return value


class _Generator(torch.Generator):
    """A generator that may say it is on the second device; its numbers are the CPU's."""

    def __new__(cls, device: torch.device | str = "cpu") -> _Generator:
        made = super().__new__(cls, "cpu")  # type: ignore[call-arg]
        made.place = torch.device(device).type  # type: ignore[attr-defined]
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE if self.place in (DEVICE.type, _INNER.type) else torch.device("cpu")  # type: ignore[attr-defined]


@contextmanager
def _own_stream() -> Iterator[None]:
    """Within it the CPU's generator is where the device's is."""
    before = torch.get_rng_state()
    torch.set_rng_state(_stream[0])
    yield
    _stream[0] = torch.get_rng_state()
    torch.set_rng_state(before)


def _get_state(_: Any = None) -> Tensor:
    return _stream[0].clone() if _stream else torch.get_rng_state()


def _set_state(state: Tensor, _: Any = None) -> None:
    if _stream:
        _stream[0] = state
    else:
        torch.set_rng_state(state)


@contextmanager
def second_device(*, own_stream: bool = False) -> Iterator[Transfers]:
    """Within it "cuda" is the second device; yields what crosses between it and the host.

    Random numbers on it are the CPU's next ones, so that the values are those of a CPU run, or with
    `own_stream` those of a generator of its own, as on CUDA.
    """
    _transfers.clear()
    _stream[:] = [torch.Generator().manual_seed(1).get_state()] if own_stream else []
    with ExitStack() as stack:
        for module, name, value in (
            (torch, "Generator", _Generator),
            (torch.autograd, "has_torch_function", lambda *_: False),  # else hooks would run without modes
            (torch._tensor, "has_torch_function_unary", lambda _: False),
            (torch.cuda, "device", lambda _: nullcontext()),
            (torch.cuda, "is_bf16_supported", lambda **_: False),
            (torch.cuda, "get_rng_state", _get_state),
            (torch.cuda, "set_rng_state", _set_state),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        types = [*optimizer._foreach_supported_types, DeviceTensor]  # as parameters on CUDA are
        for module in (optimizer, _foreach_utils):
            if hasattr(module, "_foreach_supported_types"):
                stack.enter_context(mock.patch.object(module, "_foreach_supported_types", types))
        stack.enter_context(_Dispatch())
        stack.enter_context(_Names())
        yield _transfers


Run = Callable[[torch.device, Callable[[], None]], Any]


def on_both(run: Run, *, own_stream: bool = False) -> tuple[Any, Any, Transfers]:
    """What `run(device, begin)` gives on the CPU and on the second device, and what crossed since `begin()`.

    Attention is computed by the same formula on both: the second device has no fused one.
    """
    with sdpa_kernel(SDPBackend.MATH):
        expected = run(torch.device("cpu"), lambda: None)
        with second_device(own_stream=own_stream) as transfers:
            found = run(DEVICE, transfers.clear)
            return expected, found, Transfers(list(transfers.seen))


def assert_same(found: Any, expected: Any, tolerance: float = 0.0) -> None:
    """Whether two structures of tensors, numbers and words say the same, within a relative tolerance."""
    pairs = list(zip(_flat(found), _flat(expected), strict=True))
    assert pairs, "there is nothing to compare"
    for one, other in pairs:
        if isinstance(one, Tensor | float) and not isinstance(one, bool):
            torch.testing.assert_close(
                torch.as_tensor(one), torch.as_tensor(other), rtol=tolerance, atol=tolerance, equal_nan=True
            )
        else:
            assert one == other


def _flat(value: Any) -> Iterator[Any]:
    if is_dataclass(value):
        value = [getattr(value, one.name) for one in fields(value)]
    if isinstance(value, Mapping):
        yield from (key for key in value if isinstance(key, str))
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from _flat(one)
    else:
        yield host(value)
