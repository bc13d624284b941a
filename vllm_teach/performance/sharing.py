"""How many blocks sharing saves, step by step: what the tables of some sequences list, and what they hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm_teach.engine.beam_params import BeamSearchParams
from vllm_teach.engine.beam_search import BeamSearch, search_beams
from vllm_teach.engine.llm_engine import LLMEngine
from vllm_teach.engine.prompts import Prompt
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.kvcache.block_table import without_holes
from vllm_teach.kvcache.manager import KVCacheManager


@dataclass
class Sharing:
    """After each step: `listed` blocks in all tables together, which is what sequences that share nothing would hold,
    and `held` physical blocks. `copies` were made on write.
    """

    listed: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    copies: int = 0

    @property
    def saved(self) -> float:
        """Blocks saved by sharing / blocks without sharing, over all steps (Kwon et al. 2023, figure 15); 0 to 1."""
        return 1 - sum(self.held) / sum(self.listed) if self.listed else 0.0

    @property
    def peak(self) -> int:
        """The most blocks held at a time."""
        return max(self.held, default=0)

    @property
    def peak_listed(self) -> int:
        """The most blocks that it would take without sharing."""
        return max(self.listed, default=0)

    def note(self, kv: KVCacheManager, seq_ids: Iterable[int]) -> None:
        """Add the state of this moment, if one of the sequences holds anything."""
        tables = [without_holes(kv.table(seq_id).blocks) for seq_id in seq_ids if kv.has(seq_id)]
        if any(tables):
            self.listed.append(sum(map(len, tables)))
            self.held.append(len({block for table in tables for block in table}))


def follow_samples(engine: LLMEngine, prompts: Iterable[Prompt], params: SamplingParams) -> Sharing:
    """Run the requests to their end, all at a time, and return what they shared. `engine` has nothing else to do."""
    sharing, copies = Sharing(), engine.kv.usage().copies
    for prompt in prompts:
        engine.add_request(prompt, params)
    while engine.has_unfinished_requests():
        engine.step()
        sharing.note(engine.kv, (sequence.seq_id for sequence in engine.scheduler.running))
    sharing.copies = engine.kv.usage().copies - copies
    return sharing


def follow_beams(engine: LLMEngine, prompts: list[Prompt], params: BeamSearchParams) -> Sharing:
    """Search to the end and return what the beams shared."""
    sharing, copies = Sharing(), engine.kv.usage().copies

    def note(search: BeamSearch) -> None:
        sharing.note(engine.kv, (beam.seq_id for beam in search.beams))

    search_beams(engine, prompts, params, note)
    sharing.copies = engine.kv.usage().copies - copies
    return sharing
