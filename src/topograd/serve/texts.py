"""Jobs of a request: prompts to tokens, model ids to depths, parameters to a sampling.

A model id may name a depth, `name:depth`, for clients that cannot send the field `depth`:

    reference                  the model as it is
    reference:prefix-1         depth prefix:1
    reference:speculate        depth speculate
    reference:wand-0.001       depth wand:flip-rate:0.001
    reference:wand-rival-gain-1.5, :path-1,3, :branches-1-3*2+1-2, :speculate-4-0.5, :speculate-lookup

A depth may also follow the colon as it is: reference:prefix:1.
"""

import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from topograd.decode.calibration.store import load as load_calibration
from topograd.decode.calibration.store import open_pool
from topograd.decode.exit_pool import KINDS
from topograd.decode.grammar import CompiledGrammar, Grammar
from topograd.decode.model import Model
from topograd.decode.sampling import Sampling
from topograd.decode.text import TextStream
from topograd.errors import ConfigError, TopogradError
from topograd.runs.session import LoadedTextRun
from topograd.runtime.protocol import Runtime
from topograd.serve.disk_cache import PromptCache
from topograd.serve.jobs import Job, Progress
from topograd.serve.request_schema import RequestError
from topograd.serve.settings import Limits
from topograd.serve.tools import Toolbox
from topograd.specialists.model import SpecialistPool
from topograd.specialists.tokens import Vocabulary

RULES = ("flip-rate", "rival-gain", "sum-of-bounds")
FAMILIES = ("full", "prefix", "path", "branches", *KINDS, "wand", "speculate")
MAX_CHARACTERS = 300
SAFE = re.compile(
    r"full|pool|router|shrinkage|prefix:-?\d{1,9}|(path|branches):[0-9,+*.e-]{1,200}|wand(:[a-z-]{1,20})?(:[0-9.e-]{1,20})?"
    r"|speculate(:(\d{1,9}(:[0-9.e-]{1,20})?|lookup|table|draft)(\+(\d{1,9}(:[0-9.e-]{1,20})?|lookup|table|draft)){0,3})?"
)
"""Depths that a request may name: none of the server's folders."""
OnProgress = Callable[[int], Callable[[Progress], None]]
"""The callback of each choice of a request."""


SLACK = 4
"""How much shorter a normaliser of a tokenizer may make a text."""


@dataclass
class ServedModel:
    """The model that is served, with its limits and names."""

    model: Model
    limits: Limits
    name: str = ""
    specialists: SpecialistPool | None = None
    disk: PromptCache | None = None
    started: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        session = self.model.session
        self.name = self.name or model_name(session.run.folder)
        self.tokenizer = session.tokenizer
        self.context = session.config.model.context
        self.vocab = session.config.model.vocab
        self.fingerprint = f"topograd-{session.weights[:12]}"
        self.stop_ids = self.tokenizer.stop_tokens
        self.depths = known_depths(session, self.model.engine.runtime)
        """What /v1/models lists: a calibration is read here, and not while requests wait."""
        self.max_text = SLACK * self.context * max(map(len, self.tokenizer.pieces))
        """Bytes of a text that may fit into the context; a longer one is not tokenised to find that out."""

    def depth(self, params: Mapping[str, Any]) -> str:
        """The depth of a request, by its model id and its field; they must not disagree."""
        _, named = known_id(params["model"], self.name, [self.name])
        wanted = params.get("depth")
        if wanted is not None and named is not None and wanted != named:
            raise RequestError(
                f"the model id says depth {named} and the field depth says {wanted[:100]}; give one", "depth"
            )
        depth = str(wanted or named or "full")
        if not SAFE.fullmatch(depth):
            raise RequestError(
                f"depth {depth[:100]!r} is unknown; use full, prefix:J, path:1,3, branches:1-4*3+1-2, pool, "
                "router, shrinkage, wand, speculate, or speculate by N, lookup, table or draft",
                "depth",
            )
        return depth

    def piece(self, token: int) -> bytes:
        """The bytes of a token; a head may have more rows than there are tokens."""
        return self.tokenizer.pieces[token] if token < len(self.tokenizer.pieces) else b""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return b"".join(map(self.piece, tokens)).decode("utf-8", "replace")

    def prompts(self, given: str | list[Any], words: Vocabulary | None = None) -> list[list[int]]:
        """The tokens of each prompt of a completion; `words` are of the specialists that continue it."""
        encode = self.encode if words is None else words.encode
        rows = self.vocab if words is None else words.size
        if isinstance(given, str):
            return [encode(given)]
        if all(isinstance(item, int) for item in given):
            return [self.checked(given, rows=rows)]
        return [encode(item) if isinstance(item, str) else self.checked(item, rows=rows) for item in given]

    def vocabulary(self, params: Mapping[str, Any]) -> Vocabulary | None:
        """The tokens of the specialists that a request switches on; None without any."""
        return None if self.specialists is None or not params["specialists"] else self.specialists.vocabulary

    def encode(self, text: str) -> list[int]:
        """A text's tokens, as the model was trained to read them."""
        return self.model.encode(self._bounded(text))

    def encode_bare(self, text: str) -> list[int]:
        """The same without what a tokenizer puts before a prompt."""
        return self.tokenizer.encode(self._bounded(text), "chat")

    def _bounded(self, text: str) -> str:
        if len(text.encode("utf-8", "replace")) > self.max_text:
            raise RequestError(
                f"this model's maximum context length is {self.context} tokens; the text has {len(text)} "
                "characters, which cannot fit: shorten it",
                "prompt",
                code="context_length_exceeded",
            )
        return text

    @property
    def special_tokens(self) -> dict[str, Any]:
        """The texts of the tokens with a role, where it has them, and how many tokens there are."""
        roles = ("bos_token", "eos_token", "pad_token")
        return {"vocab": self.vocab, **{name: self.tokenizer.special_tokens.get(name) for name in roles}}

    def checked(self, tokens: list[int], field: str = "prompt", rows: int | None = None) -> list[int]:
        """Tokens, if the model has them, or the `rows` of it and its specialists."""
        most, rows = max(tokens, default=0), rows or self.vocab
        if most >= rows:
            raise RequestError(f"{field} has token {most}; the model has tokens from 0 to {rows - 1}", field)
        return tokens

    def room(self, prompt: Sequence[int], tokens: int | None) -> int:
        """How many tokens may follow a prompt: as many as are requested, or what is left of the context."""
        if tokens is None and len(prompt) < self.context:
            return self.context - len(prompt)
        if len(prompt) + (tokens or 0) > self.context or (len(prompt) == self.context and tokens is None):
            raise RequestError(
                f"this model's maximum context length is {self.context} tokens; the prompt has {len(prompt)} "
                f"and {tokens or 1} are to be written: shorten one of them",
                "messages" if tokens is None else "max_tokens",
                code="context_length_exceeded",
            )
        return tokens or 0

    def jobs(
        self,
        params: Mapping[str, Any],
        prompts: Sequence[list[int]],
        tokens: int | None,
        on_progress: OnProgress,
        tools: Toolbox | None = None,
        tenant: str = "",
    ) -> list[Job]:
        """The texts of a request: n for each prompt."""
        count = params["n"]
        most = self.limits.choices
        if len(prompts) * count > most:
            raise RequestError(
                f"{len(prompts)} prompts times n = {count} are more texts than {most}; ask for less",
                "n",
            )
        active = self.active(params)
        depth, grammar = self.depth(params), self.grammar(params, tools, tenant)
        stops = [params["stop"]] if isinstance(params["stop"], str) else list(params["stop"])
        seed = secrets.randbelow(2**63) if params["seed"] is None else params["seed"] % 2**63
        deadline = time.perf_counter() + self.limits.seconds
        stop_ids = frozenset(() if params["ignore_eos"] else self.stop_ids).union(params["stop_token_ids"])
        made = []
        for i, prompt in enumerate(prompts):
            room = self.room(prompt, tokens)
            for k in range(count):
                job = Job(
                    prompt=prompt,
                    tokens=room,
                    depth=depth,
                    sampling=self._sampling(params, (seed + k) % 2**63, grammar),
                    stream=TextStream(self.tokenizer, stops, None if tools is None else tools.shown),
                    on_progress=on_progress(i * count + k),
                    specialists=active,
                    stop_ids=stop_ids,
                    deadline=deadline,
                    tenant=tenant,
                )
                made.append(job)
        return made

    def active(self, params: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
        """The specialists of a request with their weights, which are 1 unless they are given."""
        names, weights = params["specialists"], params["weights"]
        known = [] if self.specialists is None else self.specialists.names
        for name in names:
            if name not in known or names.count(name) > 1:
                raise RequestError(
                    f"specialist {name[:100]!r} is unknown or named twice; this server has: "
                    f"{', '.join(known) or 'none'}",
                    "specialists",
                )
        if weights and len(weights) != len(names):
            raise RequestError(
                f"{len(weights)} weights for {len(names)} specialists; give one for each", "weights"
            )
        return tuple(zip(names, map(float, weights or [1.0] * len(names)), strict=True))

    def grammar(
        self, params: Mapping[str, Any], tools: Toolbox | None = None, tenant: str = ""
    ) -> CompiledGrammar | None:
        """What the text must be, by `grammar`, `response_format` or a forced call; where it is new, it takes
        a while."""
        wanted = params.get("response_format") or {"type": "text"}
        forced = tools is not None and bool(tools.forced)
        field = "grammar" if params["grammar"] else "tools" if forced else "response_format"
        if params["grammar"] and (wanted["type"] != "text" or forced):
            raise RequestError("grammar is given beside response_format or a forced call", "grammar")
        try:
            if params["grammar"]:
                ((kind, what),) = params["grammar"].items()
                made: Grammar | None = getattr(Grammar, kind)(what)
            else:
                schema = _schema(wanted)
                if tools is not None:
                    made = tools.grammar(schema)
                else:
                    made = None if schema is None else Grammar.json_schema(schema)
            return None if made is None else self.model.grammars.compile(made, tenant)
        except ConfigError as error:
            raise RequestError(str(error), field) from None

    def _sampling(
        self, params: Mapping[str, Any], seed: int, grammar: CompiledGrammar | None = None
    ) -> Sampling:
        top_k = params["top_k"]
        bias = {int(token): float(value) for token, value in params["logit_bias"].items()}
        words = self.vocabulary(params)
        self.checked(list(bias), "logit_bias", None if words is None else words.size)
        try:
            return Sampling(
                temperature=float(params["temperature"]),
                top_k=None if top_k is None or top_k < 1 else top_k,
                top_p=None if params["top_p"] == 1 else float(params["top_p"]),
                min_p=params["min_p"],
                seed=seed,
                logit_bias=bias,
                presence_penalty=float(params["presence_penalty"]),
                frequency_penalty=float(params["frequency_penalty"]),
                repetition_penalty=float(params["repetition_penalty"]),
                grammar=grammar,
            )
        except TopogradError as error:
            raise RequestError(str(error)) from None


def _schema(wanted: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema of a `response_format`; None of plain text."""
    if wanted["type"] == "json_schema":
        return (wanted.get("json_schema") or {}).get("schema") or {}
    return {"type": "object"} if wanted["type"] == "json_object" else None


def model_name(folder: Path) -> str:
    """The id of a run: its folder's name, without what an id cannot have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-") or "model"


def split_id(model: str) -> tuple[str, str | None]:
    """The name and the depth of a model id; None where it names no depth."""
    if len(model) > MAX_CHARACTERS:
        raise ConfigError(
            f"model has {len(model)} characters", setting="model", allowed=f"at most {MAX_CHARACTERS}"
        )
    name, colon, suffix = model.partition(":")
    return name, depth_of_suffix(suffix) if colon else None


def known_id(model: str | None, default: str, known: Collection[str]) -> tuple[str, str | None]:
    """The same of a request's model id; RequestError where no such model is known."""
    try:
        name, depth = (default, None) if model is None else split_id(model)
    except ConfigError as error:
        raise RequestError(str(error), "model", 404, "model_not_found") from None
    if name not in known:
        raise RequestError(
            f"the model {name[:100]!r} does not exist here; /v1/models says which do: "
            f"{', '.join(map(repr, known))}",
            "model",
            404,
            "model_not_found",
        )
    return name, depth


def depth_of_suffix(suffix: str) -> str:
    """The depth that a suffix names.

    >>> depth_of_suffix("prefix-1"), depth_of_suffix("wand-0.001"), depth_of_suffix("speculate-4-0.5")
    ('prefix:1', 'wand:flip-rate:0.001', 'speculate:4:0.5')
    """
    kind, rest = re.fullmatch(r"([a-z]*)[-:]?(.*)", suffix, re.DOTALL).groups()  # type: ignore[union-attr]
    if kind not in FAMILIES:
        raise ConfigError(
            f"the depth {suffix!r} in the model id is unknown",
            setting="model",
            given=suffix,
            remedy=f"use one of {', '.join(FAMILIES)}, such as prefix-1",
        )
    if not rest:
        return str(kind)
    if kind == "wand":
        rule = next(
            (rule for rule in RULES if rest == rule or rest.startswith((f"{rule}-", f"{rule}:"))), None
        )
        number = rest if rule is None else rest[len(rule) + 1 :]
        return f"wand:{rule or 'flip-rate'}" + (f":{number}" if number else "")
    if kind == "speculate" and re.fullmatch(r"\d+-[0-9.e]+", rest):
        rest = rest.replace("-", ":", 1)
    return f"{kind}:{rest}"


def known_depths(session: LoadedTextRun, runtime: Runtime) -> list[str]:
    """The depths that /v1/models lists, as suffixes of a model id."""
    exits = len(session.plan.predicting())
    depths = ["full", *(f"prefix-{j}" for j in range(1, exits)), "speculate", "speculate-lookup"]
    try:
        load_calibration(session, runtime)
        depths += ["wand", "wand-0.001", "wand-0.01"]
        open_pool(session, "pool")
        return [*depths, "pool", "router"]
    except TopogradError:
        return depths
