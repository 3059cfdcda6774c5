# Every target sets itself up: a .venv, the pinned packages, this package in place.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/ready

.PHONY: demo test check bench clean

demo: $(READY)
	$(BIN)/topograd demo

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python benchmarks/step.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv runs
