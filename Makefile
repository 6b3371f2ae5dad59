# The two commands are `make demo` and `make test`; both make what they need.
.DELETE_ON_ERROR:
.PHONY: help install models chromium demo test fuzz clients lint types bench docs clean

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
MODELS := .models
INSTALLED := .venv/installed
PYTEST_FLAGS ?= -n 2

help:  ## Show the targets
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/'

install: $(INSTALLED)  ## Create .venv with everything for compiling, serving and developing

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "toolkit needs Python 3.11 to 3.13; none was found: install one, or set PYTHON=" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[compile,dev]'
	@touch $@

models: $(INSTALLED)  ## Fetch the two small models that tests and benchmarks use
	$(BIN)/python benchmarks/fetch_models.py $(MODELS) smollm2 gemma3

chromium:  ## Install the browser that tests of the HTML page use, where this runs as root and there is apt
	@if command -v chromium || command -v chromium-browser || command -v google-chrome; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get; then \
		apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium \
		|| echo "chromium could not be installed: tests of the HTML page will be skipped" >&2; \
	else echo "no chromium here: tests of the HTML page will be skipped" >&2; fi >/dev/null

demo: $(INSTALLED)  ## Compile a real model, serve it, and ask it a question over HTTP
	$(BIN)/python benchmarks/fetch_models.py $(MODELS) smollm2
	$(BIN)/python -m toolkit.cli.demo $(MODELS)/smollm2.gguf .demo

test: models chromium  ## Run all tests
	TOOLKIT_TEST_MODELS=$(abspath $(MODELS)) $(BIN)/python -m pytest $(PYTEST_FLAGS) -m "not gpu"

CLIENTS := $(basename $(notdir $(wildcard tests/clients/requirements/*.txt)))

clients: models $(CLIENTS:%=.clients/%/installed)  ## Run the pages on clients, each with its client installed in .clients/
	TOOLKIT_TEST_CLIENTS=$(abspath .clients) TOOLKIT_TEST_MODELS=$(abspath $(MODELS)) $(BIN)/python -m pytest tests/e2e/test_clients.py

.clients/%/installed: tests/clients/requirements/%.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check -q -r $<
	@touch $@

lint: $(INSTALLED)  ## Check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)  ## Check types
	$(BIN)/mypy --strict --explicit-package-bases src/toolkit tests

fuzz: $(INSTALLED)  ## Load 20,000 damaged files of every kind: FUZZ='--seed 7 --count 1000' changes that
	PYTHONPATH=tests $(BIN)/python -m fuzz.campaign $(FUZZ)

bench: models  ## Measure against llama.cpp and print the figures with their ratios
	$(BIN)/python benchmarks/run.py $(MODELS)

docs: $(INSTALLED)  ## Build the documentation into site/
	$(BIN)/mkdocs build --strict

clean:  ## Remove what the other targets made, models and .venv excepted
	rm -rf .demo .bench .clients site build .mypy_cache .ruff_cache .pytest_cache .hypothesis
