"""Zero-shot tasks of CORE, evaluated during training.

    tasks = ZeroShot(base, folder, items=50)                 the files that are there, as tokens, once
    tasks.read(stack, [off, on])                             accuracy of each task, for each of the plans

The tasks are those that CORE asks without examples (copa, openbook_qa, winograd, winogrande, lambada), from
the files that `topograd eval core` reads, by its rules: the first `items` of its shuffle. Plans are of the
same stages and predict otherwise, so all of them are read from one pass over the items.

Cost: one forward of the items' tokens, some thousand for 50 items of two tasks. Limits: the plans predict by
weighted sums of stages; with 50 items an accuracy is known to about 0.14.
"""

from collections.abc import Sequence
from pathlib import Path

from topograd.decode.engine import Engine
from topograd.errors import DataError
from topograd.evaluation.core import judged
from topograd.evaluation.prompts import bundle_of
from topograd.evaluation.scoring import Scorer
from topograd.evaluation.tasks import TASKS, find_files, read_items
from topograd.nn.stack import Stack
from topograd.runs.session import LoadedTextRun
from topograd.runtime.protocol import TorchRuntime
from topograd.topology.plan import Plan


class ZeroShot:
    """Items of some tasks, ready to be scored."""

    def __init__(self, base: LoadedTextRun, folder: Path | str, items: int) -> None:
        tasks = [task for task in TASKS.values() if not task.shots]
        files = find_files(Path(folder), tasks)
        if not files:
            names = ", ".join(task.file for task in tasks)
            raise DataError(
                f"{folder} holds no task that is asked without examples",
                setting="tasks",
                given=str(folder),
                remedy=f"it should hold {names}",
            )
        self.context = base.config.model.context
        self.items = {
            task: [
                (item, bundle_of(task, item, (), base.tokenizer, self.context)[0])
                for item in read_items(task, files[task.label])[:items]
            ]
            for task in tasks
            if task.label in files
        }

    def read(self, stack: Stack, plans: Sequence[Plan]) -> list[dict[str, float]]:
        """For each plan the share of every task's items that it answers right."""
        engine = Engine(stack, plans[0], self.context, TorchRuntime(stack))
        scorer = Scorer(engine, "full")
        scorer.parts = [(engine, [plan.prediction.full for plan in plans])]
        found: list[dict[str, float]] = [{} for _ in plans]
        for task, asked in self.items.items():
            scores = scorer.score([bundle for _, bundle in asked])
            right = [
                judged(task, item, bundle, score)["correct"]
                for (item, bundle), score in zip(asked, scores, strict=True)
            ]
            for accuracy, column in zip(found, zip(*right, strict=True), strict=True):
                accuracy[task.label] = sum(column) / len(column)
        return found
