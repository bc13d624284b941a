"""What another rank does with rank 0's messages; both are threads here."""

from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from vllm_teach.engine.config import EngineConfig
from vllm_teach.engine.limits import choose_num_blocks
from vllm_teach.engine.rank_messages import Forward, MakeCache, Stop, WhatFailed
from vllm_teach.engine.rank_worker import RankJob, serve
from vllm_teach.engine.ranks import load_over_ranks
from vllm_teach.models.attend import full_causal
from vllm_teach.models.load import load_config, load_model, load_shard
from vllm_teach.models.resolve import resolve_model
from vllm_teach.parallel.channel import Channel
from vllm_teach.parallel.group import Group

IDS = np.array([5, 17, 900])
PASS = Forward(
    transfers=(),
    token_ids=IDS,
    positions=np.arange(3),
    slots=np.arange(3),
    cu_seqlens_q=np.array([0, 3], dtype=np.int32),
    block_table=np.zeros((1, 1), dtype=np.int32),
    kv_lens=np.array([3], dtype=np.int32),
)


@pytest.mark.parametrize(("gpus", "sharing"), [(2, 1), (1, 2)])
def test_ranks_on_one_gpu_divide_what_is_free_of_it(monkeypatch: pytest.MonkeyPatch, gpus: int, sharing: int) -> None:
    """Rank 0 would take nine tenths, and leave no room for the other's cache."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr("vllm_teach.engine.ranks.WorkerProcesses", MagicMock())
    monkeypatch.setattr(RankJob, "load", MagicMock())
    monkeypatch.setattr(RankJob, "connect", MagicMock())
    cuda = torch.device("cuda")
    _, ranks = load_over_ranks(Path(), 2, torch.float16, cuda, EngineConfig(), 1.0)
    assert ranks.num_sharing == sharing
    shape = load_config(resolve_model("tiny"))
    free = 40 * EngineConfig().block_size * shape.kv_bytes_per_token(2)
    monkeypatch.setattr("vllm_teach.engine.limits.kv_cache_budget", lambda device, share: free)
    assert choose_num_blocks(EngineConfig(), shape, torch.float16, cuda, ranks.num_sharing) == 40 // sharing


def test_a_batch_that_finds_no_memory_keeps_nobody_waiting(
    run_ranks, model_folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made when rank 0 is in its pass already."""
    folder, store = model_folder(), dist.HashStore()
    failures = [MemoryError("no room for a batch")]
    made = Forward.batch

    def batch(message: Forward, device: torch.device) -> object:
        if failures:
            raise failures.pop()
        return made(message, device)

    monkeypatch.setattr(Forward, "batch", batch)
    ids, positions = torch.from_numpy(IDS), torch.arange(3)

    @torch.inference_mode()
    def rank(group: Group) -> list[torch.Tensor]:
        messages = Group(group.rank, 2, 30.0)
        messages.connect(store, "127.0.0.1")
        model, channel = load_shard(folder, group), Channel(messages)
        if group.rank:
            serve(model, EngineConfig(), channel)
            return []
        assert channel.ask(MakeCache(4, 0)) == [""]
        passes = []
        for failed in ("MemoryError('no room for a batch') on rank 1", ""):
            channel.tell(PASS)
            with model.in_step(3):
                passes.append(model(ids, positions, full_causal()))
            assert channel.ask(WhatFailed()) == [failed]
        channel.tell(Stop())
        return passes

    first, second = run_ranks(2, rank)[0]
    assert first.isnan().all()
    torch.testing.assert_close(second, load_model(folder)(ids, positions, full_causal()), atol=2e-4, rtol=1e-4)
