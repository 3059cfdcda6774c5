"""Tuning of drafters on one host: recorded guesses, replayed rounds, the drafters that pay most together.

At every place of some texts, each drafter's guess and whether full depth would accept it are recorded
(`record`), rounds are replayed with measured costs (`replay`), and the drafters with the largest speedup over
full depth are selected, or none (`select_drafters`).

    greedy drafts     on the model's own greedy text
    sampled drafts    on people's text, which sampled text is more like; a computed guess is accepted with
                      probability Σ min(p, q), a looked up one where it is the text's own token

Cost: one pass over the texts at full depth, a search of each place, a second of timing for each size. Limits:
behind a wrong guess a round is over, so replays of greedy text are exact but for the text's end; the best of
a few selections, on the text that chose it, is optimistic.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from topograd.data.windows import Text
from topograd.decode.calibration.measure import PositionCosts, measure_draft, measure_positions
from topograd.decode.calibration.policy import MAX_STEPS, Acceptance, ExpectedGainPolicy
from topograd.decode.draft_head import pruned_size
from topograd.decode.draft_stage import DraftStageDrafter
from topograd.decode.drafters import AutoregressiveDrafter, LookupDrafter, PrefixDrafter
from topograd.decode.engine import Engine
from topograd.decode.lookup import TableLookup, TextLookup
from topograd.decode.retrofitted import Retrofitted
from topograd.decode.strategies import FixedDepth, generate_batch
from topograd.nn.draft_stage import rank_tokens

RECORDED_STEPS = 8
"""Steps for which a draft stage is unrolled on known text."""
WORTHWHILE = 1.02
"""Drafters must beat full depth by more than this, or drafting is turned off."""
FIXED_POINT = 4
OWN_TEXTS, OWN_TOKENS = 24, 64
"""Texts that the model writes to be tuned on. Longer ones would mostly repeat themselves."""
OWN_PROMPT = 128
"""Tokens of the text before them, at most."""


@dataclass(frozen=True)
class DrafterSelection:
    """Drafters that pay together, and the policy that says when."""

    drafters: tuple[str, ...]
    policy: ExpectedGainPolicy
    predicted: float
    """Speedup over full depth in the replay."""
    vocabulary: tuple[int, ...] | None = None
    """The tokens that a prefix among them guesses; None if they are all of them."""


@dataclass(frozen=True)
class Tuning:
    """The drafters that pay on this host; None where none does."""

    greedy: DrafterSelection | None
    sampled: DrafterSelection | None
    costs: PositionCosts


Judged = tuple[bool, float]
"""Whether full depth accepts a guess, and its score."""


@dataclass(frozen=True)
class RecordedText:
    """Texts, what each drafter guesses at every place of them, and whether it is right."""

    lengths: Sequence[int]
    start: int
    """Tokens of each that are given, and not drafted."""
    looked_up: Mapping[str, list[list[list[Judged]]]]
    """By drafter, text and place (tokens known): the guesses behind them."""
    computed: Mapping[str, list[list[list[Judged]]]]
    """By drafter, text and place: its guess for the token there, in each step of a draft."""
    most: Mapping[str, int] = field(default_factory=dict)
    """By computed drafter, its guesses in a draft at most."""


@dataclass(frozen=True)
class Replay:
    """What replayed rounds reached."""

    speedup: float
    """Over full depth."""
    acceptance: float
    """Accepted over drafted; 0 where nothing was drafted."""
    mean_draft: float
    """Drafted tokens in a round."""


@torch.inference_mode()
def record(
    engine: Engine,
    texts: Sequence[Sequence[int]],
    start: int,
    drafters: Sequence[LookupDrafter | AutoregressiveDrafter],
    sampled: bool = False,
) -> RecordedText:
    """What lookups, prefixes and a draft stage guess at every place of texts; one pass at full depth."""
    looked_up: dict[str, list[Any]] = {}
    computed: dict[str, list[Any]] = {}
    generator = torch.Generator().manual_seed(0)
    for tokens in texts:
        batch, counts, full = engine.start([tokens]), [len(tokens)], engine.exits[-1]
        engine.run(batch, full)
        p = engine.logits(batch, full, counts)
        chance = torch.rand(len(tokens), generator=generator) if sampled else None
        for drafter in drafters:
            if isinstance(drafter, PrefixDrafter):
                engine.run(batch, drafter.stage)
                each = [drafter.head.logits(batch, counts)]
            elif isinstance(drafter, DraftStageDrafter):
                exits = [batch[0].cache.hidden(batch, stage, counts) for stage in engine.exits]
                states = drafter.stage.pick(torch.stack(exits, dim=1))[None]
                inputs = torch.tensor([tokens], device=states.device)
                steps = min(RECORDED_STEPS, drafter.most)
                each = [drafter.stage.readout(g)[0] for g in drafter.stage.unroll(inputs, states, steps)]
            else:
                assert not isinstance(drafter, AutoregressiveDrafter), drafter.name
                looked_up.setdefault(drafter.name, []).append(_looked_up(drafter, tokens, start))
                continue
            judged = [(_accepted(q, p, drafter.vocabulary, chance), drafter.scores(q).tolist()) for q in each]
            # a guess behind position t is for the token at t + 1
            places = [[(right[t], score[t]) for right, score in judged] for t in range(len(tokens) - 1)]
            computed.setdefault(drafter.name, []).append([[], *places])
    most = {d.name: d.most for d in drafters if isinstance(d, AutoregressiveDrafter)}
    return RecordedText([len(tokens) for tokens in texts], start, looked_up, computed, most)


def _accepted(q: Tensor, p: Tensor, vocabulary: Tensor | None, chance: Tensor | None) -> list[bool]:
    """Whether full depth with logits p accepts guesses with logits q: its own token, or min(1, p / q)."""
    if vocabulary is not None:
        q = torch.full_like(p, -math.inf).index_copy_(1, vocabulary, q)
    if chance is None:
        right = q.argmax(-1) == p.argmax(-1)
    else:
        right = torch.minimum(q.softmax(-1), p.softmax(-1)).sum(-1).cpu() > chance
    accepted: list[bool] = right.tolist()
    return accepted


def _looked_up(drafter: LookupDrafter, tokens: Sequence[int], start: int) -> list[list[Judged]]:
    text: Any = SimpleNamespace(tokens=[], drafter_state={})  # a sequence without a cache
    places: list[list[Judged]] = [[] for _ in range(start)]
    for place in range(start, len(tokens)):
        text.tokens = list(tokens[:place])
        drafter.begin(text)
        guesses = drafter.find(text, [], drafter.rule.longest)[: len(tokens) - place]
        places.append([(token == tokens[place + i], score) for i, (token, score) in enumerate(guesses)])
    return places


def acceptances(text: RecordedText) -> dict[str, Acceptance]:
    """How often each drafter's guesses are accepted, behind accepted ones, by score."""
    judged: dict[str, list[Judged]] = {}
    for name, texts in text.looked_up.items():
        for guesses in itertools.chain.from_iterable(texts):
            judged.setdefault(name, []).extend(_until_wrong(guesses))
    for name, texts in text.computed.items():
        for places in texts:
            for place in range(text.start, len(places)):
                chain = (places[place + i][i] for i in range(min(len(places[place]), len(places) - place)))
                judged.setdefault(name, []).extend(_until_wrong(chain))
    return {
        name: Acceptance.of([score for _, score in each], [right for right, _ in each])
        for name, each in judged.items()
    }


def _until_wrong(guesses: Any) -> list[Judged]:
    """Guesses up to and with the first that is not accepted."""
    judged = []
    for guess in guesses:
        judged.append(guess)
        if not guess[0]:
            break
    return judged


def replay(text: RecordedText, policy: ExpectedGainPolicy, names: Sequence[str]) -> Replay:
    """Rounds of a speculation with these drafters."""
    tokens = rounds = drafted = 0
    seconds = 0.0
    for index, length in enumerate(text.lengths):
        place = text.start
        while place < length:
            guesses, accepted, made, kept = _round(text, policy, names, index, place)
            costs = policy.costs
            seconds += costs.seconds(guesses + 1) + made * costs.draft + kept * costs.keep
            seconds += costs.start if made else 0.0
            place += accepted + 1
            tokens, drafted, rounds = tokens + accepted + 1, drafted + guesses, rounds + 1
    if not rounds:
        return Replay(1.0, 0.0, 0.0)
    acceptance = (tokens - rounds) / drafted if drafted else 0.0
    return Replay(tokens * policy.costs.full / seconds, acceptance, drafted / rounds)


def _round(
    text: RecordedText, policy: ExpectedGainPolicy, names: Sequence[str], index: int, start: int
) -> tuple[int, int, int, int]:
    """Drafted and accepted guesses of a round with `start` tokens known; those computed, and kept of them."""
    drafted = accepted = made = kept = 0
    chance, right = 1.0, True
    computing = next((name for name in names if name in text.computed), None)
    while start + drafted < text.lengths[index]:
        place = start + drafted
        guesses = {name: text.looked_up[name][index][place] for name in names if name in text.looked_up}
        computing = computing if drafted < policy.steps else None
        name, count = policy.choose(drafted, chance, guesses, computing, 1)
        if name is None:
            break
        if name != computing:
            for good, _ in guesses[name][:count]:
                right = right and good
                drafted, accepted = drafted + 1, accepted + right
            break
        made += 1
        steps = text.computed[name][index][place]
        good, score = steps[min(drafted, len(steps) - 1)]
        longer = policy.accept(name, score, drafted, chance, 1, True)
        if longer is None:
            computing = None
            continue
        chance, right, kept = longer, right and good, kept + 1
        drafted, accepted = drafted + 1, accepted + right
    return drafted, accepted, made, kept


def tune_speedup(
    text: RecordedText, policy: ExpectedGainPolicy, names: Sequence[str]
) -> tuple[ExpectedGainPolicy, float]:
    """The policy whose price of time is the speedup that it reaches, and that speedup."""
    best, most = policy, replay(text, policy, names).speedup
    for _ in range(FIXED_POINT):
        policy = replace(policy, speedup=max(most, 1.0), _cache={})
        reached = replay(text, policy, names).speedup
        if reached <= most:
            break
        best, most = policy, reached
    return best, most


def select_drafters(
    text: RecordedText, costs: PositionCosts, steps: Mapping[str, Mapping[str, float]]
) -> DrafterSelection | None:
    """The drafters that pay most together, or None; `steps` are the seconds of computed ones, as in costs.

    The computed drafter that pays most alone is tried with every combination of lookups.
    """
    rates = acceptances(text)

    def tried(names: Sequence[str]) -> DrafterSelection:
        computed = next((name for name in names if name in steps), None)
        seconds = costs if computed is None else costs.computed(**steps[computed])
        most = MAX_STEPS if computed is None else min(MAX_STEPS, text.most.get(computed, MAX_STEPS))
        own = {name: rates[name] for name in names}
        policy = ExpectedGainPolicy(own, seconds, 1.0, most)
        return DrafterSelection(tuple(names), *tune_speedup(text, policy, names))

    alone = [tried([name]) for name in text.computed]
    best_alone = max(alone, key=lambda selection: selection.predicted, default=None)
    lookups = list(text.looked_up)
    selections = [best_alone] if best_alone else []
    for count in range(1, len(lookups) + 1):
        for some in itertools.combinations(lookups, count):
            selections.append(tried(some))
            if best_alone:
                selections.append(tried([*some, *best_alone.drafters]))
    best = max(selections, key=lambda selection: selection.predicted, default=None)
    return best if best is not None and best.predicted > WORTHWHILE else None


def drafter_of(
    name: str, engine: Engine, retrofitted: Callable[[], Retrofitted], vocabulary: Tensor | None = None
) -> LookupDrafter | AutoregressiveDrafter:
    """The drafter of a run that a selection names: lookup, table, draft, or a prefix as "stage 2".

    A prefix that guesses the tokens of a `vocabulary` is named "stage 2 (512)", by how many they are.
    """
    if name == "lookup":
        return TextLookup()
    if name == "table":
        return TableLookup(retrofitted().table)
    if name == "draft":
        return DraftStageDrafter(engine, retrofitted().stage)
    number, _, pruned = name.removeprefix("stage ").partition(" ")
    return PrefixDrafter(engine, exit_=int(number) - 1, vocabulary=vocabulary if pruned else None)


def tune(engine: Engine, text: Text, retrofitted: Retrofitted | None = None) -> Tuning:
    """The drafters that pay on this host: lookup, every prefix, and what a retrofit gave the run.

    A prefix is tried with all tokens and with the most frequent ones, of the text or of the retrofit.
    """
    windows = text.inputs[::2]  # the others are left to measure on
    if retrofitted is None:
        frequent = rank_tokens(windows, engine.vocab, pruned_size(engine.vocab))
    else:
        frequent = retrofitted.stage.vocabulary
    prefixes = [f"stage {exit_ + 1}" for exit_ in range(engine.last)]
    names = ["lookup", *prefixes, *(f"{name} ({len(frequent)})" for name in prefixes)]
    names += ["table", "draft"] if retrofitted is not None else []

    def given() -> Retrofitted:
        assert retrofitted is not None
        return retrofitted

    drafters = [drafter_of(name, engine, given, frequent) for name in names]
    costs = measure_positions(engine)
    steps = {d.name: measure_draft(engine, d) for d in drafters if isinstance(d, AutoregressiveDrafter)}
    start = max(min(engine.context // 4, OWN_PROMPT), 1)
    count = min(len(windows), OWN_TEXTS)
    people = [windows[i * len(windows) // count][: start + OWN_TOKENS].tolist() for i in range(count)]
    own = own_text(engine, [row[:start] for row in people])
    greedy = select_drafters(record(engine, own, start, drafters), costs, steps)
    sampled = select_drafters(record(engine, people, start, drafters, sampled=True), costs, steps)
    both: list[DrafterSelection | None] = []
    for selection in (greedy, sampled):
        if selection is not None and any(name.endswith(")") for name in selection.drafters):  # pruned
            selection = replace(selection, vocabulary=tuple(frequent.tolist()))
        both.append(selection)
    return Tuning(both[0], both[1], costs)


def own_text(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The model's own greedy text, behind prompts of one length and with them."""
    count = min(OWN_TOKENS, engine.context - len(prompts[0]))
    written = generate_batch(FixedDepth(engine), prompts, count)
    return [[*prompt, *(e.token for e in row)] for prompt, row in zip(prompts, written, strict=True)]
