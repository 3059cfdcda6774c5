"""Reading a checkpoint: known singular points, symmetries that would be mistaken, and what is refused."""

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.integrate import quad
from torch import Tensor, nn

from raising import refused
from topograd.errors import GeometryError
from topograd.geometry import checkpoint
from topograd.geometry.checkpoint import CheckpointReading, DirectionReading, read_checkpoint
from topograd.geometry.jets import Jet
from topograd.geometry.rates import log_grid
from topograd.geometry.symmetry_search import FoundSymmetries
from topograd.nn.gpt import GPT


def chain(depth: int) -> tuple[nn.Sequential, Tensor]:
    """Linear maps with one dead unit that all share, in a random frame."""
    torch.manual_seed(0)
    frames = [torch.linalg.qr(torch.randn(4, 4).double()).Q for _ in range(depth + 1)]
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(depth))).double()
    dead = torch.diag(torch.tensor([1.0, 1.0, 1.0, 0.0]).double())
    for i, linear in enumerate(model):
        linear.weight.data = frames[i + 1] @ dead @ frames[i].T
    return model, torch.randn(200, 4).double()


def mode_share(mode: DirectionReading, n_beta: float, depth: int, t: float) -> float:
    """Of K = c t^{2 depth} on the line from -1 to 1, by quadrature; c from K at the t of the Fisher."""
    assert mode.fisher is not None
    c = n_beta * mode.fisher / 2 * t ** (2 - 2 * depth)

    def action(t: float) -> float:
        return c * t ** (2 * depth)

    mean = quad(lambda t: action(t) * math.exp(-action(t)), 0, 1)[0]
    return float(mean / quad(lambda t: math.exp(-action(t)), 0, 1)[0])


def joint(found: CheckpointReading) -> DirectionReading:
    (one,) = [one for one in found.directions if one.layer.startswith("joint")]
    return one


@pytest.mark.parametrize("depth", [2, 3])
def test_a_dead_unit_of_a_chain_has_the_order_of_its_depth(depth: int) -> None:
    model, x = chain(depth)
    found = read_checkpoint(model, (x, model(x).detach()), "squared-error", "expected")
    mode = joint(found)
    assert (mode.kind, mode.order) == ("dead", depth)
    assert mode.interval is not None
    assert mode.interval[0] == pytest.approx(depth, abs=1e-6)
    assert mode.jet is not None
    assert (mode.jet.order, mode.jet.crossover) == (depth, None), "the change is one power of t"
    assert mode.share is not None
    n_beta, grid = mode.share.n_beta, log_grid(*checkpoint.WINDOWS[0], checkpoint.POINTS).tolist()
    likely = [
        mode_share(mode, n_beta, depth, t) for t in grid[:3]
    ]  # the first above rounding, by the machine
    assert any(mode.share.value == pytest.approx(one, rel=1e-4) for one in likely)
    assert mode.crossing is not None
    assert mode.crossing["orders"] == dict.fromkeys(mode.crossing["orders"], 1)
    assert (mode.crossing["rlct"], mode.crossing["multiplicity"]) == (0.5, depth)
    alone = [one for one in found.directions if one.kind == "dead" and one is not mode]
    assert [one.layer for one in alone] == [str(i) for i in range(depth)]
    assert all(one.order is None for one in alone), "one layer alone does not move the function"
    assert sum("K is 0 along" in why for why in found.refused) == depth


def test_a_dead_unit_beside_a_rectifier_and_the_softmax_shift() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        model[0].weight[7], model[0].bias[7], model[2].weight[:, 7] = 0, 0, 0  # type: ignore[operator]
    found = read_checkpoint(model, (torch.randn(300, 6).double(), torch.randint(3, (300,))))
    assert joint(found).order == 2
    kinds = [(one.layer, one.kind) for one in found.directions if one.group is None]
    assert ("2", "symmetry") in kinds, "the head's own bottom is the shift, and the next one is read too"
    assert ("2", "dead") in kinds
    groups = {one.layer: one.dimensions for one in found.directions if one.group is not None}
    assert groups == {"0": 7, "2": 8, "2.bias": 1}, "a dead unit has no size to trade"


def test_a_symmetry_that_is_not_taken_out_reads_as_order_two(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3, bias=False), nn.Linear(3, 5, bias=False)).double()
    x = torch.randn(100, 5).double()
    first, second = (layer.weight.detach() for layer in model)  # type: ignore[operator]
    X = torch.randn(3, 3).double()
    tangent = {"0.weight": X @ first, "1.weight": -second @ X}
    ends = torch.ones(5, 1).double(), torch.ones(3, 1).double()
    way = checkpoint.Candidate("0", *ends, 1.0, 0.0, lambda step: tangent)

    def take(flat: checkpoint._Candidates, *given: Any) -> None:
        flat.found = {"0": way}

    monkeypatch.setattr(checkpoint._Candidates, "take", take)
    assert read_checkpoint(model, (x, x), "squared-error").directions[-1].kind == "symmetry"
    monkeypatch.setattr(checkpoint, "find_symmetries", lambda *args, **more: FoundSymmetries((), ()))
    fooled = read_checkpoint(model, (x, x), "squared-error").directions[-1]
    assert (fooled.kind, fooled.order) == ("dead", 2)


def gpt() -> GPT:
    torch.manual_seed(0)
    model = GPT(layers=2, width=8, heads=2, vocab=16, context=8)
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model


def test_a_model_in_use_is_live_and_left_as_it_was() -> None:
    model = gpt()
    model.embedding.weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tokens = torch.randint(16, (12, 8))
    seen: list[tuple[int, int]] = []
    found = read_checkpoint(model, [(tokens, tokens.roll(-1, 1))], on_scan=lambda *now: seen.append(now))
    followed = [one for one in found.directions if one.group is None and one.kind != "symmetry"]
    assert {one.kind for one in followed} == {"live"}
    known = [one for one in followed if one.order is not None]
    assert len(known) > len(followed) // 2
    assert all(one.order == 1 and one.limit == 0.5 and one.fluctuation == 0.5 for one in known)
    shares = [one.share for one in followed if one.share is not None]
    assert len(shares) == len(followed)
    assert all(0 < share.value < 0.6 and share.n_beta == pytest.approx(96 / math.log(96)) for share in shares)
    assert {one.jet.order for one in followed if one.jet is not None} == {1}
    assert seen[-1][0] == seen[-1][1]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.embedding.weight.requires_grad
    assert all("forward" not in vars(layer) for layer in model.layers)
    plain = json.loads(json.dumps(found.as_dict()))
    assert {"directions", "stream", "refused", "sentences"} <= plain.keys()
    assert {"layer", "kind", "order", "interval"} <= plain["directions"][0].keys()


def test_layers_before_the_first_that_moves_answer_as_they_did() -> None:
    """The shortcut gives what a whole run gives."""
    model = gpt().double()
    tokens = torch.randint(16, (1, 8))
    probe = checkpoint.Probe(model, tokens, "cross-entropy", None, None)
    name = "layers.1.mlp.up.weight"
    part = {name: torch.randn(model.get_parameter(name).shape).double()}
    grid = torch.tensor([0.01, 0.1], dtype=torch.float64)
    short, sketch = probe.scan(part, grid)
    probe._replay._layers = {}
    whole, other = probe.scan(part, grid)
    assert short == pytest.approx(whole, rel=1e-12)
    assert torch.allclose(sketch, other)
    assert float(sketch.square().sum()) == pytest.approx(2 * short[0] / 1e-4, rel=0.3), "sketches keep length"


def test_no_loss_few_scans_and_half_precision() -> None:
    model = gpt().bfloat16()
    tokens = torch.randint(16, (12, 8))
    found = read_checkpoint(model, [(tokens, None)], None, scans=3)
    assert any("layers were not scanned" in why for why in found.refused)
    assert any("no loss" in why for why in found.refused)
    assert len([one for one in found.directions if one.group is None and one.kind != "symmetry"]) == 4
    own = read_checkpoint(
        nn.Linear(3, 2),
        (torch.randn(9, 3), torch.randn(9, 2)),
        lambda o, y: (o - y).abs().sum(-1),
        "empirical",
    )
    assert any("Gaussian around the outputs" in why for why in own.refused)


@pytest.mark.parametrize(
    ("batches", "given"),
    [
        ([], None),
        ([torch.ones(3)], "Tensor"),
        ([({"x": torch.ones(3, 4)}, None), ({"y": torch.ones(3, 4)}, None)], "y"),
        ([(torch.ones(0, 4), None)], None),
    ],
)
def test_bad_batches(batches: Any, given: str | None) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    with refused(GeometryError, setting="batches", given=given):
        read_checkpoint(Named(), batches)


def layernorm_models() -> dict[str, Any]:
    """Random tiny models whose stream is read by LayerNorms alone, as wide as 16 with 40 tokens."""
    transformers = pytest.importorskip("transformers")
    opt = transformers.OPTConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        ffn_dim=32,
        num_attention_heads=2,
        max_position_embeddings=32,
        word_embed_proj_dim=16,
    )
    gpt2 = transformers.GPT2Config(
        vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    return {"opt": transformers.OPTForCausalLM(opt), "gpt2": transformers.GPT2LMHeadModel(gpt2)}


@pytest.mark.parametrize(
    ("name", "writers", "readers"),
    [
        ("opt", ("out_proj", "fc2"), ("q_proj", "k_proj", "v_proj", "fc1")),
        ("gpt2", ("attn.c_proj", "mlp.c_proj"), ("c_attn", "c_fc")),
    ],
)
def test_models_with_layernorm_have_no_dead_direction(name: str, writers: Any, readers: Any) -> None:
    """A shift of a stream that LayerNorms read, and the kernel of a LayerNorm, are symmetries, not dead."""
    torch.manual_seed(0)
    model = layernorm_models()[name].eval()
    tokens = torch.randint(40, (8, 16))
    reading = read_checkpoint(model, [(tokens, tokens.roll(-1, 1))])
    assert not [one for one in reading.directions if one.kind == "dead"]
    groups = [one for one in reading.directions if one.group is not None]
    shifted = {one.moves[0] for one in groups if "shift" in str(one.group)}
    kernels = {one.moves[0] for one in groups if "kernel" in str(one.group)}
    table = {"opt": "model.decoder.embed_tokens.weight", "gpt2": "transformer.wte.weight"}[name]
    assert table in kernels, "the tied head, as long as all gains are 1 and all biases 0"
    kernels -= {table}
    for names, parts in ((shifted, writers), (kernels, readers)):
        weights = {weight for weight in names if weight.endswith("weight")}
        assert len(weights) == 2 * len(parts), "one for each of two layers"
        assert all(any(f"{part}.weight" in weight for part in parts) for weight in weights)
    live = {one.layer for one in reading.directions if one.kind == "live"}
    assert len(live) >= 2 * (len(writers) + len(readers)), "of every map another direction is read"


class Encoder(nn.Module):
    """torch's own, whose queries, keys and values are one parameter."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True, norm_first=norm_first)
        self.body = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16), enable_nested_tensor=False)
        self.head = nn.Linear(16, 40)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(self.embedding(x)))
        return y


@pytest.mark.parametrize("name", ["opt", "gpt2", "pre-norm", "post-norm"])
def test_fresh_models_in_float64_have_no_dead_direction(name: str) -> None:
    """Before training gains are 1 and biases 0: a tied head and packed projections have the kernel too."""
    torch.manual_seed(0)
    made = Encoder(name == "pre-norm") if name.endswith("norm") else layernorm_models()[name]
    model = made.eval().double()
    tokens = torch.randint(40, (12, 16))
    fast = torch.backends.mha.get_fastpath_enabled()
    reading = read_checkpoint(model, [(tokens, tokens.roll(-1, 1))])
    assert not [one.layer for one in reading.directions if one.kind == "dead"]
    assert not [why for why in reading.refused if "jets" in why]
    assert torch.backends.mha.get_fastpath_enabled() == fast
    json.dumps(reading.as_dict(), allow_nan=False)


def test_experts_of_transformers_are_read_one_by_one() -> None:
    """Their joint kernel has no float64; some samples have no token for some experts."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=8,
        num_local_experts=3,
        max_position_embeddings=32,
    )
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).eval()
    asked = model.config._experts_implementation
    tokens = torch.randint(40, (12, 8))
    reading = read_checkpoint(model, [(tokens, tokens.roll(-1, 1))], scans=2)
    experts = [name for name in reading.layers if "experts" in name]
    assert len(experts) == 2 * 3, "gate and up in one, and down"
    assert model.config._experts_implementation == asked
    router = "model.layers.0.mlp.gate.weight"
    shifted = {one.moves for one in reading.directions if one.group is not None and "shift" in one.group}
    assert (router,) in shifted, "the softmax of a router does not see a shift of all its logits"
    assert not [one.layer for one in reading.directions if one.kind == "dead"]


def test_a_square_below_the_rounding_of_its_window_is_live_by_its_derivatives() -> None:
    """K at t = 0.1 is hidden by rounding, and the first derivative is not 0."""

    class Rounds(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            f = super().forward(x)
            return f + ((f * 1e7).round() / 1e7 - f).detach()  # values are rounded, derivatives are not

    torch.manual_seed(0)
    model, x = nn.Sequential(Rounds(3, 2).double()), torch.randn(60, 3).double()
    x[:, 2] *= 1e-5
    found = read_checkpoint(model, (x, model(x).detach()), "squared-error")
    (one,) = [one for one in found.directions if one.group is None]
    assert (one.kind, one.order, one.limit) == ("live", None, None)
    assert one.jet is not None
    assert one.jet.order == 1


def test_a_direction_below_rounding_in_its_window_is_not_called_unused() -> None:
    """The outputs move by 1e-14 t³: above rounding at t = 1, and not at 0.1."""

    class Faint(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.live, self.faint = nn.Linear(3, 2).double(), nn.Linear(3, 1, bias=False).double()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.live(x) + 1e-14 * self.faint(x) ** 3
            return y

    torch.manual_seed(0)
    model, x = Faint(), torch.randn(60, 3).double()
    nn.init.zeros_(model.faint.weight)
    found = read_checkpoint(model, (x, model(x).detach()), "squared-error")
    (one,) = [one for one in found.directions if one.layer == "faint"]
    assert one.kind == "dead"
    assert one.fisher is not None
    assert 0 < one.fisher < 1e-15
    assert any("only above t = 0.1" in why for why in found.refused)


def test_quantised_models_and_no_scans() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].weight = nn.Parameter(torch.ones(2, 3, dtype=torch.int8), requires_grad=False)
    with refused(GeometryError, setting="model", given="0.weight"):
        read_checkpoint(model, (torch.ones(4, 3), None))
    with refused(GeometryError, setting="scans", given=0):
        read_checkpoint(nn.Linear(3, 2), (torch.ones(4, 3), None), scans=0)


class Noisy(nn.Module):
    """Dropout that is no module, as in OPT."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.map(x), 0.5, self.training)


@pytest.mark.parametrize("dropout", [nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)), Noisy()])
def test_a_model_that_draws_at_random_is_refused_and_draws_nothing(dropout: nn.Module) -> None:
    """Two calls differ, and every K was that of another draw."""
    batch = (torch.randn(40, 3), torch.randint(2, (40,)))
    state = torch.get_rng_state()
    with refused(GeometryError, setting="model"):
        read_checkpoint(dropout.train(), batch)
    assert torch.equal(torch.get_rng_state(), state)
    draw = torch.Generator().manual_seed(0)
    assert read_checkpoint(dropout.eval(), batch, generator=draw).directions
    assert torch.equal(torch.get_rng_state(), state)


def test_a_norm_whose_channels_are_not_last_is_a_note() -> None:
    """As in SqueezeBERT."""

    class Across(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mT).mT

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.still, self.map = Across(5), nn.LayerNorm(4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.map(self.norm(x) + self.still(torch.ones_like(x)))
            return y

    found = read_checkpoint(Net(), (torch.randn(20, 5, 4), torch.randint(2, (20, 5))))
    assert any("norm has 5 gains" in why for why in found.refused)
    assert any("outputs of still do not vary" in why for why in found.refused)
    assert not found.inspection.norms


def test_tied_and_frozen_models_are_read() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(16, (6, 8))
    batch = (tokens, tokens.roll(-1, 1))
    tied = GPT(layers=1, width=8, heads=2, vocab=16, context=8, tied=True)
    found = read_checkpoint(tied, batch, scans=2)
    assert found.inspection.parameters == sum(parameter.numel() for parameter in tied.parameters())
    assert found.directions
    assert "embedding.weight" in found.inspection.uncovered, "its use as a table has no factor"
    plain = json.dumps(
        read_checkpoint(gpt(), batch, scans=2, generator=torch.Generator().manual_seed(0)).as_dict()
    )
    frozen = read_checkpoint(
        gpt().requires_grad_(False), batch, scans=2, generator=torch.Generator().manual_seed(0)
    )
    assert json.dumps(frozen.as_dict()) == plain, "what learns and what does not is read alike"


@pytest.mark.parametrize(("order", "jet", "kind"), [(None, 1, "live"), (None, 2, "dead"), (2, 1, "dead")])
def test_a_square_that_ends_below_the_window_is_live(order: int | None, jet: int, kind: str) -> None:
    """As in a fresh RoBERTa, where the scan saw little but t⁴."""
    probe = SimpleNamespace(
        curve=lambda parts, grid: (1e-3 * grid**2 + grid**4)[:, None].expand(-1, 2),
        jet=lambda parts: Jet(jet, 1e-4),
        floor=0.0,
    )
    scanner = checkpoint._Scanner(probe, (), [], 100.0)  # type: ignore[arg-type]
    found = scanner._at_scale(checkpoint.DirectionReading("layer", "dead", order, fisher=1e-16), {})
    assert (found.kind, found.order) == (kind, order)
