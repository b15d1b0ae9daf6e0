# The commands a person types. The README and CI call the same ones.

PYTHON ?= python3
# loadfile: the tests of a file share what its fixtures have trained, so they stay in one process.
PYTEST_FLAGS ?= -n 2 --dist=loadfile
# What `make constraints` holds TensorFlow at: the newest with a wheel for TPUs.
TENSORFLOW ?= 2.20.0

# What `make train` trains.
DATA_DIR := datasets
MODEL_DIR := runs/digits
TRAIN_FLAGS := --model=cnn --replicas=2 --train_epochs=20

BIN := .venv/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint=constraints.txt
PACKAGING := setup.cfg pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help train test lint format nightly coverage hooks constraints clean

help: ## Show this list
	@sed -n 's/^\([a-z]*\):.*## /\1|/p' Makefile | while IFS='|' read -r name text; do printf '  make %-12s %s\n' "$$name" "$$text"; done

train: .venv/.train ## Install, build the digits dataset, train a model on it, evaluate, export
	$(BIN)/python -m data.build digits --data_dir=$(DATA_DIR)
	$(BIN)/python -m trainer.main --dataset=digits --data_dir=$(DATA_DIR) --model_dir=$(MODEL_DIR) $(TRAIN_FLAGS)

test: lint ## Install, lint, type-check and run all tests but the nightly ones
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

lint: .venv/.dev ## Check style, format, types and who imports whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: .venv/.dev ## Mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

nightly: .venv/.dev ## Run the nightly tests: other TensorFlow versions, the tpu extra (downloads several GB)
	$(BIN)/python -m pytest -m nightly

coverage: .venv/.dev ## Run the tests and show the lines they miss
	$(BIN)/python -m pytest $(PYTEST_FLAGS) --cov

hooks: .venv/.dev ## Let git lint each commit (once per clone)
	$(BIN)/pre-commit install

# The cpu environment first; then the tpu one with the same versions, which adds tensorflow-tpu.
# Left out: what every environment brings (pip, wheel), certifi, whose root certificates should be the newest, and libtpu,
# of which the extras preflight and tpu each need another: setup.cfg alone says which.
constraints: ## Renew constraints.txt: the newest versions that setup.cfg allows, with TENSORFLOW
	rm -rf build/constraints && mkdir -p build/constraints
	printf 'tensorflow%s==$(TENSORFLOW)\n' '' -cpu -tpu > build/constraints/known
	for extras in cpu,digits,languages,text,dev,preflight,tune tpu; do \
	  $(PYTHON) -m venv --clear build/constraints/venv && \
	  build/constraints/venv/bin/python -m pip install -q --upgrade --upgrade-strategy=eager -c build/constraints/known -e ".[$$extras]" && \
	  build/constraints/venv/bin/python -m pip freeze --all --exclude-editable \
	    --exclude pip --exclude wheel --exclude certifi --exclude libtpu >> build/constraints/known || exit; \
	done
	{ sed '/^$$/q' constraints.txt; tr '_[:upper:]' '-[:lower:]' < build/constraints/known | sort -u; } > build/constraints/new
	mv build/constraints/new constraints.txt
	rm -rf build/constraints

clean: ## Remove the environment, datasets, runs and caches
	rm -rf .venv $(DATA_DIR) runs build *.egg-info .*_cache .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: each step runs again only when what it read has changed.

# Not .venv/bin/python itself, which stays behind where venv fails half-way (Debian without python3-venv).
.venv/.made:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || { \
	  echo "Python 3.11 to 3.13 is needed. Received: PYTHON=$(PYTHON), $$($(PYTHON) --version 2>&1)." \
	       "Name another: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@

.venv/.train: .venv/.made $(PACKAGING)
	@echo "Installing TensorFlow, Keras and the trainer into .venv; the first time takes a minute or more"
	$(PIP_INSTALL) --editable '.[cpu,digits]'
	@touch $@

.venv/.dev: .venv/.train
	@echo "Installing the tools for tests and lint into .venv"
	$(PIP_INSTALL) --editable '.[cpu,digits,languages,text,dev,preflight,tune]'
	@touch $@
