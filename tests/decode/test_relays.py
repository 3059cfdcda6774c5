"""The engine with relays: text token by token is that of the whole sequence, on every relay and bus."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from topograd.decode.engine import Engine
from topograd.decode.strategies import FixedDepth, generate_batch
from topograd.exec.forward import stage_outputs
from topograd.nn.gpt import GPT
from topograd.nn.learned_relays import LEARNED, add_relays
from topograd.topology.dag import EMBEDDING, PLAIN_RELAYS, Edge, Topology

CHAIN = Topology.chain("1,1,2")
CASES = {
    **{kind: CHAIN.with_relays(kind) for kind in (*PLAIN_RELAYS, *LEARNED)},
    "gated-bus": CHAIN.with_input_bus(Edge(EMBEDDING, relay="gate")),
    "early-bus": Topology.chain("2,1,1").with_input_bus(Edge(0, layer=1, relay="low-rank")),
}


@pytest.mark.parametrize("topology", CASES.values(), ids=CASES)
@pytest.mark.parametrize("stage", [1, 2])
def test_writing_is_reading_the_whole_again(
    topology: Topology,
    stage: int,
    make_gpt: Callable[..., GPT],
    make_engine: Callable[..., Engine],
) -> None:
    model = make_gpt(width=16)
    add_relays(model, replace(topology, relay_rank=3))
    for relay in model.learned_relays().values():
        for parameter in relay.parameters():
            nn.init.normal_(parameter, std=0.4)
    engine = make_engine(model, topology)
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6]]
    written = generate_batch(FixedDepth(engine, stage), prompts, 6)
    for prompt, said in zip(prompts, written, strict=True):
        tokens = list(prompt)
        for emitted in said:
            h = stage_outputs(model, engine.plan, torch.tensor([tokens]), [stage])[stage]
            assert emitted.token == int(model.readout(h[0, -1], stage).argmax())
            tokens.append(emitted.token)
