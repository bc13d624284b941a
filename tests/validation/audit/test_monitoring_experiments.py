"""The served run of the monitoring table, on the real server's parts, without HTTP."""

import pytest

from vllm_teach.errors import MissingDependencyError, installs
from vllm_teach.validation.audit.experiment import load_experiments
from vllm_teach.validation.audit.experiments import monitoring
from vllm_teach.validation.audit.lab import Lab
from vllm_teach.validation.audit.run import audit_row
from vllm_teach.validation.audit.verdict import CONFIRMED, PARTLY, UNDECIDED
from vllm_teach.validation.tables import get_table

TIMED = "share_of_time_spent_in_attention"
KEYS = [key for key in get_table("metrics-to-monitor").keys if key != TIMED]


@pytest.fixture(scope="module")
def lab() -> Lab:
    return Lab(quick=True)


@pytest.mark.parametrize("key", KEYS)
def test_every_metric_is_exported_and_right(key: str, lab: Lab) -> None:
    row = audit_row(load_experiments().get("metrics-to-monitor", key), lab)
    assert row.stopped is None
    gpu = key == "memory_utilisation_gpu_and_host" and not lab.on_gpu
    assert row.verdict.verdict == (PARTLY if gpu else CONFIRMED), row.verdict.judgements
    assert row.verdict.missing == (("GPU memory, exported / counted",) if gpu else ())


def test_on_a_gpu_the_gpu_serves_and_its_memory_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(quick=True)
    lab.device = "cuda"

    class Asked(Exception):
        pass

    def engine(model: str, *, device: str, **settings: object) -> None:
        raise Asked(device)

    monkeypatch.setattr("vllm_teach.LLM", engine, raising=False)
    with pytest.raises(Asked, match="cuda"):
        monitoring.serve_tiny(lab)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (30, 40))
    assert monitoring._device_share(lab) == 0.25
    assert monitoring._device_share(Lab()) is None


def test_without_the_extra_the_rows_cannot_be_decided_and_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> dict[str, str]:
        raise MissingDependencyError(f"prometheus-client is not installed: run {installs('serve')}.")

    monkeypatch.setattr(monitoring, "exported_metrics", missing)
    row = audit_row(load_experiments().get("metrics-to-monitor", "kv_cache_hit_rate"), Lab(quick=True))
    assert row.verdict.verdict == UNDECIDED
    assert ".[serve]" in (row.stopped or "")
