import time

import pytest
import torch

from vllm_teach.errors import EngineDeadError
from vllm_teach.parallel.group import Group


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("rows", [5, 5000], ids=["small", "large"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_reduce_sums_alike_everywhere_and_counts(run_ranks, size: int, rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(rows, 7).to(dtype) for _ in range(size)]

    def rank(group: Group):
        mine = parts[group.rank].clone()
        assert group.all_reduce(mine) is mine, "in place"
        return mine, group.traffic["all_reduce"]

    found = run_ranks(size, rank)
    expected = torch.stack([part.double() for part in parts]).sum(0)
    for total, traffic in found:
        torch.testing.assert_close(total.double(), expected, atol=0.06 if dtype is torch.bfloat16 else 2e-6, rtol=0)
        assert torch.equal(total, found[0][0]), "to the last bit"
        assert (traffic.calls, traffic.num_bytes) == (1, 7 * rows * dtype.itemsize)


def test_broadcast_and_gather(run_ranks) -> None:
    def rank(group: Group):
        x = group.broadcast(torch.full((2, 3), float(group.rank + 10)))
        return x, group.gather(torch.full((4,), group.rank)), group.traffic

    found = run_ranks(3, rank)
    assert all(torch.equal(x, torch.full((2, 3), 10.0)) for x, _, _ in found)
    assert torch.equal(torch.stack(found[0][1]), torch.tensor([[0] * 4, [1] * 4, [2] * 4]))
    assert found[1][1] is None
    assert found[2][1] is None
    traffic = found[1][2]
    assert (traffic["broadcast"].num_bytes, traffic["gather"].num_bytes) == (24, 32)


@pytest.mark.parametrize("fails_after", [0, 1, 2])
def test_a_rank_that_breaks_off_keeps_nobody_waiting(run_ranks, fails_after: int) -> None:
    def rank(group: Group) -> list[torch.Tensor]:
        sums = []
        try:
            with group.all_reduces(3, lambda: torch.empty(4)):
                for call in range(3):
                    if group.rank == 1 and call == fails_after:
                        raise ZeroDivisionError
                    sums.append(group.all_reduce(torch.ones(4)))
        except ZeroDivisionError:
            assert group.rank == 1
        sums.append(group.all_reduce(torch.ones(4)))  # the next pass is in step
        return sums

    sums = run_ranks(2, rank)[0]
    assert [bool(each.isnan().all()) for each in sums] == [call >= fails_after for call in range(3)] + [False]
    assert torch.equal(sums[3], torch.full((4,), 2.0))


def test_a_rank_that_is_silent_is_given_up(run_ranks) -> None:
    def rank(group: Group) -> str:
        if group.rank == 1:
            time.sleep(1.5)
            return ""
        with pytest.raises(EngineDeadError, match=r"^rank 0 of 2 lost the other ranks \(Timed out .*\): load"):
            group.all_reduce(torch.ones(4))
        return "raised"

    assert run_ranks(2, rank, timeout=0.5) == ["raised", ""]


def test_a_group_whose_peer_never_comes_is_given_up() -> None:
    import torch.distributed as dist

    with pytest.raises(EngineDeadError, match="rank 0 of 2 lost the other ranks"):
        Group(0, 2, 0.5).connect(dist.HashStore(), "127.0.0.1")
