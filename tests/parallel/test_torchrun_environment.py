import pytest

from vllm_teach.errors import EngineDeadError, InvalidArgumentError
from vllm_teach.parallel.torchrun import TorchrunRank

ENVIRONMENT = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_it_is_read() -> None:
    assert TorchrunRank.find({**ENVIRONMENT, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}) == TorchrunRank(
        rank=3, size=4, local_rank=1, local_size=2, master="127.0.0.1", port=29500
    )


@pytest.mark.parametrize("missing", list(ENVIRONMENT))
def test_without_it_there_is_none(missing: str) -> None:
    assert TorchrunRank.find({name: value for name, value in ENVIRONMENT.items() if name != missing}) is None


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("RANK", "first", "is no whole number"),
        ("RANK", "4", "is not from 0 to 3"),
        ("RANK", "-1", "is not from 0 to 3"),
        ("WORLD_SIZE", "0", "is not from 1 on"),
        ("LOCAL_WORLD_SIZE", "5", "is not from 1 to 4"),
        ("LOCAL_RANK", "4", "is not from 0 to 3"),
        ("MASTER_PORT", "", "is no whole number"),
        ("MASTER_PORT", "65536", "is not from 1 to 65535"),
    ],
)
def test_a_damaged_one_is_refused(name: str, value: str, complaint: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{name}='{value}' in the environment {complaint}: start with"):
        TorchrunRank.find({**ENVIRONMENT, name: value})


def test_the_host_is_the_address_that_reaches_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_TEACH_HOST_IP", raising=False)
    rank = TorchrunRank.find(ENVIRONMENT)
    assert rank is not None
    assert rank.host() == "127.0.0.1"
    monkeypatch.setenv("VLLM_TEACH_HOST_IP", "127.0.0.2")
    assert rank.host() == "127.0.0.2"


def test_a_master_without_an_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_TEACH_HOST_IP", raising=False)
    rank = TorchrunRank.find({**ENVIRONMENT, "MASTER_ADDR": "no such name"})
    assert rank is not None
    with pytest.raises(InvalidArgumentError, match=r"^MASTER_ADDR='no such name' .* cannot be reached \("):
        rank.host()


def test_a_store_that_is_not_there_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {**ENVIRONMENT, "MASTER_PORT": "9"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    rank = TorchrunRank.find(environment)
    assert rank is not None
    with pytest.raises(EngineDeadError, match=r"^rank 3 of 4 found no other ranks at 127\.0\.0\.1, port 9: check"):
        rank.store(0.2)
