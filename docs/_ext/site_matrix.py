"""The matrix of features, models and uses, made from the markers of the tests and the errors in the code.

    python docs/_ext/site_matrix.py          writes docs/reference/matrix.md

A test that proves a cell carries `@pytest.mark.covers(MODEL, USE, ..., feature=FEATURE)`. Without a feature
it is about the model itself; a feature that goes with no use has none. Markers are read from the source, and
nothing is run or imported. Where a use is an error, `ERRORS` names the file and a part of the line that says
so, and it must stand there. What neither a test nor an error decides is a question mark.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "matrix.md"
LIMITS = Path(__file__).with_name("known_limits.md")
"""Written by hand."""
MODELS = {
    "gpt": "GPT",
    "mamba": "Mamba, hybrid",
    "imported": "imported families",
    "adapted": "adapted modules",
    "images": "images",
    "own": "own stack",
}
USES = {
    "train": "train",
    "resume": "resume",
    "decode": "decode",
    "runtime": "ONNX Runtime",
    "serve": "serve",
    "parallel": "parallel",
    "export": "export",
}
FEATURES = {
    "topologies": "chains, forests, covers, any DAG of stages",
    "objectives": "residual, distillation, z-loss, own objectives",
    "local rules": "autoencoder, BYOL, ridge, target propagation, Forward-Forward",
    "relays": "learned relays, extra sources, private decoders",
    "interfaces": "bounded interfaces, backward by a scan",
    "recompute": "activation checkpointing",
    "search": "soft boundaries, surgery",
    "early exit": "early exit (WAND), prefixes, calibration",
    "speculation": "speculative decoding, exact",
    "retrofit": "draft stage, exits by `retrofit`",
    "lora": "LoRA",
    "frozen": "frozen base, exits that learn",
    "specialists": "specialists",
    "int8": "int8 and int4 weights",
    "scores": "scores of continuations, CORE",
    "chat": "chats by the model's template",
    "inspect": "`inspect`, K-FAC factors",
    "shards": "replicas, FSDP2 shards",
    "faults": "killed ranks, stages that die",
}
_TEXT = ("src/topograd/runs/session.py", "was trained on images")
_MIXER = ("src/topograd/runtime/operators.py", "layers are not transformer blocks")
_OWN = ("src/topograd/convert/export.py", "is a model of our own kind, which no other program knows")
_KIND = ("src/topograd/runs/config.py", "is for models of the next token, and model.kind is")
_ONNX = ("src/topograd/runtime/operators.py", "is not made of transformer blocks")
ERRORS = {
    ("mamba", "runtime"): _MIXER,
    ("mamba", "export"): _OWN,
    ("adapted", "runtime"): _ONNX,
    ("images", "decode"): _TEXT,
    ("images", "runtime"): _TEXT,
    ("images", "serve"): _TEXT,
    ("images", "export"): _TEXT,
    ("own", "runtime"): _ONNX,
    ("own", "export"): _OWN,
}
"""Model and use that raise an error: the file, and a part of the error as the source has it."""
FEATURE_ERRORS = {
    ("own", "specialists"): ("src/topograd/specialists/attach.py", "takes no new layers"),
    ("mamba", "int8"): _MIXER,
    ("adapted", "int8"): _ONNX,
    ("own", "int8"): _ONNX,
    **{("images", feature): _KIND for feature in ("interfaces", "lora", "frozen", "search")},
    **{
        ("images", feature): _TEXT
        for feature in ("speculation", "retrofit", "specialists", "int8", "scores", "chat", "inspect")
    },
}


@dataclass(frozen=True)
class Cover:
    """One marker: a test, and what it proves."""

    test: str
    model: str
    uses: tuple[str, ...]
    feature: str | None


def covers(tests: Path) -> Iterator[Cover]:
    """Every marker of the tests, in the order of their files."""
    for path in sorted(tests.rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        if "mark.covers" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for mark in node.decorator_list:
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.covers":
                        yield _read(mark, f"{path.relative_to(tests.parent).as_posix()}::{node.name}")


def _read(mark: ast.Call, test: str) -> Cover:
    model, *uses = (ast.literal_eval(word) for word in mark.args)
    named = {word.arg: ast.literal_eval(word.value) for word in mark.keywords}
    feature = named.pop("feature", None)
    if named or model not in MODELS or not (uses or feature) or not set(uses) <= USES.keys():
        raise ValueError(f"{test}: {ast.unparse(mark)} is no cell of the matrix")
    if feature is not None and feature not in FEATURES:
        raise ValueError(f"{test}: feature {feature!r} is not one of {', '.join(FEATURES)}")
    return Cover(test, model, tuple(uses), feature)


class Notes:
    """The errors that the tables link to, each once."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str]] = []

    def link(self, error: tuple[str, str]) -> str:
        file, words = error
        if words not in (ROOT / file).read_text(encoding="utf-8"):
            raise ValueError(f"{file} does not have the error {words!r} any more")
        if error not in self.rows:
            self.rows.append(error)
        return f"[–](#why-{self.rows.index(error) + 1})"

    def lines(self) -> Iterator[str]:
        for number, (file, words) in enumerate(self.rows, 1):
            yield f"(why-{number})=\n{number}. `{file}`: “{words}”.\n"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def page(root: Path = ROOT) -> str:
    """The page in Markdown."""
    found = list(covers(root / "tests"))
    notes = Notes()
    plain = {(cover.model, use) for cover in found for use in cover.uses if cover.feature is None}
    first = [
        [f"**{title}**"]
        + [
            "✓"
            if (model, use) in plain
            else notes.link(ERRORS[model, use])
            if (model, use) in ERRORS
            else "?"
            for use in USES
        ]
        for model, title in MODELS.items()
    ]
    both = plain & ERRORS.keys()
    if both:
        raise ValueError(f"a test covers what is an error: {sorted(both)}")
    second = []
    for feature, title in FEATURES.items():
        row = [title]
        for model in MODELS:
            proofs = [c for c in found if (c.feature, c.model) == (feature, model)]
            uses = {use for cover in proofs for use in cover.uses}
            words = " ".join(USES[use] if use != "runtime" else "ONNX" for use in USES if use in uses)
            error = FEATURE_ERRORS.get((model, feature))
            row.append(words or ("✓" if proofs else notes.link(error) if error else "?"))
        second.append(row)
    return "\n".join(
        [
            HEAD,
            "## Models and uses\n",
            *table(["", *USES.values()], first),
            "\n## Features\n",
            "A cell has the uses for which a test proves the feature on that model. ✓: a feature that\n"
            "goes with no use, and a test proves it.\n",
            *table(["feature", *MODELS.values()], second),
            "\n## Why not\n",
            "The error that you get, and the file that raises it.\n",
            *notes.lines(),
            LIMITS.read_text(encoding="utf-8"),
        ]
    )


HEAD = """# Matrix: what works on what

Made from marks on the tests by `python docs/_ext/site_matrix.py`; do not edit. ✓: a test proves it. –: an
error, linked to its line. ?: no test claims it; it may work.

*Mamba, hybrid*: Mamba-2, Mamba-3 and stacks that mix them with attention. *Imported families*: Llama,
Mistral, Qwen2, Qwen3, GPT-2, Gemma 1 to 3, from Hugging Face folders and GGUF files. *Adapted modules*:
other causal models, which transformers runs. *Images*: MLP, VGG, ResNet, ViT. *Own stack*: a `tg.ModelSpec`
of yours.
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
