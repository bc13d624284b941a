import psutil
import pytest
import torch

from vllm_teach.engine import device as choice
from vllm_teach.errors import InvalidArgumentError

CPU = torch.device("cpu")


def test_auto_dtype_follows_the_cpu(monkeypatch):
    monkeypatch.setattr(choice, "cpu_multiplies_bf16", lambda: True)
    assert choice.choose_dtype("auto", CPU) is torch.bfloat16
    monkeypatch.setattr(choice, "cpu_multiplies_bf16", lambda: False)
    assert choice.choose_dtype("auto", CPU) is torch.float32


@pytest.mark.parametrize(
    ("machine", "avx512", "amx", "arm", "expected"),
    [
        ("x86_64", True, False, False, True),
        ("x86_64", False, True, False, True),
        ("AMD64", False, False, True, False),
        ("aarch64", False, False, True, True),
        ("arm64", True, True, False, False),
    ],
)
def test_which_instructions_count(monkeypatch, machine, avx512, amx, arm, expected):
    monkeypatch.setattr(choice.platform, "machine", lambda: machine)
    monkeypatch.setattr(choice, "_arm_has_bf16", lambda: arm)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert choice.cpu_multiplies_bf16() is expected
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert choice.cpu_multiplies_bf16() is False


def test_the_probe_runs_on_this_machine():
    assert choice.cpu_multiplies_bf16() in (True, False)
    assert choice._arm_has_bf16() in (True, False)


def test_named_dtypes_and_devices():
    assert choice.choose_dtype("float16", CPU) is torch.float16
    assert choice.choose_dtype(torch.bfloat16, CPU) is torch.bfloat16
    assert choice.choose_device("cpu") == CPU
    assert choice.choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for bad in ("gpu", "mps", 3.5):
        with pytest.raises(InvalidArgumentError, match="device="):
            choice.choose_device(bad)


def test_cuda_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidArgumentError, match="no CUDA device"):
        choice.choose_device("cuda")


def test_budget_on_a_cpu_is_a_quarter_of_what_is_available():
    budget = choice.kv_cache_budget(CPU, 0.9)
    assert budget == pytest.approx(psutil.virtual_memory().available / 4, rel=0.2)
