# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS = all
# Compiled modules are kept even where an environment says otherwise: without them, every process compiles torch anew.
export PYTHONDONTWRITEBYTECODE :=
# Installed once for a given set of pins: the stamp is newer than what it was made from, and the environment still runs.
installed = $(BIN)/python -c 'import ncd_serve, ncd_training, ncd_export' 2>/dev/null \
  && [ $(VENV)/.installed-$(1) -nt pyproject.toml ] && [ $(VENV)/.installed-$(1) -nt constraints.txt ]

.PHONY: demo test quick check format docs sbom pins clean
.DEFAULT_GOAL := test

# Without the tools of development.
demo: EXTRAS = train
demo: install
	rm -rf ncd-demo
	$(BIN)/ncd-serve demo

# Many tests wait for a server: beside each other they take half the time, also on two cores. A file's tests stay
# together, as do fixtures; files begin in the order of tests/conftest.py, those that take longest first.
test: install check
	$(BIN)/pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder

# The inner loop, at most three minutes on two cores: all checks, and tests that start no server, browser or torchrun.
quick: check
	$(BIN)/pytest --quiet --numprocesses 2 --dist loadfile -m 'not slow and not triton' \
	  tests/contract tests/export tests/serve tests/training

# Everything that CI runs but the tests (which build the wheel and install it).
check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The pages of docs/, in build/site.
docs: install
	$(BIN)/python docs/pages.py
	$(BIN)/mkdocs build --strict

# All packages of the environment with versions, licences and hashes, as CycloneDX.
sbom: install
	mkdir -p build
	$(BIN)/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml --output-file build/sbom.cdx.json

# Whether a pinned release was taken back by its authors.
pins: install
	$(BIN)/python tools/check_pins.py

format: install
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

.PHONY: install
install:
	@$(call installed,$(EXTRAS)) || $(MAKE) --no-print-directory reinstall EXTRAS=$(EXTRAS)

# On top of what `make demo` installed, or from nothing: a half-made or moved environment is not worth mending.
# Python compiles what is imported; compiling all of it beforehand takes minutes and hundreds of megabytes.
.PHONY: reinstall
reinstall:
	$(call installed,train) || { rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); }
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $(VENV)/.installed-train $(VENV)/.installed-$(EXTRAS)

clean:
	rm -rf $(VENV) dist ncd-demo .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
