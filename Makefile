# Sluice. `make help` lists what can be done here; everything runs in .venv, which `make setup` creates.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PARTS := engine_image sidecar operator simulator
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

COMPILE = $(BIN)/uv pip compile --quiet --generate-hashes --no-emit-index-url --no-annotate --universal --python-version 3.11 \
  --no-emit-package sluice-engine --no-emit-package sluice-sidecar --no-emit-package sluice-operator \
  --no-emit-package sluice-simulator \
  --custom-compile-command "make lock"
IMAGE_LOCKS := engine torch sidecar operator build

.PHONY: lock
lock: ## Resolve the dependencies again: requirements/lock.txt, and from it what each image installs
	$(COMPILE) requirements/all.in -o requirements/lock.txt
	$(COMPILE) requirements/openai-old.in -o requirements/openai-old.txt
	set -e; for name in $(IMAGE_LOCKS); do \
	  $(COMPILE) requirements/$$name.in -c requirements/lock.txt -o requirements/$$name.txt; done

FORMAT_PATHS := engine_image sidecar operator simulator tests benchmarks demo tools
QUICK := not slow and not cluster

.PHONY: format
format: $(STAMP) ## Format the code
	$(BIN)/ruff format $(FORMAT_PATHS)
	$(BIN)/ruff check --fix --quiet $(FORMAT_PATHS) || true

.PHONY: lint
lint: $(STAMP) ## Formatting, lint and import rules
	$(BIN)/ruff format --check $(FORMAT_PATHS)
	$(BIN)/ruff check $(FORMAT_PATHS)
	$(BIN)/lint-imports

.PHONY: types
types: $(STAMP) ## mypy, strict, tests included
	$(BIN)/mypy $(PARTS:%=%/src) tests benchmarks demo tools

.PHONY: check
check: lint types test-quick ## Everything quick: format, lint, types, imports, quick tests

.PHONY: test-quick
test-quick: $(STAMP) ## Tests that need neither the real model nor the node
	$(BIN)/pytest -q -m "$(QUICK)"

.PHONY: test-slow
test-slow: $(STAMP) ## Tests with the real model and real processes
	$(BIN)/pytest -q -m "slow and not cluster"

.PHONY: test-cluster
test-cluster: $(STAMP) ## Tests on a real Kubernetes node, built and started here (root, Go)
	$(BIN)/python tests/cluster/node.py --or-skip run -- $(BIN)/pytest -q -m "cluster and not full" tests/cluster

.PHONY: test-cluster-full
test-cluster-full: $(STAMP) ## Chaos and long runs on the real node, which `make test` leaves out
	$(BIN)/python tests/cluster/node.py run --beside --dual-stack -- $(BIN)/pytest -q -m "cluster and full" tests/cluster

.PHONY: test
test: check test-slow test-cluster ## All tests: what .ci/run runs

.PHONY: demo
demo: $(STAMP) ## A real model behind the gate on this machine, driven past its limits, explained
	$(BIN)/python demo/local.py

.PHONY: demo-cluster
demo-cluster: $(STAMP) ## The same on a real Kubernetes node: install, apply, stream, refuse, delete
	$(BIN)/python tests/cluster/node.py run -- $(BIN)/python demo/on_node.py

.PHONY: bench
bench: $(STAMP) ## Benchmarks, each with its bars; beside vLLM and llama.cpp where `make peers` installed them (quiet machine, please)
	@for name in scheduler_step simulator_speed engine_load gate_overhead proxy aborts footprint techniques; do $(BIN)/python benchmarks/$$name.py || exit 1; done
	@$(BIN)/python benchmarks/peer_load.py --if-installed

.PHONY: peers
peers: $(STAMP) ## A real llama.cpp and a real vLLM behind the gate, installed outside the repository first (half an hour, 6 GB)
	$(BIN)/python benchmarks/peers.py --install

.PHONY: bench-peers
bench-peers: $(STAMP) ## Sluice, vLLM and llama.cpp under one load in one run (after `make peers`; quiet machine, please)
	$(BIN)/python benchmarks/peer_load.py

.PHONY: soak
soak: $(STAMP) ## Twenty minutes of everything a client can ask: nothing may grow, nothing be lost (on any machine)
	$(BIN)/python benchmarks/soak.py

.PHONY: harness
harness: $(STAMP) ## guidellm and `sluice bench` load the same service in turn: their figures agree (installs guidellm, 6 GB)
	$(BIN)/python benchmarks/harness.py

.PHONY: check-engine-flags
check-engine-flags: $(STAMP) ## The flags that runtime.type VLLM and SGLang become, against their own parsers (6 GB, once)
	$(BIN)/python tests/operator/engine_flags.py

.PHONY: crds
crds: $(STAMP) ## Rewrite what is generated from the CRD and the chart's values
	$(BIN)/python tools/generate.py

.PHONY: golden
golden: $(STAMP) crds ## Rewrite the golden files too; review reads the diff
	$(BIN)/python tests/operator/golden.py --write
	SLUICE_GOLDEN=write $(BIN)/pytest -q tests/charts/test_rendering.py
