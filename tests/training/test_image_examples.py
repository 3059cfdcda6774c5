"""ImageSet to look at are what they are said to be."""

from topograd.runs.folder import Run
from topograd.runs.session import open_run
from topograd.training.image_evaluation import SHOWN, examples


def test_right_wrong_and_leaving(image_run: Run) -> None:
    found = examples(open_run(image_run.folder), threshold=0.5)
    assert found["looked_through"] == 60
    assert len(found["stages"]) == 3
    assert abs(sum(stage["share"] for stage in found["stages"]) - 1) < 1e-9
    for stage in found["stages"]:
        assert all(record["label"] == record["guess"] for record in stage["right"])
        assert all(record["label"] != record["guess"] for record in stage["wrong"])
        sure = [record["confidence"] for record in stage["wrong"]]
        assert sure == sorted(sure, reverse=True)
        assert len(stage["right"]) <= SHOWN
    assert all(record["confidence"] >= 0.5 for record in found["stages"][0]["leaving"])
