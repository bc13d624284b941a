"""A fork and the writes after it, step by step on a real KV cache: which write copies a block, and which does not."""

from dataclasses import dataclass

from matplotlib.figure import Figure

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.block_table import BlockTable
from vllm_teach.kvcache.manager import KVCacheManager
from vllm_teach.teaching.figures.block_table_drawing import TableView, draw_tables, view_tables

BLOCK_SIZE, NUM_BLOCKS = 4, 8
NAMES = ("A", "B", "C")
# What happens, in order: (verb, sequence) or (verb, sequence, other).
STORY = (
    ("prefill", "A"),
    ("fork", "A", "B"),
    ("write", "A"),
    ("write", "B"),
    ("write", "A"),
    ("write", "B"),
    ("fork", "B", "C"),
    ("write", "C"),
    ("write", "B"),
    ("free", "A"),
)
_PROMPT = 6


@dataclass(frozen=True)
class ForkStep:
    """The tables after one thing happened; `caption` says what, `copied` how many blocks were copied for it."""

    caption: str
    view: TableView

    @property
    def copied(self) -> int:
        """Blocks copied on write in this step."""
        return len(self.view.copies)


def fork_steps() -> list[ForkStep]:
    """Play the story: a prompt of 6 tokens in blocks of 4, a fork inside a block, writes, a fork at a block's end."""
    kv = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE, prefix_cache=None)
    lengths: dict[int, int] = {}
    return [_play(kv, lengths, *event) for event in STORY]


def _play(kv: KVCacheManager, lengths: dict[int, int], verb: str, name: str, other: str = "") -> ForkStep:
    seq = NAMES.index(name)
    if verb == "prefill":
        kv.begin(seq, range(_PROMPT))
        what = f"{name}'s prompt of {_PROMPT} tokens is computed"
        _write(kv, lengths, seq, _PROMPT)
    elif verb == "fork":
        child = NAMES.index(other)
        kv.fork(seq, child)
        lengths[child] = lengths[seq]
        what = f"{other} forks off {name}: nothing is copied"
    elif verb == "write":
        position = lengths[seq]
        before = len(kv.table(seq).blocks)
        _write(kv, lengths, seq, 1)
        what = f"{name} writes token {position}" + (
            ": a new block, no copy" if len(kv.table(seq).blocks) > before else ""
        )
    else:
        kv.free(seq)
        del lengths[seq]
        what = f"{name} ends: what others hold stays"
    transfers = kv.take_transfers()
    if verb == "write" and "new" not in what:
        what += ": shared, so copied first" if transfers else ": its own block, no copy"
    tables = {each: kv.table(i) if kv.has(i) else BlockTable(BLOCK_SIZE) for i, each in enumerate(NAMES)}
    frozen = {each: BlockTable(BLOCK_SIZE, list(table.blocks), table.num_tokens) for each, table in tables.items()}
    return ForkStep(what, view_tables(frozen, NUM_BLOCKS, transfers))


def _write(kv: KVCacheManager, lengths: dict[int, int], seq: int, count: int) -> None:
    lengths[seq] = lengths.get(seq, 0) + count
    if not kv.extend(seq, lengths[seq]):
        raise InvalidArgumentError(f"the story needs more than {NUM_BLOCKS} blocks: give it a larger pool.")
    kv.commit(seq, lengths[seq], lambda start, size: range(start, start + size))


def draw_fork_step(steps: list[ForkStep], number: int) -> Figure:
    """Draw the tables after step `number`, counted from 0, with what happened as the title."""
    return draw_tables(steps[number].view, f"{number}. {steps[number].caption}")
