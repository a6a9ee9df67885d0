# make demo   sets up .venv and trains two small models with and without precisionpass
# make test   sets up .venv and runs every check and test
# Both work on a fresh clone. Needed beforehand: Python >= 3.11 with pip and venv (choose it with PYTHON=...).

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

export OMP_NUM_THREADS ?= 1

.PHONY: demo test

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The versions are pinned in every call of pip: an open range of torch can pull a build of several gigabytes.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "precisionpass needs Python 3.11 or newer; name one: make PYTHON=python3.11")'
	@test -x $(BIN)/python || { echo "making .venv ..."; $(PYTHON) -m venv .venv; }
	@echo "installing precisionpass and its development tools into .venv (some minutes the first time) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@
