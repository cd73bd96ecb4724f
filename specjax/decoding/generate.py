"""Prompts in, text out: plain greedy decoding under one jitted loop with fixed shapes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import cache as kv
from specjax.models import target as networks
from specjax.models.hub import Target
from specjax.models.target import TargetConfig
from specjax.models.text import encode
from specjax.types import Array, KVCache, Params

BUCKET = 64  # prompts and capacities are rounded up to it, so that few shapes compile


@dataclass(frozen=True)
class Generation:
    """What one call made.

    Attributes:
      text: the decoded tokens, or None for a target without tokenizer.
      tokens: the new token ids, the end-of-text id included.
      finish_reason: "stop" at an end-of-text id, "length" at the limit.
      stats: `tokens_per_s` of the decoding loop, prefill and compilation excluded.
    """

    text: str | None
    tokens: list[int]
    finish_reason: str
    stats: dict[str, Any]


def generate(target: Target, prompt: str | list[int], *, max_new_tokens: int = 128) -> Generation:
    """Decodes greedily, one token per step.

    Args:
      target: the model.
      prompt: text, or token ids as they are.
      max_new_tokens: at most so many new tokens.

    Raises:
      ValueError: an empty prompt, an id outside the vocabulary, or a prompt and limit beyond the
        context of the target.
    """
    ids = list(prompt) if not isinstance(prompt, str) else encode(target.tokenizer, prompt)
    _check(target, ids, max_new_tokens)
    padded = _round_up(len(ids))
    prompt_ids = np.zeros((1, padded), np.int32)
    prompt_ids[0, : len(ids)] = ids
    capacity = padded + _round_up(max_new_tokens)
    config, params = target.config, target.params
    state = _prefill(config, params, jnp.asarray(prompt_ids), jnp.int32(len(ids)), capacity)
    stops = jnp.asarray(target.eos_token_ids or (-1,), jnp.int32)
    limit = jnp.int32(max_new_tokens)
    # A limit of 1 makes no step: it compiles the loop, which the clock leaves out.
    jax.block_until_ready(_decode(config, params, *state, stops, jnp.int32(1)))
    start = time.perf_counter()
    tokens, count = jax.device_get(_decode(config, params, *state, stops, limit))
    seconds = time.perf_counter() - start
    made = tokens[0, : int(count)].tolist()
    stopped = made[-1] in target.eos_token_ids
    return Generation(
        text=_text(target, ids, made),
        tokens=made,
        finish_reason="stop" if stopped else "length",
        stats={"tokens_per_s": (len(made) - 1) / seconds if len(made) > 1 else None},
    )


def _text(target: Target, prompt: list[int], made: list[int]) -> str | None:
    """The text that `made` adds behind `prompt`: tokens are decoded together, since some
    tokenizers drop the space in front of the first one."""
    if not target.has_tokenizer:
        return None
    decode = partial(target.tokenizer.decode, skip_special_tokens=True)
    before, whole = decode(prompt), decode(prompt + made)
    return whole[len(before) :] if whole.startswith(before) else decode(made)


@partial(jax.jit, static_argnums=(0, 4))
def _prefill(
    config: TargetConfig, params: Params, prompt: Array, length: Array, capacity: int
) -> tuple[Array, KVCache]:
    """Runs the prompt [1, P]; returns the first new token [1] and the cache."""
    rows = prompt.shape[1]
    positions = jnp.arange(rows, dtype=jnp.int32)[None, None]
    cache = kv.init(config.layers, 1, capacity, params["embed"].dtype)
    out = networks.forward(config, params, prompt[:, None], positions)
    cache = kv.commit(kv.write(cache, out.k, out.v), length[None])
    last = jax.lax.dynamic_slice_in_dim(out.hidden[:, 0], length - 1, 1, axis=1)  # [1, 1, E]
    return _argmax(params, last)[:, 0], cache


@partial(jax.jit, static_argnums=0)
def _decode(
    config: TargetConfig, params: Params, first: Array, cache: KVCache, stops: Array, limit: Array
) -> tuple[Array, Array]:
    """Decodes up to `limit` tokens; returns them [1, room] and how many they are."""
    room = cache.k[0].shape[2]
    tokens = jnp.zeros((1, room), jnp.int32).at[:, 0].set(first)

    def unfinished(state: tuple[Array, Array, KVCache]) -> Array:
        tokens, count, _ = state
        return (count < limit) & ~jnp.isin(tokens[0, count - 1], stops)

    def step(state: tuple[Array, Array, KVCache]) -> tuple[Array, Array, KVCache]:
        tokens, count, cache = state
        anchor = jax.lax.dynamic_slice_in_dim(tokens, count - 1, 1, axis=1)[:, None]  # [1, 1, 1]
        out = networks.forward(config, params, anchor, cache.length[:, None, None], context=cache)
        cache = kv.commit(kv.write(cache, out.k, out.v), jnp.ones((1,), jnp.int32))
        following = _argmax(params, out.hidden[:, 0])
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, following, count, axis=1)
        return tokens, count + 1, cache

    state = (tokens, jnp.int32(1), cache)
    tokens, count, _ = jax.lax.while_loop(unfinished, step, state)
    return tokens, count


def _argmax(params: Params, hidden: Array) -> Array:
    """The most likely next token [..., ] behind final hidden states [..., E]."""
    logits = networks.unembed(networks.vocabulary(params), hidden)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _check(target: Target, ids: list[int], max_new_tokens: int) -> None:
    if not ids:
        raise ValueError("the prompt is empty: this tokenizer adds no BOS, give at least one token")
    V = target.config.vocab_size
    wrong = [i for i in ids if not 0 <= i < V]
    if wrong:
        raise ValueError(f"token id {wrong[0]} is outside the vocabulary (0 to {V - 1})")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
    room = target.config.max_positions - len(ids)
    if max_new_tokens > room:
        raise ValueError(
            f"a prompt of {len(ids)} tokens and max_new_tokens {max_new_tokens} exceed the "
            f"{target.config.max_positions} positions of {target.name}: at most {room} fit"
        )


def _round_up(rows: int) -> int:
    return -(-rows // BUCKET) * BUCKET
