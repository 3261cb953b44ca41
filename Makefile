# SPDX-License-Identifier: Apache-2.0
# Everything from a fresh clone: each target makes the virtual environment and the library it needs and skips what is done.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.14.1
MAX_JOBS ?= 2
SANITIZE ?= address,undefined
PYTEST_ARGS ?=
TRAIN_ARGS ?=
export MAX_JOBS

# Tools of the environment come first on PATH: CMake and ninja are newer there than a distribution's.
BIN := $(abspath $(VENV))/bin
export PATH := $(BIN):$(PATH)
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check

# What is done is recorded beside what it made: packages in the environment, the build in build/, where one line names
# the build folder. Only setup.py knows how that folder is called.
HAS_TORCH := $(VENV)/.has-$(subst /,-,$(TORCH))
HAS_LINT := $(VENV)/.has-lint
HAS_DOCS := $(VENV)/.has-docs
HAS_BENCH := $(VENV)/.has-bench
INSTALLED := build/.installed-$(notdir $(VENV))
BUILD = $$(cat $(INSTALLED))
comma := ,
SANITIZED := build/sanitize-$(subst $(comma),-,$(SANITIZE))-$(notdir $(VENV))

.PHONY: help train test test-slow test-install bench docs lint sanitize build build-tests format clean distclean tools

help: ## Show this list
	@echo "make train         Train a small language model with all parts of torch_sm3 [CORPUS=FILE] [RESUME=1]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) TORCH=$(TORCH) MAX_JOBS=$(MAX_JOBS) SANITIZE=$(SANITIZE)"

# --- set-up ----------------------------------------------------------------

tools:
	@say() { echo "make: $$1 is missing; install it, for example: apt-get install $$2" >&2; exit 1; }; \
	command -v $(PYTHON) >/dev/null || say "$(PYTHON)" "python3 python3-venv"; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || say "Python 3.10 or newer (PYTHON=...)" python3.11; \
	$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || say "Python's venv module" python3-venv; \
	command -v "$${CXX:-c++}" >/dev/null || say "a C++ compiler" g++; \
	echo '#include <barrier>' | "$${CXX:-c++}" -std=c++20 -x c++ -fsyntax-only - 2>/dev/null \
	  || say "a C++20 compiler (g++ 12 or newer; CXX=...)" g++-12

$(VENV)/bin/python: | tools
	@echo "== virtual environment $(VENV)"
	$(PYTHON) -m venv $(VENV)

$(HAS_TORCH): | $(VENV)/bin/python
	@echo "== $(TORCH) and build tools into $(VENV)"
	$(PIP) "$(TORCH)" "setuptools>=77" "cmake>=3.30" "ninja>=1.11"
	@rm -f $(VENV)/.has-*
	@touch "$@"

# -v, because a silent compiler of some minutes looks like one that hangs.
$(INSTALLED): setup.py pyproject.toml $(HAS_TORCH)
	@echo "== torch_sm3, editable: first build"
	$(BIN)/python -m pip install -v --disable-pip-version-check --no-build-isolation -e '.[examples,test]'
	@mkdir -p $(@D) && $(BIN)/python setup.py --build-dir > $@

$(HAS_LINT): pyproject.toml $(INSTALLED)
	@echo "== lint tools into $(VENV)"
	$(PIP) 'torch_sm3[lint]'
	@touch $@

$(HAS_DOCS): pyproject.toml $(INSTALLED)
	@echo "== documentation tools into $(VENV)"
	$(PIP) 'torch_sm3[docs]'
	@touch $@

$(HAS_BENCH): pyproject.toml $(INSTALLED)
	@echo "== rivals for benchmarks into $(VENV)"
	$(PIP) 'torch_sm3[bench]'
	$(PIP) --no-deps 'memcnn>=1.5.2'  # what it depends on is for its experiments, and may change torch
	@touch $@

build: $(INSTALLED) ## Build the library and put it into the package (an edit rebuilds only what it touches)
	@echo "== library"
	cmake --build "$(BUILD)" -j $(MAX_JOBS) --target torch_sm3
	@cmake --install "$(BUILD)" --prefix torch_sm3 | { grep -v -E 'Up-to-date|Install configuration' || true; }

build-tests: build
	@echo "== C++ tests"
	@grep -q 'TORCH_SM3_TESTS:BOOL=ON' "$(BUILD)/CMakeCache.txt" || cmake -S . -B "$(BUILD)" -DTORCH_SM3_TESTS=ON
	cmake --build "$(BUILD)" -j $(MAX_JOBS)

# --- use -------------------------------------------------------------------

train: build
	@echo "== training"
	$(BIN)/python examples/train_gpt.py $(if $(CORPUS),--corpus "$(CORPUS)") $(if $(RESUME),--resume) $(TRAIN_ARGS)

test: build-tests ## Run the Python tests (all but the slow ones) and the C++ tests
	@echo "== Python tests"
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)
	@echo "== C++ tests"
	ctest --test-dir "$(BUILD)" --output-on-failure -j $(MAX_JOBS)

test-slow: build-tests ## Run the slow Python tests
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

test-install: build ## Try the editable install, the wheel and the C++ consumer, each in a fresh environment
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" TORCH_SITE="$(TORCH_SITE)" tests/install.sh

bench: build $(HAS_BENCH) ## Run every benchmark; results as JSON in build/bench
	@mkdir -p build/bench
	@for file in benchmarks/[a-z]*.py; do echo "== $$file"; \
	  $(BIN)/python "$$file" --json "build/bench/$$(basename "$$file" .py).json"; done

docs: build $(HAS_DOCS) ## Build the documentation (docs/_build/html); warnings are errors
	@echo "== examples of docstrings and pages"
	$(BIN)/python -m pytest -q tests/python/test_examples_in_docs.py
	@echo "== pages"
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

# --- checks ----------------------------------------------------------------

CXX_FILES = $$(git ls-files --cached --others --exclude-standard '*.cpp' '*.h' '*.cu' '*.cuh')

lint: $(HAS_LINT) ## Run ruff, mypy, clang-format, clang-tidy, check the arrows of the design and the one-definition rule
	@echo "== ruff"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo "== whitespace, size"
	$(BIN)/python .ci/text.py --check
	@echo "== clang-format"
	@$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	@echo "== arrows"
	$(BIN)/python tests/helpers/arrows.py
	@echo "== one definition of each class"
	$(BIN)/python tests/helpers/definitions.py
	@echo "== mypy"
	$(BIN)/mypy
	@echo "== clang-tidy"
	@grep -q 'TORCH_SM3_TESTS:BOOL=ON' "$(BUILD)/CMakeCache.txt" || cmake -S . -B "$(BUILD)" -DTORCH_SM3_TESTS=ON
	$(BIN)/python .ci/tidy.py "$(BUILD)" -j $(MAX_JOBS)

format: $(HAS_LINT) ## Format all sources in place
	$(BIN)/ruff check --fix-only -q .
	$(BIN)/ruff format -q .
	@$(BIN)/clang-format -i $(CXX_FILES)

sanitize: $(HAS_TORCH) ## Run the C++ tests under ASan and UBSan (SANITIZE=thread for TSan)
	.ci/sanitize $(SANITIZE) $(SANITIZED)

clean: ## Remove all that was built (the environment stays)
	rm -rf build dist docs/_build torch_sm3.egg-info torch_sm3/lib torch_sm3/include torch_sm3/share

distclean: clean ## Remove the environment as well
	rm -rf $(VENV)
