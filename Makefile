# Each target sets up what it needs in .venv; nothing but Python >= 3.10 and make is assumed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CASES ?= ../shared/cases

.PHONY: setup compare test lint acceptance bench docs clean

setup: $(STAMP)

# torch first and alone: once it is there, nothing that follows pulls in another build of it.
$(STAMP): .ci/requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' .ci/requirements.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r .ci/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(STAMP)

# The main job: train on real data over a slow link with each compressor. QUICK=1, TASK=charlm, LINK=1gbit, ARGS="…".
compare: $(STAMP)
	$(BIN)/python -m experiments.compare $(if $(QUICK),--quick) $(if $(TASK),--task $(TASK)) $(if $(LINK),--link $(LINK)) $(ARGS)

test: lint
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Cases from public bug reports, where a checkout of them is at hand.
acceptance: $(STAMP)
	CASE_ADAPTER=project PROJECT_ROOT=$(CURDIR) $(BIN)/python -B $(CASES)/run_all.py $(ARGS)

bench: $(STAMP)
	$(BIN)/python -m experiments.bench $(if $(QUICK),--quick) $(ARGS)

# Rewrite the generated tables of the documentation.
docs: $(STAMP)
	$(BIN)/python -m experiments.catalogue --write docs/compressors.md

clean:
	rm -rf $(VENV) experiments/results build dist
