# make serve [PORT=30000]   environment, install, server with the embedded model
# make test                 environment, install, lint, types, the whole test suite
# TORCH="..."               pip requirement for torch, to override the choice of tools/install_torch.sh:
#                           make serve TORCH=torch on a login node whose compute nodes have GPUs
PORT ?= 30000
VENV ?= .venv
TORCH ?=
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do if command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then echo $$p; break; fi; done)
BIN := $(VENV)/bin
STAMP_TORCH := $(VENV)/.installed-torch
STAMP_SERVE := $(VENV)/.installed-serve
STAMP_TEST := $(VENV)/.installed-test
STAMP_KERNELS := $(VENV)/.compiled-kernels
CONSTRAINTS := $(VENV)/constraints.txt
TRITON := triton==3.9.0
LOWEST_TRITON := triton==3.6.0
LOWEST := build/$(subst ==,-,$(LOWEST_TRITON))
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
# pip compiles Python files with one process; COMPILE uses all cores and skips what is rarely imported, half of the bytes.
export PIP_COMPILE := 0
SKIPPED := transformers/models|testing|tests?|_inductor|openai/types|pip|setuptools|mypyc?|matplotlib|fontTools|networkx|lexers
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '/($(SKIPPED))/' $(VENV)/lib || true

.PHONY: serve test environment test-exhaustive lint types unit aot-lowest clean help

help: ## this text
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "moe-engine needs Python 3.11 or 3.12 on PATH (or make PYTHON=/path/to/python)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first: its build depends on the machine. It is then pinned with its build tag, so that pip never replaces it.
# setuptools is pinned too, and builds moe-engine in this environment rather than in an isolated one.
$(STAMP_TORCH): constraints.txt tools/install_torch.sh | $(BIN)/python
	@echo "installing moe-engine into $(VENV) ..."
	$(PIP) install -c constraints.txt setuptools
	@sh tools/install_torch.sh $(BIN)/python constraints.txt $(TORCH)
	@sed "s/^torch==.*/$$($(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))')/" \
		constraints.txt > $(CONSTRAINTS)
	@touch $@

$(STAMP_SERVE): pyproject.toml $(STAMP_TORCH)
	$(PIP) install -c $(CONSTRAINTS) --no-build-isolation -e .
	@$(COMPILE)
	@touch $@

# Needs no package but torch: the compiler works while pip, which uses one core, installs the others.
$(STAMP_KERNELS): $(STAMP_TORCH)
	@$(BIN)/python -m moe_engine.kernels.cpu
	@touch $@

# torch's GPU builds depend on their Triton version; TRITON is for the CPU build, which has no such dependency.
$(STAMP_TEST): pyproject.toml $(STAMP_TORCH)
	$(PIP) install -c $(CONSTRAINTS) --no-build-isolation -e '.[test]' $$($(BIN)/python -c 'import triton' 2>/dev/null || echo $(TRITON))
	@$(COMPILE)
	@touch $@

serve: ## start the server with the embedded model (PORT=30000)
	@$(MAKE) --no-print-directory -j 2 $(STAMP_SERVE) $(STAMP_KERNELS)
	$(BIN)/moe-engine serve --port $(PORT)

lint: $(STAMP_TEST) ## ruff
	$(BIN)/ruff check .

types: $(STAMP_TEST) ## mypy
	$(BIN)/mypy

# Bytecode is always written, for the hundreds of processes of the tests. A failed test runs a second
# time with other random values; the summary lists it as RERUN with its seed. Four processes keep
# two cores busy while tests wait for time limits and starts.
unit: $(STAMP_TEST) $(STAMP_KERNELS) ## the tests only
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --processes 4 --reruns 1 $(PYTEST_ARGS)

test-exhaustive: $(STAMP_TEST) ## all combinations and five times as many examples (half an hour)
	@MOE_TEST_EXAMPLES=5 $(MAKE) --no-print-directory unit

# Before the environment's own Triton on the path. Without dependencies: torch's GPU builds state theirs.
$(LOWEST)/.installed: | $(STAMP_TEST)
	@echo "installing $(LOWEST_TRITON) into $(LOWEST) ..."
	$(PIP) install --no-deps --target $(LOWEST) $(LOWEST_TRITON)
	@touch $@

aot-lowest: $(LOWEST)/.installed ## compiles every Triton kernel for sm_90 with the lowest supported Triton
	@echo "compiling with $(LOWEST_TRITON) ..."
	PYTHONPATH=$(LOWEST) $(BIN)/python -c 'import triton; assert "triton==" + triton.__version__ == "$(LOWEST_TRITON)"'
	PYTHONPATH=$(LOWEST) $(BIN)/python -m benchmarks.aot_table --quick --arch 90 --no-json

environment: ## everything that the tests need
	@$(MAKE) --no-print-directory -j 2 $(STAMP_TEST) $(STAMP_KERNELS)

test: environment ## everything CI checks
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory -j 2 types unit

clean: ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build *.egg-info
