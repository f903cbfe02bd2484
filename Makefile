# What each target does stands in README.md, so that pip or uv users can do without make.
# PYTHON picks the interpreter that creates .venv, ARGS is passed on to the command, WORKERS is pytest's number of
# processes, BENCHMARKS names modules of benchmarks/.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
WORKERS ?= 2
BENCHMARKS ?= engine_core api_process accuracy
TORCH := torch==2.13.0
PIP := -m pip install --quiet --disable-pip-version-check --retries 10

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Programs of others, each in an environment of its own.
CLIENTS := .cache/clients
HARNESS := .cache/lm-eval

.DEFAULT_GOAL := help
.PHONY: help install serve test test-clients lint soak bench lm-eval clean

help:
	@echo "make install       create $(VENV) and install headrace into it, with what the tests need"
	@echo "make serve         install, then start the server:  make serve ARGS='--port 9000'"
	@echo "make test          install, then check format, lint, types and imports, and run the tests"
	@echo "make test-clients  install, then run clients that others wrote against the server (needs Node 20 and npm)"
	@echo "make soak          install, then the long tests"
	@echo "make bench         install, then the benchmarks"
	@echo "make lm-eval       install, then compare lm-eval's figures through the API with those of transformers"
	@echo "make clean         remove $(VENV) and what else was installed here"

install: $(STAMP)

# torch first and alone: every later step then sees it installed and resolves nothing against it.
$(STAMP): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "headrace needs Python 3.11 or newer, and '$(PYTHON)' is not here." \
	  "Install it, or name another one: make install PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "headrace needs Python 3.11 or newer;" \
	  "'$(PYTHON)' is $$($(PYTHON) -c 'import platform; print(platform.python_version())')." \
	  "Name another one: make install PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "'$(PYTHON)' has no venv module." \
	  "On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) "$(TORCH)"
	$(BIN)/python $(PIP) -e ".[test]"
	@touch $@

serve: install
	@exec $(BIN)/headrace serve $(ARGS)

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# One thread for each test process: OpenMP teams that share cores spin against each other.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder -m "not soak" $(ARGS)

# Its tests run where the clients are; the server runs where Headrace is.
test-clients: install $(CLIENTS)/.installed
	HEADRACE_PYTHON=$(abspath $(BIN)/python) $(CLIENTS)/bin/python -m pytest --confcutdir=tests/clients tests/clients $(ARGS)

$(CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/package.json
	@node -e 'process.exit(parseInt(process.versions.node) < 20 ? 1 : 0)' && command -v npm >/dev/null || { \
	  echo "The clients' tests need Node 20 or newer, and npm." >&2; exit 1; }
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python $(PIP) -r tests/clients/requirements.txt
	npm install --prefix tests/clients --no-package-lock --no-audit --no-fund --loglevel=error --fetch-retries=10
	@touch $@

soak: install
	$(BIN)/python -m pytest -m soak --timeout 0 $(ARGS)

bench: install
	@set -e; for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python -m benchmarks.$$name; done

lm-eval: install $(HARNESS)/.installed
	$(BIN)/python -m benchmarks.lm_eval --harness $(HARNESS)/bin/lm_eval $(ARGS)

$(HARNESS)/.installed: benchmarks/lm_eval_requirements.txt
	$(PYTHON) -m venv $(HARNESS)
	$(HARNESS)/bin/python $(PIP) "$(TORCH)"
	$(HARNESS)/bin/python $(PIP) -r $<
	@touch $@

clean:
	rm -rf $(VENV) .cache tests/clients/node_modules
