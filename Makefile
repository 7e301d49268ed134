# Two commands are all anyone needs: `make demo` and `make test`. Both set up `.venv` first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
N      ?= 1

.PHONY: setup demo test lint bench deaths kills recovery pairs clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    set up, then watch a training die and hear why, and the same one guarded live on"
	@echo "make test    set up, then lint and every test (about 25 minutes on 2 cores)"
	@echo "make bench   the figures of docs/benchmarks.md, as tables and bench/results/*.json"
	@echo "make deaths  the death suite: N times every kind (make deaths N=20)"
	@echo "make kills   checkpoints under SIGKILL, power loss, full disks and flipped bits (make kills N=1000)"
	@echo "make recovery  every allocation of a training step fails once, in some 30 models (under 10 minutes)"
	@echo "make pairs   every rule of buoy check: its bad example does what the rule says, the mended one does not"
	@echo "make lint    ruff and mypy --strict"

setup: $(STAMP)

# requirements-dev.txt is exact where a looser range would pull gigabytes (see docs/decisions.md).
$(STAMP): pyproject.toml requirements-dev.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "buoy needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $(STAMP)

demo: setup
	$(BIN)/buoy demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: setup lint
	$(BIN)/python -m pytest

bench: setup
	$(BIN)/python -m bench

pairs: setup
	$(BIN)/python -m tests.lint.pairs

deaths: setup
	$(BIN)/python -m tests.deaths --repeat $(N)

kills: setup
	$(BIN)/python -m tests.kills --number $(N)

recovery: setup
	$(BIN)/python -m tests.recovery
	$(BIN)/python -m tests.keras_step

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
