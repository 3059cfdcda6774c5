"""Readings on pictures, each against the plain formula."""

import torch
import torch.nn.functional as F

from topograd.exec.forward import Predictor
from topograd.nn.pooling import pool
from topograd.runs.folder import Run
from topograd.runs.session import heldout_images, open_run
from topograd.topology.plan import Plan
from topograd.training.image_evaluation import accuracy, evaluate_images, exit_curve, image_logits


def test_readings_are_those_of_the_logits(image_run: Run) -> None:
    opened = open_run(image_run.folder)
    pictures = heldout_images(opened)
    opened.stack.train()
    reading = evaluate_images(opened.stack, opened.plan, pictures)
    assert opened.stack.training
    with torch.no_grad():
        logits = Predictor(opened.stack.eval(), opened.plan)(pictures.images)
    assert reading.accuracy.prediction == (logits.argmax(-1) == pictures.labels).double().mean().item()
    assert reading.accuracy.prediction == reading.accuracy.prefix[-1] == reading.accuracy.last
    found = image_logits(opened.stack, opened.plan, pictures.images)
    total = pool(found.alone, "sum")
    assert reading.accuracy.sum == accuracy(total, pictures.labels)
    before, after = (F.cross_entropy(pool(found.alone[:k], "sum"), pictures.labels) for k in (1, 2))
    assert abs(reading.usefulness[1] - (before - after).item()) < 1e-5  # type: ignore[operator]
    assert reading.images == 60
    assert len(reading.exits) == 8


def test_early_exit_by_hand() -> None:
    """Three pictures, two exits: the first leaves at once, the others wait."""
    plan = Plan.of("1,3", 4)
    first = torch.tensor([[9.0, 0.0], [0.1, 0.0], [0.0, 0.2]])
    second = torch.tensor([[0.0, 9.0], [9.0, 0.0], [9.0, 0.0]])
    curve = exit_curve(plan, [first, second], torch.tensor([0, 0, 1]), (0.9, 1.1))
    assert curve[0].leaving == [1 / 3, 2 / 3]
    assert abs(curve[0].accuracy - 2 / 3) < 1e-12
    assert abs(curve[0].depth - (0.25 + 1 + 1) / 3) < 1e-12
    assert curve[1].depth == 1.0
    assert abs(curve[1].accuracy - 1 / 3) < 1e-12
    assert exit_curve(Plan.of("4", 4), [first], torch.tensor([0, 0, 1])) == []
