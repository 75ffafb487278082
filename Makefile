# Two commands set a fresh machine up: `make run` answers a prompt, `make test` checks the project.
# Needs only python3 (3.11 or newer, with venv) and a C++20 compiler; cmake and ninja come with the build.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PROMPT ?= Why is the sky blue? Answer in two sentences.

.PHONY: run test nightly lint build clean help

help:            ## list the commands
	@grep -E '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

run: build       ## fetch the default model and stream an answer (PROMPT="...")
	@$(BIN)/forerun run "$(PROMPT)"

test: build lint ## lint, type-check and run the fast test suite
	$(BIN)/python -m pytest

nightly: build   ## the whole suite, slow matrices included
	$(BIN)/python -m pytest -m "slow or not slow"

lint: build      ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

build: $(VENV)/.built ## environment and native kernels

$(VENV)/.python: 
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "forerun needs Python 3.11 or newer; set PYTHON=python3.11 (Debian: apt install python3 python3-venv)"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "Python's venv module is missing (Debian: apt install python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade "pip>=25.1"
	@touch $@

$(VENV)/.built: $(VENV)/.python pyproject.toml CMakeLists.txt $(wildcard csrc/*)
	@command -v $${CXX:-c++} >/dev/null 2>&1 || command -v g++ >/dev/null 2>&1 || \
	  { echo "No C++ compiler found. Install one (Debian: apt install g++; Fedora: dnf install gcc-c++) or set CXX."; exit 1; }
	@echo "Installing the build and development tools ..."
	@$(BIN)/python -m pip install -q --group dev "scikit-build-core>=0.11,<1" "nanobind>=2.4,<3" cmake ninja
	@echo "Building the native kernels (a minute or two) ..."
	@$(BIN)/python -m pip install -q --no-build-isolation -e ".[serve]"
	@touch $@

clean:           ## remove the environment and build outputs (models stay in the cache)
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
