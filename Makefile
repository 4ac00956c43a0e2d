# Everything goes through here: a laptop, CI (`.ci/run`) and the README call the same targets.

PORT ?= 8000
FILE ?= examples/01-quickstart.yaml
VENV ?= .venv
BIN := $(VENV)/bin
BUILD := build
PYTEST := $(BIN)/python -m pytest -q
UNIT := tests/core tests/wire tests/trace tests/router tests/frontend tests/worker tests/operator tests/house
SOURCES := core router frontend worker operator
# Evaluated only by the rule that makes the environment.
PYTHON = $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)

.DEFAULT_GOAL := help
.PHONY: help up sync fmt lint type test test-unit test-property test-integration test-e2e test-soak soak cover bench ci clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

up: $(VENV)/.runtime ## install, then serve FILE on this machine (PORT=8000, FILE=examples/01-quickstart.yaml)
	@$(BIN)/fermata up -f $(FILE) --port $(PORT) $(ARGS)

sync: $(VENV)/.dev ## install everything development needs into .venv

# Two stamps, so that serving needs no test tools and a second run installs nothing.
$(VENV)/.runtime: pyproject.toml | $(VENV)/bin/python
	@echo "installing fermata into $(VENV) (a minute the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	@echo "installing fermata and its development tools into $(VENV) (two minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ $(VENV)/.runtime

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "fermata needs Python 3.11 or later on the PATH; found none" >&2; exit 1; }
	@echo "making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)

fmt: $(VENV)/.dev ## format, and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

lint: $(VENV)/.dev ## style, layers, spelling
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@$(BIN)/codespell

type: $(VENV)/.dev ## mypy and pyright, both strict
	@$(BIN)/mypy
	@$(BIN)/mypy .ci/verdict.py .ci/branch_coverage.py benchmarks/bench.py examples/chat.py
	@$(BIN)/pyright

test: test-unit test-property test-integration test-e2e test-soak ## all tests

test-unit: $(VENV)/.dev ## fast tests, no sockets (the wire's own excepted)
	@$(PYTEST) -n auto --junitxml=$(BUILD)/junit/unit.xml $(wildcard $(UNIT))

test-property: $(VENV)/.dev ## state machines against naive models
	@$(PYTEST) -n auto --timeout=400 --junitxml=$(BUILD)/junit/property.xml tests/properties

test-integration: $(VENV)/.dev ## real sockets, one part at a time
	@$(PYTEST) --junitxml=$(BUILD)/junit/integration.xml tests/integration

test-e2e: $(VENV)/.dev ## real processes, real clients, real faults
	@$(PYTEST) --timeout=180 --junitxml=$(BUILD)/junit/e2e.xml tests/e2e

test-soak: $(VENV)/.dev ## 256 programs at twice the KV while clients leave and workers die
	@$(PYTEST) -s --timeout=280 --junitxml=$(BUILD)/junit/soak.xml tests/soak

soak: $(VENV)/.dev ## the same with 2,048 programs on 16 workers (PROGRAMS=2048 WORKERS=16), by hand
	@FERMATA_SOAK_PROGRAMS=$(or $(PROGRAMS),2048) FERMATA_SOAK_WORKERS=$(or $(WORKERS),16) \
		$(PYTEST) -s --timeout=1800 tests/soak

cover: $(VENV)/.dev ## unit and property tests with branch coverage of the pure core (95 % or it fails)
	@rm -f .coverage; code=0; \
	$(PYTEST) -n auto --cov --cov-report= --junitxml=$(BUILD)/junit/unit.xml $(wildcard $(UNIT)) || code=1; \
	$(PYTEST) -n auto --cov --cov-append --cov-report= --timeout=400 --junitxml=$(BUILD)/junit/property.xml \
		tests/properties || code=1; \
	$(BIN)/coverage json --quiet -o $(BUILD)/coverage.json --fail-under=0 || code=1; \
	$(BIN)/python .ci/branch_coverage.py $(BUILD)/coverage.json || code=1; \
	exit $$code

bench: $(VENV)/.dev ## measure, print a table, write build/bench.json; never fails
	@$(BIN)/python -P benchmarks/bench.py

ci: ## what CI runs
	@.ci/run

clean: ## remove what was built; keeps .venv
	@rm -rf $(BUILD) dist .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
