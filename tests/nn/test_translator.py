"""Translators of exits: the identity at first, and never before the last head."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from topograd.nn.draft_stage import unit
from topograd.nn.translator import TranslatedReader, Translator


def test_a_translator_starts_as_the_identity() -> None:
    u = torch.randn(3, 8)
    assert torch.equal(Translator(8)(u), u)


def test_exits_are_read_through_their_translators_and_the_last_one_as_ever() -> None:
    class Plain:
        def readout(self, h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
            return h + stage if rows is None else h[..., rows] + stage

    asked: list[int] = []
    translator = Translator(4)
    nn.init.normal_(translator.affine.weight)

    def translators() -> Mapping[int, Translator]:
        asked.append(1)
        return {0: translator}

    h, rows = 100 * torch.randn(2, 4), torch.tensor([3, 1])
    reader = TranslatedReader(Plain(), translators, 2)
    assert torch.equal(reader.readout(h, 2), h + 2)
    assert not asked, "full depth needs none, so none is opened"
    assert torch.equal(reader.readout(h, 0, rows), translator(unit(h))[..., rows])
    assert torch.equal(reader.readout(h, 1), h + 1)
