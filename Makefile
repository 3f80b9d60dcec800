# The commands of this repository. Everything is installed into .venv, from the pins in constraints.txt.

SHELL := bash
.SHELLFLAGS := -o pipefail -c
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
# Of all that pip says on stdout, the name of each package, so that one sees it move; errors come on stderr.
BRIEFLY := | awk '/^Collecting / { print "  " $$2; fflush() } /^Installing / { print "  installing"; fflush() }'

# The first Python that is new enough; `make PYTHON=/some/python test` overrides the choice.
IS_NEW_ENOUGH := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python; do \
	"$$python" -c '$(IS_NEW_ENOUGH)' 2>/dev/null && echo "$$python" && break; done)

.DEFAULT_GOAL := help
.PHONY: help demo test thorough soak bench notebooks docs format clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.examples ## Train a small network on an emulated 2 x 2 mesh
	$(BIN)/python examples/digits.py

test: $(VENV)/.dev ## Lint, check the types and run the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m "not long"

thorough: $(VENV)/.dev ## Run the tests that take long: faults, races, soak and more
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m long

soak: $(VENV)/.dev ## Run for minutes on four ranks: memory stays flat
	$(BIN)/python tests/soak.py

bench: $(VENV)/.bench ## Run the measurements in benchmarks/
	$(BIN)/python benchmarks/run.py --plots docs/figures --markdown docs/figures.md

notebooks: $(VENV)/.dev ## Run the notebooks and write their outputs
	$(BIN)/python notebooks/execute.py

docs: $(VENV)/.docs ## Build the documentation into docs/_build/html
	$(BIN)/python -m sphinx -q -E -W --keep-going -b html docs docs/_build/html
	@echo "built docs/_build/html/index.html"

format: $(VENV)/.dev ## Rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Delete .venv, caches and built files
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist docs/_build docs/notebooks
	find fcoll tests examples benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +

# A stamp per set of packages: a second run installs nothing, a change of the pins installs again.
$(VENV)/.python:
	@test -n "$(PYTHON)" || { \
		echo "fcoll needs Python 3.11 or newer, with its venv module; none was found on the PATH." >&2; \
		echo "Install one, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@"$(PYTHON)" -c '$(IS_NEW_ENOUGH)' || { \
		echo "$(PYTHON) is not Python 3.11 or newer with its venv module." >&2; exit 1; }
	@echo "making $(VENV) with $$("$(PYTHON)" --version)"
	@"$(PYTHON)" -m venv $(VENV)
	@touch $@

$(VENV)/.build: $(VENV)/.python constraints.txt
	@$(PIP) --quiet hatchling editables
	@touch $@

$(VENV)/.examples: EXTRAS := examples
$(VENV)/.dev: EXTRAS := dev,examples
$(VENV)/.bench: EXTRAS := bench
$(VENV)/.docs: EXTRAS := docs
$(VENV)/.examples $(VENV)/.dev $(VENV)/.bench $(VENV)/.docs: $(VENV)/.build pyproject.toml
	@echo "installing fcoll[$(EXTRAS)] into $(VENV) (the first time, torch takes a few minutes)"
	@$(PIP) --no-build-isolation --editable '.[$(EXTRAS)]' $(BRIEFLY)
	@touch $@
