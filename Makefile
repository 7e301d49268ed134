# Two commands are all anyone needs: `make demo` and `make test`. Both set up `.venv` first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
N      ?= 1
RUN_AS ?= 65534
TESTS  ?=
JOBS   ?= auto
SHARE  ?= 1/3
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -r fEs

.PHONY: setup demo test test-all test-share test-plain lint bench deaths healthy kills recovery fuzz pairs measure compat clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    set up, then watch a training die and hear why, and the same one guarded live on"
	@echo "make test    set up, then lint and every test that is not slow (about 9 minutes on 2 cores; JOBS=1: one at a time)"
	@echo "make test-all  the slow ones too; make test-share SHARE=2/3: one third of the slow ones, the second"
	@echo "             TESTS=tests/machine, for each of these: some of them"
	@echo "make test-plain  the demo and every test without privileges: as an ordinary user, or as root (RUN_AS=0)"
	@echo "make bench   the figures of docs/benchmarks.md, as tables and bench/results/*.json"
	@echo "make deaths  the death suite: N times every kind (make deaths N=20)"
	@echo "make healthy  slow, greedy and silent trainings that are well: N times every shape, no false alarm (make healthy N=5)"
	@echo "make kills   checkpoints under SIGKILL, power loss, full disks and flipped bits (make kills N=1000)"
	@echo "make recovery  every allocation of a training step fails once, in some 30 models (under 10 minutes)"
	@echo "make fuzz    damaged and forged run folders, checkpoints, mirrors, notebooks for every verb (make fuzz N=5000)"
	@echo "make pairs   every rule of buoy check: its bad example does what the rule says, the mended one does not"
	@echo "make lint    ruff and mypy --strict"
	@echo "make compat  the framework tests against the oldest and newest versions, and Colab's (downloads several GB)"
	@echo "make measure the shape of the code in figures: files, walks through them, borrowed private names"

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
	$(PYTEST) -m "not slow" $(TESTS)

test-all: setup lint
	$(PYTEST) $(TESTS)

test-share: setup
	$(PYTEST) -m slow --share $(SHARE) $(TESTS)

# As most people run it: no capabilities, control groups read-only, no kernel log. What is skipped says why.
test-plain: setup
	$(BIN)/python scripts/ordinary_user.py --uid $(RUN_AS) -- $(BIN)/buoy demo
	$(BIN)/python scripts/ordinary_user.py --uid $(RUN_AS) -- $(PYTEST) -m "not slow" $(TESTS)

bench: setup
	$(BIN)/python -m bench

pairs: setup
	$(BIN)/python -m tests.lint.pairs

deaths: setup
	$(BIN)/python -m tests.deaths --repeat $(N)

healthy: setup
	$(BIN)/python -m tests.healthy --repeat $(N)

kills: setup
	$(BIN)/python -m tests.kills --number $(N)

fuzz: setup
	$(BIN)/python -m tests.fuzz --number $(N)

recovery: setup
	$(BIN)/python -m tests.recovery
	$(BIN)/python -m tests.keras_step

compat: setup
	$(BIN)/python scripts/compat.py

measure: setup
	$(BIN)/python scripts/measure.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
