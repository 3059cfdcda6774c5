"""Text that a model writes by itself from nothing: it stands for the text that the model learned from.

Each row begins with a separator and continues at temperature 1, so that rows are draws from the model's own
distribution p. The mean of log p - log q over them is then an estimate of KL(p ‖ q) for any later model q.

Cost: one forward pass of a token for each of `length`, all rows side by side.
"""

import torch
from torch import Tensor

from topograd.decode.engine import Engine
from topograd.runs.session import LoadedTextRun


@torch.inference_mode()
def sampled_text(session: LoadedTextRun, rows: int, length: int, seed: int = 0) -> Tensor:
    """(rows, length) tokens that the model drew, int64, without the separator in front."""
    engine = Engine(session.stack, session.plan, max(length + 1, 2))
    generator = torch.Generator().manual_seed(seed)
    batch = engine.start([[session.tokenizer.separator]] * rows)
    full, tokens = engine.exits[-1], []
    for place in range(length):
        engine.run(batch, full)
        logits = engine.logits(batch, full)[:, : session.tokenizer.vocab].float().cpu()
        noise = torch.rand(logits.shape, generator=generator).clamp_(min=1e-20)
        tokens.append((logits - noise.log_().neg_().log_()).argmax(-1))
        if place + 1 < length:
            engine.append(batch, tokens[-1][:, None].tolist())
    return torch.stack(tokens, 1)
