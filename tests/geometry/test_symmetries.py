"""Tangents of symmetries: projections against a dense basis, and that the function does not change."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from topograd.geometry.symmetries import (
    ChannelScale,
    HeadShift,
    KernelShift,
    Mixing,
    Shift,
    Symmetry,
    length,
    without_symmetries,
)

SHAPES = {"p": (12, 5), "b": (12,), "c": (7, 12), "g": (7, 24), "q": (24, 5), "gain": (5,), "head": (6, 4)}
SHAPES |= {"beta": (5,), "pt": (5, 12), "ct": (12, 7), "s1": (6, 4), "s2": (6, 4)}
CASES: dict[str, Symmetry] = {
    "units": Mixing("p", "c", bias="b"),
    "blocks": Mixing("p", "c", 4, bias="b"),
    "whole": Mixing("p", "c", 12),
    "grouped": Mixing("p", "g", 4, bias="b"),
    "rows": Mixing("p", "q", 4, by_rows=True),
    "half": Mixing("p", "q", 4, "half", by_rows=True),
    "pairs": Mixing("p", "q", 6, "pairs", by_rows=True),
    "scalar": Mixing("p", "q", 4, "scalar", by_rows=True),
    "squared": Mixing("p", "c", bias="b", degree=2),
    "turned": Mixing("pt", "ct", 4, bias="b", turned=True),
    "channels": ChannelScale("gain", ("p", "q")),
    "channels turned": ChannelScale("gain", ("pt",), dim=0),
    "shift": Shift("head"),
    "shift turned": Shift("pt", dim=1),
    "kernel": KernelShift("p", "b", "gain", "beta"),
    "kernel turned": KernelShift("pt", "b", None, None, turned=True),
    "heads": HeadShift("head", ("s1", "s2")),
}


def parameters() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()
    }


def flat(symmetry: Symmetry, direction: dict[str, Tensor]) -> Tensor:
    here = parameters()
    return torch.cat([direction.get(name, torch.zeros_like(here[name])).flatten() for name in symmetry.names])


def tangents(symmetry: Symmetry) -> Tensor:
    """A basis of the tangent from small group elements, by differences along many random ones."""
    here, found = parameters(), []
    for seed in range(2 * symmetry.dimensions(here) + 4):
        moved = symmetry.act(here, torch.Generator().manual_seed(seed))
        part = symmetry.tangent_part(here, {name: moved[name] - here[name] for name in moved})
        found.append(flat(symmetry, part))
    return torch.stack(found)


@pytest.mark.parametrize("name", CASES)
def test_the_projection_is_orthogonal_and_as_large_as_the_group(name: str) -> None:
    symmetry, here = CASES[name], parameters()
    generator = torch.Generator().manual_seed(9)
    given = {n: torch.randn(SHAPES[n], generator=generator, dtype=torch.float64) for n in symmetry.names}
    part = symmetry.tangent_part(here, given)
    again = symmetry.tangent_part(here, part)
    assert torch.allclose(flat(symmetry, part), flat(symmetry, again), atol=1e-12)
    rest = flat(symmetry, given) - flat(symmetry, part)
    assert torch.linalg.matrix_rank(tangents(symmetry), rtol=1e-9) == symmetry.dimensions(here)
    assert (tangents(symmetry) @ rest).abs().max() < 1e-9


@pytest.mark.parametrize("name", CASES)
def test_a_small_element_moves_along_the_tangent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("topograd.geometry.symmetries.SIZE", 1e-6)
    symmetry, here = CASES[name], parameters()
    moved = symmetry.act(here, torch.Generator().manual_seed(1))
    step = {n: moved[n] - here[n] for n in moved}
    outside = flat(symmetry, step) - flat(symmetry, symmetry.tangent_part(here, step))
    assert outside.norm() < 1e-5 * flat(symmetry, step).norm()


def test_products_that_the_network_sees_do_not_change() -> None:
    here = parameters()
    moved = here | CASES["whole"].act(here, torch.Generator().manual_seed(2))
    assert torch.allclose(moved["c"] @ moved["p"], here["c"] @ here["p"], atol=1e-12)
    moved = here | CASES["grouped"].act(here, torch.Generator().manual_seed(2))

    def heads(w: dict[str, Tensor]) -> Tensor:
        """Each of three heads of four units is read by two blocks of columns."""
        P, C = w["p"].reshape(3, 1, 4, 5), w["g"].reshape(7, 3, 2, 4).permute(1, 2, 0, 3)
        return C @ P

    assert torch.allclose(heads(moved), heads(here), atol=1e-12)


def test_squared_units_and_turned_matrices_do_as_they_say() -> None:
    here = parameters()
    moved = here | CASES["squared"].act(here, torch.Generator().manual_seed(2))
    x = torch.randn(5, dtype=torch.float64)

    def squared(w: dict[str, Tensor]) -> Tensor:
        return w["c"] @ torch.relu(w["p"] @ x + w["b"]).square()

    assert torch.allclose(squared(moved), squared(here), atol=1e-12)
    plain = Mixing("p", "c", 4, bias="b")
    mirrored = {"p": here["pt"].mT, "c": here["ct"].mT, "b": here["b"]}
    one = CASES["turned"].act(here, torch.Generator().manual_seed(3))
    other = plain.act(mirrored, torch.Generator().manual_seed(3))
    assert torch.equal(one["pt"].mT, other["p"])
    assert torch.equal(one["ct"].mT, other["c"])
    assert torch.equal(one["b"], other["b"])


def test_the_kernel_of_a_layernorm_does_not_show_in_a_map_that_reads_it() -> None:
    here, x = parameters(), torch.randn(9, 5, dtype=torch.float64)
    moved = here | CASES["kernel"].act(here, torch.Generator().manual_seed(2))
    y = F.layer_norm(x, (5,), here["gain"], here["beta"])
    assert torch.allclose(F.linear(y, moved["p"], moved["b"]), F.linear(y, here["p"], here["b"]), atol=1e-12)
    assert not torch.allclose(y @ moved["p"].T, y @ here["p"].T), "the bias has its part"
    zero = here | {"gain": here["gain"] * torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0]).double()}
    assert CASES["kernel"].dimensions(zero) == 2 * 12, "two dead gains are two directions"
    moved = zero | CASES["kernel"].act(zero, torch.Generator().manual_seed(2))
    y = F.layer_norm(x, (5,), zero["gain"], zero["beta"])
    assert torch.allclose(F.linear(y, moved["p"], moved["b"]), F.linear(y, zero["p"], zero["b"]), atol=1e-12)
    assert not torch.allclose(moved["p"], zero["p"])


def test_several_symmetries_that_share_tensors_are_taken_out_together() -> None:
    here = parameters()
    several = [CASES["whole"], CASES["channels"], CASES["rows"]]
    along = CASES["whole"].tangent_part(here, {"p": torch.randn(12, 5, dtype=torch.float64)})
    other = CASES["channels"].tangent_part(here, {"q": torch.randn(24, 5, dtype=torch.float64)})
    nothing = torch.zeros((), dtype=torch.float64)
    both = {n: along.get(n, nothing) + other.get(n, nothing) for n in along.keys() | other.keys()}
    left, share = without_symmetries(both, several, here)
    assert share > 1 - 1e-8
    assert length(left) < 1e-4 * length(both)
    assert without_symmetries({"head": here["head"]}, several, here)[1] == 0.0
