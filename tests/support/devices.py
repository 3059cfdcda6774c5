"""A second device on a machine that has none: tensors that say they are on "cuda" and compute on the CPU.

A `DeviceTensor` holds a CPU tensor and answers `.device` with `DEVICE`. Inside `second_device()` every torch
operation on one is checked as CUDA would check it and then run on the CPU tensor, so the values are real and
code that reads them back takes the same branches as on the CPU. What is checked and counted:

    mixing        an operation on a device tensor and a CPU tensor raises `DeviceMismatch`. As on CUDA, a CPU
                  tensor without dimensions may join elementwise operations, and an index may be on the CPU
    generators    a CPU generator in an operation on the device raises, and the reverse
    arrays        `.numpy()` of a device tensor raises
    reads         device to host, each of which waits for all the work before it: item, bool, float, tolist, cpu,
                  nonzero, boolean masks and every other operation whose result's shape depends on the data
    writes        host to device: torch.tensor(..., device=), .to(device), an index on the CPU

What it is not: no kernel, stream, memory or speed of a device is seen here, nor autocast (docs/devices.md).

How. Inside C++ the tensors claim torch's unused device "lazy", whose dispatch key reaches
`__torch_dispatch__` first, with autograd in place; a function mode translates the name "cuda" at the door and
handles the few calls that never reach the dispatcher (tolist, numpy, torch.tensor).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import topograd

DEVICE = torch.device("cuda", 0)
"""What the tensors say."""
_INNER = torch.device("lazy")
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
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
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
        return memo[id(self)]  # type: ignore[no-any-return]

    # A module's `.to` swaps its parameters in place where these two are there, so that tied ones stay tied.

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["raw"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> DeviceTensor:
        return DeviceTensor(inner["raw"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def host(value: Any) -> Any:
    """The CPU tensors of device tensors, anywhere in a structure; counts nothing."""
    return tree_map(lambda x: x.raw if isinstance(x, DeviceTensor) else x, value)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """One operation, on the CPU, with what it would be on the device: checked, counted, wrapped."""
    leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    here = any(isinstance(x, DeviceTensor) for x in leaves)
    asked = kwargs.get("device")
    to_device = here if asked is None else torch.device(asked).type in (_INNER.type, DEVICE.type)
    if here or to_device:
        with _Dispatch():  # in inference mode composites come whole
            if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
    packet = func.overloadpacket
    if packet is aten._to_copy:
        if here != to_device:
            _transfers.add("read" if here else "async write" if kwargs.get("non_blocking") else "write", "to")
    elif packet is aten.copy_:
        target, source = args[:2]
        if isinstance(target, DeviceTensor) != isinstance(source, DeviceTensor):
            _transfers.add("write" if isinstance(target, DeviceTensor) else "read", "copy_")
    elif here:
        _check_mixing(func, args, leaves)
        _count(func, packet, args)
    if not here and not to_device:
        return func(*args, **kwargs)
    func = _PLAIN.get(packet, func)
    with torch._C._DisableFuncTorch():
        out = func(*_unwrapped(args), **_unwrapped(kwargs))
    known = {id(x.raw): x for x in leaves if isinstance(x, DeviceTensor)}
    if torch.Tag.inplace_view in func.tags:  # the shell changes its shape too
        shell, raw = args[0], args[0].raw
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
        aten.as_strided_.default.redispatch(keys, shell, raw.shape, raw.stride(), raw.storage_offset())
    if not to_device:
        return out

    # In inference mode what is new is an inference tensor, and a view is what its base is.
    views = any(one.alias_info is not None for one in func._schema.returns)
    inference = torch.is_inference_mode_enabled() and not (views and not leaves[0].is_inference())

    def wrapped(x: Any) -> Any:  # what an operation in place returns is what it was given
        return (known[id(x)] if id(x) in known else DeviceTensor(x)) if isinstance(x, Tensor) else x

    with torch.inference_mode(inference):
        return tree_map(wrapped, out)


def _unwrapped(values: Any) -> Any:
    return tree_map(lambda x: torch.device("cpu") if isinstance(x, torch.device) else host(x), values)


def _check_mixing(func: Any, args: Any, leaves: list[Tensor]) -> None:
    outside = [x for x in leaves if not isinstance(x, DeviceTensor)]
    if not outside:
        return
    if func.overloadpacket in _INDEXED and isinstance(args[0], DeviceTensor):
        if all(isinstance(x, DeviceTensor) or x.dim() == 0 for x in args[2:3]):
            _transfers.add("write", "index on the CPU")
            return
    elementwise = torch.Tag.pointwise in func.tags or "_foreach_" in func._schema.name
    if not elementwise or any(x.dim() for x in outside):
        shapes = [tuple(x.shape) for x in outside]
        raise DeviceMismatch(f"{func} has tensors on {DEVICE} and on the CPU, of shapes {shapes}")


def _count(func: Any, packet: Any, args: Any) -> None:
    if packet in _READS:
        _transfers.add("read", func._schema.name.removeprefix("aten::"))
    elif packet in _INDEXED:
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                _transfers.add("read", "boolean index")


class _Dispatch(TorchDispatchMode):
    """Sees what has no device tensor among its arguments: constructors, and what comes from the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Names(TorchFunctionMode):
    """Reads "cuda" as the second device, and does what never reaches the dispatcher."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__):
            if isinstance(first, DeviceTensor):
                if func is not torch.Tensor.tolist:
                    raise TypeError("can't convert cuda:0 device type tensor to numpy; use Tensor.cpu() first")
                _transfers.add("read", "tolist")
                return first.raw.tolist()
        if func in (torch.Tensor.data_ptr, torch.Tensor.untyped_storage) and isinstance(first, DeviceTensor):
            return func(first.raw)
        if func in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor):
            return _made(func, args, kwargs)
        if func is torch._C._nn.one_hot and isinstance(first, DeviceTensor):
            return DeviceTensor(func(first.raw, *args[1:], **kwargs))  # on CUDA it does not look at its input
        if func is torch.Tensor.cuda:
            return first.to(DEVICE)  # type: ignore[union-attr]
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and isinstance(first, DeviceTensor):
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
        made = super().__new__(cls, "cpu")
        made.place = torch.device(device).type  # type: ignore[attr-defined]
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE if self.place in (DEVICE.type, _INNER.type) else torch.device("cpu")  # type: ignore[attr-defined]


@contextmanager
def second_device() -> Iterator[Transfers]:
    """Within it "cuda" is the second device; yields what crosses between it and the host."""
    _transfers.clear()
    with ExitStack() as stack:
        for module, name, value in (
            (torch, "Generator", _Generator),
            (torch.autograd, "has_torch_function", lambda *_: False),  # else hooks would run without modes
            (torch._tensor, "has_torch_function_unary", lambda _: False),
            (torch.cuda, "device", lambda _: nullcontext()),
            (torch.cuda, "is_bf16_supported", lambda **_: False),
            (torch.cuda, "get_rng_state", lambda _=None: torch.get_rng_state()),
            (torch.cuda, "set_rng_state", lambda state, _=None: torch.set_rng_state(state)),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        types = [*optimizer._foreach_supported_types, DeviceTensor]  # as parameters on CUDA are
        for module in (optimizer, _foreach_utils):
            if hasattr(module, "_foreach_supported_types"):
                stack.enter_context(mock.patch.object(module, "_foreach_supported_types", types))
        stack.enter_context(_Dispatch())
        stack.enter_context(_Names())
        yield _transfers
