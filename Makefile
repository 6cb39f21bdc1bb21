# Sluice. `make help` lists what can be done here; everything runs in .venv, which `make setup` creates.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PARTS := engine_image sidecar operator
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z][a-z-]*:.*## ' $(MAKEFILE_LIST) | sort | awk -F':.*## ' '{printf "  %-20s %s\n", $$1, $$2}'

.PHONY: setup
setup: $(STAMP) ## Create .venv with everything that runs and tests Sluice

$(STAMP): requirements/lock.txt requirements/demo.txt $(PARTS:%=%/pyproject.toml)
	@echo "setup: creating $(VENV) (torch is large: the first time takes a minute or two)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==0.13.9
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements/lock.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --require-hashes -r requirements/demo.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation $(PARTS:%=-e ./%)
	@touch $(STAMP)

.PHONY: lock
lock: ## Resolve the dependencies again into requirements/lock.txt
	$(BIN)/uv pip compile --quiet requirements/all.in --generate-hashes --no-emit-index-url --no-annotate --universal \
	  --python-version 3.11 $(PARTS:%=--no-emit-package sluice-%) --no-emit-package sluice-engine \
	  --custom-compile-command "make lock" -o requirements/lock.txt
