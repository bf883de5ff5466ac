# make compare and make test are all a newcomer needs: each makes the environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help venv compare test test-all campaign lint docs bench clean

help:
	@echo "make compare  train on real data to the same loss on emulated hosts, by phantom, tensor parallel, FSDP2 and others; show what it cost"
	@echo "make venv     make $(VENV) with everything pinned in constraints.txt"
	@echo "make test     lint, then the tests but those of the second tier"
	@echo "make test-all lint, then all tests"
	@echo "make campaign 100 kills, 10,000 malformed inputs, 300 ranks that differ: counts of tried, clean and bad, also in out/campaign.json"
	@echo "make lint     ruff, mypy and the direction of imports"
	@echo "make docs     build the documentation to site/"
	@echo "make bench    measure the layers: ratios from one interleaved run, also in out/bench.json"
	@echo "make clean    remove $(VENV) and what was built"

venv: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed, this is " + sys.version'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch setuptools
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev,docs,hosts]'
	touch $@

compare: venv
	out=out/compare-$$(date -u +%Y%m%d-%H%M%S); \
	$(BIN)/phantom compare --preset planted --out $$out-planted && \
	$(BIN)/phantom compare --preset digits-hosts --hosts-optional --out $$out

# Two processes at once, a file of tests at a time: tests with ranks wait more than they compute.
test: lint
	$(BIN)/python -m pytest -m "not slow" --numprocesses 2 --dist loadfile

test-all: test
	$(BIN)/python -m pytest -m slow --numprocesses 2 --dist loadfile

campaign: venv
	$(BIN)/python -m tests.campaign --out out/campaign.json

lint: venv
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: venv
	$(BIN)/mkdocs build --quiet

bench: venv
	$(BIN)/python -m benchmarks.layers

clean:
	rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
