# `make demo` and `make test` are all a newcomer needs: each creates .venv, installs, builds and runs. The second time
# is quick: nothing is installed or built again unless pyproject.toml, CMakeLists.txt or C++ sources changed.
#
#   make demo PYTHON=python3.12     another interpreter for a new .venv
#   make test PYTEST_ARGS="-k view" only some tests

PYTHON ?= python3
PYTEST_ARGS ?=
TORCH ?= torch==2.13.0

BIN := .venv/bin
PY := $(BIN)/python
PIP := $(PY) -m pip --disable-pip-version-check
CPP := $(shell find csrc tests/stub_plugin -name '*.cpp' -o -name '*.h' 2>/dev/null)
LINTED := $(wildcard torch_tpu tests tools examples benchmarks)

.PHONY: help setup demo test check coverage format docs clean
.DEFAULT_GOAL := help

help:
	@echo 'make setup    create .venv, install what is needed, build the extension'
	@echo 'make demo     setup, then a first program, a sentence encoder and a small training run on device "tpu"'
	@echo 'make test     setup, then make check and the test suite (PYTEST_ARGS="-k view" for a part)'
	@echo 'make check    format, lint, types, import and include contracts, sizes, spelling'
	@echo 'make coverage every entry of PyTorch'"'"'s operator database; writes docs/ops.md'
	@echo 'make format   rewrite Python and C++ sources the way make check wants them'
	@echo 'make docs     write the generated pages of docs/'
	@echo 'make clean    remove builds, caches and what the examples wrote; .venv stays'

setup: .venv/.built

.venv/.requirements: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "torch_tpu needs Python 3.11 or newer; set PYTHON=")'
	test -x $(PY) || $(PYTHON) -m venv .venv
	@echo 'Installing requirements into .venv'
	$(PIP) show -q torch >/dev/null 2>&1 || $(PIP) install -q $(TORCH)
	$(PY) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' \
	  > .venv/build-requirements.txt
	$(PIP) install -q -r .venv/build-requirements.txt
	@touch $@

.venv/.built: .venv/.requirements CMakeLists.txt $(CPP)
	@echo 'Building the extension and installing torch_tpu (some minutes the first time)'
	$(PIP) install -q --no-build-isolation -e '.[dev,test,demo,hf,cli,export]'
	@touch $@

demo: setup
	$(PY) examples/first_steps.py

test: check
	$(PY) -m pytest -n auto $(PYTEST_ARGS)

check: setup
	$(BIN)/ruff format --check $(LINTED)
	$(BIN)/ruff check $(LINTED)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PY) tools/check_includes.py
	$(PY) tools/check_size.py
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/codespell

format: setup
	$(BIN)/ruff format $(LINTED)
	$(BIN)/ruff check --fix $(LINTED)
	$(BIN)/clang-format -i $(CPP)

coverage: setup
	OPINFO=all TORCH_TPU_CPU_FALLBACK=error $(PY) -m pytest -n auto -W ignore tests/test_opinfo.py tests/test_opinfo_dtypes.py \
	  tests/test_error_inputs.py tests/test_device_type.py tests/test_modules.py tests/test_optim.py
	$(MAKE) docs

docs: setup
	$(PY) tools/gen_docs.py env > docs/env.md
	$(PY) tools/gen_docs.py ops > docs/ops.md

clean:
	rm -rf build dist examples/out .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	rm -f .venv/.built
	find $(LINTED) -name __pycache__ -type d -prune -exec rm -rf {} +
