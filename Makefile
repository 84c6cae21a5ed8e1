# make setup | compare | test | bench: each sets up what it needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup compare test lint acceptance docs bench clean

setup: $(STAMP)

$(STAMP): .ci/requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	# torch first and alone: with it present nothing that follows can pull in another build of it
	$(BIN)/python -m pip install --quiet $$(grep '^torch==' .ci/requirements.txt)
	$(BIN)/python -m pip install --quiet -r .ci/requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $(STAMP)

compare: $(STAMP)
	$(BIN)/python -m experiments.compare $(if $(QUICK),--quick) $(if $(TASK),--task $(TASK)) $(if $(LINK),--link $(LINK)) $(ARGS)

test: lint
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
