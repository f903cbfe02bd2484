# What each target does stands in README.md, so that pip or uv users can do without make.
# PYTHON picks the interpreter that creates .venv, ARGS is passed on to the command, WORKERS is pytest's number of
# processes, BENCHMARKS names modules of benchmarks/.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
WORKERS ?= 2
BENCHMARKS ?= engine_core api_process accuracy
TORCH := torch==2.13.0

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install serve test lint soak bench clean

help:
	@echo "make install   create $(VENV) and install headrace into it, with what the tests need"
	@echo "make serve     install, then start the server:  make serve ARGS='--port 9000'"
	@echo "make test      install, then check format, lint, types and imports, and run the tests"
	@echo "make soak      install, then the long tests"
	@echo "make bench     install, then the benchmarks"
	@echo "make clean     remove $(VENV)"

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
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[test]"
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

soak: install
	$(BIN)/python -m pytest -m soak --timeout 0 $(ARGS)

bench: install
	@set -e; for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python -m benchmarks.$$name; done

clean:
	rm -rf $(VENV)
