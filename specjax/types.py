"""The vocabulary of the library: every state pytree and the protocols of the loop.

Dimension legend, used in every shape comment:

  B  batch rows                       S  context capacity (rows of a cache)
  N  blocks                           L  layers
  T  rows of one drafter block        H  query heads        G  key/value heads
  R  tail rows of one block           D  head dim           E  model dim
  K  capacity of a proposal           F  feature dim (taps x E)
  W  verify rows, K + 1               V  vocabulary
  C  carried rows of one block        A  anchors (training)

The anchor `tokens[length - 1]` is sampled but has not been run through the target yet, so
`target.length == length - 1` and no feature exists for it.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
from flax import struct

Array = jax.Array
Params = dict[str, Any]


@struct.dataclass
class KVCache:
    """Keys and values of committed rows, one array per layer.

    Rows at or past `length` are dead: finite, overwritten later, and seen by nobody.
    """

    k: tuple[Array, ...]  # L x [B, G, S, D]
    v: tuple[Array, ...]  # L x [B, G, S, D]
    length: Array  # [B] int32


@struct.dataclass
class Vocabulary:
    """The view of a target that a drafter gets: its embedding and head, never copies."""

    embedding: Array  # [V, E]
    head: Array  # [V, E]; the embedding itself when tied


@struct.dataclass
class Carried:
    """Target features of rejected rows that enter a drafter pass as extra keys and values."""

    features: Array  # [B, N, C, F]
    positions: Array  # [B, N, C] int32
    valid: Array  # [B, N, C] bool
    offset: Array | None = None  # [E], added to the fused feature after its norm


@struct.dataclass
class Block:
    """What one drafter pass reads: N blocks of T rows over a shared context."""

    tokens: Array  # [B, N, T] int32
    positions: Array  # [B, N, T] int32
    context_end: Array  # [B, N] int32: context rows at or past it are invisible
    context_start: Array | None = None  # [B, N] int32: first row of the block's document
    delta: Array | None = None  # [B, N, T, E], added to the token embeddings
    carried: Carried | None = None


@struct.dataclass
class SparseLaw:
    """A law over few candidates per position: zero everywhere else."""

    ids: Array  # [B, K, candidates] int32
    probs: Array  # [B, K, candidates] float32


@struct.dataclass
class Proposal:
    """Tokens to verify, and the law that produced each of them."""

    tokens: Array  # [B, K] int32
    count: Array  # [B] int32: how many of the K are real
    law: Array | SparseLaw | None = None  # probs [B, K, V] | sparse | None: point mass
    parents: Array | None = None  # [B, K] int32 node indices, -1: child of the anchor; None: chain
    hidden: Array | None = None  # [B, K, E] drafter state by predicted position


@struct.dataclass
class Verdict:
    """What verification decided about one proposal."""

    accepted: Array  # [B] int32: accepted drafts, bonus excluded
    path: Array  # [B, W] int32: verify rows to commit, in order; a chain's is arange
    next_token: Array  # [B] int32: correction or bonus token, the next anchor
    emitted: Array  # [B] int32: tokens committed after stop and limit cuts


@struct.dataclass
class Rejected:
    """States of the rejected suffix of the last verification; row r stands for position a' + r.

    a' is the new anchor's position, `tokens[:, 0]` the first rejected token. A state that the
    method does not keep has zero rows. `count` is 0 after prefill, full acceptance, a stop or a
    limit, and for finished rows.
    """

    tokens: Array  # [B, K or 0] int32
    count: Array  # [B] int32
    features: Array  # [B, K or 0, F]
    final_hidden: Array  # [B, K or 0, E]: the target's, after its last norm
    argmax: Array  # [B, K or 0] int32: the verifier's own next token behind each row
    certainty: Array  # [B, K or 0] float32: its probability of that token, at temperature 1
    draft_hidden: Array  # [B, K or 0, E]: the drafter's, by predicted position


@struct.dataclass
class Stats:
    """Counts since prefill, summed over rounds."""

    rounds: Array  # [B] int32
    proposed: Array  # [B] int32
    accepted: Array  # [B] int32
    histogram: Array  # [B, W] int32: rounds by number of accepted drafts


@struct.dataclass
class SpecState:
    """Everything that a round needs from the rounds before it."""

    # evolving text
    tokens: Array  # [B, S] int32
    length: Array  # [B] int32: committed tokens, the anchor included
    limit: Array  # [B] int32: length at which a row stops
    done: Array  # [B] bool
    key: Array  # [B] PRNG keys
    round: Array  # [B] int32
    # what the networks remember
    target: KVCache
    features: Array  # [B, W, F] of the rows committed last
    fresh: Array  # [B] int32: how many of them are new to the drafter
    draft: Any  # the drafter's own pytree
    rejected: Rejected
    # statistics
    stats: Stats


@struct.dataclass
class RoundInfo:
    """What a person may want to look at after a round and the loop does not need."""

    proposed: Array  # [B] int32
    accepted: Array  # [B] int32
    emitted: Array  # [B] int32; 0 for rows that were done
    tokens: Array  # [B, W] int32: the emitted ones first
    logprobs: Array  # [B, W or 0] float32: log softmax of the raw logits at these tokens


@struct.dataclass
class Sampling:
    """How tokens are drawn. Changing an array does not recompile; changing a word does."""

    temperature: Array  # [B] float32; 0 is greedy
    top_k: Array  # [] int32; 0 keeps every token
    top_p: Array  # [] float32; 1 keeps every token
    # greedy: every temperature is 0; sampled: no filter; filtered: top-k or top-p is on.
    mode: str = struct.field(pytree_node=False, default="greedy")
    # How a drafter draws: greedy (argmax), coupled (the target's own noise) or independent.
    drafting: str = struct.field(pytree_node=False, default="greedy")


class Reuse(Protocol):
    """How a method uses the rejected rows: one file per method.

    A method some of whose parameters may grow from nothing in training names them in `grows`.
    """

    @property
    def keeps(self) -> frozenset[str]:
        """The fields of `Rejected` that it reads; nothing else is stored."""

    def table(self, config: Any) -> dict[str, Any]:
        """The parameter table of the method's own weights."""

    def inject(
        self, config: Any, params: Params, vocabulary: Vocabulary, rejected: Rejected, block: Block
    ) -> Block:
        """Adds an embedding delta, carried rows or further blocks to `block`.

        `params` are the whole drafter's: a method may use the fusion and its own weights.
        """


class Head(Protocol):
    """Decides tokens and their law; in training the same code scores recorded tokens."""

    def table(self, config: Any) -> dict[str, Any]:
        """The parameter table of the head."""

    def propose(
        self,
        params: Params,
        block: Block,
        hidden: Array,
        logits: Array,
        key: Array,
        sampling: Sampling,
    ) -> Proposal:
        """Block states [B, N, T, E] and base logits [B, N, T, V] -> what to verify.

        One block gives a chain or a tree; several blocks are merged by their positions.
        """


class Drafter(Protocol):
    """A frozen dataclass that is also its JSON config.

    One whose drawn drafts come with their law may say so by `hands_law = True`, for which
    `generate(verify="auto")` looks.
    """

    @property
    def num_draft(self) -> int:
        """K, the capacity of its proposals."""

    @property
    def taps(self) -> tuple[int, ...]:
        """The target layers it reads, in concatenation order."""

    @property
    def keeps(self) -> frozenset[str]:
        """The fields of `Rejected` that it reads."""

    def init(self, batch: int, capacity: int, dtype: Any) -> Any:
        """The empty draft state; `dtype` is that of the parameters."""

    def extend(
        self, params: Params, draft: Any, features: Array, positions: Array, count: Array
    ) -> Any:
        """Takes committed rows as context: features [B, W, F], positions [B, W], count [B]."""

    def propose(
        self,
        params: Params,
        vocabulary: Vocabulary,
        draft: Any,
        tokens: Array,
        length: Array,
        rejected: Rejected,
        key: Array,
        sampling: Sampling,
    ) -> tuple[Proposal, Any]:
        """Proposes what follows the anchor `tokens[length - 1]`, at position `length - 1`."""
