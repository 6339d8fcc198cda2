# Every target works from a fresh clone: what it needs is installed into .venv first.
# Needs: Linux, Python 3.11 or newer with its headers (python3-dev), and a C++ compiler
# (g++), because hnswlib is compiled. Another Python: make PYTHON=python3.12 ...

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
FUZZER := $(VENV)/.fuzzer
PIP := $(BIN)/python -m pip --disable-pip-version-check

# The versions that hnswlib is compiled with are those of the lock as well; pip 25.3
# renamed the variable for that. Without HNSWLIB_NO_NATIVE it is compiled for this very
# processor, and the environment crashes when it is moved to an older one.
export HNSWLIB_NO_NATIVE := 1
WITH_LOCK := PIP_CONSTRAINT=$(CURDIR)/requirements.lock PIP_BUILD_CONSTRAINT=$(CURDIR)/requirements.lock

.PHONY: help install demo test test-quick test-federation test-faults test-endurance test-data test-milvus test-clients attacks sim fuzz lint format bench bench-learning bench-generator bench-poisoning proto lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-15s %s\n", $$1, $$2 }'

install: $(INSTALLED) ## make .venv and install everything that is needed

demo: $(INSTALLED) ## three sites on this machine train together and answer (ARGS="--json")
	@$(BIN)/fedctl demo $(ARGS)

# Files are dealt out; a process that dies ends the run: behind it pytest-xdist has been seen to wait for ever.
DEALT := --dist loadfile --max-worker-restart 0
THREE := -n 3 $(DEALT)

test: $(INSTALLED) ## run the tests that need no real daemons, three at once (ARGS="-k rounds"; ARGS="-n 0" for one at a time)
	@$(BIN)/python -m pytest $(THREE) -m "not federation and not faults and not endurance and not data" $(ARGS)

test-federation: $(INSTALLED) ## real daemons, gateways and browsers over real TLS: rounds, people, attacks
	@$(BIN)/python -m pytest $(THREE) -m "federation and not faults and not endurance and not data" $(ARGS)

test-quick: $(INSTALLED) ## run the tests that are quick each, a minute and a quarter together
	@$(BIN)/python -m pytest -q $(THREE) -m "not slow and not federation" $(ARGS)

SEEDS ?= 1000
sim: $(INSTALLED) ## simulate rounds under drawn faults, with liars, with restored states, of two models (SEEDS=100000 ARGS="--first 5000 --jobs 2")
	@$(BIN)/python -m tests.simulation --seeds $(SEEDS) $(ARGS)
	@$(BIN)/python -m tests.simulation --liars --seeds $(SEEDS) $(ARGS)
	@$(BIN)/python -m tests.simulation --restores --seeds $(SEEDS) $(ARGS)
	@$(BIN)/python -m tests.simulation --liars --restores --seeds $(SEEDS) $(ARGS)
	@$(BIN)/python -m tests.simulation.lines --seeds $(SEEDS) $(ARGS)

# In network namespaces, which need root or CAP_SYS_ADMIN and CAP_NET_ADMIN; skipped without.
test-faults: $(INSTALLED) ## cut the networks of five daemons, fill their disks, kill them; coordinators lie; drawn simulations
	@$(BIN)/python -m pytest -q -n 2 $(DEALT) --durations=12 -m "faults and not endurance" $(ARGS)

test-endurance: $(INSTALLED) ## kill daemons at every effect boundary, train 200 rounds
	@$(BIN)/python -m pytest -q -s --durations=12 -m "endurance and not attacks" $(ARGS)

test-data: $(INSTALLED) ## what is measured on data kept elsewhere (HANSE_DATA): three institutes, real PDFs
	@$(BIN)/python -m pytest -q -s -m data $(ARGS)

# Its packages take 350 MB, so the tests of `make test` leave it out.
MILVUS := $(VENV)/.milvus
test-milvus: $(MILVUS) ## the dense index at a Milvus Lite server, in tests and figures beside hnswlib
	@$(BIN)/python -m pytest -q tests/daemon/library/dense tests/live/test_milvus.py $(ARGS)

# Clients as people have them, each major version in an environment of its own. MCP's 1.10 is the
# first with structured results, and imports what later versions of pydantic lack.
CLIENTS := openai-1 openai-2 openai-3 langchain mcp-1.10 mcp-1 mcp-2
openai-1 := 'openai>=1,<2'
openai-2 := 'openai>=2,<3'
openai-3 := 'openai>=3,<4'
langchain := 'langchain-openai>=1,<2'
mcp-1.10 := 'mcp>=1.10,<1.11' 'pydantic<2.12'
mcp-1 := 'mcp>=1.30,<2'
mcp-2 := 'mcp>=2,<3'
LLAMA_CPP := $(VENV)/.llama-cpp
test-clients: $(CLIENTS:%=$(VENV)/.clients-%/.installed) $(LLAMA_CPP)/.installed ## OpenAI's, LangChain's and MCP's clients and curl ask a real site; llama.cpp's server writes
	@$(BIN)/python -m tests.daemon.gateway.clients $(CLIENTS:%=$(VENV)/.clients-%)
	@$(BIN)/python -m pytest -q tests/daemon/answering/test_llama_cpp.py

$(LLAMA_CPP)/.installed: $(INSTALLED)
	@$(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check install -qq 'xllamacpp==2026.10.11549' 'gguf==0.19.0'
	@touch $@

$(VENV)/.clients-%/.installed: $(INSTALLED)
	@$(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check install -qq $($*)
	@touch $@

MINUTES ?= 10
fuzz: $(FUZZER) ## give hostile bytes to every parser of a peer's (MINUTES=30 ARGS="--only push x509")
	@$(BIN)/python -m tests.fuzz run --minutes $(MINUTES) $(ARGS)

attacks: $(INSTALLED) ## attack a site, with its defences and without; 10,000 connections
	@$(BIN)/python -m pytest -q -rP -m attacks $(ARGS)

lint: $(INSTALLED) ## check style, layout and types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

format: $(INSTALLED) ## lay out the code and fix what can be fixed
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

bench: $(INSTALLED) ## measure; figures go to docs/results/bench.jsonl
	@$(BIN)/python -m tests.benchmarks $(ARGS)

bench-poisoning: $(INSTALLED) ## poison updates on real questions, with and without robust rules
	@$(BIN)/python -m tests.benchmarks.attacks.poisoning $(ARGS)

# Finished cells and the encoder's features stay in the cache (CACHE=..., default
# ~/.cache/hanse-learning-bench), so it can be interrupted and taken up again.
DATA ?= $(or $(HANSE_DATA),../shared/data)
bench-learning: $(INSTALLED) ## compare recipes on real data (DATA=../shared/data QUICK=1 CACHE=...)
	@QUICK=$(QUICK) $(BIN)/python -m tests.learning_bench --data $(DATA) $(if $(CACHE),--cache $(CACHE)) $(ARGS)

# Rows stay in the cache (CACHE=..., default ~/.cache/hanse-generator-bench) as they are done.
bench-generator: $(INSTALLED) ## train generators on real answers: alone, federated, with noise (ARGS="--seeds 1 --base-model FOLDER")
	@$(BIN)/python -m tests.generator_bench --data $(DATA) $(if $(CACHE),--cache $(CACHE)) $(ARGS)

proto: $(INSTALLED) ## write the generated code of proto/*.proto again
	@$(BIN)/python -m tests.proto.test_wire

# The stamp exists only behind a complete installation: without it the environment is
# made from nothing, with an old one it is brought up to date.
$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Installing into $(VENV): takes a few minutes, hnswlib is compiled ..."
	@if [ -e $@ ]; then rm $@; else $(PYTHON) -m venv --clear $(VENV); fi
	@$(WITH_LOCK) $(PIP) install -qq --no-compile -r requirements.lock
	@$(PIP) install -qq --no-deps --no-build-isolation -e .
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # some packages ship files of other Pythons
	@touch $@
	@echo "Installed."

$(MILVUS): $(INSTALLED)
	@$(WITH_LOCK) $(PIP) install -qq $$($(BIN)/python -c 'import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; print(*extras["milvus"], *extras["milvus-lite"])')
	@touch $@

# Some 35 MiB that nothing but `make fuzz` needs.
$(FUZZER): $(INSTALLED)
	@$(PIP) install -qq --no-deps "$$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["fuzz"])')"
	@touch $@

# Newest versions that pyproject.toml allows. The +cpu of a torch from elsewhere goes, and
# so do the libraries of its CUDA build, which torch pins itself.
lock: ## renew requirements.lock
	@folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	$(PYTHON) -m venv "$$folder/venv"; \
	"$$folder/venv/bin/python" -m pip --disable-pip-version-check install -qq \
	  '.[dev,offline-model,eval]' setuptools wheel pybind11; \
	{ sed -n '/^#/p; /^#/!q' requirements.lock; \
	  "$$folder/venv/bin/python" -m pip freeze --all --exclude pip --exclude hanse \
	    | sed -E 's/\+[a-z0-9.]+$$//' | grep -vE '^(nvidia-|cuda-|triton)'; } > "$$folder/lock"; \
	mv "$$folder/lock" requirements.lock
	@echo "requirements.lock renewed: run make lint test"

clean: ## remove .venv and everything that was generated
	@rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .fuzz demo-work
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
