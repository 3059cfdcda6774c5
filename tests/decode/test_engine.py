"""Writing by a prefix of the stages or by paths through them, against reading the window again each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from decoding import tokens_of
from raising import refused
from tests.oracles.decoding import greedy, moved, next_logits
from topograd.decode.drafters import DraftRule
from topograd.decode.engine import Emitted, Engine
from topograd.decode.sampling import Sampling, draw, probabilities
from topograd.decode.speculation import Speculate
from topograd.decode.strategies import (
    DecodeStrategy,
    FixedDepth,
    PathEnsemble,
    generate_batch,
    generate_tokens,
)
from topograd.errors import ConfigError, DivergenceError
from topograd.exec.forward import stage_outputs
from topograd.nn.adapted.adapt import adapt
from topograd.nn.gpt import GPT
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan

CONTEXT, LAST = 24, 3
SAMPLING = Sampling(temperature=0.8, top_k=20, seed=11)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-10 * b.abs().max().item())


@pytest.mark.parametrize("stage", range(4))
def test_every_prefix_is_the_slow_loop_in_batches_and_beyond_the_context(
    gpt: GPT, engine: Engine, prompts: list[list[int]], stage: int
) -> None:
    expected = [greedy(gpt, engine.plan, prompt, 14, stage, CONTEXT) for prompt in prompts]
    assert len({tuple(row[-5:]) for row in expected}) > 1
    assert tokens_of(FixedDepth(engine, stage), prompts, 14) == expected
    assert all(
        e.exit == stage for row in generate_batch(FixedDepth(engine, stage), prompts[:2], 3) for e in row
    )


def test_stages_write_unlike_texts(engine: Engine, prompts: list[list[int]]) -> None:
    """So that the comparisons of this folder can fail."""
    written = {str(tokens_of(FixedDepth(engine, stage), prompts[:2], 8)) for stage in range(4)}
    assert len(written) == 4
    assert generate_batch(FixedDepth(engine), prompts, 2) == generate_batch(
        FixedDepth(engine, LAST), prompts, 2
    ), "the default"


@pytest.mark.parametrize("context", [1, 2, 5])
def test_small_and_odd_contexts(gpt: GPT, make_engine: Callable[..., Engine], context: int) -> None:
    engine = make_engine(gpt, context=context)
    expected = [greedy(gpt, engine.plan, prompt, 12, LAST, context) for prompt in ([1], [2, 3, 4])]
    assert tokens_of(FixedDepth(engine), [[1], [2, 3, 4]], 12) == expected


@pytest.mark.parametrize(
    "topology",
    [
        Topology.chain("1,2,1").with_input_bus(),
        replace(Topology.forest(["1,1", "2"]), prediction="last"),
        Topology.chain("4"),
    ],
    ids=["input bus", "forest", "one stage"],
)
def test_other_topologies(gpt: GPT, make_engine: Callable[..., Engine], topology: Topology) -> None:
    """Each stage alone; `test_prediction.py` has those that predict together."""
    engine = make_engine(gpt, topology)
    for stage in range(len(topology.stages)):
        expected = [greedy(gpt, engine.plan, prompt, 6, stage, CONTEXT) for prompt in ([1, 2], [3])]
        assert tokens_of(FixedDepth(engine, stage), [[1, 2], [3]], 6) == expected


@torch.inference_mode()
def test_logits_of_a_batch_are_those_of_its_rows(gpt: GPT, engine: Engine, prompts: list[list[int]]) -> None:
    batch = engine.start(prompts)
    for stage in (0, 2, LAST):
        engine.run(batch, stage)
        z = engine.logits(batch, stage)
        assert z.shape == (len(prompts), 50)
        for row, prompt in enumerate(prompts):
            close(z[row], next_logits(gpt, engine.plan, prompt[-CONTEXT:], stage))
    engine.append(batch, [[1], [], [2], [3], []])
    assert [len(sequence) for sequence in batch] == [2, 5, 3, 13, CONTEXT]
    engine.run(batch, LAST)
    close(engine.logits(batch, LAST)[3], next_logits(gpt, engine.plan, [*prompts[3][-12:], 3], LAST))
    z = engine.logits(batch, LAST, [2, 5, 1, 3, 1])
    assert z.shape == (12, 50)
    hidden = stage_outputs(gpt, engine.plan, torch.tensor([prompts[1]]), [LAST])[LAST]
    close(z[2:7], gpt.readout(hidden, LAST)[0])
    assert engine.vocab == 50


def sampled(gpt: GPT, engine: Engine, prompt: Sequence[int], tokens: int, sampling: Sampling) -> list[int]:
    """The slow loop with dice."""
    generator = torch.Generator().manual_seed(sampling.seed)
    window, written = list(prompt[-CONTEXT:]), []
    for _ in range(tokens):
        p = probabilities(next_logits(gpt, engine.plan, window, LAST), sampling)
        written.append(draw(p, generator))
        window = moved(window, written[-1], CONTEXT)
    return written


def test_each_row_has_a_random_stream_of_its_own(gpt: GPT, engine: Engine, prompts: list[list[int]]) -> None:
    full, rows = FixedDepth(engine), prompts[2:]
    found = tokens_of(full, rows, 14, SAMPLING)
    assert found == tokens_of(full, rows, 14, SAMPLING), "streams begin anew"
    for row, prompt in enumerate(rows):
        own = Sampling(temperature=0.8, top_k=20, seed=11 + row)
        assert found[row] == sampled(gpt, engine, prompt, 14, own)
        assert found[row] == tokens_of(full, [prompt], 14, own)[0]
    assert found != tokens_of(full, rows, 14, Sampling(temperature=0.8, top_k=20))


@pytest.mark.parametrize("sampling", [None, SAMPLING], ids=["greedy", "sampled"])
def test_a_finished_row_stops_and_the_others_go_on(
    engine: Engine, prompts: list[list[int]], sampling: Sampling | None
) -> None:
    whole = generate_batch(FixedDepth(engine), prompts[:3], 12, sampling)
    rows: list[list[Emitted]] = [[], [], []]
    asked = []

    def finished(row: int, emitted: Emitted) -> bool:
        asked.append((row, emitted))
        return row == 1 and len(rows[1]) == 4

    for row, emitted in generate_tokens(FixedDepth(engine), prompts[:3], 12, finished, sampling):
        rows[row].append(emitted)
    assert rows == [whole[0], whole[1][:4], whole[2]]
    assert len(asked) == 28


def test_tokens_come_as_they_are_made(engine: Engine) -> None:
    stream = generate_tokens(FixedDepth(engine), [[1], [2]], 10**9)
    assert [next(stream)[0] for _ in range(5)] == [0, 1, 0, 1, 0]
    assert list(generate_tokens(FixedDepth(engine), [[1]], 0)) == []


def by_hand(gpt: GPT, window: Sequence[int], path: Sequence[int]) -> Tensor:
    """Logits behind the layers of a path, one layer a stage, and the head of its last."""
    inputs = torch.tensor([list(window)])
    with torch.no_grad():
        h = gpt.embed(inputs)
        ctx = gpt.layer_context(h, inputs)
        for layer in path:
            h = gpt.layers[layer](h, ctx)
        return gpt.readout(h, path[-1])[0, -1]


def test_one_full_path_is_full_depth(engine: Engine, prompts: list[list[int]]) -> None:
    found = generate_batch(PathEnsemble(engine, {(0, 1, 2, 3): 2.0}), prompts, 14)
    assert found == generate_batch(FixedDepth(engine), prompts, 14)


WEIGHTS = {(0, 1): 1.0, (0, 1, 2, 3): 2.5, (0, 2): 0.5}


@pytest.mark.parametrize(
    "weights", [{(0, 2): 1.0}, {(0, 1): 1.0, (0, 2): 1.0}, WEIGHTS], ids=["skip", "two", "three"]
)
def test_paths_are_pooled_as_by_hand(
    gpt: GPT, engine: Engine, prompts: list[list[int]], weights: dict[tuple[int, ...], float]
) -> None:
    def pooled(window: Sequence[int]) -> Tensor:
        each = [w * by_hand(gpt, window, path).log_softmax(-1) for path, w in weights.items()]
        return torch.stack(each).sum(0).div(sum(weights.values())).log_softmax(-1)

    mode = PathEnsemble(engine, weights)
    with torch.inference_mode():
        batch = mode.engine.start(prompts)
        for end in mode.ends:
            mode.engine.run(batch, end)
        found = mode.predictions(batch).log_softmax(-1)
        for row, prompt in enumerate(prompts):
            close(found[row], pooled(prompt[-CONTEXT:]))
    window, expected = list(prompts[1]), []
    for _ in range(24):
        expected.append(int(pooled(window).argmax()))
        window = moved(window, expected[-1], CONTEXT)
    written = generate_batch(mode, prompts[:2], 24)[1]
    assert [emitted.token for emitted in written] == expected
    assert {emitted.exit for emitted in written} == {max(path[-1] for path in weights)}


MODES: dict[str, Callable[[Engine], DecodeStrategy]] = {
    "prefix": lambda engine: FixedDepth(engine, 1),
    "full": FixedDepth,
    "composed": lambda engine: PathEnsemble(engine, WEIGHTS),
    "speculate": lambda engine: Speculate(engine, DraftRule(0.2, 3)),
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
@pytest.mark.parametrize("sampling", [None, SAMPLING], ids=["greedy", "sampled"])
def test_a_stack_without_states_writes_the_same(
    engine: Engine,
    forgetful: Engine,
    prompts: list[list[int]],
    mode: Callable[[Engine], DecodeStrategy],
    sampling: Sampling | None,
) -> None:
    assert engine.keeps_states
    assert not forgetful.keeps_states
    found, expected = (generate_batch(mode(e), prompts[1:4], 14, sampling) for e in (forgetful, engine))
    assert found == expected


@torch.inference_mode()
def test_what_is_recomputed_follows_the_tokens(engine: Engine, forgetful: Engine) -> None:
    """Going back and on to the same length must not find the old answer."""
    for token in (5, 6):
        batches = [each.start([[1, 2, 3], [4]]) for each in (engine, forgetful)]
        for batch in batches:
            cache = batch[0].cache
            cache.push(batch, [[7], [8]])
            cache.run(batch, LAST)
            cache.truncate(batch, [3, 1])
            cache.push(batch, [[token], [token]])
            cache.run(batch, LAST)
        for counts in (None, [4, 2], [1, 2]):
            found, expected = (batch[0].cache.hidden(batch, LAST, counts) for batch in reversed(batches))
            close(found, expected)


class Toy(nn.Module):
    """Somebody's module: a table, layers that add a mean of the past, a head."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, h: Tensor) -> Tensor:
            mean = h.cumsum(1) / torch.arange(1, h.shape[1] + 1, dtype=h.dtype)[:, None]
            return h + torch.tanh(self.linear(mean))

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(23, 6), nn.Linear(6, 23)
        self.blocks = nn.ModuleList(self.Layer() for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        h = self.table(inputs)
        for block in self.blocks:
            h = block(h)
        return self.out(h)


def test_an_adapted_module_writes(make_engine: Callable[..., Engine]) -> None:
    stack = adapt(Toy().double(), layers="blocks", head="out")
    engine = make_engine(stack, "1,1,1", context=8)
    for stage in (0, 2):
        expected = [greedy(stack, engine.plan, prompt, 12, stage, 8) for prompt in ([3], [1, 4, 1])]
        assert tokens_of(FixedDepth(engine, stage), [[3], [1, 4, 1]], 12) == expected


def test_what_makes_no_sense_is_refused(gpt: GPT, engine: Engine, make_engine: Callable[..., Engine]) -> None:
    nothing: list[list[list[int]]] = [[], [[]], [[1], []]]
    for empty in nothing:
        with refused(ConfigError, setting="prompts"):
            generate_batch(FixedDepth(engine), empty, 1)
    with refused(ConfigError, setting="tokens", given=-1):
        generate_batch(FixedDepth(engine), [[1]], -1)
    for stage, shown in ((4, 5), (-1, 0)):
        with refused(ConfigError, setting="exit", given=shown):
            FixedDepth(engine, stage)
    with refused(ConfigError, setting="context", given=0):
        make_engine(gpt, context=0)
    silent = make_engine(gpt, Topology.soft([0.0, 1.0, 0.0]))
    assert (silent.exits, silent.last, silent.stage_of(1)) == ([0, 2, 3], 2, 2), "stage 2 is no exit"
    with refused(ConfigError, setting="exit", given=4):
        FixedDepth(silent, 3)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")], ids=str)
def test_paths_without_a_positive_weight_are_refused(engine: Engine, weight: float) -> None:
    with refused(ConfigError, setting="weights") as caught:
        PathEnsemble(engine, {(0, 1): 1.0, (0, 2): weight})
    assert repr(getattr(caught.value, "given", None)) == repr(weight)


def test_paths_that_end_where_nothing_is_predicted_are_refused(
    gpt: GPT, make_engine: Callable[..., Engine]
) -> None:
    silent = make_engine(gpt, Topology.soft([0.0, 1.0, 0.0]))
    with refused(ConfigError, setting="weights", given="1-2"):
        PathEnsemble(silent, {(0, 1, 2, 3): 1.0, (0, 1): 1.0})
    assert generate_batch(PathEnsemble(silent, {(0, 1, 2, 3): 1.0}), [[1]], 2), "it may lie on the way"


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_logits_that_are_not_finite_are_refused(
    make_gpt: Callable[..., GPT],
    make_engine: Callable[..., Engine],
    mode: Callable[[Engine], DecodeStrategy],
    value: float,
) -> None:
    model = make_gpt()
    with torch.no_grad():
        model.head.weight[3] = value
    with refused(DivergenceError, setting="logits"):
        generate_batch(mode(make_engine(model)), [[1, 2]], 1)


def test_the_vocabulary_costs_no_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(GPT(layers=2, width=8, heads=2, vocab=50, context=8), Plan.of("1,1", 2), 8)
    monkeypatch.setattr(engine, "run", lambda *_: pytest.fail("a forward pass"))
    assert engine.vocab == 50
