PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types unit browser docs slow soak audit mnist experiments bench clean

DATA ?= .data
PRESET ?= smoke
WORKERS ?= 2

help:  ## show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

setup: $(READY)  ## create .venv with everything that development needs

# torch goes first and alone: its pinned build is the small one, which the rest then accepts.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/epsilons demo --out .venv/.demo >/dev/null 2>&1  # Numba compiles its loops here, once
	rm -rf .venv/.demo
	@touch $@

demo: setup  ## train on the embedded digits, show ε per example, write the report
	$(BIN)/epsilons demo

test: lint types unit  ## lint, type-check and test

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

unit: setup
	$(BIN)/pytest -m "not slow" -n $(WORKERS) --dist loadscope

browser: setup  ## reports and the owners' page in a real Chromium alone
	$(BIN)/pytest -m browser

docs: setup  ## the documentation as a site, in .site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open .site/index.html, or with search: $(BIN)/python -m http.server -d .site"

slow: setup  ## the full-size tests
	$(BIN)/pytest -m slow

soak: setup  ## 200 times kill -9 at random moments, 100 of one rank of several; readers beside 10,000 steps
	EPSILONS_KILLS=200 $(BIN)/pytest tests/training/test_resume.py -k killed
	EPSILONS_KILLS=100 $(BIN)/pytest tests/training/test_distributed.py -k "killed"
	EPSILONS_LIVE_STEPS=10000 $(BIN)/pytest tests/journal/test_live.py

audit: setup  ## known faults and which instrument finds each; calibration, power, audits of right code
	PYTHONPATH=tests/gradients $(BIN)/python tests/audit/mutants.py
	$(BIN)/python tests/audit/figures.py

mnist: setup  ## all 60,000 examples, both clippings, from the folder DATA (default .data)
	@for clipping in max individual; do \
	  $(BIN)/python experiments/mnist.py $(DATA) runs/mnist-$$clipping --clipping $$clipping || exit 1; done
	$(BIN)/python experiments/mnist.py $(DATA) runs/mnist-rarely --refreshes-per-epoch 0.334 --epochs 9
	$(BIN)/python experiments/mnist.py $(DATA) runs/mnist-followed --follow 1000 --epochs 15

experiments: setup  ## the paper's tables and figures, preset PRESET (default smoke), from DATA
	$(BIN)/python -m experiments all --preset $(PRESET) --data $(DATA)

bench: setup  ## every figure of speed beside its peer
	@for name in accounting distributed noise norms; do \
	  echo "== $$name"; $(BIN)/python benchmarks/$$name.py || exit 1; done

clean:  ## remove what the commands above made, except runs/
	rm -rf .venv .data .site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks experiments -name __pycache__ -type d -prune -exec rm -rf {} +
