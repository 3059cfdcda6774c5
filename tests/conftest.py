"""What several folders of tests share: a cache of their own, small texts, small models of transformers."""

import gzip
import json
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from topograd.convert.importing import import_model
from topograd.nn.config import GPTConfig
from topograd.nn.images.config import ImageConfig
from topograd.runs.config import OptimizerConfig, TrainConfig
from topograd.runs.folder import Run
from topograd.runs.session import LoadedTextRun, open_session
from topograd.runs.topology_config import TopologyConfig
from topograd.training.runs import start

settings.load_profile("ci")  # the same examples each time, of any duration
SIZES = {"vocab_size": 320, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
ROOT = Path(__file__).parents[1]
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>"


def pytest_configure() -> None:
    """Whoever starts the tests may ignore or block signals (nohup, background jobs); children inherit that.

    What closing the terminal means stays as it was: no test needs it, and nohup does.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD})


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", type=int, default=1, help="times the usual number of faults (tests/hostile)")


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing that a test prepares stays in the cache of whoever runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def untracked() -> set[str]:
    """The files of the repository that git neither knows nor ignores; none where there is no git."""
    listing = ["git", "ls-files", "--others", "--exclude-standard"]
    try:
        found = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return set()
    return set(found.stdout.splitlines())


@pytest.fixture(scope="session", autouse=True)
def _clean_repository() -> Iterator[None]:
    """Tests write into folders of their own; files left in the repository are an error of the last one."""
    before = untracked()
    yield
    left = untracked() - before
    assert not left, f"the tests left files in the repository: {', '.join(sorted(left))}"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chosen = random.Random(0).choices(["stage", "gradient", "layer", "stack", "relay", "loss"], k=900)
    path = tmp_path_factory.mktemp("data") / "corpus.txt"
    path.write_text(" ".join(chosen))
    return path


@pytest.fixture(scope="session")
def config(corpus: Path) -> TrainConfig:
    return TrainConfig(
        topology=TopologyConfig(partition="1,1"),
        steps=20,
        batch=3,
        seed=1,
        data=str(corpus),
        tokenizer="bytes",
        eval_every=8,
        eval_bytes=300,
        save_every=4,
        model=GPTConfig(layers=2, width=16, heads=2, context=16),
    )


@pytest.fixture(scope="session")
def straight(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that was never stopped."""
    trainer = start(config, tmp_path_factory.mktemp("straight") / "run")
    trainer.train()
    return trainer.task.run


@pytest.fixture(scope="module")
def make_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., LoadedTextRun]]:
    """Runs on bytes, a layer a stage, of random weights whose stages disagree; saved as if of some step."""
    folder = tmp_path_factory.mktemp("session")
    (folder / "corpus.txt").write_text(" ".join(random.Random(0).choices(["stage", "loss", "relay"], k=900)))

    def make(stages: int, step: int = 0, **topology: Any) -> LoadedTextRun:
        partition: dict[str, Any] = {} if "graph" in topology else {"partition": ",".join(["1"] * stages)}
        config = TrainConfig(
            topology=TopologyConfig(**partition, **topology),
            data=str(folder / "corpus.txt"),
            tokenizer="bytes",
            eval_bytes=300,
            model=GPTConfig(layers=stages, width=16, heads=2, context=16),
        )
        name = "-".join([str(stages), str(step), *(f"{value}" for value in topology.values())])
        trainer = start(config, folder / f"run-{name}")
        with torch.no_grad():
            for parameter in trainer.task.stack.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        trainer.step = step
        trainer.save()
        return open_session(trainer.task.run.folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield make


def write_idx(path: Path, values: torch.Tensor) -> None:
    """An IDX file of unsigned bytes; gzipped if its name says so."""
    head = bytes((0, 0, 8, values.dim())) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    content = head + values.to(torch.uint8).numpy().tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture(scope="session")
def idx_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ImageSet of 8 × 8 of three classes that a small network tells apart: a bright third, and noise."""
    folder = tmp_path_factory.mktemp("pictures")
    generator = torch.Generator().manual_seed(0)
    for name, count in (("train", 120), ("t10k", 60)):
        labels = torch.arange(count) % 3
        images = torch.randint(0, 120, (count, 8, 8), generator=generator)
        for i, label in enumerate(labels.tolist()):
            images[i, :, 2 * label : 2 * label + 3] += 100
        write_idx(folder / f"{name}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"{name}-labels-idx1-ubyte.gz", labels)
    return folder


@pytest.fixture(scope="session")
def image_config(idx_folder: Path) -> TrainConfig:
    return TrainConfig(
        topology=TopologyConfig(partition="1,1,1"),
        steps=20,
        batch=16,
        seed=1,
        data=str(idx_folder),
        eval_every=8,
        save_every=4,
        model=ImageConfig(widths=(12, 9)),
        optimizer=OptimizerConfig(name="adamw", lr_matrix=0.03, lr_head=0.03, lr_scalar=0.03),
    )


@pytest.fixture(scope="session")
def image_run(image_config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on pictures that was never stopped."""
    trainer = start(image_config, tmp_path_factory.mktemp("images") / "run")
    trainer.train()
    return trainer.task.run


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["def read(self): return self.x\n" * 20], trainer)
    return tokenizer


def model_of(family: str) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if family == "gpt2":
        config = transformers.GPT2Config(
            n_embd=32, n_layer=4, n_head=4, vocab_size=320, n_positions=64, bos_token_id=0, eos_token_id=0
        )
        return transformers.GPT2LMHeadModel(config).eval()
    name = {"llama": "Llama", "qwen3": "Qwen3"}[family]
    config = getattr(transformers, f"{name}Config")(
        hidden_size=32, intermediate_size=64, max_position_embeddings=64, head_dim=8, **SIZES
    )
    config.tie_word_embeddings = family == "llama"
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """A Hugging Face folder of a family and its model; made once."""
    made: dict[str, tuple[Path, Any]] = {}
    place = tmp_path_factory.mktemp("sources")

    def make(family: str) -> tuple[Path, Any]:
        if family not in made:
            folder, model = place / family, model_of(family)
            model.save_pretrained(folder)
            byte_level().save(str(folder / "tokenizer.json"))
            (folder / "tokenizer_config.json").write_text(
                '{"eos_token": "<|endoftext|>", "chat_template": ' + repr(TEMPLATE).replace("'", '"') + "}",
                encoding="utf-8",
            )
            made[family] = folder, model
        return made[family]

    return make


@pytest.fixture(scope="session")
def imported(
    source: Callable[[str], tuple[Path, Any]], tmp_path_factory: pytest.TempPathFactory
) -> LoadedTextRun:
    """A run of two stages of a small Llama with a chat template."""
    run = tmp_path_factory.mktemp("imported") / "run"
    import_model(source("llama")[0], run, partition="2,2")
    return open_session(run)


@pytest.fixture(scope="session")
def adapted(
    source: Callable[[str], tuple[Path, Any]], tmp_path_factory: pytest.TempPathFactory
) -> LoadedTextRun:
    """A run of two stages of a small GPT-NeoX, which has no native stack: transformers runs it."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("adapted")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = transformers.GPTNeoXConfig(
        vocab_size=320, max_position_embeddings=64, attn_implementation="eager", **sizes
    )
    transformers.GPTNeoXForCausalLM(config).save_pretrained(folder / "neox")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source("llama")[0] / name, folder / "neox" / name)
    import_model(folder / "neox", folder / "run", partition="2,2")
    return open_session(folder / "run")


@pytest.fixture(scope="module")
def gpt(make_session: Callable[..., LoadedTextRun]) -> LoadedTextRun:
    """A run of three stages on bytes."""
    return make_session(3)


@pytest.fixture(scope="module")
def bases(gpt: LoadedTextRun, imported: LoadedTextRun) -> dict[str, LoadedTextRun]:
    """Bases for specialists."""
    return {"gpt": gpt, "imported": imported}


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve conversations about where somebody was born."""
    path = tmp_path_factory.mktemp("chats") / "chat.jsonl"
    lines = []
    for i, place in enumerate(["Oslo", "Lima", "Kyoto", "Accra"] * 3):
        said = [("user", f"born {i}?"), ("assistant", place)]
        lines.append(json.dumps({"messages": [{"role": role, "content": text} for role, text in said]}))
    path.write_text("\n".join(lines) + "\n")
    return path
