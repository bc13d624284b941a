"""What a server's metrics should say, read from an engine's event log alone."""

from collections import Counter, defaultdict
from collections.abc import Callable

import pytest

from vllm_teach.engine.events import (
    Admitted,
    Arrived,
    BroughtBack,
    Finished,
    FirstToken,
    Forked,
    Preempted,
    Scheduled,
    StepEnded,
)
from vllm_teach.engine.llm_engine import LLMEngine
from vllm_teach.kvcache.events import Allocated, Copied, Evicted, Freed, Moved, PrefixHit, Shared, SwappedIn, SwappedOut


class Ledger:
    """Everything the metrics say, from the events alone."""

    def __init__(self, entries, now: float, block_size: int, caching: bool) -> None:
        self.now, self.block_size, self.caching = now, block_size, caching
        self.state: dict[int, str] = {}
        self.parent: dict[int, int] = {}
        self.known: dict[int, int] = {}  # tokens of a sequence, prompt and answer
        self.arrived: dict[int, tuple[float, int]] = {}
        self.admitted: dict[int, float] = {}
        self.looked_up: set[int] = set()
        self.tables: dict[int, list[int]] = defaultdict(list)
        self.computed: dict[int, int] = defaultdict(int)
        self.on_host: dict[int, int] = {}  # blocks
        self.token_times: dict[int, list[float]] = defaultdict(list)  # by request, a moment once
        self.generated: list[float] = []  # the moment of each token
        self.ended: dict[int, tuple[float, str]] = {}
        self.steps: list[tuple[int, int, float]] = []  # prefill, decode, seconds
        self.counts: Counter[str] = Counter()
        self._planned: list[tuple[int, int]] = []
        self._began = 0.0
        self._last: object = None
        for entry in entries:
            self._take(entry.time, entry.event)
            self._last = entry.event

    def _take(self, time: float, event) -> None:
        match event:
            case Arrived(seq, prompt, forks):
                self.arrived[seq] = (time, prompt)
                for child in range(seq, seq + forks + 1):
                    self.parent[child], self.known[child], self.state[child] = seq, prompt, "waiting"
            case Admitted(seq, cached, resumed):
                self.state[seq], self.computed[seq] = "running", cached
                self.admitted.setdefault(self.parent[seq], time)
                self.looked_up |= {seq} if self.caching and not resumed else set()
            case Scheduled(seq, start, count):
                self._planned.append((seq, start + count))
                self._began = time
            case StepEnded(prefill, decode):
                self._end_step(time, prefill, decode)
            case Preempted(seq, mode):
                self.state[seq] = "swapped" if mode == "swap" else "waiting"
                self.counts[mode] += 1
            case BroughtBack(seq):
                self.state[seq] = "running"
            case Forked(_, child, queued):
                self.state[child] = "waiting" if queued else "running"
                self.computed[child] = self.known[child]
            case FirstToken(seq):
                self.counts["prompt_tokens"] += self.known[seq] if self.parent[seq] == seq else 0
                if self.parent[seq] != seq:  # it is in no plan yet: its parent's step draws for it
                    self._draw(seq, time)
            case Finished(seq, reason):
                self.state.pop(seq, None)
                self.on_host.pop(seq, None)
                self.ended[self.parent[seq]] = time, reason
            case PrefixHit(_, found, _):
                self.counts["hits"] += found
            case _:
                self._take_blocks(event)

    def _take_blocks(self, event) -> None:
        match event:
            case Allocated(seq, blocks) | Shared(seq, blocks):
                self.tables[seq] += blocks
            case Freed(seq, blocks):
                table, before = self.tables[seq], self._last
                if isinstance(before, Shared) and before.seq_id == seq and len(blocks) == 1:
                    table[table.index(blocks[0])] = table.pop()  # it had computed what was there already
                else:
                    self.tables[seq] = [block for block in table if block not in blocks]
            case Moved(pairs):
                moves = dict(pairs)
                self.tables = defaultdict(
                    list, {seq: [moves.get(block, block) for block in table] for seq, table in self.tables.items()}
                )
                self.counts["move"] += len(pairs)
            case Copied():
                self.counts["copy"] += 1
            case Evicted(blocks):
                self.counts["evict"] += len(blocks)
            case SwappedOut(seq, count):
                self.counts["swap_out"] += count
                self.on_host[seq] = count
            case SwappedIn(seq, count):
                self.counts["swap_in"] += count
                del self.on_host[seq]

    def _end_step(self, time: float, prefill: int, decode: int) -> None:
        self.steps.append((prefill, decode, time - self._began if self._planned else 0.0))
        for seq, reached in self._planned:
            # What ended in this step gave its blocks back before, and holds nothing.
            self.computed[seq] = reached
            if reached == self.known[seq]:
                self._draw(seq, time)
        self._planned = []

    def _draw(self, seq: int, time: float) -> None:
        self.known[seq] += 1
        self.generated.append(time)
        times = self.token_times[self.parent[seq]]
        times += [] if times and times[-1] == time else [time]

    def number(self, state: str) -> int:
        return list(self.state.values()).count(state)

    def held(self) -> dict[int, int]:
        """Each held block with the tokens in it."""
        filled: dict[int, int] = {}
        for seq, table in self.tables.items():
            for place, block in enumerate(table):
                tokens = min(self.block_size, self.computed[seq] - place * self.block_size)
                filled[block] = max(filled.get(block, 0), tokens)
        return filled

    def answered(self, request: int) -> int:
        """The tokens of all answers to a request."""
        return sum(
            self.known[seq] - self.arrived[request][1] for seq, leader in self.parent.items() if leader == request
        )

    def whole(self, *reasons: str) -> list[int]:
        return [seq for seq, (_, reason) in self.ended.items() if reason in reasons]


@pytest.fixture
def read_log() -> Callable[[LLMEngine, float], Ledger]:
    """Return a function from an engine and the time to what its log says now."""

    def read(engine: LLMEngine, now: float) -> Ledger:
        return Ledger(engine.events, now, engine.kv.block_size, engine.config.enable_prefix_caching)

    return read
