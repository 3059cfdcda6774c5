"""Agreement and margins of two models' logits, by the formula."""

import torch

from quantized_prompts import compared, summary


def test_agreement_margins_and_their_change() -> None:
    plain = torch.tensor([[3.0, 1.0, 0.0], [1.0, 1.1, 0.0]])
    other = torch.tensor([[3.5, 1.0, 0.0], [1.2, 1.1, 0.0]])
    part = compared(plain, other)
    assert part["same"].tolist() == [True, False]
    torch.testing.assert_close(part["margin"], torch.tensor([2.0, 0.1]))
    torch.testing.assert_close(part["change"], torch.tensor([0.5, 0.2]))
    result = summary([part, compared(plain, plain)])
    assert (result["places"], result["agreement"], result["first_token_agreement"]) == (4, 0.75, 1.0)
    assert abs(result["lost_margin_max"] - 0.1) < 1e-6
    assert summary([compared(plain, plain)])["lost_margin_max"] == 0.0
