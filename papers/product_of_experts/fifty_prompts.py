"""Fifty prompts in eight categories, scored by rule: PASS, PARTIAL, FAIL or DEGENERATE.

After "Product of Experts" §6.4, whose prompts and hand scores are not published: these are ours, and so is
the rule. A text is DEGENERATE if it is empty or if more than half of its 4-grams of words have come before;
else PASS if it has one of the words that a right answer has, PARTIAL if it has one of those of a near miss,
FAIL if none. A rule cannot read: it counts a right word in a wrong sentence. It is the same for every model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

SCORES = ("PASS", "PARTIAL", "FAIL", "DEGENERATE")
PROMPTS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "greeting": (
        ("Hello!", r"hello|hi\b|welcome|help", r"you"),
        ("Good morning, how are you?", r"good|fine|well|great|thank", r"morning"),
        ("Nice to meet you.", r"nice|meet|pleas|glad", r"you"),
        ("Thank you for your help.", r"welcome|glad|happy|pleas", r"help"),
        ("Goodbye!", r"bye|see you|take care|farewell|day", r"you"),
    ),
    "factual": (
        ("What is the capital of France?", r"paris", r"france"),
        ("What is the capital of Japan?", r"tokyo", r"japan"),
        ("Who wrote Romeo and Juliet?", r"shakespeare", r"play|author"),
        ("What is the largest planet in the solar system?", r"jupiter", r"saturn|planet"),
        ("Who was the first president of the United States?", r"washington", r"president"),
        ("What is the chemical formula of water?", r"h2o|h₂o", r"hydrogen|oxygen"),
        ("How many continents are there?", r"seven|7", r"continent"),
        ("Which ocean is the largest?", r"pacific", r"atlantic|ocean"),
        ("In which country are the pyramids of Giza?", r"egypt", r"africa"),
        ("What language is spoken in Brazil?", r"portuguese", r"spanish|brazil"),
    ),
    "math": (
        ("What is 2 + 2?", r"\b4\b|four", r"\d"),
        ("What is 10 - 3?", r"\b7\b|seven", r"\d"),
        ("What is 6 times 7?", r"\b42\b|forty", r"\d"),
        ("What is half of 20?", r"\b10\b|ten\b", r"\d"),
        ("What comes after 99?", r"\b100\b|hundred", r"\d"),
    ),
    "code": (
        ("Write a Python function that adds two numbers.", r"def .*\n?.*return|a \+ b|x \+ y", r"def|python"),
        ("Write a Python function that returns the square of x.", r"\*\* ?2|x ?\* ?x", r"def|python"),
        ("Write a for loop in Python that prints 0 to 9.", r"range\(", r"for|print"),
        ("How do you open a file in Python?", r"open\(", r"file"),
        ("Write a Python list with three numbers.", r"\[ ?\d", r"list"),
        ("How do you define a class in Python?", r"class ", r"def|object"),
        ("How do you import the math module?", r"import math", r"import"),
        ("Write a Python dictionary.", r"\{", r"dict|key"),
        ("How do you find the length of a list in Python?", r"len\(", r"length"),
        ("Write a comment in Python.", r"#", r"comment"),
    ),
    "creative": (
        ("Write a short poem about the sea.", r"sea|wave|ocean|shore", r"\n"),
        ("Tell me a story about a dragon.", r"dragon", r"once"),
        ("Describe a sunset.", r"sun|sky|orange|red|gold", r"light"),
        ("Invent a name for a cat.", r"[A-Z][a-z]{2,}", r"cat"),
        ("Write a sentence about winter.", r"winter|snow|cold", r"season"),
    ),
    "explanation": (
        ("Why is the sky blue?", r"scatter|light|atmosphere", r"blue"),
        ("What is photosynthesis?", r"plant|sunlight|oxygen|carbon", r"process"),
        ("How does a magnet work?", r"field|pole|electron|iron", r"attract"),
        ("What is DNA?", r"genetic|gene|molecule|deoxy", r"cell"),
        ("Why do we sleep?", r"rest|brain|body|energy", r"sleep"),
    ),
    "short": (
        ("Yes or no: is ice cold?", r"yes", r"cold"),
        ("One word: the opposite of big.", r"small|little|tiny", r"big"),
        ("Name a color.", r"red|blue|green|yellow|black|white|purple|orange", r"color"),
        ("Name an animal.", r"dog|cat|lion|tiger|elephant|bear|horse|bird|fish|wolf|fox", r"animal"),
        ("Count to three.", r"1.*2.*3|one.*two.*three", r"1|one"),
    ),
    "knowledge": (
        ("What do bees make?", r"honey", r"hive|nectar"),
        ("What do you use to cut paper?", r"scissor|knife", r"cut"),
        ("Where do fish live?", r"water|ocean|sea|river|lake", r"fish"),
        ("What do you wear when it rains?", r"coat|jacket|boot|umbrella", r"wear"),
        ("What is bread made of?", r"flour|wheat", r"dough|water"),
    ),
}


def score(text: str, right: str, near: str) -> str:
    """One of SCORES."""
    if is_degenerate(text):
        return "DEGENERATE"
    if re.search(right, text, re.IGNORECASE | re.DOTALL):
        return "PASS"
    return "PARTIAL" if re.search(near, text, re.IGNORECASE | re.DOTALL) else "FAIL"


def is_degenerate(text: str) -> bool:
    """Whether it is empty, or says the same again and again."""
    words = text.split()
    if not words:
        return True
    grams = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return len(grams) > 4 and len(set(grams)) < len(grams) / 2


def table_of(answers: Callable[[Sequence[str]], list[str]]) -> list[dict[str, Any]]:
    """A row for each category: how many of its prompts got which score."""
    flat = [(category, *prompt) for category, prompts in PROMPTS.items() for prompt in prompts]
    texts = answers([prompt for _, prompt, _, _ in flat])
    rows = [{"category": category, **dict.fromkeys(SCORES, 0)} for category in PROMPTS]
    places = list(PROMPTS)
    for (category, _, right, near), text in zip(flat, texts, strict=True):
        row = rows[places.index(category)]
        row[score(text, right, near)] += 1  # type: ignore[operator]
    total = {name: sum(row[name] for row in rows) for name in SCORES}  # type: ignore[misc]
    return [*rows, {"category": "overall", **total}]
