"""What a kill leaves behind is tested in tests/training/test_trainer_resume.py, on a whole run."""

import copy
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from topograd.errors import CheckpointError, ConfigError
from topograd.runs.checkpoint import available, latest, load, save

FILES = ("model.safetensors", "optimizer.safetensors", "state.json")


class Net(nn.Module):
    """Tied, transposed, empty and scalar tensors, an integer buffer and dropout."""

    seen: Tensor

    def __init__(self, width: int = 4, tied: bool = True, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width, dtype=dtype)
        self.mix = nn.Parameter(torch.randn(width, width, dtype=dtype).t())
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=dtype))
        self.head = nn.Linear(width, 7, dtype=dtype)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("nothing_too", torch.zeros(0, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += 1
        return self.head(torch.dropout(self.embed(tokens) @ self.mix * self.scale, 0.3, self.training))


def groups(net: Net) -> list[dict[str, Any]]:
    matrices, others = ([p for p in net.parameters() if (p.ndim == 2) is is2d] for is2d in (True, False))
    return [{"params": matrices, "lr": 0.05, "weight_decay": 0.1}, {"params": others, "lr": 0.01}]


def train(net: Net, optimizer: Optimizer, steps: int) -> list[float]:
    """Losses of some steps on tokens from torch's generator, the learning rates decaying as they go."""
    losses = []
    for _ in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.9
        tokens = torch.randint(0, 7, (5, 3))
        loss = nn.functional.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def snapshot(model: nn.Module, *optimizers: Optimizer) -> list[Any]:
    states = [dict(model.state_dict()), torch.get_rng_state(), *(each.state_dict() for each in optimizers)]
    return copy.deepcopy(states)


def equal(left: Any, right: Any) -> bool:
    """Same types, dtypes, keys and bits, all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    return left == right


def a_pair(seed: int = 7) -> tuple[Net, Optimizer]:
    torch.manual_seed(seed)
    net = Net()
    optimizer = AdamW(groups(net))
    train(net, optimizer, 2)
    return net, optimizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two good checkpoints, of steps 40 and 80."""
    net, optimizer = a_pair(seed=0)
    for step in (40, 80):
        train(net, optimizer, 1)
        save(tmp_path, step=step, model=net, optimizers={"adamw": optimizer}, extra={"position": step})
    return tmp_path


OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], Optimizer]] = {
    "adamw": lambda groups: AdamW(groups, foreach=False),
    "foreach": lambda groups: AdamW(groups, foreach=True, amsgrad=True),
    "fused": lambda groups: AdamW(groups, fused=True),
    "tensor-lr": lambda groups: AdamW([g | {"lr": torch.tensor(g["lr"])} for g in groups], foreach=False),
    "sgd": lambda groups: SGD(groups, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_training_goes_on_bit_for_bit(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    net = Net(dtype=dtype)
    optimizer = OPTIMIZERS[kind](groups(net))
    train(net, optimizer, 3)
    path = save(tmp_path, step=3, model=net, optimizers={"all": optimizer}, extra={"order": [1, 2.5, None]})
    at_save = snapshot(net, optimizer)
    losses = train(net, optimizer, 4)
    at_end = snapshot(net, optimizer)

    torch.manual_seed(2)
    other = Net(dtype=dtype)
    resumed = OPTIMIZERS[kind](groups(other))
    train(other, resumed, 1)
    checkpoint = load(path, other, {"all": resumed})
    assert (checkpoint.step, checkpoint.extra, checkpoint.path) == (3, {"order": [1, 2.5, None]}, path)
    assert equal(snapshot(other, resumed), at_save)
    assert train(other, resumed, 4) == losses
    assert equal(snapshot(other, resumed), at_end)


def test_two_optimizers_each_get_their_own_state_back(tmp_path: Path) -> None:
    torch.manual_seed(1)
    nets = [Net(), Net()]
    sets = [{"sgd": SGD([groups(net)[0]], momentum=0.9), "adamw": AdamW([groups(net)[1]])} for net in nets]
    for optimizer in sets[0].values():
        train(nets[0], optimizer, 2)
    load(save(tmp_path, step=2, model=nets[0], optimizers=sets[0], extra={}), nets[1], sets[1])
    assert equal(snapshot(nets[1], *sets[1].values()), snapshot(nets[0], *sets[0].values()))


def test_state_keeps_its_dtype_where_torch_would_cast_it_to_the_parameter(tmp_path: Path) -> None:
    models = [nn.Linear(2, 3, dtype=torch.bfloat16) for _ in range(2)]
    optimizers = [SGD(model.parameters(), lr=0.1) for model in models]
    for parameter in models[0].parameters():
        master = parameter.detach().float() / 3
        odd = {"master": master, "rows": torch.arange(3), "name": "plain", "pair": (1, 2.5), "none": None}
        optimizers[0].state[parameter] = odd
    path = save(tmp_path, step=1, model=models[0], optimizers={"sgd": optimizers[0]}, extra={})
    load(path, models[1], {"sgd": optimizers[1]})
    assert equal(snapshot(models[1], optimizers[1]), snapshot(models[0], optimizers[0]))


def test_without_optimizers_only_the_model_changes(folder: Path) -> None:
    net, optimizer = a_pair()
    before = snapshot(net, optimizer)
    assert load(folder / "step-00000080", net).extra == {"position": 80}
    after = snapshot(net, optimizer)
    assert equal(after[1:], before[1:])
    assert not equal(after[0], before[0])


def test_tied_weights_are_stored_once_and_stay_tied(folder: Path) -> None:
    path = folder / "step-00000080"
    assert sorted(os.listdir(path)) == list(FILES)
    state = json.loads((path / "state.json").read_text())
    assert (state["format"], state["version"], state["step"]) == ("topograd-checkpoint", 1, 80)
    assert state["aliases"] == {"head.weight": "embed.weight"}
    assert "head.weight" not in load_file(path / FILES[0])
    assert {"rng", "adamw.state.0.exp_avg", "adamw.state.0.step"} <= load_file(path / FILES[1]).keys()
    net = Net()
    load(path, net)
    assert net.head.weight is net.embed.weight
    with pytest.raises(CheckpointError, match=r"only one of them ties 'head\.weight' to 'embed\.weight'"):
        load(path, Net(tied=False))


def test_views_of_one_storage_that_are_not_tied_are_saved_apart(tmp_path: Path) -> None:
    whole = torch.randn(4, 6)
    model, other = nn.Module(), nn.Module()
    for name, view in (("a", whole), ("b", whole[1:]), ("c", whole.t()), ("d", whole[0].expand(3, 6))):
        model.register_buffer(name, view)
        other.register_buffer(name, torch.zeros(view.shape))
    load(save(tmp_path, step=0, model=model, optimizers={}, extra={}), other, {})
    assert equal(snapshot(other), snapshot(model))


def test_the_newest_are_kept_and_a_future_that_was_given_up_is_not(tmp_path: Path) -> None:
    assert latest(tmp_path / "none") is None
    for step, kept in ((1, [1]), (2, [1, 2]), (8, [1, 2, 8]), (9, [2, 8, 9]), (3, [2, 3])):
        path = save(tmp_path, step=step, model=nn.Linear(1, 1), optimizers={}, extra={}, keep=3)
        assert sorted(os.listdir(tmp_path)) == [f"step-0000000{step}" for step in kept]
        assert latest(tmp_path) == path


def test_names_sort_as_numbers_and_strangers_do_not_count(tmp_path: Path) -> None:
    for name in ("step-100000000", "step-99999999", "step-1", ".tmp-7-1", ".trash-step-00000009-1"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000003").write_text("a file")
    assert [path.name for path in available(tmp_path)] == ["step-99999999", "step-100000000"]


def test_a_step_saved_again_is_replaced(folder: Path) -> None:
    net, optimizer = a_pair(seed=5)
    save(folder, step=80, model=net, optimizers={"adamw": optimizer}, extra={"again": True})
    expected = snapshot(net, optimizer)
    other, resumed = a_pair(seed=6)
    assert load(folder / "step-00000080", other, {"adamw": resumed}).extra == {"again": True}
    assert equal(snapshot(other, resumed), expected)
    assert sorted(os.listdir(folder)) == ["step-00000040", "step-00000080"]


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def edit(file: Path, change: dict[str, Any]) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


DAMAGE: list[tuple[Callable[..., object], str, tuple[Any, ...], str]] = [
    (os.truncate, "model.safetensors", (100,), r"is damaged \(model.safetensors: 100 bytes, expected \d+\)"),
    (os.truncate, "optimizer.safetensors", (0,), "optimizer.safetensors: 0 bytes, expected"),
    (os.truncate, "state.json", (300,), "state.json is damaged"),
    (flip, "model.safetensors", (-1,), "model.safetensors: its SHA-256"),
    (flip, "optimizer.safetensors", (-9,), "optimizer.safetensors: its SHA-256"),
    (os.remove, "model.safetensors", (), "model.safetensors is missing"),
    (os.remove, "optimizer.safetensors", (), "optimizer.safetensors is missing"),
    (os.remove, "state.json", (), "state.json is missing"),
    (edit, "state.json", ({"step": 81},), "state.json: its SHA-256"),
    (edit, "state.json", ({"format": "other"},), "is foreign"),
    (edit, "state.json", ({"version": 2},), "has version 2 .this program reads version 1"),
    (Path.write_text, "state.json", ("[1]",), "is foreign"),
    (shutil.rmtree, "", (), "does not exist"),
]


@pytest.mark.parametrize(("damage", "name", "arguments", "problem"), DAMAGE)
def test_damage_is_named_nothing_changes_and_the_one_before_is_offered(
    folder: Path, damage: Callable[..., object], name: str, arguments: tuple[Any, ...], problem: str
) -> None:
    path = folder / "step-00000080"
    damage(path / name, *arguments)
    net, optimizer = a_pair()
    before = snapshot(net, optimizer)
    with pytest.raises(CheckpointError, match=problem) as caught:
        load(path, net, {"adamw": optimizer})
    offer = "; the one before it is good: resume with --from step-00000040"
    assert re.fullmatch(rf"checkpoint {re.escape(str(path))} .*{offer}", str(caught.value))
    assert equal(snapshot(net, optimizer), before)
    flip(folder / "step-00000040" / "model.safetensors", -1)
    with pytest.raises(CheckpointError, match=f"{problem}.*; no checkpoint before it can be loaded"):
        load(path, net, {"adamw": optimizer})


def test_any_flipped_byte_is_refused_or_harmless(folder: Path) -> None:
    """Space between JSON's tokens is not data; a flip there may pass, but then nothing else differs."""
    net, optimizer = a_pair()
    path = folder / "step-00000080"
    good = load(path, net, {"adamw": optimizer})
    expected = snapshot(net, optimizer)
    chance = random.Random(0)
    for index in range(60):
        file = path / FILES[index % 3]
        whole = file.read_bytes()
        flip(file, chance.randrange(len(whole)))
        try:
            assert load(path, net, {"adamw": optimizer}) == good
            assert file.name == "state.json"
        except CheckpointError:
            pass
        assert equal(snapshot(net, optimizer), expected)
        file.write_bytes(whole)


Make = Callable[[Net], dict[str, Optimizer]]
MISFITS: list[tuple[dict[str, Any], Make, str]] = [
    ({"width": 5}, lambda n: {}, r"is \(7, 4\) float64, the model's is \(7, 5\) float64"),
    ({"dtype": torch.float32}, lambda n: {}, r"is .* float64, the model's is .* float32"),
    ({}, lambda n: {"adamw": SGD(groups(n))}, "it is AdamW, expected SGD"),
    ({}, lambda n: {"muon": AdamW(groups(n))}, r"it has \['adamw'\], expected \['muon'\]"),
    ({}, lambda n: {"adamw": AdamW(n.parameters())}, "its groups hold other parameters"),
    ({}, lambda n: {"adamw": AdamW(groups(n)[::-1])}, "its groups hold other parameters"),
]


@pytest.mark.parametrize(("options", "make", "problem"), MISFITS)
def test_what_does_not_fit_is_refused_before_anything_changes(
    folder: Path, options: dict[str, Any], make: Make, problem: str
) -> None:
    net = Net(**options)
    optimizers = make(net)
    before = snapshot(net, *optimizers.values())
    with pytest.raises(
        CheckpointError, match=f"does not fit .*{problem}.*no checkpoint before it can be loaded"
    ):
        load(folder / "step-00000080", net, optimizers)
    assert equal(snapshot(net, *optimizers.values()), before)


def test_missing_and_unknown_names_are_refused(folder: Path) -> None:
    more, fewer = Net(), Net()
    more.extra = nn.Linear(1, 1)
    del fewer.scale
    with pytest.raises(CheckpointError, match=r"it lacks 'extra\.bias' and 1 more"):
        load(folder / "step-00000080", more)
    with pytest.raises(CheckpointError, match=r"the model has no 'scale'"):
        load(folder / "step-00000080", fewer)


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> str:
        return "no tensor"


def test_what_cannot_be_saved_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    good: dict[str, Any] = {"step": 1, "model": model, "optimizers": {}, "extra": {}}
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"extra": {"x": object()}}, CheckpointError, "cannot be written as JSON"),
        ({"model": WithExtraState(1, 1)}, CheckpointError, "'_extra_state' is not a tensor"),
        (
            {"optimizers": {"a": SGD([{"params": [model.bias], "f": max}])}},
            CheckpointError,
            r"groups\.0\.f is a",
        ),
        ({"step": -1}, ConfigError, "step is -1"),
        ({"keep": 0}, ConfigError, "keep is 0"),
    ]
    for change, error, problem in refused:
        with pytest.raises(error, match=problem):
            save(tmp_path, **(good | change))
    assert os.listdir(tmp_path) == []


def test_a_save_that_fails_keeps_what_was_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"cannot save .*step-00000120 .*No space left on device"):
        save(folder, step=120, model=Net(), optimizers={}, extra={})
    assert sorted(os.listdir(folder)) == ["step-00000040", "step-00000080"]
    assert load(folder / "step-00000080", Net()).step == 80


def test_everything_is_on_the_disk_before_it_gets_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    rename, fsync = os.rename, os.fsync

    def spy_fsync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def spy_rename(source: Path, target: Path) -> None:
        if target.name == "step-00000120":
            assert {path.stat().st_ino for path in (source, *source.iterdir())} <= synced
            synced.clear()
        elif target.name.startswith(".trash-"):
            assert folder.stat().st_ino in synced  # the new name is on the disk before an old one goes
        rename(source, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "rename", spy_rename)
    save(folder, step=120, model=Net(), optimizers={}, extra={})
    assert [path.name for path in available(folder)] == ["step-00000080", "step-00000120"]
