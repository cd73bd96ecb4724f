"""ReAnchor: further blocks, anchored behind rejected rows; nothing is trained.

A drafter only knows context rows that lie strictly before its anchor. A rejected state at position
t can therefore be used as it is by a block whose anchor stands after t: block s is anchored at
a' + s with the verifier's own choice there, and reads the rejected rows a' .. a' + s - 1 as if
they were committed. Block 0 is the plain draft. How the blocks become one chain is decided by
`decoding.merging`. (Only the abstract of ReAnchor is public; this is our design of it.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax.numpy as jnp

from specjax.models.params import Table
from specjax.models.reuse.carryover import stale_rows
from specjax.types import Block, Params, Rejected, Vocabulary


@dataclass(frozen=True)
class ReAnchor:
    """Shifted blocks beside the plain one.

    Attributes:
      shifts: how far behind the new anchor each further block is anchored, ascending.
      threshold: least pooled probability of a draft past the end of the plain block.
    """

    shifts: tuple[int, ...] = (1, 2, 4)
    threshold: float = 0.5
    keeps: ClassVar[frozenset[str]] = frozenset({"features", "argmax"})

    def __post_init__(self) -> None:
        if any(s < 1 for s in self.shifts) or list(self.shifts) != sorted(set(self.shifts)):
            raise ValueError(f"shifts {self.shifts} must be ascending, from 1 on, none twice")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold {self.threshold} is no probability")

    def table(self, config: Any) -> Table:
        """Nothing is learned."""
        return {}

    def check_num_draft(self, config: Any, num_draft: int) -> int:
        """Returns `num_draft`: the chain may go on past the plain block to the end of the last one.

        Raises:
          ValueError: not between 1 and the drafts of the block plus the largest shift.
        """
        most = config.num_drafts + max(self.shifts, default=0)
        if not 1 <= num_draft <= most:
            raise ValueError(
                f"num_draft {num_draft} is not between 1 and {most}: a block holds "
                f"{config.num_drafts} drafts and the largest shift of {self.shifts} adds to it"
            )
        return num_draft

    def inject(
        self, config: Any, params: Params, vocabulary: Vocabulary, rejected: Rejected, block: Block
    ) -> Block:
        """One block per shift behind the plain one; those past the rejected rows mean nothing."""
        shifts = jnp.asarray((0, *self.shifts), jnp.int32)[None, :, None]
        shape = (block.tokens.shape[0], shifts.shape[1], block.tokens.shape[2])
        last = rejected.argmax.shape[1] - 1
        stale = [rejected.argmax[:, min(s - 1, last)] for s in self.shifts]
        anchors = jnp.stack([block.tokens[:, 0, 0], *stale], axis=1)
        tokens = jnp.broadcast_to(block.tokens, shape).at[:, :, 0].set(anchors)
        shifted = replace(
            block,
            tokens=tokens,
            positions=block.positions + shifts,
            context_end=jnp.broadcast_to(block.context_end, shape[:2]),
        )
        rows = stale_rows(rejected, shifted, rejected.features)
        before = rows.positions < shifted.positions[:, :, :1]
        return replace(shifted, carried=replace(rows, valid=rows.valid & before))
