# Everything runs inside .venv, which is made once from pyproject.toml.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help venv browser demo test bench clean

help:
	@echo "make demo    train a small network twice, audit its heatmaps, write a report (minutes, no data needed)"
	@echo "make test    format, lint, types, tests"
	@echo "make bench   measure speed against bare forward passes and other packages"
	@echo "make venv    only the environment, in .venv"
	@echo "make clean   remove .venv, caches and what the demo wrote"

venv: $(READY)

# The pages are tested in a real browser. Where it can be neither found nor installed, those tests say so.
browser:
	@command -v chromium >/dev/null || { test -x /usr/bin/apt-get && test "$$(id -u)" = 0 \
	  && apt-get update -qq >/dev/null && apt-get install -y -qq chromium >/dev/null; } || true

$(READY): pyproject.toml
	@echo "making .venv (once; downloads PyTorch)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

demo: $(READY)
	@$(BIN)/heatproof demo --out demo

test: $(READY) browser
	@$(BIN)/ruff format --check --quiet src tests docs/*.py examples
	@$(BIN)/ruff check --quiet --output-format concise src tests docs/*.py examples
	@$(BIN)/mypy --no-error-summary
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile

bench: $(READY)
	@$(BIN)/heatproof bench

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis demo build dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
