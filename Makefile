# Every target needs only Python 3.11 or newer: it makes .venv when that is missing.
#   make test TORCH=2.14.1            with another torch
#   make setup PYTHON=python3.12      with another Python
#   make test-dist ARGS='-k redistribute -x'

TORCH ?= 2.13.0
PYTHON ?=
JOBS ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2); [ $$n -gt 8 ] && n=8; echo $$n)
ARGS ?=

BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest

# Several processes share the cores: with more than one thread each they slow one another down tenfold.
export OMP_NUM_THREADS := 1
export TORCH PYTHON

.DEFAULT_GOAL := help
.PHONY: help setup format check test test-dist test-kernels test-ops test-paper test-gpu demo bench clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make or refresh .venv (torch, hdtensor, tools)
	@bash scripts/setup.sh

format: setup ## format, and mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: setup ## lint, types, layers, spelling, the report page in a browser if there is one
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/check_private_torch.py
	$(BIN)/python scripts/installed_view.py mypy
	$(BIN)/python scripts/installed_view.py lint-imports
	$(BIN)/codespell
	$(BIN)/python scripts/check_page.py --quick

test: setup ## every test that needs no GPU
	$(PYTEST) -n $(JOBS) --dist worksteal $(ARGS)

test-dist: setup ## tests on real gloo processes
	$(PYTEST) -m dist $(ARGS)

test-kernels: setup ## kernels against their references
	$(PYTEST) tests/kernels $(ARGS)

test-ops: setup ## PyTorch's whole operator database, beside DTensor; half an hour
	$(BIN)/python -m scripts.opinfo_report --beside-dtensor $(ARGS)

test-paper: setup ## figures, tables and rules of the paper
	$(PYTEST) -m paper $(ARGS)

test-gpu: setup ## tests that need a GPU
	$(PYTEST) -m "gpu or multi_gpu" $(ARGS)

demo: setup ## train a Llama on unlike local processes: a switch of plans, then two pipelines
	$(BIN)/python examples/train_llama.py $(ARGS)
	$(BIN)/python examples/train_pipelines.py $(ARGS)

bench: setup ## time of an operator beside plain torch and DTensor
	$(BIN)/python benchmarks/bench_dispatch.py $(ARGS)

clean: ## remove .venv, builds and caches
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
