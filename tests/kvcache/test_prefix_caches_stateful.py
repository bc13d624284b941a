"""Both prefix caches against brute-force models, through random lives of sequences in a pool of simulated blocks.

Each slot of the pool holds the whole prefix of the token written there, so what a match returns can be read back and
compared. What is freed is wiped: a stale index entry shows as lost content.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.block_pool import BlockPool
from vllm_teach.kvcache.block_table import NO_BLOCK
from vllm_teach.kvcache.compaction import relocate
from vllm_teach.kvcache.eviction import EVICTION_POLICIES
from vllm_teach.kvcache.hash_prefix_cache import HashPrefixCache
from vllm_teach.kvcache.prefix_cache import PrefixMatch, tokens_of
from vllm_teach.kvcache.prefix_caches import PREFIX_CACHES, make_prefix_cache
from vllm_teach.kvcache.radix_prefix_cache import RadixPrefixCache
from vllm_teach.kvcache.radix_tree import RadixNode

NUM_BLOCKS = 14
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
SALTS = st.sampled_from(["", "", "", "user"])
Prefix = tuple[str, tuple[int, ...]]


@dataclass(eq=False)
class Running:
    """A sequence as a manager would keep it."""

    salt: str
    tokens: list[int]
    table: list[int]
    computed: int
    cursor: object
    # What the model says of its indexing: positions indexed so far, whether it was running when the cache was reset.
    indexed: int
    detached: bool = False

    def read(self, start: int, count: int) -> list[int]:
        return self.tokens[start : start + count]

    def prefix(self, end: int) -> Prefix:
        return self.salt, tuple(self.tokens[:end])


def common(a: Prefix, b: Prefix) -> int:
    if a[0] != b[0]:
        return 0
    return next((i for i, (x, y) in enumerate(zip(a[1], b[1], strict=False)) if x != y), min(len(a[1]), len(b[1])))


class PrefixCaches(RuleBasedStateMachine):
    """A minimal manager around one cache; checks every answer and, after each step, the books."""

    @initialize(
        name=st.sampled_from(sorted(PREFIX_CACHES)),
        eviction=st.sampled_from(EVICTION_POLICIES),
        size=st.integers(1, 4),
        adopts=st.booleans(),
        drops=st.booleans(),
        copies=st.booleans(),
    )
    def set_up(self, name: str, eviction: str, size: int, adopts: bool, drops: bool, copies: bool) -> None:
        self.pool = BlockPool(NUM_BLOCKS)
        cache = make_prefix_cache(name, self.pool, size, eviction)
        assert isinstance(cache, HashPrefixCache | RadixPrefixCache)
        self.cache, self.size, self.adopts, self.drops, self.copies = cache, size, adopts, drops, copies
        self.slots: list[list[Prefix | None]] = [[None] * size for _ in range(NUM_BLOCKS)]
        self.running: list[Running] = []
        self.history: list[Prefix] = []  # all that was ever indexed, since the last reset
        self.complete = True  # nothing of it was given up
        self.index: dict[Prefix, int] = {}  # what a cache of whole blocks holds: the prefix itself is the key

    @rule(tokens=TOKENS, salt=SALTS)
    def begin(self, tokens: list[int], salt: str) -> None:
        match = self.cache.match(tokens, salt, len(tokens) - 1)
        self.check_match(match, (salt, tuple(tokens)), len(tokens) - 1)
        for block in match.blocks:
            self.pool.hold(block)
        cursor = self.cache.start(tokens, match, salt)
        self.running.append(Running(salt, tokens, list(match.blocks), match.num_tokens, cursor, match.num_tokens))

    @rule(tokens=TOKENS, salt=SALTS)
    def serve(self, tokens: list[int], salt: str) -> None:
        """Let a sequence run its whole life at once."""
        self.begin(tokens, salt)
        self.advance(self.running[-1], len(tokens), 0)
        self.finish(self.running[-1])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 8), token=st.integers(0, 1))
    def compute(self, data: st.DataObject, count: int, token: int) -> None:
        self.advance(data.draw(st.sampled_from(self.running)), count, token)

    def advance(self, sequence: Running, count: int, token: int) -> None:
        """Write the next tokens, new ones after the prompt, into writable slots; then index them."""
        for position in range(sequence.computed, sequence.computed + count):
            if not self.make_writable(sequence, position):
                break
            sequence.tokens += [token] * (position == len(sequence.tokens))
            block = sequence.table[position // self.size]
            self.slots[block][position % self.size] = sequence.prefix(position + 1)
            sequence.computed += 1
        end = sequence.computed - sequence.computed % self.size
        expected = self.model_insert(sequence, end)
        adoptions = self.cache.insert(sequence.cursor, sequence.read, sequence.table, sequence.computed)
        if isinstance(self.cache, HashPrefixCache):
            assert adoptions == expected
        for i, cached in adoptions.items():
            last = (i + 1) * self.size
            assert self.slots[cached] == [sequence.prefix(p + 1) for p in range(i * self.size, last)]
            assert cached != sequence.table[i] != NO_BLOCK
            if self.adopts:
                self.pool.hold(cached)
                self.pool.release(sequence.table[i])
                sequence.table[i] = cached
        self.wipe_free()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.running))
        for block in parent.table:
            if block != NO_BLOCK:
                self.pool.hold(block)
        cursor = self.cache.copy_cursor(parent.cursor)
        child = Running(
            parent.salt, parent.tokens[:], parent.table[:], parent.computed, cursor, parent.indexed, parent.detached
        )
        self.running.append(child)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.finish(data.draw(st.sampled_from(self.running)))

    def finish(self, sequence: Running) -> None:
        self.running.remove(sequence)
        self.model_insert(sequence, sequence.computed)
        self.cache.end(sequence.cursor, sequence.read, sequence.table, sequence.computed)
        for block in reversed(sequence.table):
            if block != NO_BLOCK:
                self.pool.release(block)
        self.wipe_free()

    @precondition(lambda self: self.running and self.drops)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """Give back one full block that was indexed."""
        sequence = data.draw(st.sampled_from(self.running))
        full = [i for i in range(sequence.indexed // self.size) if sequence.table[i] != NO_BLOCK]
        if full:
            i = data.draw(st.sampled_from(full))
            block, sequence.table[i] = sequence.table[i], NO_BLOCK
            self.pool.release(block)
            self.wipe_free()

    @precondition(lambda self: self.pool.num_idle)
    @rule(count=st.integers(1, NUM_BLOCKS))
    def evict(self, count: int) -> None:
        texts = [*self.history, *(sequence.prefix(sequence.indexed) for sequence in self.running)]
        before = [self.cache.match(tokens, salt) for salt, tokens in texts]
        idle, free = self.idle(), self.free()
        freed = self.cache.evict(count)
        assert len(freed) == len(set(freed)) >= min(count, len(idle))
        assert set(freed) <= idle
        assert self.free() == free | set(freed)
        assert isinstance(self.cache, RadixPrefixCache) or self.drops or len(freed) == min(count, len(idle))
        for (salt, tokens), match in zip(texts, before, strict=True):
            if not set(match.blocks) & set(freed):
                after = self.cache.match(tokens, salt)
                assert after.blocks == match.blocks
                assert self.by_token or after == match
        self.model_forget(set(freed))
        self.wipe_free()

    def forget(self, block: int) -> None:
        idle, free = self.idle(), self.free()
        freed = self.cache.forget(block)
        assert (self.pool.holders(block), self.pool.pins(block)) == (1, 0)
        assert len(freed) == len(set(freed))
        assert set(freed) <= idle
        assert self.free() == free | set(freed)
        self.model_forget({block, *freed})
        self.wipe_free()

    @rule(order=st.permutations(range(NUM_BLOCKS)))
    def compact(self, order: list[int]) -> None:
        used = set(range(NUM_BLOCKS)) - self.free()
        relocate(self.pool, {block: order[block] for block in used if block != order[block]}, self.apply_moves)
        self.wipe_free()

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.history, self.index, self.complete = [], {}, True
        for sequence in self.running:
            sequence.detached = True
        assert self.pool.num_idle == 0
        self.wipe_free()

    @rule(tokens=TOKENS, salt=SALTS, limit=st.one_of(st.none(), st.integers(0, 14)))
    def look_up(self, tokens: list[int], salt: str, limit: int | None) -> None:
        match = self.cache.match(tokens, salt, limit)
        self.check_match(match, (salt, tuple(tokens)), len(tokens) if limit is None else limit)

    @invariant()
    def counts_agree(self) -> None:
        """Holders are table entries, pins are index entries, idle is pinned and not held."""
        holders = Counter(block for sequence in self.running for block in sequence.table)
        pins = Counter(self.entries())
        for block in range(NUM_BLOCKS):
            assert self.pool.holders(block) == holders[block]
            assert self.pool.pins(block) == pins[block]
        assert self.pool.num_idle == len(self.idle())
        assert self.pool.num_free == len(self.free())
        assert len(self.cache) == len(pins)

    @invariant()
    def policy_none_keeps_nothing(self) -> None:
        if self.cache.eviction == "none":
            assert not self.idle()

    @invariant()
    def running_sequences_are_found(self) -> None:
        """What a running sequence indexed and holds stays findable, whatever was evicted.

        Not the tokens that it found in a block which it has copied since: the original may go.
        """
        for sequence in self.running:
            if self.adopts and not self.drops and not sequence.detached:
                text = sequence.prefix(sequence.indexed)
                assert self.cache.match(text[1], text[0]).num_tokens >= sequence.indexed // self.size * self.size

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for sequence in self.running:
                self.cache.end(sequence.cursor, sequence.read, sequence.table, sequence.computed)
                for block in reversed(sequence.table):
                    if block != NO_BLOCK:
                        self.pool.release(block)
            self.cache.evict(NUM_BLOCKS)
            assert self.pool.num_free == NUM_BLOCKS
            assert len(self.cache) == 0

    @property
    def by_token(self) -> bool:
        return isinstance(self.cache, RadixPrefixCache)

    def check_match(self, match: PrefixMatch, text: Prefix, limit: int) -> None:
        """A match is computed content, and as long as the model says."""
        salt, tokens = text
        assert match.num_tokens <= min(limit, len(tokens))
        assert len(match.blocks) == -(-match.num_tokens // self.size)
        for position in range(match.num_tokens):
            block = match.blocks[position // self.size]
            assert self.slots[block][position % self.size] == (salt, tokens[: position + 1])
        if self.by_token:
            longest = max((common(text, past) for past in self.history), default=0)
            assert match.num_tokens <= longest
            if self.complete:
                assert match.num_tokens == min(limit, longest)
        else:
            blocks: list[int] = []
            for end in range(self.size, min(limit, len(tokens)) + 1, self.size):
                if (salt, tokens[:end]) not in self.index:
                    break
                blocks.append(self.index[salt, tokens[:end]])
            assert match == PrefixMatch(tuple(blocks), len(blocks) * self.size)

    def model_insert(self, sequence: Running, end: int) -> dict[int, int]:
        adoptions: dict[int, int] = {}
        if sequence.detached:
            return adoptions
        for i in range(sequence.indexed // self.size, end // self.size):
            block = self.index.setdefault(sequence.prefix((i + 1) * self.size), sequence.table[i])
            if block != sequence.table[i]:
                adoptions[i] = block
        sequence.indexed = max(sequence.indexed, end)
        self.history.append(sequence.prefix(end))
        return adoptions

    def model_forget(self, blocks: set[int]) -> None:
        self.index = {prefix: block for prefix, block in self.index.items() if block not in blocks}
        self.complete = self.complete and not blocks

    def wipe_free(self) -> None:
        """Free blocks lose their content; under the policy "none" the index has lost those that it pinned."""
        free = self.free()
        for block in free:
            self.slots[block] = [None] * self.size
        if self.cache.eviction == "none":
            lost = free & set(self.index.values())
            # The tree forgets a last block that is not full, too, which the index does not know.
            self.model_forget(lost if not self.by_token else free)

    def make_writable(self, sequence: Running, position: int) -> bool:
        """Give `sequence` a block of its own for `position`, copied if need be; False if there is none.

        Without `copies` the cache has to give up a block that nobody else holds.
        """
        i = position // self.size
        alone = i < len(sequence.table) and self.pool.holders(sequence.table[i]) == 1
        if alone and self.pool.pins(sequence.table[i]) and not self.copies:
            self.forget(sequence.table[i])
        if alone and not self.pool.pins(sequence.table[i]):
            return True
        if not self.pool.num_free:
            if not self.pool.num_idle:
                return False
            self.evict(1)
        block = self.pool.take()[0]
        if i < len(sequence.table):
            shared = sequence.table[i]
            rest = position % self.size
            self.slots[block] = [*self.slots[shared][:rest], *[None] * (self.size - rest)]
            sequence.table[i] = block
            self.pool.release(shared)
            self.wipe_free()
        else:
            sequence.table.append(block)
        return True

    def apply_moves(self, moves: Mapping[int, int]) -> None:
        self.pool.move(moves)
        self.cache.move(moves)
        before = [slots[:] for slots in self.slots]
        for source, destination in moves.items():
            self.slots[destination] = before[source]
        for sequence in self.running:
            sequence.table = [moves.get(block, block) for block in sequence.table]
        self.index = {prefix: moves.get(block, block) for prefix, block in self.index.items()}

    def free(self) -> set[int]:
        return {b for b in range(NUM_BLOCKS) if not self.pool.holders(b) and not self.pool.pins(b)}

    def idle(self) -> set[int]:
        return {b for b in range(NUM_BLOCKS) if not self.pool.holders(b) and self.pool.pins(b)}

    def entries(self) -> list[int]:
        """Return the block of each index entry; checks the shape of the tree on the way."""
        if isinstance(self.cache, HashPrefixCache):
            assert {cached.block for cached in self.cache._by_key.values()} == set(self.index.values())
            return [cached.block for cached in self.cache._by_key.values()]
        blocks: list[int] = []
        for salt, root in self.cache._roots.items():
            assert root.children or root.cursors
            todo: list[tuple[RadixNode, Prefix]] = [(root, (salt, ()))]
            while todo:
                node, before = todo.pop()
                text = (salt, (*before[1], *node.tokens))
                for i, block in enumerate(node.blocks, node.start // self.size):
                    for position in range(i * self.size, min((i + 1) * self.size, node.end)):
                        assert self.slots[block][position % self.size] == (salt, text[1][: position + 1])
                if node.end % self.size and node.children:
                    assert node.blocks[-1] in [child.blocks[0] for child in node.children.values()]
                blocks += node.blocks
                for token, child in node.children.items():
                    assert child.parent is node
                    assert child.start == node.end
                    assert child.tokens[0] == token
                    todo.append((child, text))
        return blocks


TestPrefixCaches = PrefixCaches.TestCase
TestPrefixCaches.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)


def run_to_the_end(pool: BlockPool, cache: HashPrefixCache | RadixPrefixCache, tokens: list[int]) -> int:
    """Compute `tokens` as one sequence that ends; return how many of them it found."""
    size = cache.block_size
    match = cache.match(tokens, limit=len(tokens) - 1)
    for block in match.blocks:
        pool.hold(block)
    cursor = cache.start(tokens, match)
    table = list(match.blocks)
    if match.num_tokens % size:  # a copy of the block in which the match ends
        pool.release(table.pop())
    table += pool.take(-(-len(tokens) // size) - len(table))
    for block in table:
        assert pool.holders(block) == 1
    cache.insert(cursor, tokens_of(tokens), table, len(tokens))
    cache.end(cursor, tokens_of(tokens), table, len(tokens))
    for block in reversed(table):
        pool.release(block)
    return match.num_tokens


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), max_size=12), st.integers(1, 5))
def test_radix_finds_at_least_what_hash_finds(prompts: list[list[int]], size: int) -> None:
    found = []
    for cache_type in (HashPrefixCache, RadixPrefixCache):
        pool = BlockPool(300)
        cache = cache_type(pool, size)
        found.append([run_to_the_end(pool, cache, prompt) for prompt in prompts])
    for prompt, by_block, by_token in zip(prompts, *found, strict=True):
        limit = len(prompt) - 1
        assert by_block == by_token // size * size
        assert by_token <= limit


def test_an_unknown_cache_is_refused() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"prefix_cache='trie' is not known: choose one of \('hash', 'radix'\)"
    ):
        make_prefix_cache("trie", BlockPool(1), 4)
    assert make_prefix_cache(None, BlockPool(1), 4) is None
