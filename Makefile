# Each target sets up all it needs, with Python 3.11, pip and make.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# Its notices of newer versions are for nobody: versions are pinned.
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Compiled modules are kept even where the environment says not to: tests start many processes.
export PYTHONDONTWRITEBYTECODE :=
export NO_MKDOCS_2_WARNING := 1
# Three at a time on two cores: many tests wait for processes that they start.
PARALLEL := -n 3 --dist worksteal
READY := $(VENV)/.ready

.PHONY: demo test durations test-all test-extras test-integrations test-ray test-browser test-reports chaos mutants trainers site lint clean

# The main job: which method, here? Planned, then each class's best trained for real, in virtual
# time, on a described network: a table that says what is gained. A step is taken to compute for
# 60 ms, so that the times are the same everywhere.
demo: $(READY)
	$(BIN)/paceline compare examples/digits.py --workers 8 --link 100mbit --seed 0 \
	    --forward 0.02 --backward 0.04 --until accuracy=0.95

test: lint
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow"

# Fast tests that took more than 2 s in the last run, once more, alone: they fail if they still do.
durations: $(READY)
	$(BIN)/python -m tests.support.durations

# With as many examples of each law as its test asks for (tests/support/profiles.py).
test-all: lint
	HYPOTHESIS_PROFILE=ci $(BIN)/python -m pytest $(PARALLEL)

# With all that is optional: others' trainers, Ray, pages in Chromium (Debian: chromium,
# chromium-driver), W&B and MLflow. GPU tests are among `make test-all`: they run where CUDA is.
test-extras: test-integrations test-ray test-browser test-reports

# What they learn under their own DDP and under paceline.
test-integrations: trainers
	PACELINE_TESTS_NEED="$(PACELINE_TESTS_NEED) trainers" \
	    $(BIN)/python -m pytest -n 2 --dist loadfile tests/integrations

# Jobs on Ray, whose workers, server and nodes are killed; then SEEDS at random instants.
test-ray: $(VENV)/.with-ray
	PACELINE_TESTS_NEED="$(PACELINE_TESTS_NEED) ray" $(BIN)/python -m pytest tests/integrations/test_ray.py
	$(BIN)/python -m tests.chaos --ray --seeds $(SEEDS) --from $(FROM) --processes 3

test-browser: $(VENV)/.with-browser
	PACELINE_TESTS_NEED="$(PACELINE_TESTS_NEED) browser" $(BIN)/python -m pytest tests/tools/report

test-reports: $(VENV)/.with-reports
	PACELINE_TESTS_NEED="$(PACELINE_TESTS_NEED) reports" $(BIN)/python -m pytest tests/integrations/test_reports.py

# Faults at random instants: VIRTUAL seeds of state machines, then SEEDS of real jobs, from seed FROM on.
SEEDS ?= 40
VIRTUAL ?= 2000
FROM ?= 0
# Then as many random MESSAGES, and as many mutated ones, to each port.
MESSAGES ?= 2000
chaos: $(READY)
	@echo "replay all: make chaos SEEDS=$(SEEDS) VIRTUAL=$(VIRTUAL) FROM=$(FROM) MESSAGES=$(MESSAGES)"
	$(BIN)/python -m tests.chaos --virtual --seeds $(VIRTUAL) --from $(FROM)
	$(BIN)/python -m tests.chaos --seeds $(SEEDS) --from $(FROM)
	$(BIN)/python -m tests.chaos --ports --messages $(MESSAGES) --from $(FROM)

# N random mutants of the source, and the tests that kill them: benchmarks/results/mutants.jsonl.
N ?= 200
SEED ?= 0
JOBS ?= 2
mutants: $(VENV)/.with-mutants
	$(BIN)/python -m tests.support.mutants --number $(N) --seed $(SEED) --jobs $(JOBS)

# The documentation as pages: site/index.html. A link that leads nowhere is an error.
site: $(VENV)/.with-docs
	$(BIN)/python -m mkdocs build --quiet --strict --config-file website/mkdocs.yml

trainers: $(VENV)/.with-lightning,transformers,prometheus,manifests

# Extras of pyproject.toml, installed once.
$(VENV)/.with-%: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[$*]"
	touch $@

# What five papers claim, and what paceline reaches: docs/reference/paper-results.md. About ten minutes;
# QUICK=1 checks a lower bound of each in a minute, PAPER=osp is one paper, AGAIN=1 measures anew.
.PHONY: reproduce
reproduce: $(READY)
	$(BIN)/python -m benchmarks.papers $(if $(QUICK),--quick) $(addprefix --paper ,$(PAPER)) $(if $(AGAIN),--again)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python website/prose.py

$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV), once: Python's own part, torch (200 MB or more), then the rest; about a minute"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt \
	    "torch==2.13.0"
	@echo "torch is there; now paceline and what its tests need"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt \
	    --editable ".[examples,dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) site paceline-runs paceline-plan paceline-doctor paceline-switches .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
