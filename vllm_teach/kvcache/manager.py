"""The paged KV cache: which sequence's tokens lie in which blocks. Plans only; `KVStorage` has the tensors.

Block tables, sharing and copy on write are Kwon et al. 2023, "Efficient Memory Management for Large Language Model
Serving with PagedAttention", section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.block_supply import BlockSupply
from vllm_teach.kvcache.block_table import NO_BLOCK, BlockTable, put_between_holes, without_holes
from vllm_teach.kvcache.cached_sequences import CachedSequence, CachedSequences
from vllm_teach.kvcache.events import CacheEvent, PrefixHit, SwappedIn, SwappedOut
from vllm_teach.kvcache.placement import make_placement
from vllm_teach.kvcache.prefix_cache import PrefixMatch, Tokens
from vllm_teach.kvcache.prefix_caches import make_prefix_cache
from vllm_teach.kvcache.swap_space import SwapSpace
from vllm_teach.kvcache.transfers import Transfer
from vllm_teach.kvcache.usage import CacheUsage, measure_usage, renew_usage


class KVCacheManager:
    """Gives sequences blocks for their tokens, shares what is equal, and takes back what nobody needs.

    A sequence writes only to blocks that it alone holds and no prefix cache pins. So what a block holds changes only
    while it is of use to one sequence, and any other content stays until the block is free. `extend` sees to it: only
    the last block with computed tokens can be shared or pinned and written to at once, and that one is copied.

    Each change is complete when its method returns, but for the contents of blocks that are copied: these are in place
    when the storage has applied `take_transfers()`. Each change is recorded as an event (`vllm_teach.kvcache.events`).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        prefix_cache: str | None = "hash",
        eviction: str = "lru",
        placement: str = "scattered",
        compact_above: float = 0.5,
        num_host_blocks: int = 0,
        record: Callable[[CacheEvent], None] | None = None,
    ) -> None:
        if block_size < 1:
            raise InvalidArgumentError(f"block_size={block_size} is not valid: a block has at least one slot.")
        self.num_blocks, self.block_size, self.num_host_blocks = num_blocks, block_size, num_host_blocks
        self._sequences = CachedSequences()
        self._record = record or (lambda event: None)
        self._placement = make_placement(placement, num_blocks, self._tables, self._move, compact_above=compact_above)
        self.pool = self._placement.pool
        self.prefix_cache = make_prefix_cache(prefix_cache, self.pool, block_size, eviction)
        self._supply = BlockSupply(self._placement, self.prefix_cache, self._record)
        self._swap_space = SwapSpace(num_host_blocks)
        # Elsewhere a block that was computed twice stays, so that its sequence can still be read as one view.
        self._adopts = placement == "scattered"

    @property
    def max_tokens(self) -> int:
        """The length of the longest sequence that fits, alone in the cache."""
        return self._placement.max_blocks * self.block_size

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Say whether `num_tokens` tokens of one sequence fit, alone in the cache."""
        return num_tokens <= self.max_tokens

    def has(self, seq_id: int) -> bool:
        """Say whether `seq_id` has a table, swapped out or not."""
        return seq_id in self._sequences

    def table(self, seq_id: int) -> BlockTable:
        """Return the table of `seq_id` itself, which later calls change; a swapped sequence's has no blocks."""
        return self._sequences.find(seq_id).table

    def begin(
        self, seq_id: int, token_ids: Sequence[int], *, salt: str = "", share: bool = True, count: bool = True
    ) -> int:
        """Make a table for `seq_id` that starts with the blocks in which a prefix of `token_ids` is computed already.

        Returns how many tokens that is: never all of them, since the last one's logits are needed, and none without
        `share`. Takes no free blocks. A prefix under another `salt` is another one. `count=False` leaves the look-up
        out of the hit statistics. Raises InvalidArgumentError for no tokens, or if `seq_id` has a table.
        """
        self._sequences.check_new(seq_id)
        if not len(token_ids):
            raise InvalidArgumentError(f"token_ids of seq_id={seq_id} is empty: a sequence has at least one token.")
        match, cursor = PrefixMatch(), None
        if self.prefix_cache is not None:
            if share:
                match = self.prefix_cache.match(token_ids, salt, len(token_ids) - 1)
            self._supply.hold(seq_id, match.blocks)
            cursor = self.prefix_cache.start(token_ids, match, salt)
            if share and count:
                self._supply.counts.hit_queries += len(token_ids)
                self._supply.counts.hit_tokens += match.num_tokens
                if match.num_tokens:
                    self._record(PrefixHit(seq_id, match.num_tokens, len(token_ids)))
        table = BlockTable(self.block_size, list(match.blocks), match.num_tokens)
        self._sequences.add(seq_id, CachedSequence(table, match.num_tokens, cursor))
        return match.num_tokens

    def extend(self, seq_id: int, num_tokens: int) -> bool:
        """See to it that the first `num_tokens` tokens of `seq_id` have slots and the uncomputed ones can be written.

        Takes free blocks, and idle ones when these run out; copies the last block on write, or has the prefix cache
        forget it where that alone is in the way and there is no room for a copy; may move blocks of any sequence (by
        placement). Returns False, with nothing changed, when there are too few blocks. To ask a second time changes
        nothing more. Raises InvalidArgumentError for a sequence that is swapped out or not there.
        """
        sequence = self._sequences.resident(seq_id)
        missing, copy = self._missing(sequence, num_tokens)
        if (missing or copy) and not self._supply.append(seq_id, sequence.table, missing, copy):
            return False
        written = self._written_first(sequence, num_tokens)
        if not copy and written is not None and self.pool.pins(written):
            self._supply.uncache(written)
        sequence.table.num_tokens = max(sequence.table.num_tokens, num_tokens)
        return True

    def blocks_to_extend(self, seq_id: int, num_tokens: int) -> int:
        """Return how many of the pool's available blocks `extend` would take now."""
        sequence = self._sequences.resident(seq_id)
        return self._supply.cost(sequence.table, *self._missing(sequence, num_tokens))

    def commit(self, seq_id: int, num_computed: int, tokens: Tokens) -> None:
        """Record that the first `num_computed` tokens, `tokens(start, count)` from position start on, are computed.

        Full blocks become prefix hits for others. With scattered placement, blocks that were computed twice are given
        back for the cached ones. Raises InvalidArgumentError for more tokens than slots, or fewer than before.
        """
        sequence = self._sequences.resident(seq_id)
        table = sequence.table
        if not sequence.num_computed <= num_computed <= table.num_tokens:
            raise InvalidArgumentError(
                f"num_computed={num_computed} is not valid for seq_id={seq_id}: {sequence.num_computed} tokens are "
                f"computed and {table.num_tokens} have slots; extend it first."
            )
        sequence.num_computed = num_computed
        if self.prefix_cache is not None:
            twice = self.prefix_cache.insert(sequence.cursor, tokens, table.blocks, num_computed)
            # They were written since the last commit, so no other table has them: each becomes free.
            for logical, cached in twice.items() if self._adopts else ():
                self._supply.hold(seq_id, [cached])
                own, table.blocks[logical] = table.blocks[logical], cached
                self._supply.release(seq_id, [own])

    def fork(self, parent_id: int, child_id: int) -> None:
        """Let `child_id` begin as what `parent_id` is: it shares all blocks with computed tokens, and takes no others.

        Slots of the parent that nothing is computed in are given back. Raises InvalidArgumentError if `child_id` has a
        table, or the parent is swapped out or not there.
        """
        self._sequences.check_new(child_id)
        parent = self._sequences.resident(parent_id)
        self._supply.trim(parent_id, parent.table, parent.num_computed)
        blocks = list(parent.table.blocks)
        self._supply.hold(child_id, without_holes(blocks))
        cursor = None if self.prefix_cache is None else self.prefix_cache.copy_cursor(parent.cursor)
        table = BlockTable(self.block_size, blocks, parent.num_computed)
        self._sequences.add(child_id, CachedSequence(table, parent.num_computed, cursor))

    def drop(self, seq_id: int, logical_blocks: Iterable[int]) -> None:
        """Give back blocks that no later query of `seq_id` sees; those given back before are left out.

        Raises InvalidArgumentError for a block that is not full: its slots are still to be written.
        """
        sequence = self._sequences.resident(seq_id)
        blocks, full = sequence.table.blocks, sequence.num_computed // self.block_size
        chosen = sorted(set(logical_blocks), reverse=True)
        if chosen and not 0 <= chosen[-1] <= chosen[0] < full:
            raise InvalidArgumentError(
                f"logical_blocks={chosen} is not valid for seq_id={seq_id}: its full blocks are 0 to {full - 1}."
            )
        gone = [(logical, blocks[logical]) for logical in chosen if blocks[logical] != NO_BLOCK]
        for logical, _ in gone:
            blocks[logical] = NO_BLOCK
        self._supply.release(seq_id, [block for _, block in gone])

    def free(self, seq_id: int, tokens: Tokens | None = None, num_computed: int = 0) -> None:
        """End `seq_id`, swapped out or not, and give back all it holds, the tail first; one not there is left alone.

        With `tokens` and `num_computed`, what it computed is indexed to the last token. Raises InvalidArgumentError
        for more tokens than slots.
        """
        if seq_id not in self._sequences:
            return
        sequence = self._sequences.find(seq_id)
        table = sequence.table
        if sequence.host_blocks is not None or tokens is None:
            tokens, num_computed = _no_tokens, 0
        if num_computed > table.num_tokens:
            raise InvalidArgumentError(
                f"num_computed={num_computed} is more than the {table.num_tokens} slots of seq_id={seq_id}."
            )
        if self.prefix_cache is not None:
            self.prefix_cache.end(sequence.cursor, tokens, table.blocks, num_computed)
        self._sequences.remove(seq_id)
        self._swap_space.give(without_holes(sequence.host_blocks or ()))
        self._supply.empty(seq_id, table)

    def swap_out(self, seq_id: int) -> bool:
        """Copy all computed blocks of `seq_id` to host blocks of its own and give its blocks back.

        Returns False, with nothing changed, when the host has too few. Raises InvalidArgumentError for a sequence that
        is swapped out already or not there.
        """
        sequence = self._sequences.resident(seq_id)
        table = sequence.table
        computed = table.blocks[: -(-sequence.num_computed // self.block_size)]
        sources = without_holes(computed)
        if len(sources) > self._swap_space.num_free:
            return False
        taken = self._swap_space.take(len(sources))
        self._supply.transfers.record("swap_out", zip(sources, taken, strict=True))
        sequence.host_blocks = put_between_holes(computed, taken)
        self._supply.counts.swapped_out += len(sources)
        self._record(SwappedOut(seq_id, len(sources)))
        self._supply.empty(seq_id, table)
        return True

    def swap_in(self, seq_id: int) -> bool:
        """Bring `seq_id` back into blocks of its own. Returns False, with nothing changed, when there are too few.

        Raises InvalidArgumentError for a sequence that is not swapped out.
        """
        sequence, host_blocks = self._sequences.swapped(seq_id)
        table, sources = sequence.table, without_holes(host_blocks)
        if not self._supply.append(seq_id, table, len(sources)):
            return False
        self._supply.transfers.record("swap_in", zip(sources, table.blocks, strict=True))
        table.blocks[:] = put_between_holes(host_blocks, list(table.blocks))
        table.num_tokens, sequence.host_blocks = sequence.num_computed, None
        self._swap_space.give(sources)
        self._supply.counts.swapped_in += len(sources)
        self._record(SwappedIn(seq_id, len(sources)))
        return True

    def compact(self) -> int:
        """Move all blocks in use to the pool's start, as the placement packs them; return how many moved."""
        return self._placement.compact()

    def take_transfers(self) -> tuple[Transfer, ...]:
        """Return what the storage has to do, in this order, before the next tokens are written; each is told once."""
        return self._supply.transfers.take()

    def reset_prefix_cache(self) -> None:
        """Forget all computed prefixes. Sequences go on, and what they share stays shared."""
        if self.prefix_cache is not None:
            self.prefix_cache.reset()

    def usage(self) -> CacheUsage:
        """Return the figures of this moment. Looks at every table and every free block: not for each step of a loop."""
        computed = ((each.table, each.num_computed) for each in self._sequences)
        return measure_usage(self.pool, self.block_size, computed, self._swap_space, self._supply.counts)

    def renew(self, usage: CacheUsage) -> CacheUsage:
        """Return `usage` with the figures of this moment, but what needs a look at every block: for each step."""
        return renew_usage(usage, self.pool, self._swap_space, self._supply.counts)

    def _missing(self, sequence: CachedSequence, num_tokens: int) -> tuple[int, bool]:
        """Return how many blocks the first `num_tokens` tokens lack, and whether the last one must be copied first.

        It is the last one: blocks behind it would have come from an earlier `extend`, which copied it, and nobody
        comes to share or pin a block that is being written.
        """
        table, written = sequence.table, self._written_first(sequence, num_tokens)
        missing = max(0, -(-num_tokens // self.block_size) - len(table.blocks))
        copy = written is not None and (self.pool.holders(written) > 1 or self.pool.pins(written) > 0)
        if written is not None and copy and self.pool.holders(written) == 1:
            # Who runs comes before what may be of use: rather than stop for want of a copy, it takes the block itself.
            copy = self._supply.cost(table, missing, copy_last=True) <= self.pool.num_available
        return missing, copy

    def _written_first(self, sequence: CachedSequence, num_tokens: int) -> int | None:
        """Return the block that has computed tokens and gets more of the first `num_tokens`, or None."""
        computed = sequence.num_computed
        if num_tokens <= computed or not computed % self.block_size:
            return None
        return sequence.table.blocks[computed // self.block_size]

    def _tables(self) -> list[BlockTable]:
        return [sequence.table for sequence in self._sequences]

    def _move(self, moves: Mapping[int, int]) -> None:
        self._supply.move(moves, self._tables())


def _no_tokens(start: int, count: int) -> Sequence[int]:
    return ()
