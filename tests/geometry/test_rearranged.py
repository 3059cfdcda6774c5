"""Weights through views, slices, einsum and nn.MultiheadAttention: factors as of the plain layer."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.geometry import checkpoint
from topograd.geometry.checkpoint import read_checkpoint
from topograd.geometry.factors import Factors, kfac_factors
from topograd.geometry.rearranged import einsum_of
from topograd.geometry.symmetry_search import FoundSymmetries

HEADS, WIDTH, SIZE = 2, 4, 2


class Attention(nn.Module):
    """Plain projections; `kind` says how the same numbers are held and used."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        generator = torch.Generator().manual_seed(0)
        q, k, v, o = (torch.randn(WIDTH, WIDTH, generator=generator).double() for _ in range(4))
        if kind == "heads":
            self.read = nn.ParameterList([w.view(HEADS, SIZE, WIDTH).mT.clone() for w in (q, k, v)])
            self.write = nn.Parameter(o.T.reshape(HEADS, SIZE, WIDTH).clone())
        elif kind == "module":
            self.inner = nn.MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=True).double()
            self.inner.in_proj_weight.data = torch.cat((q, k, v))
            self.inner.out_proj.weight.data = o
        elif kind in ("fused", "sliced"):
            self.fused, self.write = nn.Parameter(torch.cat((q, k, v))), nn.Parameter(o)
        else:
            self.read, self.write = nn.ParameterList([q, k, v]), nn.Parameter(o)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "module":
            return x + self.inner(x, x.clone(), x.clone(), need_weights=False)[0]
        if self.kind == "heads":
            q, k, v = (torch.einsum("bsd,hde->bhse", x, w) for w in self.read)
            mixed = F.scaled_dot_product_attention(q, k, v)
            return x + torch.einsum("bhse,hed->bsd", mixed, self.write)
        if self.kind == "fused":
            flat = (x @ self.fused.T).chunk(3, -1)
        elif self.kind == "sliced":
            flat = tuple(F.linear(x, part) for part in self.fused.split(WIDTH))
        else:
            flat = tuple(F.linear(x, w) for w in self.read)
        q, k, v = (part.view(*x.shape[:2], HEADS, SIZE).transpose(1, 2) for part in flat)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + F.linear(mixed, self.write)


def read(kind: str) -> Factors:
    x = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    return kfac_factors(Attention(kind), (x, torch.zeros_like(x)), "squared-error", "empirical")


@pytest.mark.parametrize(
    ("kind", "parts", "write"),
    [
        ("sliced", ("fused[0:4]", "fused[4:8]", "fused[8:12]"), "write"),
        ("heads", ("read.0", "read.1", "read.2"), "write"),
        ("module", tuple(f"inner.in_proj_weight[{i}:{i + 4}]" for i in (0, 4, 8)), "inner.out_proj"),
    ],
)
def test_factors_are_those_of_plain_projections(kind: str, parts: tuple[str, ...], write: str) -> None:
    plain, found = read("plain"), read(kind)
    assert set(found) == {*parts, write}
    assert found.uncovered == {}
    for name, part in zip(("read.0", "read.1", "read.2", "write"), (*parts, write), strict=True):
        torch.testing.assert_close(found[part].A, plain[name].A)
        torch.testing.assert_close(found[part].G, plain[name].G)


def test_a_fused_projection_has_one_gradient_factor_whose_blocks_are_those_of_the_parts() -> None:
    plain, found = read("plain"), read("fused")
    for i in range(3):
        block = found["fused"].G[4 * i : 4 * i + 4, 4 * i : 4 * i + 4]
        torch.testing.assert_close(block, plain[f"read.{i}"].G)


def test_self_attention_of_a_module_is_one_packed_layer() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, norm_first=True).double()
    x = torch.randn(2, 3, 4).double()
    factors = kfac_factors(model.eval(), (x, x), "squared-error")
    assert set(factors) == {"self_attn.in_proj_weight", "self_attn.out_proj", "linear1", "linear2"}
    assert factors["self_attn.in_proj_weight"].G.shape == (12, 12)


@pytest.mark.parametrize("kind", ["heads", "sliced"])
def test_directions_of_a_rearranged_weight_are_those_of_the_plain_one(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symmetries are left in: they are looked for in plain matrices only."""
    monkeypatch.setattr(checkpoint, "find_symmetries", lambda *args, **more: FoundSymmetries((), ()))
    x = torch.randn(8, 5, WIDTH, generator=torch.Generator().manual_seed(1)).double()

    def flattest(kind: str) -> list[Any]:
        found = read_checkpoint(Attention(kind), (x, x), "squared-error", "expected")
        return sorted(one.fisher for one in found.directions if one.fisher and "joint" not in one.layer)

    assert flattest(kind) == pytest.approx(flattest("plain"), rel=1e-6)


@pytest.mark.parametrize(
    "equation", ["bsd,hde", "bshd,hde->bshe", "bsd,de->bs", "bdd,de->be", "bsd,...d->bs", "bs,de->bsde"]
)
def test_what_is_no_one_linear_map(equation: str) -> None:
    left, _, right = equation.partition("->")[0].partition(",")
    assert einsum_of(equation, len(left), len(right)) is None


def test_an_ellipsis_stands_for_rows() -> None:
    found = einsum_of("...d,de->...e", 3, 2)
    assert found is not None
    x, W = torch.randn(2, 5, 3), torch.randn(3, 4)
    rows, gradients, matrix = found
    expected = gradients(torch.einsum("...d,de->...e", x, W))
    torch.testing.assert_close(rows(x) @ matrix(W).T, expected)


def test_a_part_that_is_no_block_of_rows_has_a_reason() -> None:
    class Columns(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x[..., :2], self.weight[:, :2]) + super().forward(x)

    model = Columns(4, 3).double()
    x = torch.randn(5, 4).double()
    found = kfac_factors(model, (x, torch.zeros(5, 3).double()), "squared-error")
    assert found.uncovered == {"weight": "used by a part of it that is no block of rows"}
