"""The served run of the monitoring table, on the real server's parts, without HTTP."""

from types import SimpleNamespace

import pytest

from vllm_teach.errors import MissingDependencyError, installs
from vllm_teach.performance import step_profile
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


def test_the_meters_share_is_the_median_of_its_rounds_as_the_ratio_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rounds of 100 s of forward passes, the last far from the others."""
    meter = SimpleNamespace(attention_seconds=0.0, forward_seconds=0.0, settle=lambda: None)
    rounds = iter([30.0, 20.0, 40.0, 30.0, 90.0])

    def measure(*_: object) -> None:
        meter.attention_seconds += next(rounds)
        meter.forward_seconds += 100.0

    def engine(model: str, **settings: object) -> SimpleNamespace:
        tokenizer = SimpleNamespace(encode=lambda text: [*range(1000)])
        return SimpleNamespace(tokenizer=tokenizer, engine=SimpleNamespace(runner=SimpleNamespace(meter=meter)))

    shares = dict.fromkeys(step_profile.KINDS, 0.0) | {"attention": 0.5, "norms": 0.5}
    monkeypatch.setattr("vllm_teach.LLM", engine, raising=False)
    monkeypatch.setattr(step_profile, "profile_steps", lambda *_: SimpleNamespace(shares=shares))
    monkeypatch.setattr(step_profile, "measure_step_parts", measure)
    [found] = monitoring.attention_share(Lab(quick=True))
    assert found.value == pytest.approx(0.3 / 0.5)
    assert found.setting.startswith("the meter says 0.30 of the forward pass;")


def test_without_the_extra_the_rows_cannot_be_decided_and_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> dict[str, str]:
        raise MissingDependencyError(f"prometheus-client is not installed: run {installs('serve')}.")

    monkeypatch.setattr(monitoring, "exported_metrics", missing)
    row = audit_row(load_experiments().get("metrics-to-monitor", "kv_cache_hit_rate"), Lab(quick=True))
    assert row.verdict.verdict == UNDECIDED
    assert ".[serve]" in (row.stopped or "")
