# make compare and make test are all a newcomer needs: each makes the environment first, with what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --constraint constraints.txt

# Processes share their bytecode: tests start hundreds, and each would compile the package again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help venv compare test test-all test-stacks campaign lint style types docs bench clean

help:
	@echo "make compare  train to the same loss on emulated hosts, by phantom, tensor parallel, Megatron and others; show what it cost"
	@echo "make venv     make $(VENV) with everything pinned in constraints.txt"
	@echo "make test     lint, then the tests but those of the second tier"
	@echo "make test-all lint, then all tests"
	@echo "make test-stacks the tests that need Lightning, lm_eval, Megatron-Core, PEFT or torchtitan"
	@echo "make campaign 25 kills, 1,000 malformed inputs: what was tried, clean and bad"
	@echo "make lint     ruff, mypy and the direction of imports"
	@echo "make docs     build the documentation to site/"
	@echo "make bench    measure the layers: ratios from one interleaved run, also in out/bench.json"
	@echo "make clean    remove $(VENV) and what was built"

venv: $(VENV)/dev

# What the commands need. torch first and pinned: nothing that follows may bring another one.
$(VENV)/run: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed, this is " + sys.version'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch setuptools
	$(PIP) --no-build-isolation --editable '.[digits,hosts]'
	touch $@

# What tests, linters and documentation need besides.
$(VENV)/dev: $(VENV)/run
	$(PIP) --no-build-isolation --editable '.[dev,docs]'
	touch $@

# Darcy flow, then briefly digits, where a small dense model does better; at the end, the headline of the first again.
compare: $(VENV)/run
	@out=out/compare-$$(date -u +%Y%m%d-%H%M%S); \
	$(BIN)/phantom compare --preset darcy-hosts --hosts-optional --out $$out --strategies phantom tensor megatron \
		phantom+int8 megatron+int8 phantom@1x1 dense@1x1 small-dense@1x1 --timed-seconds 1.5 --inference-turns 4 && \
	echo && echo "Digits, whose 64 pixels need no wide model:" && \
	$(BIN)/phantom compare --preset digits-hosts --hosts-optional --out $$out-digits \
		--strategies phantom megatron small-dense@1x1 --learning-rates 1e-3 4e-3 --inference-turns 2 && \
	echo && echo "Darcy flow, the first comparison:" && sed '/^$$/q' $$out/summary.txt && echo "Report: $$out/report.html"

# Three processes at once, a file of tests at a time: tests with ranks wait as long as they compute. Types and imports
# are checked meanwhile.
PYTEST := $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

test: style
	$(MAKE) --no-print-directory types >$(VENV)/types.log 2>&1 & types=$$!; \
	$(PYTEST) -m "not slow"; tests=$$?; wait $$types; types=$$?; cat $(VENV)/types.log; exit $$((tests + types))

test-all: test
	$(PYTEST) -m slow

# Libraries that bring much of their own live in an environment on top of $(VENV), which they cannot change. One that
# cannot be installed is left out, and its tests are skipped; a test that fails is a failure.
$(VENV)/stacks/made: $(VENV)/dev
	$(BIN)/python -m venv --clear --without-pip $(VENV)/stacks
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(\"" + sysconfig.get_path("purelib") + "\")")' \
		>"$$($(VENV)/stacks/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	touch $@

test-stacks: $(VENV)/stacks/made
	grep -v '^#' tests/stacks.txt | while read -r stack; do \
		$(BIN)/pip --python $(VENV)/stacks/bin/python install --quiet --no-deps $$stack </dev/null || echo "left out, not installed: $$stack"; \
	done
	$(VENV)/stacks/bin/python -m pytest --numprocesses 2 --dist loadfile -rs tests/integrations tests/test_lightning.py \
		tests/test_peft.py tests/cli/test_eval.py

campaign: venv
	$(BIN)/python -m tests.campaign

lint: style types

style: venv
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check .

types: venv
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: venv
	$(BIN)/mkdocs build --quiet

bench: $(VENV)/run
	$(BIN)/python -m benchmarks.layers

clean:
	rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
