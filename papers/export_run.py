"""Export of a run for inference: its newest weights in bfloat16, without optimizer.

    python -m papers.export_run RUN TARGET

The rest of the folder (settings, log, tokenizer, results) is copied. What is exported can be evaluated,
calibrated and run, and is float32 once loaded; it cannot be trained further.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch

from topograd.errors import RunError, TopogradError
from topograd.runs.folder import Run
from topograd.runs.session import open_session


def export(source: Path, target: Path) -> Path:
    """Write the run at `source` to the folder `target`, which must not exist, and return it."""
    if target.exists():
        raise RunError(setting="target", given=target, allowed="a new folder")
    session = open_session(source)
    results = session.run.read_results()
    run = Run.create(target)
    if session.run.metrics_file.exists():
        shutil.copyfile(session.run.metrics_file, run.metrics_file)
    run.manifest.bind(run.tokenizer_file.name, session.run.tokenizer_file.read_bytes())
    run.write_config(session.config.as_dict())
    weights = session.stack.to(torch.bfloat16)
    extra = {"run": run.manifest.identity(), "metrics": run.log_mark(session.step)}
    name = run.store.save(step=session.step, model=weights, optimizers={}, extra=extra, keep=1)
    if results is not None:
        run.write_results(results | {"weights": run.store.weights(name)})
    return target


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("give two folders: python -m papers.export_run RUN TARGET")
    try:
        export(Path(sys.argv[1]), Path(sys.argv[2]))
    except TopogradError as error:
        sys.exit(str(error))
