import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

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


def test_who_may_wait_for_ever_still_connects_in_time() -> None:
    store = dist.HashStore()

    def rank(number: int) -> float:
        group = Group(number, 2, 1000.0)
        group.connect(store, "127.0.0.1", patience=0.5)
        time.sleep(1.0 * (number == 0))
        return group.broadcast(torch.full((), float(number))).item()

    with pytest.raises(EngineDeadError, match="rank 0 of 2 lost the other ranks"):
        Group(0, 2, 1000.0).connect(dist.HashStore(), "127.0.0.1", patience=0.5)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank, range(2))) == [0.0, 0.0]


def test_a_group_whose_peer_never_comes_is_given_up() -> None:
    with pytest.raises(EngineDeadError, match="rank 0 of 2 lost the other ranks"):
        Group(0, 2, 0.5).connect(dist.HashStore(), "127.0.0.1")


@pytest.mark.parametrize("operation", ["all_reduce", "broadcast", "gather"])
def test_an_operation_that_was_broken_off_is_the_last(run_ranks, operation: str) -> None:
    """Else the other rank, which still waits for it, would take the next one's numbers for it."""

    def rank(group: Group) -> str:
        if group.rank == 0:
            interrupt = pytest.MonkeyPatch()
            interrupt.setattr(group, "_exchange", lambda sent, received: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                getattr(group, operation)(torch.ones(4))
            interrupt.undo()
        else:
            with pytest.raises(EngineDeadError, match="rank 1 of 2 lost the other ranks"):
                group.broadcast(torch.zeros(4))
        with pytest.raises(
            EngineDeadError, match=r"^rank \d of 2 lost the other ranks \(an operation was broken off\)"
        ):
            group.all_reduce(torch.full((4,), 7.0))
        return "raised"

    assert run_ranks(2, rank, timeout=0.5) == ["raised", "raised"]


def test_an_interrupt_within_a_sum_goes_on_as_itself(run_ranks) -> None:
    def rank(group: Group) -> type[BaseException] | None:
        try:
            with group.all_reduces(3, lambda: torch.empty(4)):
                if group.rank == 0:
                    group._exchange = lambda sent, received: (_ for _ in ()).throw(KeyboardInterrupt)
                group.all_reduce(torch.ones(4))
        except BaseException as error:  # noqa: BLE001 - it is what is asked for
            return type(error)
        return None

    assert run_ranks(2, rank, timeout=0.5) == [KeyboardInterrupt, EngineDeadError]
