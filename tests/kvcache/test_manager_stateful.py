"""Random lives of sequences in the paged cache, against a memory that says what every slot really holds.

A computed slot holds the salt and all tokens up to its own, since keys and values depend on all before them. Only
`take_transfers` changes the memory, and the steps that the machine computes: so what a table promises can be read.
"""

import copy
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from vllm_teach.kvcache.block_table import NO_BLOCK
from vllm_teach.kvcache.buddy import next_power_of_two
from vllm_teach.kvcache.events import Allocated, CacheEvent, Copied, Evicted, Freed, Moved, PrefixHit, Shared
from vllm_teach.kvcache.eviction import EVICTION_POLICIES
from vllm_teach.kvcache.manager import KVCacheManager
from vllm_teach.kvcache.placement import PLACEMENTS
from vllm_teach.kvcache.transfers import Transfer

TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
PICKS = st.integers(0, 11)
# Nine kinds of caches, so 2,007 examples in all.
LIMITS = settings(max_examples=223, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))

Slots = list[list[object]]


@dataclass(eq=False)
class Text:
    """A sequence as its owner knows it."""

    seq_id: int
    salt: str
    tokens: list[int]
    computed: int = 0
    dropped: set[int] = field(default_factory=set)
    swapped: bool = False

    def read(self, start: int, count: int) -> list[int]:
        assert start + count <= self.computed
        return self.tokens[start : start + count]

    def content(self, position: int) -> object:
        return self.salt, tuple(self.tokens[: position + 1])


def apply(transfers: tuple[Transfer, ...], device: Slots, host: Slots) -> None:
    for transfer in transfers:
        assert len({destination for _, destination in transfer.pairs}) == len(transfer.pairs)
        source = host if transfer.kind == "swap_in" else device
        target = host if transfer.kind == "swap_out" else device
        read = [list(source[a]) for a, _ in transfer.pairs]
        for (_, b), slots in zip(transfer.pairs, read, strict=True):
            target[b] = slots


class Lives(RuleBasedStateMachine):
    prefix_cache: str | None
    placement: str

    @initialize(
        size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(3, 14),
        num_host_blocks=st.sampled_from([0, 3, 6, 12]),
        eviction=st.sampled_from(EVICTION_POLICIES),
    )
    def make(self, size: int, num_blocks: int, num_host_blocks: int, eviction: str) -> None:
        self.events: list[CacheEvent] = []
        self.kv = KVCacheManager(
            num_blocks,
            size,
            prefix_cache=self.prefix_cache,
            eviction=eviction,
            placement=self.placement,
            compact_above=0.3,
            num_host_blocks=num_host_blocks,
            record=self.events.append,
        )
        self.size, self.pool = size, self.kv.pool
        self.device: Slots = [[None] * size for _ in range(num_blocks)]
        self.host: Slots = [[None] * size for _ in range(num_host_blocks)]
        self.texts: list[Text] = []
        self.num_begun = self.num_replayed = 0
        self.owned: dict[int, Counter[int]] = {}  # who holds what, by the events
        self.looked_up = self.found = 0

    def pick(self, pick: int, swapped: bool = False) -> Text | None:
        texts = [text for text in self.texts if text.swapped == swapped]
        return texts[pick % len(texts)] if texts else None

    def new(self, salt: str, tokens: list[int]) -> Text:
        self.num_begun += 1
        return Text(self.num_begun, salt, tokens)

    @rule(
        tokens=TEXTS,
        salt=st.sampled_from(["", "", "", "user"]),
        share=st.sampled_from([True, True, True, False]),
        count=st.booleans(),
    )
    def begin(self, tokens: list[int], salt: str, share: bool, count: bool) -> None:
        text, available = self.new(salt, tokens), self.pool.num_available
        idle = self.pool.num_idle
        text.computed = self.kv.begin(text.seq_id, tokens, salt=salt, share=share, count=count)
        self.texts.append(text)
        assert 0 <= text.computed < len(tokens)
        assert share or not text.computed
        assert available - self.pool.num_available == idle - self.pool.num_idle  # only idle blocks, no free ones
        if share and count and self.prefix_cache is not None:
            self.looked_up += len(tokens)
            self.found += text.computed

    @rule(pick=PICKS, tail=st.lists(st.integers(0, 1), max_size=3))
    def fork(self, pick: int, tail: list[int]) -> None:
        parent = self.pick(pick)
        if parent is not None:
            available = self.pool.num_available
            child = self.new(parent.salt, parent.tokens[: parent.computed] + tail)
            child.computed, child.dropped = parent.computed, set(parent.dropped)
            self.kv.fork(parent.seq_id, child.seq_id)
            self.texts.append(child)
            assert self.pool.num_available >= available
            assert self.kv.table(child.seq_id).blocks == self.kv.table(parent.seq_id).blocks

    @rule(pick=PICKS, swapped=st.booleans(), index=st.booleans())
    def free(self, pick: int, swapped: bool, index: bool) -> None:
        text = self.pick(pick, swapped)
        if text is not None:
            self.texts.remove(text)
            if index:
                self.kv.free(text.seq_id, text.read, text.computed)
            else:
                self.kv.free(text.seq_id)
            assert not self.kv.has(text.seq_id)
            self.kv.free(text.seq_id)  # a second time, it is left alone

    @rule(picks=st.lists(st.tuples(PICKS, st.integers(1, 9)), min_size=1, max_size=4), fails=st.booleans())
    def step(self, picks: list[tuple[int, int]], fails: bool) -> None:
        """Compute the next tokens of some sequences; a step that fails has written something all the same."""
        planned: dict[Text, int] = {}
        for pick, count in picks:
            text = self.pick(pick)
            if text is not None and text not in planned:
                end = self.extend(text, count)
                if end is not None:
                    planned[text] = end
        apply(self.kv.take_transfers(), self.device, self.host)
        for block in self.pool.free:
            self.device[block] = [None] * self.size
        self.check_contents(self.device)
        for text, end in planned.items():
            for position in range(text.computed, end):
                block = self.kv.table(text.seq_id).blocks[position // self.size]
                assert (self.pool.holders(block), self.pool.pins(block)) == (1, 0)
                self.device[block][position % self.size] = "garbage" if fails else text.content(position)
        if not fails:
            for text, end in planned.items():
                text.computed = end
                told, free = len(self.events), self.pool.num_free
                self.kv.commit(text.seq_id, end, text.read)
                adopted = sum(1 for event in self.events[told:] if isinstance(event, Shared))
                assert self.placement == "scattered" or not adopted
                assert self.pool.num_free == free + adopted

    @rule(pick=PICKS, count=st.integers(1, 9))
    def extend_only(self, pick: int, count: int) -> None:
        """As a scheduler that breaks off afterwards."""
        text = self.pick(pick)
        if text is not None:
            self.extend(text, count)

    def extend(self, text: Text, count: int) -> int | None:
        """Make room for up to `count` more tokens; return where they end, or None if there was none."""
        if text.computed == len(text.tokens):
            text.tokens.append(self.num_begun % 2)
        end = min(len(text.tokens), text.computed + count)
        cost, available = self.kv.blocks_to_extend(text.seq_id, end), self.pool.num_available
        needed = Counter({b: self.pool.holders(b) + self.pool.pins(b) for b in range(self.pool.num_blocks)})
        before, told = self.state(), len(self.events)
        done = self.kv.extend(text.seq_id, end)
        assert done == (cost <= available)
        news = self.events[told:]
        copies = [event for event in news if isinstance(event, Copied)]
        if not done:
            assert self.state() == before
            assert not news
            return None
        assert len(copies) <= 1
        if copies and not any(isinstance(event, Moved) for event in news):
            assert needed[copies[0].source] > 1
        left = sum(1 for event in copies if not self.pool.holders(event.source))
        assert self.pool.num_available == available - cost + left
        after, told = self.state(), len(self.events)
        assert self.kv.blocks_to_extend(text.seq_id, end) == 0
        assert self.kv.extend(text.seq_id, end)
        assert self.state() == after
        assert len(self.events) == told
        return end

    def state(self) -> str:
        tables = [(text.seq_id, self.kv.table(text.seq_id)) for text in self.texts]
        counts = [(self.pool.holders(b), self.pool.pins(b)) for b in range(self.pool.num_blocks)]
        return repr((tables, counts, list(self.pool.free), self.pool.longest_idle))

    @rule(pick=PICKS, chosen=st.sets(st.integers(0, 6), min_size=1))
    def drop(self, pick: int, chosen: set[int]) -> None:
        text = self.pick(pick)
        if text is not None:
            chosen = {logical for logical in chosen if logical < text.computed // self.size}
            self.kv.drop(text.seq_id, chosen)
            text.dropped |= chosen

    @rule(pick=PICKS)
    def swap_out(self, pick: int) -> None:
        text = self.pick(pick)
        if text is not None:
            needed, before = self.num_kept(text), self.state()
            free = self.kv.num_host_blocks - self.kv.usage().host_blocks_used
            text.swapped = self.kv.swap_out(text.seq_id)
            assert text.swapped == (needed <= free)
            assert text.swapped or self.state() == before

    @rule(pick=PICKS)
    def swap_in(self, pick: int) -> None:
        text = self.pick(pick, swapped=True)
        if text is not None:
            before, needed = self.state(), self.num_kept(text)
            if needed and self.placement == "contiguous":
                needed = next_power_of_two(needed)
            possible = needed <= self.pool.num_available
            text.swapped = not self.kv.swap_in(text.seq_id)
            assert possible != text.swapped
            assert possible or self.state() == before
            if possible:
                table = self.kv.table(text.seq_id)
                blocks = [block for block in table.blocks if block != NO_BLOCK]
                assert all((self.pool.holders(block), self.pool.pins(block)) == (1, 0) for block in blocks)
                assert table.num_tokens == text.computed

    @rule()
    def compact(self) -> None:
        told = len(self.events)
        moved = self.kv.compact()
        assert moved == sum(len(event.pairs) for event in self.events[told:] if isinstance(event, Moved))
        held = {text.seq_id: list(self.kv.table(text.seq_id).blocks) for text in self.texts}
        assert self.kv.compact() == 0
        assert held == {text.seq_id: self.kv.table(text.seq_id).blocks for text in self.texts}

    @rule()
    def reset_prefix_cache(self) -> None:
        self.kv.reset_prefix_cache()
        assert self.pool.num_idle == 0
        assert not any(self.pool.pins(block) for block in range(self.pool.num_blocks))

    def num_kept(self, text: Text) -> int:
        return -(-text.computed // self.size) - len(text.dropped)

    def slots(self, text: Text) -> dict[int, tuple[int, int]]:
        """Position -> (block, place) of the tokens that a resident sequence has in the cache."""
        blocks = self.kv.table(text.seq_id).blocks
        kept = [p for p in range(text.computed) if p // self.size not in text.dropped]
        return {position: (blocks[position // self.size], position % self.size) for position in kept}

    def check_contents(self, device: Slots) -> None:
        for text in self.texts:
            if not text.swapped:
                for position, (block, place) in self.slots(text).items():
                    assert device[block][place] == text.content(position)

    @invariant()
    def every_block_is_counted_for(self) -> None:
        tables = [self.kv.table(text.seq_id) for text in self.texts]
        held = Counter(block for table in tables for block in table.blocks + table.spare if block != NO_BLOCK)
        blocks = range(self.pool.num_blocks)
        assert [self.pool.holders(block) for block in blocks] == [held[block] for block in blocks]
        pinned = {block for block in blocks if self.pool.pins(block)}
        assert self.prefix_cache is not None or not pinned
        assert sorted(self.pool.free) == [block for block in blocks if block not in held and block not in pinned]
        assert self.pool.num_idle == len(pinned - set(held))
        assert self.pool.num_held == len(held)

    @invariant()
    def tables_have_the_right_length(self) -> None:
        for text in self.texts:
            table = self.kv.table(text.seq_id)
            if text.swapped:
                assert (table.blocks, table.spare, table.num_tokens) == ([], [], 0)
            else:
                assert len(table.blocks) == -(-table.num_tokens // self.size)
                assert table.num_tokens >= text.computed
                assert {i for i, block in enumerate(table.blocks) if block == NO_BLOCK} == text.dropped

    @invariant()
    def tables_hold_their_sequences(self) -> None:
        """If what is pending were applied now; it is not taken, so that it may come to be merged with more."""
        device, host = copy.deepcopy((self.device, self.host))
        apply(copy.deepcopy(self.kv._supply.transfers).take(), device, host)
        self.check_contents(device)

    @invariant()
    def events_tell_who_holds_what(self) -> None:
        for event in self.events[self.num_replayed :]:
            match event:
                case Allocated(seq_id, blocks) | Shared(seq_id, blocks):
                    self.owned.setdefault(seq_id, Counter()).update(blocks)
                case Freed(seq_id, blocks):
                    self.owned[seq_id].subtract(blocks)
                case Moved(pairs):
                    moves = dict(pairs)
                    for seq_id, owned in self.owned.items():
                        self.owned[seq_id] = Counter({moves.get(b, b): n for b, n in owned.items() if n})
        self.num_replayed = len(self.events)
        tables = {t.seq_id: Counter(b for b in self.kv.table(t.seq_id).blocks if b != NO_BLOCK) for t in self.texts}
        for seq_id, owned in self.owned.items():
            assert +owned == tables.get(seq_id, Counter())

    @invariant()
    def the_figures_are_right(self) -> None:
        usage = self.kv.usage()
        resident = [text for text in self.texts if not text.swapped]
        assert usage.tokens_stored == len({slot for text in resident for slot in self.slots(text).values()})
        assert usage.slots_held == self.pool.num_held * self.size >= usage.tokens_stored
        assert usage.host_blocks_used == sum(self.num_kept(text) for text in self.texts if text.swapped)
        assert (usage.hit_queries, usage.hit_tokens) == (self.looked_up, self.found)
        assert usage.copies == sum(isinstance(event, Copied) for event in self.events)
        assert usage.moves == sum(len(event.pairs) for event in self.events if isinstance(event, Moved))
        assert usage.evictions == sum(len(event.blocks) for event in self.events if isinstance(event, Evicted))
        assert usage.hit_tokens == sum(event.num_tokens for event in self.events if isinstance(event, PrefixHit))

    def teardown(self) -> None:
        """End all; before, read back what is on the host, in an otherwise empty cache."""
        if not hasattr(self, "kv"):
            return
        for text in [text for text in self.texts if not text.swapped]:
            self.texts.remove(text)
            self.kv.free(text.seq_id, text.read, text.computed)
        for text in list(self.texts):
            assert self.kv.swap_in(text.seq_id)
            text.swapped = False
            apply(self.kv.take_transfers(), self.device, self.host)
            self.check_contents(self.device)
            self.texts.remove(text)
            self.kv.free(text.seq_id, text.read, text.computed)
        assert self.pool.num_held == self.kv.usage().host_blocks_used == 0
        self.kv.reset_prefix_cache()
        assert sorted(self.pool.free) == list(range(self.pool.num_blocks))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("prefix_cache", [None, "hash", "radix"])
def test_any_lives_of_sequences(prefix_cache: str | None, placement: str) -> None:
    machine = type("Machine", (Lives,), {"prefix_cache": prefix_cache, "placement": placement})
    run_state_machine_as_test(machine, settings=LIMITS)
