"""Corrections begin where they are told to, and the model computes the same."""

from __future__ import annotations

import pytest
import torch

import topograd as tg
from topograd.geometry.safe_directions import adapter_directions, input_moments
from topograd.nn.lora import add_lora, corrected_maps, has_lora, low_rank_factors, merge_lora, scale_lora
from topograd.runs.tune_config import Directions
from topograd.training.lora_directions import begin_lora

OLD, NEW = (torch.randint(40, (4, 8), generator=torch.Generator().manual_seed(s)) for s in (1, 2))
FORMS = {"plain": "plain", "pissa": "shifted", "random": "held", "dead": "held", "safe": "held"}


@pytest.fixture
def stack() -> tg.GPT:
    torch.manual_seed(0)
    made = tg.GPT(layers=2, width=16, heads=2, vocab=40, context=8).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made.eval()


@pytest.mark.parametrize("directions", FORMS)
def test_nothing_changes_and_what_should_learns(stack: tg.GPT, directions: Directions) -> None:
    before = stack(NEW)
    add_lora(stack.layers, 2, form=FORMS[directions], max_inputs=16)  # type: ignore[arg-type]
    begin_lora(stack, directions, [OLD], [NEW])
    torch.testing.assert_close(stack(NEW), before, rtol=0, atol=1e-12)
    learns = {name.rpartition(".")[2] for name, p in stack.layers.named_parameters() if p.requires_grad}
    assert learns == ({"lora_b"} if FORMS[directions] == "held" else {"lora_a", "lora_b"})
    for module in corrected_maps(stack).values():
        with torch.no_grad():
            module.get_parameter("lora_b").add_(0.1)
    moved = stack(NEW)
    assert (moved - before).abs().max() > 1e-3
    merge_lora(stack)
    assert not any(has_lora(module) for module in stack.modules())
    torch.testing.assert_close(stack(NEW), moved, rtol=0, atol=1e-12)


def test_safe_rows_are_those_of_the_geometry(stack: tg.GPT) -> None:
    names = [n for n, m in stack.named_modules() if isinstance(m, torch.nn.Linear) and m.in_features <= 16]
    maps = [n for n in names if n.startswith("layers.")]
    old, new = (input_moments(stack, maps, [text]) for text in (OLD, NEW))
    add_lora(stack.layers, 2, form="held", max_inputs=16)
    begin_lora(stack, "safe", [OLD], [NEW])
    assert set(corrected_maps(stack)) == set(maps)
    for name, module in corrected_maps(stack).items():
        torch.testing.assert_close(
            module.get_parameter("lora_a").detach(), adapter_directions("safe", old[name], new[name], 2)
        )


def test_pissa_begins_with_the_leading_singular_vectors(stack: tg.GPT) -> None:
    add_lora(stack.layers, 2, form="shifted")
    begin_lora(stack, "pissa")
    for module in corrected_maps(stack).values():
        weight = module.get_parameter("weight").detach()
        a, b = (module.get_parameter(name).detach() for name in ("lora_a", "lora_b"))
        U, S, Vh = torch.linalg.svd(weight)
        scale = low_rank_factors(module)[2]
        torch.testing.assert_close(scale * b @ a, (U[:, :2] * S[:2]) @ Vh[:2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["plain", "shifted"])
def test_a_scaled_correction_is_a_share_of_it(stack: tg.GPT, form: str) -> None:
    add_lora(stack.layers, 2, form=form)  # type: ignore[arg-type]
    begin_lora(stack, "pissa" if form == "shifted" else "plain")
    (_, module), *_ = corrected_maps(stack).items()
    with torch.no_grad():
        module.get_parameter("lora_b").normal_(generator=torch.Generator().manual_seed(4))
    a, b, scale = low_rank_factors(module)
    whole = scale * b @ a
    scale_lora(stack, 0.25)
    a, b, scale = low_rank_factors(module)
    torch.testing.assert_close(scale * b @ a, whole / 4)
