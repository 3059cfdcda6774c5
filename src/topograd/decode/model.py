"""The model API: text in, text out, as deep as each token needs.

model = load("runs/mine")
model.generate("def ", tokens=8)                     text, as a string that knows how it came about
model.generate("def ", depth="prefix:1")             depths as in `decode/depths.py`
model.generate("{", grammar=Grammar.json_object())   nothing but what a grammar allows (`decode/grammar.py`)
model.logits([1, 2, 3])                              what it predicts behind each token
model.evaluate()                                     bits per byte and the rest, on its held-out text
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from topograd.decode.depths import default_depth, engine_of, strategy_of
from topograd.decode.engine import Engine
from topograd.decode.sampling import Sampling
from topograd.decode.sequence import Sequence as TokenSequence
from topograd.decode.strategies import DecodeStrategy, FixedDepth, continue_tokens
from topograd.decode.text import TextStream
from topograd.errors import ConfigError
from topograd.registry import Registry
from topograd.runs.session import LoadedTextRun, heldout_text, open_session
from topograd.runtime.choice import check_runtime
from topograd.runtime.quantize import check_precision

if TYPE_CHECKING:
    from torch import Tensor

    from topograd.data.windows import Text
    from topograd.decode.grammar import Grammar, GrammarCompiler
    from topograd.training.evaluation import Evaluation

MAX_TOKENS = 100_000
MAX_PROMPT = 1_000_000
SOURCES: Registry[Callable[[Path | str], Path]] = Registry("model source")
"""What finds the run of a MODEL; the entry lies in a package above, which can convert models."""
MAX_STRATEGIES = 16


class Piece(NamedTuple):
    """A part of a text that a token released."""

    text: str
    exit: int
    """The exit that the token left after, counted from 0."""
    drafter: str = ""
    """Which drafter drafted the token; empty where the model itself wrote it."""


class Generated(str):
    """A continuation: the text, and how it came about."""

    prompt: str
    depth: str
    """The depth that it was written at."""
    deepest: int
    """The last exit that may have run, counted from 1."""
    pieces: list[Piece]
    """One for each token."""
    seconds: float
    drafted: int | None
    """Tokens that were drafted; None without speculation."""
    accepted: int | None
    by_drafter: dict[str, tuple[int, int]]
    """Drafted and accepted tokens of each drafter."""

    def exits(self, count: int) -> list[int]:
        """How many tokens left after each of `count` exits."""
        return [sum(piece.exit == exit_ for piece in self.pieces) for exit_ in range(count)]


class Model:
    """An opened run."""

    def __init__(self, session: LoadedTextRun, runtime: str | None = None, weights: str = "float32") -> None:
        self.session, self.runtime, self.precision = session, runtime, check_precision(weights)
        self._strategies: dict[tuple[str, bool, str], DecodeStrategy] = {}
        """By depth, whether it is greedy, and draft: what they lay out is laid out once."""

    @cached_property
    def engine(self) -> Engine:
        """The model laid out for decoding; made when it is first used."""
        return engine_of(self.session, self.runtime, self.precision)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """What makes grammars ready for its tokenizer."""
        from topograd.decode.grammar import GrammarCompiler

        return GrammarCompiler(self.session.tokenizer)

    def generate(
        self,
        prompt: str | Sequence[int] = "",
        tokens: int = 200,
        *,
        depth: str | None = None,
        draft: Path | str | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        stop_token_ids: Collection[int] = (),
        logit_bias: Mapping[int, float] | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        grammar: Grammar | None = None,
        on_piece: Callable[[Piece], None] | None = None,
    ) -> Generated:
        """Continue a text, or the tokens of one, by at most `tokens`; `on_piece` gets each part as it comes.

        By default the likeliest token each time, speculating where the run's calibration says that it pays.
        `draft` is the folder of a smaller run that drafts, or of a draft stage that is not in the run's own.
        Bias, penalties (`decode/processor.py`) and grammar (`decode/grammar.py`) hold at every depth; a token
        of `stop_token_ids` ends the text and is no part of it.
        """
        check_request(prompt, tokens)
        sampling = Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            logit_bias=logit_bias or {},
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            repetition_penalty=repetition_penalty,
            grammar=None if grammar is None else self.grammars.compile(grammar),
        )
        stream = TextStream(self.session.tokenizer, stop)
        engine = self.engine  # laid out once for all texts, so it is not of this one's time
        began = time.perf_counter()
        if depth is None:
            depth = default_depth(self.session, engine.runtime) if draft is None else "speculate"
        key = depth, sampling.greedy, str(draft)
        if key not in self._strategies:
            if len(self._strategies) == MAX_STRATEGIES:
                self._strategies.clear()
            self._strategies[key] = strategy_of(depth, self.session, engine, sampling.greedy, draft)
            paused = time.perf_counter()  # a runtime's sessions are made once too, when a stage first runs
            self._strategies[key].warm_up()
            began += time.perf_counter() - paused
        strategy = self._strategies[key]
        if strategy.drafter is not None:
            strategy.drafter.policy.forget()  # the same seed writes the same text
        pieces: list[Piece] = []
        tokenizer = self.session.tokenizer
        begin = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        (sequence,) = strategy.engine.start([begin], sampling)
        ends = tokenizer.stop_tokens.union(stop_token_ids)
        for piece in continue_text(strategy, sequence, tokens, stream, ends):
            pieces.append(piece)
            if on_piece is not None:
                on_piece(piece)
        if rest := stream.finish():  # it belongs to the last token: a piece is a token
            last = pieces[-1]
            pieces[-1] = last._replace(text=last.text + rest)
            if on_piece is not None:
                on_piece(last._replace(text=rest))
        sequence.close_drafters()
        made, tally = Generated(stream.text), sequence.tally
        made.prompt = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
        made.depth, made.deepest, made.pieces = depth, strategy.exit + 1, pieces
        drafts = strategy.drafter is not None or depth == "speculate"  # full depth where none pays
        made.drafted, made.accepted = (tally.drafted, tally.accepted) if drafts else (None, None)
        made.by_drafter = {name: (count.drafted, count.accepted) for name, count in tally.by.items()}
        made.seconds = time.perf_counter() - began
        return made

    def encode(self, prompt: str) -> list[int]:
        """The prompt's tokens, as the model was trained to read them; the separator where there are none."""
        tokenizer = self.session.tokenizer
        return tokenizer.encode(prompt, "prompt") or [tokenizer.separator]

    def logits(self, tokens: Sequence[int] | Sequence[Sequence[int]] | Tensor) -> Tensor:
        """What the model predicts behind each token: (time, vocab), or (rows, time, vocab) of rows."""
        import torch

        from topograd.exec.forward import Predictor

        vocab, context = self.session.config.model.vocab, self.session.config.model.context
        allowed = f"numbers of 0..{vocab - 1}, (time,) or (sequences, time), at most {context} of a sequence"
        refused = ConfigError(setting="tokens", given=tokens, allowed=allowed)
        try:
            inputs = torch.as_tensor(tokens, device=next(self.session.stack.parameters()).device)
        except (TypeError, ValueError, RuntimeError):
            raise refused from None
        if inputs.dim() not in (1, 2) or not inputs.numel() or inputs.is_floating_point():
            raise refused
        if not 0 <= int(inputs.min()) <= int(inputs.max()) < vocab or inputs.shape[-1] > context:
            raise refused
        sequences = inputs if inputs.dim() == 2 else inputs[None]
        if self.precision == "float32":
            with torch.no_grad():
                logits: Tensor = Predictor(self.session.stack, self.session.plan)(sequences)
        else:  # the quantised weights are the engine's
            full, (count, length) = FixedDepth(self.engine), sequences.shape
            batch = full.engine.start(sequences.tolist())
            with torch.no_grad():
                full.engine.run(batch, full.stage)
                logits = full.predictions(batch, [length] * count).view(count, length, -1)
        return logits if inputs.dim() == 2 else logits[0]

    def evaluate(self, data: Path | str | None = None, limit_bytes: int | None = None) -> Evaluation:
        """Readings on the run's held-out text, or on all of the text at `data`."""
        from topograd.training.evaluation import evaluate

        if self.precision != "float32":
            remedy = "load it with weights float32, or compare both with: topograd eval RUN --weights"
            raise ConfigError(setting="weights", given=self.precision, remedy=remedy)
        text: Text = heldout_text(self.session, None if data is None else Path(data), limit_bytes)
        return evaluate(self.session.stack, self.session.plan, text)


def load(
    model: Path | str,
    checkpoint: str | None = None,
    *,
    runtime: str | None = None,
    weights: str = "float32",
) -> Model:
    """A model: a run's folder, a Hugging Face folder, a GGUF file or "hf:ORG/NAME".

    What is no run is converted once, into a cache. Of a run, the checkpoint is the newest, or the one called
    `checkpoint`.

    It writes with the faster runtime, or with torch, onnx or native; `weights` may be int8 or int4 in the
    latter two, and bfloat16 in the last.
    """
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(setting="model", given=model, allowed="a path, or hf:ORG/NAME")
    check_runtime(runtime, weights)  # before the model is read
    later = runtime in (None, "native")  # what others run is made of the model itself
    return Model(open_session(SOURCES["any"](model), checkpoint, later=later), runtime, weights)


def generate(model: Model | Path | str, prompt: str = "", tokens: int = 200, **settings: object) -> Generated:
    """Continue a text with a model, or with one that `load` takes; settings are those of `Model.generate`."""
    opened = model if isinstance(model, Model) else load(model)
    return opened.generate(prompt, tokens, **settings)  # type: ignore[arg-type]


def check_request(prompt: str | Sequence[int], tokens: int) -> None:
    """Whether a text can be continued so: types and sizes."""
    if not isinstance(tokens, Integral) or isinstance(tokens, bool) or not 0 <= tokens <= MAX_TOKENS:
        allowed = f"a whole number, at least 0 and at most {MAX_TOKENS}"
        raise ConfigError(setting="tokens", given=tokens, allowed=allowed)
    whole = isinstance(prompt, str) or (
        isinstance(prompt, Sequence) and all(isinstance(token, Integral) for token in prompt)
    )
    if not whole:
        raise ConfigError(setting="prompt", given=prompt, allowed="a text, or a list of token numbers")
    if len(prompt) > MAX_PROMPT:
        problem = f"the prompt has {len(prompt)} {'characters' if isinstance(prompt, str) else 'tokens'}"
        remedy = f"give at most {MAX_PROMPT}, the end of the text"
        raise ConfigError(problem, setting="prompt", given=len(prompt), remedy=remedy)


def continue_text(
    strategy: DecodeStrategy,
    sequence: TokenSequence,
    tokens: int,
    stream: TextStream,
    ends: Collection[int] = (),
) -> Iterator[Piece]:
    """For each token the text that can be shown since it came, the exit that it left after, who drafted it.

    A token of `ends` is the last and no part of the text: an imported model says by it that it is done.

    What was held back, the beginning of a character or of a stop string, comes with the token that releases
    it; what is held back at the end, `stream.finish` gives.
    """
    for _, emitted in continue_tokens(strategy, [sequence], tokens):
        end = emitted.token in ends
        yield Piece("" if end else stream.feed(emitted.token), emitted.exit, emitted.drafter)
        if stream.stopped or end:
            break
