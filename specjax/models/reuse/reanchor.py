"""ReAnchor: further blocks, anchored behind rejected rows; nothing is trained.

A drafter only knows context rows that lie strictly before its anchor. A rejected state at position
t can therefore be used as it is by a block whose anchor stands after t: block s is anchored at
a' + s with the verifier's own choice there, and reads the rejected rows a' .. a' + s - 1 as if
they were committed. Block 0 is the plain draft. The verifier's choices can be drafts themselves,
too, which needs no further row. How all of it becomes one chain is decided by
`decoding.merging`. (Only the abstract of ReAnchor is public; this is our design of it.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from specjax.models.params import Table
from specjax.models.reuse.carryover import stale_rows
from specjax.types import Block, Params, Rejected, Vocabulary


@dataclass(frozen=True)
class ReAnchor:
    """Shifted blocks and the verifier's choices beside the plain block.

    Attributes:
      shifts: how far behind the new anchor each further block is anchored, ascending.
      threshold: least pooled probability of a draft past the end of the plain block.
      trust: how much the verifier's choice for a slot, behind the rejected drafts, counts beside
        the law of the blocks: this share, times the probability that it had there. The slot is the
        choice where it then is the most likely token; 0: never. It pays where the text behind a
        wrong token is still determined, as in copying; measured with 0.25.
    """

    shifts: tuple[int, ...] = (1, 2, 4)
    threshold: float = 0.5
    trust: float = 0.0

    def __post_init__(self) -> None:
        shifts = tuple(self.shifts)
        whole = all(isinstance(s, int) and s >= 1 for s in shifts)
        if not whole or list(shifts) != sorted(set(shifts)):
            raise ValueError(
                f"shifts {shifts} must be whole numbers from 1 on, ascending, none twice"
            )
        object.__setattr__(self, "shifts", shifts)  # a list would not be hashable
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold {self.threshold} is no probability")
        if not 0 <= self.trust <= 1:
            raise ValueError(f"trust {self.trust} is not between 0 and 1")

    @property
    def keeps(self) -> frozenset[str]:
        """States only where blocks read them."""
        blocks = {"features", "argmax"} if self.shifts else set()
        return frozenset(blocks | ({"argmax", "certainty"} if self.trust else set()))

    def table(self, config: Any) -> Table:
        """Nothing is learned."""
        return {}

    def check_num_draft(self, config: Any, num_draft: int) -> int:
        """Returns `num_draft`: the chain may go on past the plain block, where others go on.

        Raises:
          ValueError: not between 1 and the last slot up to which some block reaches every slot.
        """
        most = config.num_drafts
        for shift in self.shifts:
            if shift <= most:
                most = shift + config.num_drafts
        if not 1 <= num_draft <= most:
            raise ValueError(
                f"num_draft {num_draft} is not between 1 and {most}: a block holds "
                f"{config.num_drafts} drafts, and with those of shifts {self.shifts} there is one "
                f"for every slot up to {most}"
            )
        return num_draft

    def inject(
        self, config: Any, params: Params, vocabulary: Vocabulary, rejected: Rejected, block: Block
    ) -> Block:
        """One block per shift behind the plain one; those past the rejected rows mean nothing."""
        if not self.shifts:
            return block
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
