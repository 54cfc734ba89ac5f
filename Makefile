# Each target sets up all it needs, with Python 3.11, pip and make.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# Two at a time: many tests start processes of their own, and wait for them.
PARALLEL := -n 2 --dist worksteal
READY := $(VENV)/.ready

.PHONY: demo test test-all lint clean

# The main job: a real model on real data, in virtual time on a described network, with
# a table that says what the network costs.
demo: $(READY)
	$(BIN)/paceline compare examples/digits.py --workers 8 --link 100mbit --seed 0 \
	    --variant bsp --variant bsp:fusion=ddp --variant bsp:fusion=wfbp

test: lint
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow"

test-all: lint
	$(BIN)/python -m pytest $(PARALLEL)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt \
	    "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt \
	    --editable ".[examples,dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) paceline-runs .pytest_cache .mypy_cache .ruff_cache
