"""The expected acceptance length under every rule, in closed form, without decoding anything.

The target has written answers at the settings of verification. Given such a text, every slot of
the block behind every token is kept with a chance that `acceptance.kept` knows, so that the rounds
of decoding are a Markov chain over its tokens: where a round begins, it ends after m + 1 tokens
with the chance S_m - S_{m+1}. The chain is summed exactly. At temperature 0 it is the walk of
`heldout`, whatever the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.request import RULES
from specjax.decoding.sampling import law, make_sampling
from specjax.models import drafter as backbone
from specjax.models import hub
from specjax.models import target as networks
from specjax.models.drafter import DrafterConfig
from specjax.models.hub import Target
from specjax.models.target import TargetConfig
from specjax.training import blocks
from specjax.training.acceptance import kept
from specjax.training.blocks import Anchors
from specjax.training.data import Documents
from specjax.training.features import clean_pass
from specjax.training.heldout import in_dtype_of
from specjax.training.identity import check_answers
from specjax.training.packing import Batch
from specjax.types import Array, Params, Sampling

ROWS = 4  # answers of one batch
ANCHORS = 16  # blocks of an answer whose laws exist at a time
BUCKET = 128  # texts are padded to a multiple of it: few shapes, few compiles


def expected(
    target: Target,
    config: DrafterConfig,
    params: Params,
    answers: Documents,
    *,
    num_draft: int | None = None,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """The acceptance length that decoding has in the mean, under every rule.

    Args:
      target: the model that gave the answers.
      config: the drafter; it must not read rejected states.
      params: its parameters, used in the target's dtype as when they are loaded.
      answers: of `training.data.answer`; their temperature, top-k and top-p are those of
        verification.
      num_draft: drafts verified per round; None: all that a block holds.
      limit: the first so many answers.
      progress: called with (done, total) after every batch of answers.

    Returns:
      `rules`: by the names of `generate(verify=)`, `tau` (pooled, bonus included) with its
      `standard_error` over answers; `temperature`, `top_k`, `top_p`, `answers`, `num_draft`.

    Raises:
      ValueError: as for `rounds`.
    """
    made = rounds(
        target, config, params, answers, num_draft=num_draft, limit=limit, progress=progress
    )
    tokens = _new_tokens(answers)[: len(next(iter(made.values())))] - 1
    return {
        "rules": {rule: _pooled(tokens, made[rule]) for rule in RULES},
        "answers": len(tokens),
        "num_draft": config.num_drafts if num_draft is None else num_draft,
        **{name: answers.manifest.get(name) for name in ("temperature", "top_k", "top_p")},
    }


def rounds(
    target: Target,
    config: DrafterConfig,
    params: Params,
    answers: Documents,
    *,
    num_draft: int | None = None,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, np.ndarray]:
    """The expected number of rounds [answers] in which decoding gives each answer, by rule.

    Arguments as for `expected`.

    Raises:
      ValueError: a drafter that does not fit the target or reads rejected states, more drafts than
        its block holds, or answers of another target.
    """
    hub.check_fit(config, target.config, target.name)
    drafts = config.check_num_draft(config.num_drafts if num_draft is None else num_draft)
    check_answers(target, answers.manifest)
    if config.reuse is not None:
        raise ValueError("the drafter reads rejected states, which recorded text does not have")
    total = min(len(answers), limit or len(answers))
    longest = int(np.diff(answers.starts)[:total].max(initial=0))
    if longest > config.max_positions:
        raise ValueError(
            f"an answer ends at position {longest}, the drafter was made for "
            f"{config.max_positions}: decoding would do without it"
        )
    said = answers.manifest
    sampling = make_sampling(
        said.get("temperature", 0.0),
        said.get("top_k"),
        said.get("top_p"),
        batch=ROWS,
        vocab_size=target.config.vocab_size,
        drafting="independent",
    )
    params = in_dtype_of(target, params)
    made: dict[str, np.ndarray] = {}
    order = sorted(range(total), key=lambda i: len(answers.document(i)[0]))
    for start in range(0, total, ROWS):
        chosen = order[start : start + ROWS]
        chances = jax.device_get(
            _chances(
                target.config,
                config,
                drafts,
                target.params,
                params,
                _batch(answers, chosen),
                sampling,
            )
        )
        for rule, of_rule in chances.items():
            each = made.setdefault(rule, np.zeros(total))
            for b, i in enumerate(chosen):
                text, prompt = answers.document(i)
                each[i] = _visits(of_rule[b], prompt, len(text))
        if progress is not None:
            progress(min(start + ROWS, total), total)
    return made


def _visits(kept: np.ndarray, first: int, length: int) -> float:
    """How many rounds give the tokens behind `first`, from the chances [S, K] at every token."""
    ends = -np.diff(np.pad(kept, ((0, 0), (1, 1)), constant_values=((0, 0), (1, 0))), axis=1)
    visits = np.zeros(length + ends.shape[1])
    visits[first] = 1
    for at in range(first, length - 1):
        visits[at + 1 : at + 1 + ends.shape[1]] += visits[at] * ends[at]
    return float(visits[first : length - 1].sum())


def _pooled(tokens: np.ndarray, rounds: np.ndarray) -> dict[str, float | None]:
    """Tokens over rounds, and the standard error of this ratio over answers."""
    if not rounds.sum():
        return {"tau": None, "standard_error": None}
    tau = tokens.sum() / rounds.sum()
    error = None
    if len(rounds) > 1:
        spread = np.std(tokens - tau * rounds, ddof=1) / rounds.mean()
        error = round(float(spread / np.sqrt(len(rounds))), 4)
    return {"tau": round(float(tau), 4), "standard_error": error}


def _new_tokens(answers: Documents) -> np.ndarray:
    return np.diff(answers.starts) - answers.prompt_lengths


def _batch(answers: Documents, chosen: list[int]) -> Batch:
    """One answer per row; rows that fill the batch have nothing to predict."""
    longest = max(len(answers.document(i)[0]) for i in chosen)
    size = -(-longest // BUCKET) * BUCKET
    tokens = np.zeros((ROWS, size), np.int32)
    document = np.full((ROWS, size), -1, np.int32)
    supervised = np.zeros((ROWS, size), bool)
    for b, i in enumerate(chosen):
        text, prompt = answers.document(i)
        tokens[b, : len(text)], document[b, : len(text)] = text, i
        supervised[b, prompt : len(text)] = True
    positions = np.broadcast_to(np.arange(size, dtype=np.int32), tokens.shape)
    start = np.where(document < 0, positions, np.int32(0))
    arrays = (tokens, positions, start, document, supervised, document)
    return Batch(*map(jnp.asarray, arrays))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _chances(
    target_config: TargetConfig,
    config: DrafterConfig,
    drafts: int,
    target_params: Params,
    params: Params,
    batch: Batch,
    sampling: Sampling,
) -> dict[str, Array]:
    """`acceptance.kept` [B, S, K] of the block behind every token."""
    B, S = batch.tokens.shape
    V = target_config.vocab_size
    clean = clean_pass(target_config, target_params, batch, config.taps)
    vocabulary = networks.vocabulary(target_params)
    context = blocks.context(config, params, clean.features, batch.positions)

    def of_some(at: Array) -> dict[str, Array]:  # [ANCHORS]
        anchors = Anchors(jnp.broadcast_to(at, (B, ANCHORS)), jnp.ones((B, ANCHORS), bool))
        block = blocks.block_inputs(config, batch, anchors)
        hidden = backbone.forward(config, params, vocabulary, block, context)
        hidden = hidden[:, :, config.first_slot :][:, :, :drafts]
        labels = blocks.block_labels(config, batch, anchors)
        labels = jax.tree.map(lambda x: x[:, :, :drafts], labels)
        logits = backbone.unembed(config, params, vocabulary, hidden)
        logits = backbone.target_logits(params, vocabulary, logits)
        states = blocks.target_rows(clean.final_hidden, labels)

        def processed(logits: Array) -> Array:
            return law(logits.reshape(B, -1, V), sampling).reshape(B, ANCHORS, drafts, V)

        p = processed(networks.unembed(vocabulary, states))
        return kept(processed(logits), p, labels.tokens, labels.mask)

    every = jnp.arange(S, dtype=jnp.int32).reshape(-1, ANCHORS)
    made = jax.lax.map(of_some, every)  # of each [S / ANCHORS, B, ANCHORS, K]
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(B, S, -1), made)
