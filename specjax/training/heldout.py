"""The exact acceptance length of a drafter at temperature 0, without decoding anything.

The target's greedy answers are known, so the target runs over them once and the drafter is asked
at the anchors where decoding would ask it: at the first answer token, then behind what each round
emits. Greedy verification accepts a draft iff it is the target's own next token, which is the next
token of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import verify
from specjax.decoding.drafting import DFlash
from specjax.decoding.sampling import argmax, make_sampling
from specjax.decoding.stats import PromptStats, summary
from specjax.models import cache as kv
from specjax.models import hub
from specjax.models import target as networks
from specjax.models.drafter import DrafterConfig
from specjax.models.hub import Target
from specjax.models.target import TargetConfig
from specjax.training.data import Documents
from specjax.training.features import CHUNK
from specjax.training.identity import check_answers
from specjax.types import Array, KVCache, Params, Sampling, Vocabulary

ROWS = 8  # answers of one batch
BUCKET = 128  # texts are padded to a multiple of it: few shapes, few compiles


class Texts(NamedTuple):
    """A batch of prompts with their answers, and the target's states of them."""

    documents: np.ndarray  # [B]: their indices, -1 for a row that fills the batch
    tokens: Array  # [B, S] int32: prompt, answer, and what the target would say behind it
    prompts: Array  # [B] int32: tokens of the prompt
    lengths: Array  # [B] int32: tokens of prompt and answer
    features: Array  # [B, S, F]


@dataclass(frozen=True, eq=False)
class Walkable:
    """Greedy answers with the target's states, ready to be walked by one drafter after another.

    Iterating gives the batches. Their states are computed anew each time, or with `keep` only
    once: S x F numbers per answer then stay in memory (SmolLM2-135M with five taps: 4 MB).

    Answers of `training.data.answer` have to be greedy and of this very target; others are taken
    at their word.

    Attributes:
      target: the model that gave the answers, greedily.
      taps: layers of the features.
      drafts: most drafts of a round. A last round may be verified behind the end of the answer;
        the target continues each answer by so many tokens, less one, to count it as decoding does.
      documents: prompts and answers.
      limit: the first so many of them; None: all.
      rows: answers of one batch, B.
      keep: whether to keep the states.
    """

    target: Target
    taps: tuple[int, ...]
    drafts: int
    documents: Documents
    limit: int | None = None
    rows: int = ROWS
    keep: bool = False
    _kept: list[Texts] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        _check_greedy(self.target, self.documents.manifest)
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, not {self.limit}")
        if not len(self.documents):
            raise ValueError("there are no answers to walk")
        networks.check_taps(self.taps, self.target.config.layers.num_layers)

    def __len__(self) -> int:
        """Number of answers."""
        return min(len(self.documents), self.limit or len(self.documents))

    def __iter__(self) -> Iterator[Texts]:
        """Batches of answers of similar length, the shortest first."""
        if self._kept:
            yield from self._kept
            return
        made = []
        texts = [self.documents.document(i) for i in range(len(self))]
        order = sorted(range(len(self)), key=lambda i: (len(texts[i][0]), i))
        for start in range(0, len(order), self.rows):
            batch = self._batch(order[start : start + self.rows], texts)
            if self.keep:
                made.append(batch)
            yield batch
        self._kept.extend(made)  # whole or not at all

    def _batch(self, chosen: list[int], texts: list[tuple[np.ndarray, int]]) -> Texts:
        longest = max(len(texts[i][0]) for i in chosen) + self.drafts
        size = -(-longest // BUCKET) * BUCKET
        tokens = np.zeros((self.rows, size), np.int32)
        index = np.full(self.rows, -1)
        prompts, lengths = np.ones((2, self.rows), np.int32)
        for b, i in enumerate(chosen):
            text, prompts[b] = texts[i]
            index[b], lengths[b] = i, len(text)
            tokens[b, : len(text)] = text
        continued, features = _states(
            self.target.config,
            self.taps,
            self.drafts - 1,
            self.target.params,
            jnp.asarray(tokens),
            jnp.asarray(lengths),
        )
        return Texts(index, continued, jnp.asarray(prompts), jnp.asarray(lengths), features)


def walk(
    target: Target,
    config: DrafterConfig,
    params: Params,
    answers: Documents | Walkable,
    *,
    num_draft: int | None = None,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """The greedy acceptance length over known answers, and what goes with it.

    Args:
      target: the model that gave the answers, greedily.
      config: the drafter.
      params: its parameters, used in the target's dtype as when they are loaded.
      answers: prompts and answers, or a `Walkable` of them where several drafters are compared.
      num_draft: drafts verified per round; None: all that a block holds.
      limit: the first so many documents.
      progress: called with (done, total) after every batch of answers.

    Returns:
      `tau` (pooled over rounds, bonus included), `tau_macro` (mean over answers) and its
      `standard_error`, `tau_untruncated`, `acceptance_rate`, `acceptance_per_position`,
      `conditional_acceptance`, `verify_efficiency`, `rounds`, `new_tokens`, `answers`,
      `num_draft`: as `evaluation.evaluate` defines them.

    Raises:
      ValueError: a drafter that does not fit the target, more drafts than its block holds, or
        answers that were sampled or are another target's.
    """
    hub.check_fit(config, target.config, target.name)
    drafts = config.check_num_draft(config.num_drafts if num_draft is None else num_draft)
    if not isinstance(answers, Walkable):
        answers = Walkable(target, config.taps, drafts, answers, limit)
    elif limit not in (None, answers.limit):
        raise ValueError(f"limit {limit}: these answers were prepared for {answers.limit}")
    if answers.target is not target:
        raise ValueError(f"the answers were prepared with {answers.target.name}, loaded elsewhere")
    if answers.taps != config.taps:
        raise ValueError(f"the answers have features of {answers.taps}, not of {config.taps}")
    vocabulary = networks.vocabulary(target.params)
    network = DFlash(config, drafts, config.reuse)
    stats = rounds(network, in_dtype_of(target, params), vocabulary, answers, progress=progress)
    return summary(stats) | {"answers": len(stats), "num_draft": drafts}


def in_dtype_of(target: hub.Target, params: Params) -> Params:
    """A drafter's parameters in the dtype of its target; token ids stay what they are."""
    dtype = target.params["embed"].dtype
    return jax.tree.map(
        lambda p: p.astype(dtype) if jnp.issubdtype(p.dtype, jnp.floating) else p, params
    )


def rounds(
    network: Any,
    params: Params,
    vocabulary: Vocabulary,
    answers: Walkable,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[PromptStats]:
    """The rounds in which decoding would give each answer, as `generate` counts them.

    Args:
      network: a `types.Drafter` that keeps nothing of a rejected block.
      params: its parameters.
      vocabulary: of the target.
      answers: what is walked.
      progress: called with (done, total) after every batch of answers.

    Raises:
      ValueError: more drafts than the answers were prepared for, a drafter that reads rejected
        states, or an answer beyond the positions that the drafter was made for.
    """
    if network.num_draft > answers.drafts:
        raise ValueError(
            f"num_draft {network.num_draft}: these answers were prepared for {answers.drafts}"
        )
    if network.keeps:
        raise ValueError(
            f"the drafter reads rejected states ({', '.join(sorted(network.keeps))}), which no "
            "teacher-forced pass has: measure it with specjax.evaluate"
        )
    walked: dict[int, PromptStats] = {}
    for batch in answers:
        _check_positions(network, batch)
        log = jax.device_get(_rounds(network, params, vocabulary, *batch[1:]))
        for b, index in enumerate(batch.documents.tolist()):
            if index < 0:
                continue
            ran = log.emitted[:, b] > 0
            walked[index] = PromptStats(
                prompt_tokens=int(batch.prompts[b]),
                new_tokens=int(batch.lengths[b] - batch.prompts[b]),
                drafted=log.drafted[ran, b].tolist(),
                accepted=log.accepted[ran, b].tolist(),
                emitted=log.emitted[ran, b].tolist(),
            )
        if progress is not None:
            progress(len(walked), len(answers))
    return [walked[i] for i in range(len(answers))]


def _check_greedy(target: Target, manifest: Mapping[str, Any]) -> None:
    """Refuses answers that `target` would not give; hand-made documents do not say."""
    if manifest.get("temperature", 0) != 0:
        raise ValueError(
            f"the answers were drawn at temperature {manifest['temperature']}: a walk is exact for "
            "greedy ones only; make answers at temperature 0"
        )
    check_answers(target, manifest)


def _check_positions(network: Any, batch: Texts) -> None:
    most = network.config.max_positions if isinstance(network, DFlash) else None
    longest = int(jnp.max(batch.lengths))
    if most is not None and longest > most:
        raise ValueError(
            f"an answer ends at position {longest}, the drafter was made for {most}: decoding "
            "would do without it"
        )


# ------------------------------------------------------------------------------------ the target
@partial(jax.jit, static_argnums=(0, 1, 2))
def _states(
    config: TargetConfig,
    taps: tuple[int, ...],
    beyond: int,
    params: Params,
    tokens: Array,
    lengths: Array,
) -> tuple[Array, Array]:
    """The texts continued greedily by `beyond` tokens [B, S], and the features [B, S, F]."""
    B, S = tokens.shape
    chunk = CHUNK if S % CHUNK == 0 else BUCKET
    positions = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))

    def blocks(rows: Array) -> Array:
        return rows.reshape(B, -1, chunk)

    out = networks.forward(
        config,
        params,
        blocks(tokens),
        blocks(positions),
        tail_valid=blocks(positions < lengths[:, None]),
        taps=taps,
    )
    vocabulary = networks.vocabulary(params)

    def step(_: Array, carry: tuple[Array, KVCache, Array]) -> tuple[Array, KVCache, Array]:
        tokens, cache, last = carry
        following = argmax(networks.unembed(vocabulary, last))
        at = cache.length[:, None]
        tokens = jnp.where(positions == at, following[:, None], tokens)
        new = networks.forward(config, params, following[:, None, None], at[:, None], context=cache)
        cache = kv.commit(cache, new.k, new.v, jnp.ones_like(lengths))
        return tokens, cache, new.hidden[:, 0, 0]

    hidden = out.hidden.reshape(B, S, -1)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    start = (tokens, KVCache(out.k, out.v, lengths), last)
    tokens = jax.lax.fori_loop(0, beyond, step, start)[0]
    return tokens, out.features.reshape(B, S, -1)


# ----------------------------------------------------------------------------------- the drafter
class _Log(NamedTuple):
    """Rounds of a batch, [rounds, B]; those that did not run emitted nothing."""

    drafted: Array
    accepted: Array
    emitted: Array


@partial(jax.jit, static_argnums=0)
def _rounds(
    network: Any,
    params: Params,
    vocabulary: Vocabulary,
    tokens: Array,
    prompts: Array,
    lengths: Array,
    features: Array,
) -> _Log:
    """Walks the answers of a batch side by side, one anchor of each at a time."""
    B, S = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
    # All context at once: an anchor sees the rows before it and none else.
    context = network.init(B, S, features.dtype)
    context = network.extend(params, context, features, positions, lengths)
    sampling = _greedy(B, vocabulary.embedding.shape[0])
    ahead = jnp.arange(1, network.num_draft + 1, dtype=jnp.int32)[None]

    def unfinished(carry: tuple[Array, Array, _Log]) -> Array:
        return jnp.any(carry[1] < lengths - 1)

    def body(carry: tuple[Array, Array, _Log]) -> tuple[Array, Array, _Log]:
        i, at, log = carry
        proposal, _ = network.propose(
            params, vocabulary, context, tokens, at + 1, None, None, sampling
        )
        choice = jnp.take_along_axis(tokens, at[:, None] + ahead, axis=1, mode="clip")  # [B, K]
        accepted = jax.vmap(verify.match)(choice, proposal.tokens, proposal.count)
        left = jnp.maximum(lengths - 1 - at, 0)  # 0 where the answer has ended
        emitted = jnp.minimum(accepted + 1, left)
        now = _Log(proposal.count, accepted, emitted)
        log = jax.tree.map(lambda rows, row: rows.at[i].set(row), log, now)
        return i + 1, at + emitted, log

    empty = jnp.zeros((S, B), jnp.int32)
    start = (jnp.int32(0), prompts, _Log(empty, empty, empty))
    return jax.lax.while_loop(unfinished, body, start)[2]


def _greedy(batch: int, vocab_size: int) -> Sampling:
    return make_sampling(0.0, None, None, batch=batch, vocab_size=vocab_size, drafting="greedy")
