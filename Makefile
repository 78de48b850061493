# make demo   a small real checkpoint inspected, converted and verified (no torch)
# make test   everything that is checked on every change
# make bench  memory and time beside cp, and DeepSpeed if DEEPSPEED names the Python of an environment with 0.19.8
#             (10 minutes, 10 GB of disk); make bench-70b the same for 70B and 405B models
# make soak   200 kills, and every call of writer and reader failing in turn (12 minutes); make fuzz a minute of hostile input
# The virtual environment .venv is the project's own; constraints.txt pins what goes into it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
DEMO := tests/data/b_z3_tied_triple/checkpoint

.PHONY: demo test lint format bench bench-70b fuzz soak test-deepspeed clean

demo: $(VENV)/.installed
	rm -rf demo-out
	$(BIN)/lazyzero inspect $(DEMO)
	$(BIN)/lazyzero convert $(DEMO) demo-out --max-shard-size 5KB
	$(BIN)/lazyzero verify $(DEMO) demo-out

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --cov --cov-report=term

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python setup.cfg constraints.txt
	$(PIP) --editable .
	touch $@

# torch first and by itself: its pin decides which build is taken, whatever asks for it later.
$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) torch
	$(PIP) --editable '.[dev]'
	touch $@

# Scratch files of up to 10 GB go to SCRATCH and are deleted; DEEPSPEED names a Python that has DeepSpeed, the peer.
SCRATCH ?= bench-scratch
BENCH := $(BIN)/python -m benchmarks --dir $(SCRATCH) --out benchmarks/results $(if $(DEEPSPEED),--deepspeed $(DEEPSPEED))

bench: $(VENV)/.installed-bench
	$(BENCH) small

bench-70b: $(VENV)/.installed-bench
	$(BENCH) large

fuzz: $(VENV)/.installed-dev
	$(BIN)/python -m tests.fuzz --seconds 60

soak: $(VENV)/.installed-dev
	$(BIN)/python -m tests.reliability.soak --kills 200
	SOAK=1 $(BIN)/python -m pytest -q tests/reliability/test_faults.py tests/hostile

# DeepSpeed's own converter beside ours, in an environment of its own.
test-deepspeed: $(VENV)-deepspeed/.installed
	DS_ACCELERATOR=cpu $(VENV)-deepspeed/bin/python -m pytest -m deepspeed

$(VENV)/.installed-bench: $(VENV)/.installed-dev
	$(PIP) --editable '.[bench]'
	touch $@

$(VENV)-deepspeed/.installed: setup.cfg constraints.txt
	$(PYTHON) -m venv $(VENV)-deepspeed
	$(VENV)-deepspeed/bin/python -m pip install --quiet --constraint constraints.txt torch setuptools wheel
	$(VENV)-deepspeed/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	DS_BUILD_OPS=0 $(VENV)-deepspeed/bin/python -m pip install --quiet --constraint constraints.txt --no-build-isolation deepspeed
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-deepspeed demo-out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*
