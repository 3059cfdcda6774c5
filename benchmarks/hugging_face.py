"""Decoding against Hugging Face's `generate`: the same weights, one row, greedy, on the CPU with a KV cache.

    python benchmarks/hugging_face.py [--width 512] [--layers 8] [--train-steps 300] [--threads 2] [--json]

1. Full depth: a Llama with random weights, by `generate` and by our engine.
2. Speculation: a Llama that was trained in stages for a short while, so that its first layers predict
   through the shared norm and head, which is what `assistant_early_exit` assumes. Our drafters are those that
   calibration selects on held-out text that is not prompted; where none pays ("on" is false), drafts of 4 by
   the first stage are measured. Theirs is measured twice: as it comes, leaving after our first stage, and
   with the fastest exit, length and confidence of a grid, which is chosen on the prompts that are measured,
   and so flattered.

Times are whole continuations of all prompts, the reading of the prompts included, in one process, taking
turns. A ratio "a / b" is of speeds: above 1, a is faster. `generate` runs in inference mode and without an
end token, so that nothing stops it and nothing is done to its logits. Texts are compared with those of
`generate` at full depth; where one differs, the gap of the two best logits says whether rounding decided.

Limits: `generate` as it comes, with its growing cache and not compiled. Few prompts; a short training, whose
greedy text loops, which flatters drafts (`distinct_4grams`).
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import transformers
import tyro
from transformers import LlamaConfig, LlamaForCausalLM

from topograd.convert.families import stack_of
from topograd.data import Loader, Prepared, windows
from topograd.data.windows import Text
from topograd.decode.agreement import distinct, is_tie
from topograd.decode.benchmark import heldout_prompts
from topograd.decode.calibration.measure import Calibration, Readings, join, read
from topograd.decode.calibration.tune import DrafterSelection, drafter_of, tune
from topograd.decode.drafters import DraftRule
from topograd.decode.engine import Emitted, Engine
from topograd.decode.retrofitted import Retrofitted
from topograd.decode.sequence import Tally
from topograd.decode.speculation import Speculate
from topograd.decode.strategies import DecodeStrategy, FixedDepth, continue_tokens, generate_batch
from topograd.errors import ConfigError
from topograd.exec.forward import stage_outputs
from topograd.exec.train_step import train_step
from topograd.nn.stack import Stack
from topograd.runs.config import TrainConfig, preset
from topograd.runs.session import load_data
from topograd.timing import Spread, ratio, take_turns
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan
from topograd.training.optimizers import make_optimizers

Texts = list[list[int]]
Way = Callable[[Texts, int], Texts]
"""From prompts and a number of tokens to what follows each prompt."""
LAYERS_PER_STAGE = 2
DRAFTS, CONFIDENCES = (2, 4, 8, 20), (0.0, 0.4)
EXIT, TUNED = "hugging face, early exit", "hugging face, early exit, tuned"
PAIRS = (
    ("ours", "hugging face"),
    ("ours, drafts", "ours"),
    (EXIT, "hugging face"),
    (TUNED, "hugging face"),
    ("ours, drafts", EXIT),
    ("ours, drafts", TUNED),
)


@dataclass(frozen=True)
class Settings:
    """The two models and how long to measure."""

    width: int = 512
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    vocab: int = 4096
    prompts: int = 4
    prompt_tokens: int = 32
    tokens: int = 48
    rounds: int = 7
    train_steps: int = 300
    """0 leaves speculation out."""
    train_width: int = 256
    train_layers: int = 8
    threads: int | None = None
    json: bool = False

    def __post_init__(self) -> None:
        if self.train_layers % LAYERS_PER_STAGE or self.train_layers < 2 * LAYERS_PER_STAGE:
            raise ConfigError(f"train-layers is {self.train_layers}; give an even number of at least 4")


@dataclass(frozen=True)
class Exit:
    """How Hugging Face drafts; the defaults are those of transformers 5."""

    layers: int
    drafts: int = 20
    """How many tokens are drafted at most."""
    confidence: float = 0.4
    """A draft ends behind the first token of less probability."""


def llama(settings: Settings, width: int, layers: int, vocab: int) -> Any:
    """A Llama with random weights and no special tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 32 * 32,
        num_hidden_layers=layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@torch.inference_mode()
def theirs(model: Any, prompts: Texts, tokens: int, leave: Exit | None = None) -> Texts:
    """What `generate` writes behind each prompt."""
    how: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    if leave is not None:
        # The assistant reads these two from the model's settings, not from the call.
        model.generation_config.num_assistant_tokens = leave.drafts
        model.generation_config.assistant_confidence_threshold = leave.confidence
        how["assistant_early_exit"] = leave.layers
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        row = model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=True, **how)[0]
        found.append(row[len(prompt) :].tolist())
    return found


def ours(strategy: DecodeStrategy, prompts: Texts, tokens: int) -> Texts:
    """What our engine writes behind each prompt."""
    return [
        [emitted.token for emitted in generate_batch(strategy, [prompt], tokens)[0]] for prompt in prompts
    ]


def measure(model: Any, prompts: Texts, ways: Mapping[str, Way], settings: Settings) -> dict[str, Any]:
    """Speed of each way, and its texts beside those of "hugging face"."""
    written: dict[str, Texts] = {}

    def run(name: str) -> None:
        written[name] = ways[name](prompts, settings.tokens)

    seconds = take_turns({name: partial(run, name) for name in ways}, settings.rounds)
    tokens, base = settings.tokens * len(prompts), written["hugging face"]
    return {
        "tokens_per_second": {name: tokens / statistics.median(times) for name, times in seconds.items()},
        "ratios": {
            f"{fast} / {slow}": ratio(seconds, slow, fast).as_dict()
            for fast, slow in PAIRS
            if fast in ways and slow in ways
        },
        "texts": {name: compare(model, prompts, base, texts) for name, texts in written.items()},
        "distinct_4grams": distinct([[Emitted(token, 0) for token in text] for text in base]),
    }


@torch.inference_mode()
def compare(model: Any, prompts: Texts, base: Texts, some: Texts) -> dict[str, Any]:
    """How many texts are equal, and where the others leave."""
    differences = []
    for index, (prompt, expected, found) in enumerate(zip(prompts, base, some, strict=True)):
        if found != expected:
            where = next(i for i in range(len(expected)) if found[i : i + 1] != expected[i : i + 1])
            logits = model(torch.tensor([[*prompt, *expected[:where]]])).logits[0, -1]
            best, second = logits.topk(2).values.tolist()
            tie = len(found) > where and is_tie(logits, expected[where], found[where])
            differences.append({"prompt": index, "token": where, "top_2_gap": best - second, "tie": tie})
    return {"equal": len(base) - len(differences), "of": len(base), "differences": differences}


def full_depth(settings: Settings) -> dict[str, Any]:
    """Random weights, random prompts, every layer for every token."""
    model = llama(settings, settings.width, settings.layers, settings.vocab)
    prompts = torch.randint(settings.vocab, (settings.prompts, settings.prompt_tokens)).tolist()
    plan = Plan.of(Topology.chain(str(settings.layers)), settings.layers)
    engine = Engine(stack_of(model), plan, settings.prompt_tokens + settings.tokens)
    ways = {"hugging face": partial(theirs, model), "ours": partial(ours, FixedDepth(engine))}
    return measure(model, prompts, ways, settings)


def train(stack: Stack, topology: Topology, config: TrainConfig, data: Prepared) -> list[float]:
    """Train in stages; return each stage's loss, the mean of the last steps."""
    optimizers = make_optimizers(stack, config.optimizer)
    loader = Loader(data.train, config.model.context, config.batch, config.seed)
    losses = []
    for step in range(config.steps):
        optimizers.set_rates(step, config.steps)
        losses.append(train_step(stack, topology, *next(loader)))
        optimizers.step()
        optimizers.zero_grad()
        if (step + 1) % 50 == 0:
            print(f"trained {step + 1} of {config.steps} steps", file=sys.stderr)
    mean: list[float] = torch.stack(losses[-20:]).mean(0).tolist()
    return mean


@torch.no_grad()
def readings(stack: Stack, plan: Plan, text: Text, batch: int = 4) -> Readings:
    """What every stage predicts on the text, a window a sequence."""
    parts = []
    for start in range(0, len(text.inputs), batch):
        inputs = text.inputs[start : start + batch]
        counted = text.targets[start : start + batch] != -100
        outputs = stage_outputs(stack, plan, inputs, plan.predicting())
        rows = torch.arange(start, start + len(inputs))[:, None].expand_as(inputs)
        parts.append(read([stack.readout(outputs[k][counted], k) for k in plan.predicting()], rows[counted]))
    return join(parts)


def speculation(settings: Settings) -> dict[str, Any]:
    """A model trained in stages, on held-out prompts: both programs, without and with drafts."""
    config, data = load_data(preset("small", steps=settings.train_steps))
    context, wanted = config.model.context, settings.prompt_tokens + settings.tokens
    if wanted > context:
        raise ConfigError(f"prompt-tokens and tokens are {wanted} together; give at most {context}")
    model = llama(settings, settings.train_width, settings.train_layers, config.model.vocab)
    stack, stages = stack_of(model), settings.train_layers // LAYERS_PER_STAGE
    topology = Topology.chain(",".join([str(LAYERS_PER_STAGE)] * stages))
    plan = Plan.of(topology, settings.train_layers)
    losses = train(stack, topology, config, data)
    text = Text(*windows(data.heldout, data.tokenizer, context, config.eval_bytes))
    prompts = heldout_prompts(text, settings.prompts, settings.prompt_tokens)

    engine = Engine(stack, plan, context)
    calibration = Calibration.of(readings(stack, plan, text).split()[0], config.steps)
    selection = tune(engine, text).greedy
    drafting = Speculate(engine, DraftRule(0.0, 4))
    if selection is not None:
        chosen = [drafter_of(name, engine, no_retrofit) for name in selection.drafters]
        drafting = Speculate(engine, chosen, policy=selection.policy)
    exits = early_exits(model, prompts, settings.tokens)
    ways: dict[str, Way] = {
        "hugging face": partial(theirs, model),
        "ours": partial(ours, FixedDepth(engine)),
        "ours, drafts": partial(ours, drafting),
    }
    if not isinstance(exits, str):
        ways |= {name: partial(theirs, model, leave=leave) for name, leave in exits.items()}
    found = measure(model, prompts, ways, settings)
    found |= {"losses": losses, "agreement": calibration.agreement}
    found["ours, drafts"] = our_drafts(drafting, selection, prompts, settings.tokens)
    if isinstance(exits, str):
        return found | {EXIT: exits}
    return found | {
        name: their_drafts(model, prompts, settings.tokens, leave) for name, leave in exits.items()
    }


def no_retrofit() -> Retrofitted:
    raise AssertionError("a model that was trained here has no draft stage")


def early_exits(model: Any, prompts: Texts, tokens: int) -> dict[str, Exit] | str:
    """Hugging Face's drafts as they come and as tuned as they can be; or why there are none."""
    layers = model.config.num_hidden_layers
    default = Exit(LAYERS_PER_STAGE)
    try:
        theirs(model, prompts[:1], tokens, default)
    except Exception as error:  # whatever it is, it belongs in the report
        model.config.num_hidden_layers = layers  # an exception leaves it at the exit
        return f"unavailable: {type(error).__name__}: {error}"
    each = product(range(LAYERS_PER_STAGE, layers, LAYERS_PER_STAGE), DRAFTS, CONFIDENCES)
    grid = {str(numbers): Exit(*numbers) for numbers in each}
    trials = {name: partial(theirs, model, prompts[:2], tokens, leave) for name, leave in grid.items()}
    seconds = take_turns(trials, rounds=3, warmup=1)
    return {EXIT: default, TUNED: grid[min(grid, key=lambda name: statistics.median(seconds[name]))]}


def our_drafts(
    strategy: Speculate, selection: DrafterSelection | None, prompts: Texts, tokens: int
) -> dict[str, Any]:
    """Our drafters and their acceptance."""
    tally = Tally()
    for prompt in prompts:
        batch = strategy.engine.start([prompt])
        for _ in continue_tokens(strategy, batch, tokens):
            pass
        tally.add(batch[0].tally)
    return {
        "on": selection is not None,
        "drafters": strategy.drafter.name,
        "predicted_speedup": 1.0 if selection is None else selection.predicted,
        "acceptance": tally.acceptance if tally.drafted else None,
    }


def their_drafts(model: Any, prompts: Texts, tokens: int, leave: Exit) -> dict[str, Any]:
    """Acceptance, counted at the first layer, called once a draft and once a round, and at the last."""
    calls = [0, 0]

    def count(end: int, *_: object) -> None:
        calls[end] += 1

    ends = (model.model.layers[0], model.model.layers[-1])
    hooks = [layer.register_forward_hook(partial(count, end)) for end, layer in enumerate(ends)]
    theirs(model, prompts, tokens, leave)
    for hook in hooks:
        hook.remove()
    drafted, accepted = calls[0] - calls[1], tokens * len(prompts) - calls[1]
    return asdict(leave) | {"acceptance": accepted / drafted if drafted else None}


def show(part: str, found: dict[str, Any]) -> None:
    print(f"\n{part}\n{'tokens/s':>10}   texts equal")
    for name, rate in found.pop("tokens_per_second").items():
        texts = found["texts"][name]
        print(f"{rate:10.1f}   {texts['equal']} of {texts['of']}   {name}")
        for d in texts["differences"]:
            kind = "a tie" if d["tie"] else "NO TIE"
            print(f"{'':13}text {d['prompt'] + 1}, token {d['token'] + 1}: gap {d['top_2_gap']:.1e}, {kind}")
    for name, spread in found.pop("ratios").items():
        print(f"{Spread(**spread)!s:28} {name}")
    del found["texts"]
    for name, value in found.items():
        print(f"{name}: {value}")


def main() -> None:
    settings = tyro.cli(Settings)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    transformers.utils.logging.set_verbosity_error()  # its early exit calls itself in a deprecated way
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    result: dict[str, Any] = {
        "settings": asdict(settings) | {"threads": torch.get_num_threads(), **versions},
        "full_depth": full_depth(settings),
    }
    if settings.train_steps:
        result["speculation"] = speculation(settings)
    if settings.json:
        print(json.dumps(result))
        return
    print(result.pop("settings"))
    for part, found in result.items():
        show(part.replace("_", " "), found)


if __name__ == "__main__":
    main()
