import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.parallel.torchrun import TorchrunRank

ENVIRONMENT = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_it_is_read() -> None:
    assert TorchrunRank.find({**ENVIRONMENT, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}) == TorchrunRank(
        rank=3, size=4, local_rank=1, local_size=2, master="127.0.0.1"
    )


@pytest.mark.parametrize("missing", list(ENVIRONMENT))
def test_without_it_there_is_none(missing: str) -> None:
    assert TorchrunRank.find({name: value for name, value in ENVIRONMENT.items() if name != missing}) is None


def test_a_damaged_one_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^RANK='first' in the environment is no whole number"):
        TorchrunRank.find({**ENVIRONMENT, "RANK": "first"})


def test_the_host_is_the_address_that_reaches_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_TEACH_HOST_IP", raising=False)
    rank = TorchrunRank.find(ENVIRONMENT)
    assert rank is not None
    assert rank.host() == "127.0.0.1"
    monkeypatch.setenv("VLLM_TEACH_HOST_IP", "127.0.0.2")
    assert rank.host() == "127.0.0.2"
