"""What /v1/models says: the model, and one id for each depth that it has."""

from __future__ import annotations

from typing import Any

from topograd.serve.chats import Chats
from topograd.serve.texts import Served


def describe(served: Served, chats: Chats) -> list[dict[str, Any]]:
    """The model under its name, with what a page needs to know, and under name:depth."""
    session = served.model.session
    common = {"object": "model", "created": served.started, "owned_by": "topograd"}
    exits = session.plan.predicting()
    about = {
        "context": served.context,
        "vocab": served.vocab,
        "exits": [
            {"exit": k, "stage": stage + 1, "layers": session.plan.stages[stage].stage.stop}
            for k, stage in enumerate(exits, 1)
        ],
        "stages": len(session.plan.stages),
        "depths": served.depths,
        "default_depth": served.default_depth,
        "chat": "template" if chats.template is not None else "plain",
        "specialists": [] if served.specialists is None else served.specialists.names,
    }
    base = {"id": served.name, **common, "topograd": about}
    return [base, *({"id": f"{served.name}:{depth}", **common} for depth in served.depths)]
