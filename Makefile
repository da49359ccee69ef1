# Everything runs inside .venv, which is made once from pyproject.toml: the core for the demo, all extras for the rest.
PYTHON ?= python3
BIN := .venv/bin
LIGHT := .venv/.light
READY := .venv/.ready
SITE := .venv/.site
INSTALL := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-compile --editable
# pip compiles every file with one core; this uses all of them, and leaves out folders that tests hardly import.
UNUSED := /tests?/|/transformers/models/|/ray/(autoscaler|dashboard|data|llm|rllib|serve|train|tune)/|/torch/(_inductor|_vendor|testing)/
UNUSED := $(UNUSED)|/sympy/(combinatorics|parsing|physics|stats)/|/(databricks|debugpy|fontTools|mypyc?|networkx|onnxruntime)/
UNUSED := $(UNUSED)|/(pip|pygments|pytorch_lightning|setuptools|spacy|torchgen)/
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '$(UNUSED)' .venv/lib src benchmarks research

# In the order of their names: files with few tests, which take longest, would come last and leave a core idle.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder
# After a training, numbers differ between instruction sets and numbers of threads; what tests assert must not. oneDNN and ATen read
# the first two variables; the third keeps threads that wait from taking the core of the other process.
OTHER_CPU := ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE
MOST_SENSITIVE := tests/project/test_docs.py tests/verdict

.PHONY: help venv browser demo test types tests test-portable bench calibrate docs clean

help:
	@echo "make demo    train a small network twice, audit its heatmaps, write a report (minutes, no data needed)"
	@echo "make test    format, lint, types, tests"
	@echo "make test-portable   all tests that train a network, on other instruction sets and numbers of threads (an hour)"
	@echo "make bench   measure speed against bare forward passes and other packages"
	@echo "make calibrate  measure the error rates of the verdict (hours; see python -m research.calibration --help)"
	@echo "make docs    the documentation as a site that needs no server, in site/"
	@echo "make venv    only the environment for tests, in .venv"
	@echo "make clean   remove .venv, caches and what the demo wrote"

venv: $(READY)

# The pages are tested in a real browser, the PDF with pdftotext. Where they can be neither found nor installed, those tests say so.
browser:
	@{ command -v chromium && command -v pdftotext; } >/dev/null || { test -x /usr/bin/apt-get && test "$$(id -u)" = 0 \
	  && apt-get update -qq >/dev/null && apt-get install -y -qq chromium poppler-utils >/dev/null; } || true

$(BIN)/python:
	@$(PYTHON) -m venv .venv

# Not one after the other: pip shall choose versions that suit everything at once.
$(LIGHT): pyproject.toml | $(BIN)/python
	@echo "filling .venv for the demo (once; downloads PyTorch, which takes minutes)"
	@$(INSTALL) .
	@touch $@

$(READY): pyproject.toml | $(BIN)/python
	@echo "filling .venv for the tests (once; downloads PyTorch and what heatproof is compared with, which takes minutes)"
	@$(INSTALL) ".[dev]"
	@$(COMPILE) || true
	@touch $(LIGHT) $(SITE) $@

demo: $(LIGHT)
	@$(BIN)/heatproof demo --out demo

test: $(READY) browser
	@$(BIN)/ruff format --check --quiet src tests benchmarks research docs/*.py examples
	@$(BIN)/ruff check --quiet --output-format concise src tests benchmarks research docs/*.py examples
	@$(MAKE) --no-print-directory --jobs 2 types tests

# At the same time: mypy uses one core, and tests leave some of both idle.
types:
	@nice $(BIN)/mypy --no-error-summary

tests:
	@OMP_NUM_THREADS=1 $(PYTEST)
	@$(OTHER_CPU) $(PYTEST) -m trains $(MOST_SENSITIVE)

# Every pair of an instruction set of oneDNN, one of ATen and a number of threads; DEFAULT and no value are the machine's own.
test-portable: $(READY)
	@set -e; for setting in "DEFAULT avx2 1" "DEFAULT default 2" "AVX2 default 1" "AVX2 avx2 2" "SSE41 default 2" "SSE41 avx2 1"; do \
	  set -- $$setting; echo "oneDNN $$1, ATen $$2, threads $$3"; \
	  ONEDNN_MAX_CPU_ISA=$$1 ATEN_CPU_CAPABILITY=$$2 OMP_NUM_THREADS=$$3 OMP_WAIT_POLICY=PASSIVE $(PYTEST) -m "trains or seeds"; \
	done

bench: $(READY)
	@$(BIN)/python -m benchmarks

calibrate: $(READY)
	@$(BIN)/python -m research.calibration --out calibration

$(SITE): pyproject.toml | $(BIN)/python
	@echo "filling .venv for the documentation (once)"
	@$(INSTALL) ".[docs]"
	@touch $(LIGHT) $@

docs: $(SITE)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open site/index.html"

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis demo site build dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
