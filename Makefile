# make test is all a newcomer needs: it makes the environment, checks style and types, and runs every test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help venv test lint bench clean

help:
	@echo "make venv   make $(VENV) with everything pinned in constraints.txt"
	@echo "make test   lint, then all tests"
	@echo "make lint   ruff and mypy"
	@echo "make bench  measure the layers: ratios from one interleaved run, also in out/bench.json"
	@echo "make clean  remove $(VENV) and what was built"

venv: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed, this is " + sys.version'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch setuptools
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

test: lint
	$(BIN)/python -m pytest

lint: venv
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: venv
	$(BIN)/python -m benchmarks.layers

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
