"""Activations on the wire come back as they were, or rounded by no more than the format says."""

import pytest
import torch

from topograd.parallel.settings import WIRES, WireKind
from topograd.parallel.transport import decode, encode, room


@pytest.mark.parametrize("kind", WIRES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_decoded_is_near(kind: WireKind, dtype: torch.dtype) -> None:
    value = torch.randn(3, 5, 8, dtype=dtype).transpose(0, 1)
    value[0, 0] = 0.0
    sent = encode(value, kind)
    place = room(tuple(value.shape), dtype, kind, value.device)
    assert (place.shape, place.dtype) == (sent.shape, sent.dtype)
    got = decode(sent, tuple(value.shape), dtype, kind)
    assert (got.shape, got.dtype) == (value.shape, dtype)
    bound = {"exact": 0.0, "bf16": 2**-8, "int8": 0.51 / 127}[kind]
    assert ((got - value).abs() <= bound * value.abs().amax(-1, keepdim=True) + 1e-30).all()
