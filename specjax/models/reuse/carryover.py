"""Carryover: rejected rows are extra keys and values of the next draft (arXiv 2609.14717).

The target's features of the rejected rows go through the drafter's own fusion and key/value
projections and keep their positions. One learned embedding tells them from committed rows: they
were computed behind a wrong token, and they stand at and past the anchor, where a committed row
never does. They are read once and never enter a cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import jax.numpy as jnp

from specjax.models.params import Param, Table
from specjax.types import Array, Block, Carried, Params, Rejected, Vocabulary


@dataclass(frozen=True)
class Carryover:
    """Extra context rows.

    Attributes:
      site: where the embedding is added: to the features ("pre_fc", as published), or to the
        fused state behind its norm ("post_norm", fewer parameters).
    """

    site: Literal["pre_fc", "post_norm"] = "pre_fc"
    keeps: ClassVar[frozenset[str]] = frozenset({"features"})

    def __post_init__(self) -> None:
        if self.site not in ("pre_fc", "post_norm"):
            raise ValueError(f"site {self.site!r} is not pre_fc or post_norm")

    def table(self, config: Any) -> Table:
        """The embedding, zero at first: rejected rows then look like committed ones."""
        before = self.site == "pre_fc"
        E = config.layers.hidden_size
        width = len(config.taps) * config.target_hidden_size if before else E
        return {"embedding": Param((width,), (None,), "zeros", "reuse.embedding")}

    def inject(
        self, config: Any, params: Params, vocabulary: Vocabulary, rejected: Rejected, block: Block
    ) -> Block:
        """Carries the rejected rows into a single block per batch row."""
        embedding, features = params["reuse"]["embedding"], rejected.features
        if self.site == "pre_fc":
            features = features + embedding[None, None, :]
        carried = stale_rows(rejected, block, features)
        if self.site == "post_norm":
            carried = replace(carried, offset=embedding)
        return replace(block, carried=carried)


def stale_rows(rejected: Rejected, block: Block, features: Array) -> Carried:
    """The rejected rows as carried rows of every block, from the first block's anchor on."""
    B, N = block.tokens.shape[:2]
    row = jnp.arange(features.shape[1], dtype=jnp.int32)[None, None]
    shape = (B, N, features.shape[1])
    return Carried(
        features=jnp.broadcast_to(features[:, None], (*shape, features.shape[2])),
        positions=jnp.broadcast_to(block.positions[:, :1, :1] + row, shape),
        valid=jnp.broadcast_to(row < rejected.count[:, None, None], shape),
    )
