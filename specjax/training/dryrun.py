"""What a run will cost, told before anything is written: memory, bytes on disk, time."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import request
from specjax.models import drafter as backbone
from specjax.models import params
from specjax.training import run, trainer
from specjax.training.config import TrainConfig
from specjax.training.features import DTYPE
from specjax.training.packing import Batch
from specjax.training.trainer import States

TIMED = 3  # steps
BYTES = 12  # of a parameter and its two moments, float32


def estimate(config: TrainConfig) -> str:
    """A table of what `fit` would need. Runs a few steps on made-up text; writes nothing.

    Bytes of the cache and numbers of tokens are upper bounds: every answer is taken to be as long
    as it may be.
    """
    setup = run.prepare(config)
    documents, asked, answers = 0, 0, 0
    for source in config.sources:
        prompts = run.prompts_of(source)
        lengths = [1] * prompts if isinstance(prompts, int) else _lengths(setup.target, prompts)
        documents += len(lengths)
        asked += sum(lengths)
        answers += len(lengths) * source.max_new_tokens
    seconds, memory = _timed(setup)
    count = params.count(backbone.table(setup.network))
    everything = ""
    if config.vocabulary == "data":
        everything = f"; timed over all {setup.target.config.vocab_size:,} tokens, not the data's"
    lines = {
        "drafter": f"{count:,} parameters, {2 * count / 1e6:.1f} MB exported in bfloat16",
        "training text": f"{documents:,} documents, at most {asked + answers:,} tokens, of which "
        f"the target answers at most {answers:,}",
        "memory": f"{memory} and {BYTES * count / 1e6:,.0f} MB of parameters and moments, beside "
        "the target",
        "time": f"{seconds:.2f} s a step, {config.steps * seconds / 60:.0f} min for "
        f"{config.steps:,} steps, {config.rows * config.row_length / seconds:,.0f} tokens/s; "
        f"answers, cache and evaluation are not included{everything}",
        "checkpoints": f"{BYTES * count / 1e6:.0f} MB each, {config.keep + 1} at most",
    }
    if config.branches is not None:
        clean, more = config.row_length, config.branches.verified * setup.network.num_drafts
        lines["branches"] = (
            f"the target runs {config.rows * (clean + more):,} rows a step; without branches "
            f"{config.rows * clean:,}"
        )
    tapped = len(setup.network.taps) + config.objective.needs_target
    width = tapped * setup.target.config.layers.hidden_size * DTYPE.itemsize
    total = width * (asked + answers)
    lines["target's states"] = f"{width:,} bytes a token, " + (
        f"at most {total / 1e9:.2f} GB on disk (limit {config.cache_gb:g} GB)"
        if config.features == "cache"
        else f"computed in every step (a cache would take at most {total / 1e9:.2f} GB)"
    )
    return "\n".join(f"{key:<17} {value}" for key, value in lines.items())


def _lengths(target: Any, prompts: list[list[Any]]) -> list[int]:
    """Tokens of each turn's prompt, without the answers before it."""
    chats = target.has_tokenizer and target.tokenizer.chat_template
    asked = [
        [{"role": "user", "content": turn}] if chats and isinstance(turn, str) else turn
        for turns in prompts
        for turn in turns
    ]
    return [len(request.token_ids(target, turn, enable_thinking=False)) for turn in asked]


def _timed(setup: run.Setup) -> tuple[float, str]:
    """Seconds of a step on random text, and the temporary memory that it needs, in words."""
    config, plan = setup.config, setup.plan
    optimizer = trainer.make_optimizer(config.optimizer, config.steps)
    state = trainer.fresh_state(plan, optimizer, mesh=setup.mesh, params=setup.start)
    shape = (config.rows, config.row_length)
    rng = np.random.default_rng(config.seed)
    arrays: dict[str, Any] = {
        "tokens": rng.integers(0, setup.target.config.vocab_size, shape, np.int32),
        "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        "start": np.zeros(shape, np.int32),
        "document": np.zeros(shape, np.int32),
        "supervised": np.ones(shape, bool),
        "source": np.zeros(shape, np.int32),
    }
    states = None
    if config.features == "cache":
        E = setup.target.config.layers.hidden_size
        F = len(setup.network.taps) * E
        hidden = jnp.zeros((*shape, E), jnp.bfloat16) if plan.objective.needs_target else None
        states = States(jnp.zeros((*shape, F), jnp.bfloat16), hidden)
    batch, states = run.placed(setup.mesh, Batch(**arrays), states)
    step = trainer.make_step(plan, optimizer)
    arguments = (setup.target.params, batch, states, None)
    compiled = step.lower(state, *arguments).compile()
    analysis = compiled.memory_analysis()
    memory = "temporary memory that this backend does not tell"
    if analysis is not None:
        memory = f"{analysis.temp_size_in_bytes / 1e6:,.0f} MB of temporary memory in a step"
    state, _ = compiled(state, *arguments)
    jax.block_until_ready(state)
    begin = time.perf_counter()
    for _ in range(TIMED):
        state, _ = compiled(state, *arguments)
    jax.block_until_ready(state)
    return (time.perf_counter() - begin) / TIMED, memory
