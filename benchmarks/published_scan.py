"""The published engine of "LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces" beside ours.

One process, taking turns, on models of the same sizes: transformers of 12 layers in 6 regions, the mean of
the whole sequence as the interface. Theirs is their model with their engine, ours is our model with ours; a
step is forward, loss and all gradients. Each scan is also given over its own model's plain autograd, since
the models are not the same to the last operation (biases, the interface's maps, how norms are cast).

    git clone https://github.com/shaunlee8/latent-bounded-interfaces DIR
    python benchmarks/published_scan.py DIR [--width 256] [--rank 16] [--context 256] [--rounds 5]
                                            [--threads 1] [--json]

Their scan has two ways to make Jacobians: `graph` (the default of their code) and `recompute` (that of their
paper's script), the latter with all directions at once. Gradients of each scan are held against autograd's.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clone  # noqa: F401  (for what is not installed)
from papers.latent_bounded_interfaces.measure import build_model, random_tokens
from papers.latent_bounded_interfaces.parity import difference
from scan import Settings as BenchSettings
from topograd.exec.gradient import Autograd, GradientEngine
from topograd.exec.train_step import train_step
from topograd.interfaces.engines import Scan
from topograd.timing import Spread, ratio, take_turns

THEIRS, OURS = "theirs, autograd", "ours, autograd"


def their_steps(folder: Path, settings: BenchSettings) -> tuple[nn.Module, dict[str, Callable[[], object]]]:
    """Their model, and a step by autograd and by each of their scans."""
    sys.path.insert(0, str(folder))
    general: Any = import_module("backbones.general")
    vector: Any = import_module("interfaces.vector_mlp")
    engines: dict[str, Any] = {THEIRS: import_module("backward.autograd").AutogradEngine()}
    scan = import_module("backward.scan").ScanADEngine
    engines["theirs, scan by graph"] = scan(state_jacobian_mode="graph", state_jacobian_basis_chunk=1)
    engines["theirs, scan by recompute"] = scan(
        state_jacobian_mode="recompute", state_jacobian_basis_chunk=settings.rank
    )
    spec = general.BackboneSpec(
        name="transformer",
        dim=settings.width,
        layers=settings.regions * settings.region_layers,
        n_heads=settings.heads,
        use_flash_attn=False,
        fused_add_norm=False,
    )
    torch.manual_seed(0)
    interface = vector.VectorMLPInterface(
        feature_dim=settings.width,
        num_regions=settings.regions,
        interface_width=settings.rank,
        interface_map_hidden_dim=settings.width,
        update_scale_init=1.0,
    )
    model: nn.Module = import_module("models.lbi_language_model").LBILanguageModel(
        vocab_size=settings.vocab,
        layers_per_region=settings.region_layers,
        backbone_spec=spec,
        interface=interface,
    )
    inputs, targets = random_tokens(settings)
    return model, {name: partial(_their_step, model, one, inputs, targets) for name, one in engines.items()}


def _their_step(model: Any, engine: Any, inputs: Tensor, targets: Tensor) -> None:
    logits, cache = model.forward_with_cache(inputs)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    engine.backward(model=model, loss=loss, cache=cache)


def our_steps(settings: BenchSettings) -> tuple[nn.Module, dict[str, Callable[[], object]]]:
    """Our model, and a step by autograd and by scan with Jacobians in two ways."""
    model, (inputs, targets) = build_model(settings, settings.published), random_tokens(settings)
    run = partial(_our_step, model, settings, inputs, targets)
    return model, {
        OURS: partial(run, Autograd()),
        "ours, scan by loop": partial(run, Scan("loop")),
        "ours, scan by hand": partial(run, Scan("pullback")),
    }


def _our_step(
    model: Any, settings: BenchSettings, inputs: Tensor, targets: Tensor, engine: GradientEngine
) -> None:
    model.zero_grad(set_to_none=True)
    train_step(model, settings.topology, inputs, targets, gradient=engine)


def off(model: nn.Module, steps: dict[str, Callable[[], object]]) -> dict[str, float]:
    """‖ĝ - g‖ / ‖g‖ of each scan's gradients against autograd's, over all parameters that have one."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, step in steps.items():
        step()
        found[name] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    first = next(iter(found))
    same = {name: {n: g for n, g in grads.items() if n in found[first]} for name, grads in found.items()}
    return {name: difference(same[name], found[first]).rel_l2 for name in found if name != first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    for name, number in (("width", 256), ("rank", 16), ("context", 256), ("rounds", 5), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if not (asked.folder / "backward" / "scan.py").is_file():
        parser.error(f"{asked.folder} has no backward/scan.py; clone the published code there")
    torch.set_num_threads(asked.threads)
    settings = BenchSettings(width=asked.width, rank=asked.rank, context=asked.context)
    (theirs, their), (ours, our) = their_steps(asked.folder, settings), our_steps(settings)
    gradients = off(theirs, their) | off(ours, our)
    seconds = take_turns({**their, **our}, asked.rounds, warmup=1)
    pairs = [(name, THEIRS if name in their else OURS) for name in seconds if name not in (THEIRS, OURS)]
    pairs += [(name, "ours, scan by hand") for name in their if name != THEIRS] + [(THEIRS, OURS)]
    rows = {f"{a} / {b}": ratio(seconds, a, b).as_dict() for a, b in pairs}
    medians = {name: Spread.of(times).median for name, times in seconds.items()}
    result = {"threads": asked.threads, "seconds": medians, "ratios": rows, "gradients": gradients}
    if asked.json:
        print(json.dumps(result))
        return
    for name, found in rows.items():
        print(f"{name:55s} {found['median']:.2f} ({found['low']:.2f} to {found['high']:.2f})")
    for name, error in gradients.items():
        print(f"gradients, {name:44s} {error:.1e}")


if __name__ == "__main__":
    main()
