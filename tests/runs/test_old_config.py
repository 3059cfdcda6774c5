"""Settings of 0.2, with [imported], [adapted] and [images] beside [model], become one [model] table."""

from typing import Any

import pytest

from raising import refused
from topograd.errors import ConfigError
from topograd.nn.adapted.spec import AdaptedConfig
from topograd.nn.config import GPTConfig
from topograd.nn.images.config import ImageConfig
from topograd.nn.transformer.config import TransformerConfig
from topograd.runs.config import TrainConfig

SIZES = {"layers": 2, "width": 16, "heads": 4, "vocab": 30, "context": 8}
FAMILY = {"family": "llama", **SIZES, "kv_heads": 2, "head_width": 4, "mlp_width": 24, "context": 64}
HF = {"settings": '{"model_type": "opt"}', "list": "h", "head": "lm", **SIZES, "context": 64}
del HF["heads"]


def read(**tables: Any) -> TrainConfig:
    return TrainConfig.from_dict({"version": 2, **tables})


def test_a_gpt_stays_what_it_was() -> None:
    assert read(model=SIZES).model == GPTConfig(**SIZES)  # type: ignore[arg-type]


def test_an_imported_model_sees_what_its_run_saw() -> None:
    config = read(model=SIZES, imported=FAMILY, tokenizer="imported")
    spec = config.model
    assert isinstance(spec, TransformerConfig)
    assert (spec.family, spec.context, spec.trained_context, spec.positions) == ("llama", 8, 64, 64)
    assert config.brings_tokenizer
    whole = read(model={**SIZES, "context": 64}, imported=FAMILY, tokenizer="imported").model
    assert isinstance(whole, TransformerConfig)
    assert (whole.context, whole.trained_context) == (64, None)


def test_an_adapted_model_and_images() -> None:
    spec = read(model=SIZES, adapted=HF, tokenizer="imported").model
    assert isinstance(spec, AdaptedConfig)
    assert (spec.kind, spec.family, spec.context) == ("hf", "opt", 8)
    images = {"model": "resnet8", "classes": 3, "shape": [1, 8, 8]}
    assert read(images=images, data="x").model == ImageConfig(network="resnet8", classes=3, shape=(1, 8, 8))
    own = read(images={"model": "a.package:Net", "depth": 2}, data="x").model
    assert isinstance(own, ImageConfig)
    assert (own.kind, own.network) == ("image", "a.package:Net")


@pytest.mark.parametrize("tables", [{"model": SIZES, "imported": FAMILY}, {"model": SIZES, "adapted": HF}])
def test_what_was_read_is_written_as_the_new_version(tables: dict[str, Any]) -> None:
    config = read(tokenizer="imported", **tables)
    values = {name: value for name, value in config.as_dict().items() if value is not None}
    assert values["version"] == 3
    assert "imported" not in values
    assert "adapted" not in values


def test_a_damaged_table_is_one_line() -> None:
    with refused(ConfigError, setting="imported", given=3):
        read(model=SIZES, imported=3)
    with refused(ConfigError, setting="model", given=3):
        read(model=3)
