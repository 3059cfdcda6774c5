"""A run's stages as ONNX graphs, for any program that has ONNX Runtime.

    stage-K.onnx, .bin    the layers of each stage (`runtime/layers.py`), and its weights
    head*.onnx, .bin      the head, or each stage's own
    tables.npz            embeddings and rotations
    manifest.json         sizes, inputs, windows, and some texts: prompts, margins, and for each token the
                          exit that it left after
    SHA256SUMS            of these files, as sha256sum writes it
    run.py                at most 66 lines of onnxruntime and numpy: verify the files, write those texts again

A text's margins say how far ahead the best logit of each stage must be for a token to leave after it. Limits:
chains whose stages read the one before them and that predict by their last stage; float32.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from topograd.decode.engine import Engine
from topograd.decode.strategies import FixedDepth, generate_batch
from topograd.decode.wand import Wand
from topograd.errors import ConfigError
from topograd.files import dump_json, sha256, write_atomic
from topograd.nn.transformer.parts import EPSILON
from topograd.runs.session import LoadedTextRun
from topograd.runtime.onnx_runtime import OnnxRuntime, unsupported_reason
from topograd.topology.dag import EMBEDDING

SCRIPT = Path(__file__).with_name("onnx_script.py")
WRITTEN = 12
"""Tokens of each text of the manifest; the script knows the number."""
MARGINS = (float("inf"), 2.0, 0.5)
"""Texts of the manifest: full depth, and two that leave early."""


def write_onnx(folder: Path, session: LoadedTextRun) -> None:
    """Write graphs, tables, manifest and script into a folder."""
    _check(session)
    runtime = OnnxRuntime(session.stack)
    plan, stack = session.plan, runtime.stack
    heads: dict[int, str] = {}
    stages = []
    for planned in plan.stages:
        name = f"stage-{planned.index + 1}.onnx"
        runtime.graph(planned).write(folder / name)
        which = planned.head if stack.has_head(planned.head) else -1
        if which not in heads:
            heads[which] = "head.onnx" if which < 0 else f"head-{which + 1}.onnx"
            runtime.head_graph(planned.head).write(folder / heads[which])
        shapes = runtime.shapes(planned)
        states = {f"{kind}.{i}": list(shapes[i]) for i in planned.layers for kind in ("keys", "values")}
        output = f"h.{planned.stage.stop}"
        stages.append({"file": name, "head": heads[which], "states": states, "output": output})
    context = session.config.model.context
    tables = runtime.rotations(context)
    tables["embedding"] = stack.embedding.weight.detach().numpy()
    traits = stack.config.traits
    if stack.previous is not None:
        tables["previous"] = stack.previous.weight.detach().numpy()
    np.savez(folder / "tables.npz", allow_pickle=False, **tables)
    manifest = {
        "stages": stages,
        "width": stack.width,
        "room": context,
        "windows": runtime.windows(),
        "scale": stack.width**0.5 if traits.scaled_embedding else 1.0,
        "normed": traits.normed_embedding,
        "epsilon": EPSILON,
        "weights": session.weights,
        "texts": _texts(session, Engine(session.stack, plan, context, runtime)),
    }
    write_atomic(folder / "manifest.json", dump_json(manifest, indent=1) + "\n")
    sums = [f"{sha256(file)}  {file.name}\n" for file in sorted(folder.iterdir())]
    write_atomic(folder / "SHA256SUMS", "".join(sums))
    write_atomic(folder / "run.py", SCRIPT.read_text(encoding="utf-8"))


def _check(session: LoadedTextRun) -> None:
    where, plan = session.run.folder, session.plan
    problem = unsupported_reason(session.stack)
    if problem is not None:
        raise ConfigError(f"{where} cannot be written as ONNX: {problem}", remedy="keep the run's folder")
    chain = all(
        [port.source for port, _ in planned.inputs] == [planned.index - 1 if planned.index else EMBEDDING]
        and planned.stage.start == (plan.stages[planned.index - 1].stage.stop if planned.index else 0)
        and all(port.relay == "identity" for port, _ in planned.inputs)
        for planned in plan.stages
    )
    if not chain or plan.prediction.kind != "last" or len(plan.predicting()) != len(plan.stages):
        raise ConfigError(
            f"{where} is no plain chain of stages that predict, which is all that the script can run",
            remedy="keep the run's folder",
        )


@torch.inference_mode()
def _texts(session: LoadedTextRun, engine: Engine) -> list[dict[str, Any]]:
    """Short texts of the model, with the exit of each token."""
    ids = session.tokenizer.encode("The first line of a text is ") or [session.tokenizer.separator]
    if session.config.model.context <= WRITTEN:
        problem = f"a context of {session.config.model.context} has no room for {WRITTEN} tokens to check"
        raise ConfigError(problem)
    prompt = ids[: session.config.model.context - WRITTEN]
    found = []
    for margin in MARGINS if engine.last else MARGINS[:1]:
        margins = [margin] * engine.last
        strategy = Wand(engine, margins) if margins else FixedDepth(engine)
        (text,) = generate_batch(strategy, [prompt], WRITTEN)
        tokens = [[emitted.token, emitted.exit + 1] for emitted in text]
        finite = [min(value, 1e30) for value in margins]
        found.append({"prompt": prompt, "margins": finite, "tokens": tokens})
    return found
