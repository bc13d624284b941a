import psutil
import pytest
import torch
import torch.distributed as dist

from vllm_teach.parallel.channel import Channel
from vllm_teach.parallel.group import Group


@pytest.mark.parametrize("size", [0, 1, 4_000, 4_096, 100_000])
def test_messages_of_every_size_arrive_in_order(run_ranks, size: int) -> None:
    messages = [b"x" * size, {"a": (1, None)}, b"y" * size]

    def rank(group: Group) -> list[object]:
        channel = Channel(group)
        if group.rank == 0:
            for message in messages:
                channel.tell(message)
            return messages
        return [channel.listen() for _ in messages]

    assert run_ranks(3, rank) == [messages] * 3


def test_each_rank_answers(run_ranks) -> None:
    def rank(group: Group) -> object:
        channel = Channel(group)
        if group.rank == 0:
            return channel.ask("how are you?"), channel.ask("all of it?")
        assert channel.listen() == "how are you?"
        channel.answer(f"rank {group.rank} is «well»" if group.rank == 1 else "")
        channel.listen()
        channel.answer("é" * 10_000)
        return None

    first, second = run_ranks(3, rank)[0]
    assert first == ["rank 1 is «well»", ""]
    assert all(answer.startswith("é" * 1000) and len(answer) < 10_000 for answer in second), "cut, and not broken"


def test_nothing_listens_beyond_this_machine(run_ranks) -> None:
    def rank(group: Group) -> list[str]:
        group.broadcast(torch.ones(1))
        return [each.laddr.ip for each in psutil.Process().net_connections("inet") if each.status == "LISTEN"]

    for addresses in run_ranks(2, rank):
        assert addresses
        assert set(addresses) == {"127.0.0.1"}
    assert dist.is_initialized() is False, "the process's default group is left alone"
