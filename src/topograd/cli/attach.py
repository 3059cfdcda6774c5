"""`topograd attach`: add a specialist to a frozen run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from topograd.cli.console import Json, note, out, parse, print_json
from topograd.errors import ConfigError
from topograd.limits import DEPTH, SEED, SIZE, check_numbers


@dataclass(frozen=True, kw_only=True)
class Attach:
    """Add a stage and a head of its own behind a frozen run. It changes nothing until it is trained."""

    base: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="BASE")]
    """The run's folder, trained here or imported; it is referred to by hash and never changed."""
    out: Path
    """The specialist's folder, new or empty."""
    layers: int = 1
    """Layers of the new stage."""
    rank: Annotated[int | None, tyro.conf.arg(metavar="R")] = None
    """Rank of its own head; by default whole for a small vocabulary, 16 for one of 8192 tokens or more."""
    whole_head: tyro.conf.FlagCreatePairsOff[bool] = False
    """A whole head, however large the vocabulary."""
    token: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="NEW=WORD")] = ()
    """A new special token, begun from a related word, as "<|user|>=User"; may be given again."""
    seed: int = 0
    """Draws what does not start at zero."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, layers=DEPTH, rank=SIZE, seed=SEED)
        if self.rank is not None and self.whole_head:
            raise ConfigError("--rank and --whole-head are both given", remedy="give one of them")


def run(argv: list[str]) -> int:
    """Attach, say what came of it, return the exit code."""
    asked = parse(Attach, argv, "attach")
    from topograd.runs.session import open_session
    from topograd.specialists.attach import attach, new_specialist
    from topograd.specialists.composition import composed
    from topograd.specialists.preservation import Preservation
    from topograd.specialists.tokens import NewToken

    base = open_session(asked.base)
    adapter = new_specialist(
        asked.out,
        base,
        layers=asked.layers,
        head_rank=asked.rank,
        whole_head=asked.whole_head,
        tokens=[NewToken.parse(words) for words in asked.token],
        seed=asked.seed,
    )
    attached = attach(base, {"new": adapter})
    read = Preservation(base).read(attached.stack, composed(attached, {"new": 1.0}))
    numbers = sum(tensor.numel() for tensor in adapter.tensors.values())
    answer = {
        "specialist": str(asked.out),
        "base": str(base.run.folder),
        "base_weights": base.weights,
        "layers": asked.layers,
        "first_layer": adapter.settings["first_layer"],
        "head_rank": adapter.settings["head_rank"],
        "parameters": numbers,
        "bytes": sum(path.stat().st_size for path in asked.out.iterdir()),
        "insertion_max_abs_logit_delta": read.base_max_abs_logit_delta,
    }
    if asked.json:
        print_json(answer)
    else:
        head = "a whole head" if answer["head_rank"] is None else f"a head of rank {answer['head_rank']}"
        out().print(
            f"{asked.out}: {asked.layers} layers behind layer {answer['first_layer']} of {asked.base} and "
            f"{head}, {numbers / 1e6:.2f} M parameters; logits changed by "
            f"{answer['insertion_max_abs_logit_delta']}",
            soft_wrap=True,
        )
        note(f"train it with: topograd finetune {asked.out} --data CHAT.jsonl")
    return 0
