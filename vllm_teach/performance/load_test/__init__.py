"""A load test of an OpenAI-compatible server: what is sent and when, what comes back, and what it says.

`bench` ties it together. `plan`, `arrivals` and `prompts` say what is sent, `requests` how it is put; `client` sends it
to a `target` and times each `answer`; `record` is what became of one request, `tally` of all, `report` shows it.

    plan = LoadPlan(OpenLoop(rate=10), num_requests=200, lengths=ALPACA)
    report = await ServeBench(Target("http://127.0.0.1:8000"), plan).run()
    print(format_load(report))
"""

from vllm_teach.performance.load_test.arrivals import ClosedLoop, OpenLoop
from vllm_teach.performance.load_test.bench import ServeBench, ServeBenchOptions, run_until_interrupted
from vllm_teach.performance.load_test.plan import LoadPlan
from vllm_teach.performance.load_test.record import RequestRecord
from vllm_teach.performance.load_test.report import LoadReport, format_load
from vllm_teach.performance.load_test.tally import Slo
from vllm_teach.performance.load_test.target import Target

__all__ = [
    "ClosedLoop",
    "LoadPlan",
    "LoadReport",
    "OpenLoop",
    "RequestRecord",
    "ServeBench",
    "ServeBenchOptions",
    "Slo",
    "Target",
    "format_load",
    "run_until_interrupted",
]
