# Every target does its own set-up, in .venv; Python 3.11 or newer and make are all it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# uv reads its own variable for local wheels; pip's is passed on where it is set.
UV := $(if $(PIP_FIND_LINKS),UV_FIND_LINKS="$(PIP_FIND_LINKS)" )$(BIN)/uv
INSTALL := VIRTUAL_ENV="$(CURDIR)/$(VENV)" $(UV) pip install --quiet

.PHONY: quickstart test lint bench clean

quickstart: $(VENV)/.installed-quickstart  ## Train the calculator agent, from nothing.
	$(BIN)/agentrl train --config configs/quickstart.yaml

test: $(VENV)/.installed-test  ## All tests that need no GPU and no vLLM.
	$(BIN)/python -m pytest -m "not vllm" $(PYTEST_ARGS)

lint: $(VENV)/.installed-test  ## Style and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed-test  ## Every benchmark, one after the other.
	$(BIN)/python -m benchmarks.gateway
	$(BIN)/python -m benchmarks.embedded_engine
	$(BIN)/python -m benchmarks.training

clean:  ## Remove the virtual environment.
	rm -rf $(VENV)

$(BIN)/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "agentrl needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + ". Type: make quickstart PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "uv>=0.5"

$(VENV)/.installed-quickstart: pyproject.toml | $(BIN)/uv
	$(INSTALL) -e ".[openai-agents]"
	touch $@

$(VENV)/.installed-test: pyproject.toml | $(BIN)/uv
	$(INSTALL) -e ".[all,dev]"
	touch $@
