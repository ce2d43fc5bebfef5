# `make train`: set up and run the main job.  `make check`: the quick look.  `make test`: set up and check everything.
# `make docs`: build the documentation into site/.  `make study-text`: the text of the studies.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
# Bytecode is kept: the tests start many processes, and each would compile the same files again.
unexport PYTHONDONTWRITEBYTECODE
# torch is pinned by constraints.txt so that a CPU machine never pulls CUDA packages.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Three processes of pytest keep two cores at work, since many tests wait for a time-out or a signal. A file stays with
# one of them, and so do its fixtures; the longest are begun first (`tests/conftest.py`).
PYTEST := $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder
CODE := src tests examples studies tools
# What starts no process, trains nothing and takes no more than a moment.
FAST := $(addprefix tests/, test_config.py test_docs.py test_imports.py test_private_names.py metrics \
  $(addprefix schedule/test_, actions.py schedule_cli.py simulate.py staleness.py torch_order.py validate.py) \
  $(addprefix optim/test_, build.py corrections.py lr.py muon.py stacks.py) \
  $(addprefix models/test_, loss.py moe.py) $(addprefix data/test_, prepare.py tokens.py) \
  $(addprefix plan/test_, memory.py partition.py penalty_devices.py throughput.py) \
  $(addprefix study/test_, penalty.py statistics.py sweep.py) \
  $(addprefix pipeline/test_, channel.py depth.py one_stage.py) \
  $(addprefix bench/test_, measure.py work.py) $(addprefix train/test_, checkpoint.py reporting.py))

.PHONY: train check lint types test test-all bench fuzz chaos docs study-text format clean
train: $(VENV)/.installed
	$(BIN)/slipstream train

check: $(VENV)/.installed-dev
	@$(MAKE) --no-print-directory -j 2 --output-sync=target lint types fast

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)

types: $(VENV)/.installed-dev
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

.PHONY: fast
fast: $(VENV)/.installed-dev
	$(BIN)/pytest -x $(FAST)

test: lint types
	$(PYTEST)

test-all: $(VENV)/.installed-dev
	$(PYTEST) -m "not bench"

# Wall-clock times, one thing at a time: on a machine that does nothing else.
bench: $(VENV)/.installed-dev
	$(BIN)/pytest -m bench

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Open site/index.html"

# Damaged input to every reader, and faults in small runs: INPUTS, CASES and SEED may be given.
fuzz: $(VENV)/.installed-dev
	PYTHONPATH=tests $(BIN)/python -m fuzz.campaign --inputs $(or $(INPUTS),20000) --seed $(or $(SEED),0)

chaos: $(VENV)/.installed-dev
	PYTHONPATH=tests $(BIN)/python -m chaos.campaign --cases $(or $(CASES),1000) --seed $(or $(SEED),0) --workers $(or $(WORKERS),1) --out chaos.jsonl

# The text of the studies, out of a public source (130 MB fetched): OUT may be given.
study-text:
	$(PYTHON) tools/study_text.py $(or $(OUT),data/study_text)

format: $(VENV)/.installed-dev
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) torch==2.13.0
	$(PIP_INSTALL) -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP_INSTALL) -e '.[dev]'
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP_INSTALL) -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .ruff_cache
