# Everything happens in .venv: nothing is installed outside of this folder, no root is needed.
# Works with GNU make 3.81 and newer, and with any POSIX shell.

PYTHON ?= python3
EXTRAS ?= examples,frameworks,deepspeed,boosting,dev
VENV := .venv
PY := $(VENV)/bin/python
comma := ,
STAMP := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))

.DEFAULT_GOAL := help
.PHONY: help demo test setup data check unit bench clean

help:  ## List these targets.
	@sed -n 's/^\([a-z]*\):.*  ## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

demo: setup  ## Install, then run a first sweep: digit classifiers that race under ASHA.
	$(PY) sweep.py sweeps=digits_asha

test: check  ## Install, then run everything that CI runs: lint, types, layers, all tests.
	@$(MAKE) data || echo "Not all data is here: tests that need what is missing are skipped." >&2
	$(PY) -m pytest

setup: $(STAMP)  ## Create .venv with the pinned versions and heats; quick where it is up to date.
	@:

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "heats needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) -V 2>/dev/null || echo not there)." >&2; \
		echo "Install one and name it: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing into $(VENV): a few minutes the first time, seconds after that."
	$(PY) -m pip install -qq --disable-pip-version-check -c requirements.lock -e '.[$(EXTRAS)]'
	@touch $@

data: setup  ## Download what the recipes' offline settings read (160 MB) to .cache/data, unless it is there.
	$(PY) -m heats.recipes.offline

check: setup  ## Lint, formatting, types and import layers.
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

unit: setup  ## Only the unit tests: no Ray, seconds.
	$(PY) -m pytest tests/unit

bench: setup  ## The benchmarks, side by side with what one would use instead (minutes).
	$(PY) -m benchmarks

clean:  ## Remove .venv, caches and builds. Never touches mlruns/.
	rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
