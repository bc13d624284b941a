"""Who held which block of the KV cache in which step, from the event log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from vllm_teach.engine.events import LogEntry, Scheduled, StepEnded
from vllm_teach.kvcache.events import Allocated, Freed, Moved, Shared


@dataclass(frozen=True)
class BlocksHeld:
    """At `time`, in `step`: for each physical block that a table holds, the sequences whose tables these are, sorted.

    `computing`: the step is planned and not yet computed; else it has just ended.
    """

    step: int
    time: float
    computing: bool
    holders: dict[int, tuple[int, ...]]

    @property
    def num_shared(self) -> int:
        """Blocks that more than one table holds."""
        return sum(len(seq_ids) > 1 for seq_ids in self.holders.values())


def block_history(log: Iterable[LogEntry]) -> list[BlocksHeld]:
    """Return who held what when each step was planned and when it had ended, oldest first.

    A log that lost its oldest events knows nothing of blocks that were taken before. Blocks that only a prefix cache
    keeps are held by nobody.
    """
    holders: dict[int, set[int]] = {}
    history: list[BlocksHeld] = []
    planned = 0
    for step, time, event in log:
        _follow(holders, event)
        first = isinstance(event, Scheduled) and step != planned
        if first or isinstance(event, StepEnded):
            planned = step
            held = {block: tuple(sorted(holders[block])) for block in sorted(holders)}
            history.append(BlocksHeld(step, time, first, held))
    return history


@dataclass(frozen=True)
class BlocksCounted:
    """At `time`: how many blocks one table alone holds, and how many are in several."""

    time: float
    own: int
    shared: int


def count_blocks(log: Iterable[LogEntry]) -> Iterator[BlocksCounted]:
    """Yield how many blocks were held whenever `block_history` says which, in time that the events alone determine."""
    holders: dict[int, set[int]] = {}
    shared: set[int] = set()
    planned = 0
    for step, time, event in log:
        for block in _follow(holders, event):
            if len(holders.get(block, ())) > 1:
                shared.add(block)
            else:
                shared.discard(block)
        if (isinstance(event, Scheduled) and step != planned) or isinstance(event, StepEnded):
            planned = step
            yield BlocksCounted(time, len(holders) - len(shared), len(shared))


def _follow(holders: dict[int, set[int]], event: object) -> Iterable[int]:
    """Bring `holders` up to date with one event; return the blocks it was about."""
    match event:
        case Allocated(seq_id, blocks) | Shared(seq_id, blocks):
            for block in blocks:
                holders.setdefault(block, set()).add(seq_id)
            return blocks
        case Freed(seq_id, blocks):
            for block in blocks:
                left = holders.get(block, set()) - {seq_id}
                if left:
                    holders[block] = left
                else:
                    holders.pop(block, None)
            return blocks
        case Moved(pairs):
            moved = {after: holders.pop(before) for before, after in pairs if before in holders}
            holders.update(moved)
            return {block for pair in pairs for block in pair}
    return ()
