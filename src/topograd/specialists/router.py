"""A learned router over specialists, from the base's hidden state ("Product of Experts" §10.2).

    x = mean over the read positions of norm(h_base)     p = softmax(MLP(x)) over base and specialists

The MLP has one hidden layer of 32. It is trained on held-out text: it reads the first half of a row and is
judged on the second half, whose mean loss under each choice c is known (`interference.py`):

    minimise  Σ_rows Σ_c p_c ℓ_c                             the expected loss of drawing a choice

Its regret is what it loses against the oracle, who knows the best choice for each row: mean ℓ_chosen - min ℓ.
On rows that it was not trained on, beside always the base, always each specialist, and everything at once.
The hidden state is normalised, and position 0 is left out: in imported models it is thousands of times
longer.

A router is an adapter of kind "router" that names its specialists by digest. `RoutedModel` asks it for each
prompt. Cost: the base reads the prompt once more, and two small products. Limits: it chooses once for a
request, not for each token.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.decode.model import Generated, check_request
from topograd.errors import ConfigError, RunError
from topograd.exec.forward import stage_outputs
from topograd.runs.adapter import Adapter, BaseIdentity, create_adapter, open_adapter
from topograd.runtime.choice import check_runtime
from topograd.specialists.attach import Attached
from topograd.specialists.composition import Weights, parse_specialists
from topograd.specialists.interference import token_losses
from topograd.specialists.model import ComposedModel, SpecialistPool, open_named
from topograd.training.trainer import Schedule, StepRecord, Task, train_task

KIND = "router"
HIDDEN = 32
STEPS = 300
BASE = "base"


class Router(nn.Module):
    """From a base's state to a choice: the base, or one of the specialists."""

    mean: Tensor
    scale: Tensor

    def __init__(self, width: int, names: Sequence[str]) -> None:
        super().__init__()
        self.names = [BASE, *names]
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("scale", torch.ones(width))
        self.inner = nn.Linear(width, HIDDEN)
        self.outer = nn.Linear(HIDDEN, len(self.names))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.relu(self.inner((x - self.mean) / self.scale)))

    @torch.no_grad()
    def choose(self, attached: Attached, tokens: Sequence[int]) -> Weights:
        """The specialist that a prompt wants, as weights; none is the base."""
        seen = list(tokens)[-attached.base.config.model.context :]
        x = features(attached, torch.tensor([seen]))
        name = self.names[int(self(x).argmax())]
        return {} if name == BASE else {name: 1.0}


@torch.no_grad()
def features(attached: Attached, inputs: Tensor, batch: int = 8) -> Tensor:
    """(rows, width): the base's last state, normalised, averaged over positions but the first."""
    stage = attached.base.plan.prediction.full[-1][0]
    device = next(attached.stack.parameters()).device
    means = []
    for rows in inputs.split(batch):
        h = stage_outputs(attached.stack, attached.plan, rows.to(device), [stage])[stage]
        h = F.rms_norm(h.float(), (h.shape[-1],))
        means.append((h[:, 1:] if h.shape[1] > 1 else h).mean(1).cpu())
    return torch.cat(means)


def choice_losses(attached: Attached, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(choices, rows) mean nats of each row's second half, and which rows have a target there."""
    half = inputs.shape[1] // 2
    late = targets.clone()
    late[:, :half] = -100
    choices: list[Weights] = [{}, *({name: 1.0} for name in attached.stages)]
    losses = token_losses(attached, choices, inputs, late)
    counts = (late != -100).sum(1)
    return losses.sum(2) / counts.clamp(min=1), counts > 0


class RouterTask(Task):
    """A router that learns from the rows `x`, and the loss of each choice on them."""

    def __init__(self, router: Router, x: Tensor, losses: Tensor, seed: int) -> None:
        super().__init__(Schedule(STEPS))
        self.model = self.router = router
        self.x, self.losses = x, losses
        self.optimizers = {"adamw": torch.optim.AdamW(router.parameters(), lr=3e-3, weight_decay=0.1)}
        content = x.numpy().tobytes() + losses.contiguous().numpy().tobytes()
        self.key = {"seed": seed, "names": router.names, "data": hashlib.sha256(content).hexdigest()}

    def step(self, step: int) -> StepRecord:
        optimizer = self.optimizers["adamw"]
        optimizer.zero_grad()
        loss = (self.router(self.x).softmax(-1) * self.losses.t()).sum(1).mean()
        loss.backward()
        optimizer.step()
        return StepRecord([loss.item()])


def train_router(
    attached: Attached, texts: Sequence[tuple[Tensor, Tensor]], seed: int = 0, work: Path | None = None
) -> tuple[Router, dict[str, Any]]:
    """A router for what is attached, trained on every second row of the texts and judged on the others.

    With a `work` folder a call that was stopped is resumed.
    """
    if not attached.stages:
        raise ConfigError(setting="specialists", given=[], allowed="at least one, for a router to choose")
    parts = []
    for inputs, targets in texts:
        judged, counted = choice_losses(attached, inputs, targets)
        half = max(inputs.shape[1] // 2, 1)
        parts.append((features(attached, inputs[counted, :half]), judged[:, counted]))
    x, losses = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts], 1)
    if len(x) < 4:
        raise ConfigError(
            f"the texts have {len(x)} sequences", setting="texts", given=len(x), allowed="at least 4"
        )
    learning = torch.arange(len(x)) % 2 == 0
    torch.manual_seed(seed)
    router = Router(x.shape[1], list(attached.stages))
    router.mean.copy_(x[learning].mean(0))
    router.scale.copy_(x[learning].std(0).clamp(min=1e-3))
    train_task(RouterTask(router, x[learning], losses[:, learning], seed), work)
    return router.requires_grad_(False), regret(router, x[~learning], losses[:, ~learning])


@torch.no_grad()
def regret(router: Router, x: Tensor, losses: Tensor) -> dict[str, Any]:
    """Mean nats of the router's choices beside the oracle's, and beside always the same choice."""
    chosen = router(x).argmax(-1)
    routed = losses[chosen, torch.arange(len(x))]
    oracle = losses.min(0)
    always = {name: float(losses[i].mean()) for i, name in enumerate(router.names)}
    return {
        "rows": len(x),
        "router": float(routed.mean()),
        "oracle": float(oracle.values.mean()),
        "regret": float((routed - oracle.values).mean()),
        "agreement": float((chosen == oracle.indices).float().mean()),
        "always": always,
        "best_fixed": min(always.values()),
        "chosen": {name: int((chosen == i).sum()) for i, name in enumerate(router.names)},
    }


def save_router(
    folder: Path | str,
    attached: Attached,
    adapters: Mapping[str, Adapter],
    router: Router,
    found: Mapping[str, Any],
) -> Adapter:
    """Write a router as an adapter that names its specialists."""
    settings = {
        "peft_type": "TOPOGRAD_ROUTER",
        "specialists": {name: adapters[name].digest for name in attached.stages},
        "regret": dict(found),
    }
    words = f"Regret on held-out rows: {found['regret']:.4f} nats a token."
    return create_adapter(
        folder,
        kind=KIND,
        base=BaseIdentity.of(attached.base),
        tensors=router.state_dict(),
        settings=settings,
        card=f"# {Path(folder).name}\n\nA router over: {', '.join(router.names)}.\n{words}",
    )


def open_router(folder: Path | str, attached: Attached, adapters: Mapping[str, Adapter]) -> Router:
    """A router's folder; one of other specialists or of another base is refused."""
    adapter = open_adapter(folder, KIND)
    adapter.check_base(attached.base)
    digests = {name: adapters[name].digest for name in attached.stages}
    if adapter.settings["specialists"] != digests:
        raise RunError(
            f"router {folder} was trained for {', '.join(adapter.settings['specialists'])} as they were",
            remedy="give it those specialists, or train it again",
        )
    router = Router(attached.stack.width, list(attached.stages))
    router.load_state_dict(adapter.tensors)
    return router.requires_grad_(False)


class RoutedModel(ComposedModel):
    """A base whose router chooses a specialist, or none, for each prompt; `weights` are those of the last."""

    def __init__(self, pool: SpecialistPool, router: Router) -> None:
        super().__init__(pool, {})
        self.router = router

    def generate(self, prompt: str | Sequence[int] = "", tokens: int = 200, **settings: Any) -> Generated:
        """As `Model.generate`, with what the router chooses for this prompt."""
        check_request(prompt, tokens)
        begun = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self.weights = dict(self.router.choose(self.pool.attached, begun))
        return self.pool.model(self.weights).generate(prompt, tokens, **settings)


def open_routed(
    base: Path | str,
    specialists: str,
    router: Path | str,
    runtime: str | None = None,
    weights: str = "float32",
) -> RoutedModel:
    """A model with specialists as users write them, of which a router chooses."""
    if any(weight != 1 for weight in parse_specialists(specialists).values()):
        raise ConfigError(
            setting="specialists",
            given=specialists,
            allowed="without weights: a router chooses one of them or none",
        )
    check_runtime(runtime, weights)
    adapters, _ = open_named(specialists)
    pool = SpecialistPool.open(base, adapters, runtime=runtime, weights=weights)
    return RoutedModel(pool, open_router(router, pool.attached, adapters))
