# `make train`: set up and run the main job.  `make test`: set up and check everything.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
# torch is pinned by constraints.txt so that a CPU machine never pulls CUDA packages.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: train test test-all format clean
train: $(VENV)/.installed
	$(BIN)/slipstream train

test: $(VENV)/.installed-dev
	$(BIN)/ruff format --check src tests examples studies
	$(BIN)/ruff check src tests examples studies
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/pytest

test-all: $(VENV)/.installed-dev
	$(BIN)/pytest -m ""

format: $(VENV)/.installed-dev
	$(BIN)/ruff format src tests examples studies
	$(BIN)/ruff check --fix src tests examples studies

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) torch==2.13.0
	$(PIP_INSTALL) -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP_INSTALL) -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache
