"""Grammars at every depth, against a language that is written out and masked token by token, in float64."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor

from decoding import tokens_of, written
from hf_files import byte_level, fallback, metaspace_decoder
from raising import refused
from tests.oracles.decoding import moved, next_logits
from tests.oracles.processing import changed, pooled_predictor, processed_greedy, stage_predictor
from topograd.data.bpe import BPETokenizer
from topograd.data.hf_tokenizer import HFTokenizer
from topograd.data.tokenizer import Tokenizer
from topograd.decode.draft_model import ModelDrafter
from topograd.decode.drafters import CompositeDrafter, DraftRule, PrefixDrafter
from topograd.decode.engine import Emitted, Engine
from topograd.decode.grammar import MAX_CHARACTERS, MAX_CHOICES, MAX_REFERENCES, Grammar, GrammarCompiler
from topograd.decode.lookup import TextLookup
from topograd.decode.model import Model, load
from topograd.decode.sampling import Sampling, distribution
from topograd.decode.speculation import Drafter, Speculate
from topograd.decode.strategies import FixedDepth, PathEnsemble, generate_batch
from topograd.decode.wand import Wand
from topograd.errors import ConfigError
from topograd.nn.gpt import GPT
from topograd.pretrained import REFERENCE

CONTEXT, LAST, TOKENS, END = 24, 3, 30, 49
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVW"
LANGUAGE = [
    "abcabcabd",
    "abcabcabdabcx",
    "abW",
    "Wqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq",
    "WqqA",
    "hHhHhHhH",
    "jKKKL",
]
LANGUAGE += [f"k{a}{b}{a}{b}" for a in "abcMN" for b in "deWQq"] + ["".join(LETTERS[7:40])]


class Letters(BPETokenizer):
    """A token for each of some letters, and one that ends a text."""

    def __init__(self, letters: str) -> None:
        super().__init__(())
        self.pieces = (*(letter.encode() for letter in letters), b"")
        self.stop_tokens, self.separator = frozenset([len(letters)]), len(letters)
        self.letters = letters

    def encode(self, text: str, kind: str = "document") -> list[int]:
        return [self.letters.index(letter) for letter in text]


def allowed_by(language: Collection[str], letters: str) -> Callable[[Sequence[int]], set[int]]:
    """What may follow a text of tokens: by looking at every text of the language."""

    def allowed(text: Sequence[int]) -> set[int]:
        if len(letters) in text:
            return set()
        begun = "".join(letters[token] for token in text)
        after = {letters.index(w[len(begun)]) for w in language if w.startswith(begun) and w != begun}
        return after | {len(letters)} if begun in language and after else after

    return allowed


allowed = allowed_by(LANGUAGE, LETTERS)
compiler = GrammarCompiler(Letters(LETTERS))
SAMPLINGS = {
    "grammar": Sampling(grammar=compiler.compile(Grammar.choice(LANGUAGE))),
    "grammar and penalties": Sampling(
        grammar=compiler.compile(Grammar.choice(LANGUAGE)), frequency_penalty=0.3, logit_bias={END: -1.0}
    ),
}
samplings = pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)


def test_masks_are_those_of_the_language() -> None:
    for word in LANGUAGE:
        tokens = compiler.tokenizer.encode(word)
        matcher = compiler.compile(Grammar.choice(LANGUAGE)).start()
        for place in range(len(tokens)):
            ahead = tokens[place : place + 3]
            masks = matcher.masks(ahead, len(ahead) + 1, 50)
            for i, mask in enumerate(masks):
                expected = allowed(tokens[: place + i])
                assert set(mask.nonzero().flatten().tolist()) == (expected or set(range(50)))
            assert torch.equal(matcher.masks(ahead, 1, 50)[0], masks[-1])
            assert matcher.fits([], [*ahead, 3]) == len(ahead) + (3 in allowed(tokens[: place + 3]))
            assert not matcher.stopped
            assert matcher.ends(tokens[place:]) is not allowed(tokens)
            matcher.take([tokens[place]])
        assert matcher.stopped is (not allowed(tokens))


def test_a_head_may_have_more_rows_than_the_tokenizer_has_tokens() -> None:
    mask = compiler.compile(Grammar.choice(LANGUAGE)).start().masks([], 1, 60)[0]
    assert set(mask.nonzero().flatten().tolist()) == allowed([])


@samplings
def test_full_and_prefix_depths(
    mild: GPT, mild_engine: Engine, prompts: list[list[int]], sampling: Sampling
) -> None:
    for exit_ in (0, LAST):
        predict = stage_predictor(mild, mild_engine.plan, exit_)
        expected = [
            processed_greedy(predict, prompt, TOKENS, CONTEXT, sampling, allowed) for prompt in prompts
        ]
        assert tokens_of(FixedDepth(mild_engine, exit_), prompts, TOKENS, sampling) == expected
        assert len({len(text) for text in expected}) > 1, "they end where the grammar does"


@samplings
@pytest.mark.parametrize("name", ["stage", "lookup", "model", "both"])
def test_speculation_writes_what_full_depth_writes(
    mild: GPT,
    mild_engine: Engine,
    make_gpt: Callable[..., GPT],
    prompts: list[list[int]],
    sampling: Sampling,
    name: str,
) -> None:
    small = Engine(make_gpt(later=0.1), "4", CONTEXT)
    made: dict[str, Callable[[], list[Drafter]]] = {
        "stage": lambda: [PrefixDrafter(mild_engine, DraftRule(0.0, 5))],
        "lookup": lambda: [TextLookup()],
        "model": lambda: [ModelDrafter(mild_engine, small, rule=DraftRule(0, 4))],
        "both": lambda: [TextLookup(), PrefixDrafter(mild_engine, DraftRule(0.0, 3), 1)],
    }
    begins = [*prompts, [0, 1, 2] * 3, compiler.tokenizer.encode("jKKKLjKKKL"), [7, 33] * 4]
    predict = stage_predictor(mild, mild_engine.plan, LAST)
    expected = [processed_greedy(predict, begin, TOKENS, CONTEXT, sampling, allowed) for begin in begins]
    strategy = Speculate(mild_engine, made[name]())
    together, tally = written(strategy, begins, TOKENS, sampling)
    assert [[e.token for e in row] for row in together] == expected
    assert 0 < tally.accepted <= tally.drafted
    for begin, text in zip(begins, expected, strict=True):
        assert tokens_of(strategy, [begin], TOKENS, sampling) == [text]


@torch.inference_mode()
def test_drafts_that_the_grammar_forbids_are_not_proposed(mild_engine: Engine) -> None:
    """In the prompt, "abc" is followed by "abd" and then by what no text of the language has."""
    prompt = compiler.tokenizer.encode("abcabdZ".replace("Z", "W") * 2)
    for drafters in ([TextLookup()], [PrefixDrafter(mild_engine, DraftRule(0.0, 6))]):
        batch = mild_engine.start([prompt, prompt, [1]], SAMPLINGS["grammar"])
        drafter = CompositeDrafter(mild_engine, drafters)
        for sequence in batch:
            sequence.start_writing()
        batch[1].take(compiler.tokenizer.encode("abc"))
        batch[1].tokens += compiler.tokenizer.encode("abc")
        for draft, before in zip(drafter.draft(batch), ["", "abc", ""], strict=True):
            for place, token in enumerate(draft.tokens):
                assert token in allowed([*compiler.tokenizer.encode(before), *draft.tokens[:place]])
        if isinstance(drafters[0], TextLookup):
            assert draft.tokens == []


@samplings
def test_ensembles(mild: GPT, mild_engine: Engine, sampling: Sampling) -> None:
    strategy = PathEnsemble(mild_engine, {(0,): 1.0, (0, 1): 3.0})
    predict = pooled_predictor(mild, mild_engine.plan, {0: 0.25, 1: 0.75})
    for prompt in ([3, 1, 4], [7], [20, 9]):
        expected = processed_greedy(predict, prompt, TOKENS, CONTEXT, sampling, allowed)
        assert tokens_of(strategy, [prompt], TOKENS, sampling) == [expected]


@samplings
def test_wand_by_the_margins_of_what_is_allowed(mild: GPT, mild_engine: Engine, sampling: Sampling) -> None:
    thresholds = (0.5, 0.4, 0.3)
    exits = set()
    for prompt in ([3, 1, 4], [7], [20, 9], [0, 1]):
        window, text, expected = list(prompt), list[int](), list[Emitted]()
        while len(text) < TOKENS and allowed(text):
            for exit_, tau in enumerate([*thresholds, -math.inf]):
                logits = next_logits(mild, mild_engine.plan, window, exit_).tolist()
                z = changed(logits, prompt, text, sampling, allowed)
                first, second = sorted(z, reverse=True)[:2]
                if first - second > tau:
                    break
            text.append(z.index(first))
            expected.append(Emitted(text[-1], exit_))
            window = moved(window, text[-1], CONTEXT)
        strategy = Wand(mild_engine, thresholds, (0.05,) * 3)
        assert generate_batch(strategy, [prompt], TOKENS, sampling)[0] == expected
        exits |= {emitted.exit for emitted in expected}
    assert len(exits) > 1


ROWS, FARTHEST = 1500, 0.1
"""As in test_speculation.py."""


@pytest.mark.parametrize("drafter", ["stage", "lookup"])
def test_sampled_text_has_the_distribution_of_token_by_token(
    make_gpt: Callable[..., GPT], make_engine: Callable[..., Engine], drafter: str
) -> None:
    model, prompt, language = make_gpt(layers=2, width=8, heads=1, vocab=5, context=6), [2, 0, 2], []
    language = ["aa", "ab", "ba", "ca", "cb", "cd", "c"]
    grammar = GrammarCompiler(Letters("abcd")).compile(Grammar.choice(language))
    engine, sampling = (
        make_engine(model, "1,1", context=6),
        Sampling(temperature=1.0, seed=1, grammar=grammar),
    )
    predict, may = stage_predictor(model, engine.plan, 1), allowed_by(language, "abcd")

    def exact(text: list[int]) -> Tensor:
        z = changed(predict([*prompt, *text]).tolist(), prompt, text, sampling, may)
        return distribution(torch.tensor(z, dtype=torch.float64), sampling)

    pairs = torch.zeros(5, 5, dtype=torch.float64)
    for token in (0, 1, 2):
        pairs[token] = exact([])[token] * exact([token])
    drafters: Drafter = PrefixDrafter(engine, DraftRule(0.0, 3)) if drafter == "stage" else TextLookup()
    texts, tally = written(Speculate(engine, drafters), [prompt] * ROWS, 4, sampling)
    found = torch.zeros(5, 5, dtype=torch.float64)
    for a, b in texts:
        found[a.token, b.token] += 1 / ROWS
    assert (found - pairs).abs().sum() / 2 < FARTHEST
    assert 0 < tally.accepted < tally.drafted


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "n", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model() -> Model:
    return load(REFERENCE, runtime="torch")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_of_every_depth_fits_its_schema(model: Model, temperature: float) -> None:
    texts = {}
    for depth in ("full", "prefix:1", "wand", "speculate", "speculate:4", "speculate:lookup+2", "path:1,3"):
        made = model.generate(
            "x = ", 96, depth=depth, temperature=temperature, seed=3, grammar=Grammar.json_schema(SCHEMA)
        )
        jsonschema.validate(json.loads(made), SCHEMA)
        texts[depth] = str(made)
    if not temperature:
        assert texts["full"] == texts["speculate"] == texts["speculate:4"] == texts["speculate:lookup+2"]


def test_what_a_text_may_be(model: Model) -> None:
    assert model.generate("x", 64, grammar=Grammar.choice(["yes"])) == "yes"
    odd = "a.*+?[]{}()|\\^$ \"'\n\té—😀#&~-<>/"
    assert model.generate("x", 64, grammar=Grammar.choice([odd])) == odd
    assert set(model.generate("x", 20, grammar=Grammar.regex("[ab]{5}"))) <= {"a", "b"}
    listed = model.generate(
        "x", 64, grammar=Grammar.lark('start: "<" WORD ("," WORD)? ">"\nWORD: /[a-z]{1,4}/')
    )
    assert listed[0] + listed[-1] == "<>"
    assert isinstance(json.loads(model.generate("{}", 3, grammar=Grammar.json_schema({"const": {}}))), dict)
    started = model.generate("x", 12, grammar=Grammar.json_object())
    assert started.startswith("{")


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": lambda: BPETokenizer(()),
    "byte level": lambda: HFTokenizer(byte_level().to_str(), {"eos_token": "</s>"}),
    "fallback": lambda: HFTokenizer(fallback("▁").to_str(), {"eos_token": "</s>"}),
    "metaspace": lambda: HFTokenizer(metaspace_decoder().to_str(), {"eos_token": "</s>"}),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_tokenizer_spells_json(kind: str) -> None:
    """Any of the allowed tokens, each time, until the text ends: its bytes are JSON of the schema."""
    tokenizer = TOKENIZERS[kind]()
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        matcher, text = GrammarCompiler(tokenizer).compile(Grammar.json_schema(SCHEMA)).start(), list[int]()
        while not matcher.stopped:
            (mask,) = matcher.masks([], 1, tokenizer.vocab)
            assert mask.any()
            text.append(int(torch.multinomial(mask.double(), 1, generator=generator)))
            matcher.take(text[-1:])
        spelled = b"".join(tokenizer.pieces[token] for token in text)
        jsonschema.validate(json.loads(spelled.decode("utf-8", "replace")), SCHEMA)


HOSTILE: dict[str, Callable[[], Grammar]] = {
    "long": lambda: Grammar.regex("a" * (MAX_CHARACTERS + 1)),
    "nested schema": lambda: Grammar.json_schema('{"items":' * 2000 + "{}" + "}" * 2000),
    "nested beyond json": lambda: Grammar.json_schema('{"items":' * 200_000),
    "chain of references": lambda: Grammar.json_schema(
        {"$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(MAX_REFERENCES + 1)}}
    ),
    "chain of rules": lambda: Grammar.lark(
        "\n".join([f"r{i}: r{i + 1}" for i in range(1000)] + ['r1000: "a"', "start: r0"])
    ),
    "product of alternatives": lambda: Grammar.json_schema(
        {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(12)]} for i in range(6)]}
    ),
    "doubling": lambda: Grammar.lark(
        "\n".join([f"R{i}: R{i + 1} R{i + 1}" for i in range(99)] + ['R99: "a"', "start: R0"])
    ),
    "remote": lambda: Grammar.json_schema({"$ref": "http://localhost:1/schema"}),
    "unknown keyword": lambda: Grammar.json_schema({"type": "frob"}),
    "no json": lambda: Grammar.json_schema("{"),
    "no object": lambda: Grammar.json_schema("[]"),
    "no number": lambda: Grammar.json_schema({"const": object()}),
    "no regex": lambda: Grammar.regex("(a"),
    "no rule": lambda: Grammar.lark("start: other"),
    "no choice": lambda: Grammar.choice([]),
    "empty choice": lambda: Grammar.choice(["a", ""]),
    "many choices": lambda: Grammar.choice(["a"] * (MAX_CHOICES + 1)),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_no_grammar_or_too_large_is_refused_in_one_line(case: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GrammarCompiler(BPETokenizer(())).compile(HOSTILE[case]())
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("grammar", [Grammar.lark('start: "a" start'), Grammar.json_schema({"$ref": "#"})])
def test_a_grammar_that_never_ends_ends_its_text(model: Model, grammar: Grammar) -> None:
    with refused(ConfigError, setting="grammar"):
        model.generate("x", 64, grammar=grammar)


@pytest.mark.parametrize("references", [MAX_REFERENCES - 2])
def test_the_longest_chains_that_are_taken_are_compiled(references: int) -> None:
    rules = [f"r{i}: r{i + 1}" for i in range(references)] + [f'r{references}: "a"', "start: r0"]
    (mask,) = (
        GrammarCompiler(BPETokenizer(())).compile(Grammar.lark("\n".join(rules))).start().masks([], 1, 257)
    )
    assert mask.nonzero().flatten().tolist() == [ord("a")]
    schema: dict[str, Any] = {"$ref": "#/$defs/a0", "$defs": {f"a{references}": {"type": "null"}}}
    schema["$defs"] |= {
        f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(references)
    }
    GrammarCompiler(BPETokenizer(())).compile(Grammar.json_schema(schema))


def test_compiled_grammars_are_kept_and_texts_of_one_are_apart() -> None:
    grammar = compiler.compile(Grammar.choice(["ab", "cd"]))
    assert compiler.compile(Grammar.choice(["ab", "cd"])) is grammar
    first, second = grammar.start(), grammar.start()
    first.take([0])
    assert first.masks([], 1, 50).nonzero()[:, 1].tolist() == [1]
    assert second.masks([], 1, 50).nonzero()[:, 1].tolist() == [0, 2]


def test_without_llguidance_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with refused(ConfigError, setting="grammar") as caught:
        GrammarCompiler(BPETokenizer(())).compile(Grammar.json_object())
    assert "topograd[serve]" in str(caught.value)
