"""What Prometheus reads to find the replicas: through nginx, each scrape would tell of any one of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import yaml

from vllm_teach import resources

_TARGETS = "targets.json"


def write_prometheus_files(folder: Path, addresses: Sequence[str]) -> None:
    """Write `targets.json`, a file for Prometheus' `file_sd_configs`, and a `prometheus.yml` that names it to `folder`.

    The latter is data/monitoring/prometheus.yml but for its targets. Prometheus sees that `targets.json` has changed by
    itself. The label `replica` is a replica's number, which stays when its port is another one after a new start.
    """
    targets = [{"targets": [each], "labels": {"replica": str(index)}} for index, each in enumerate(addresses)]
    (folder / _TARGETS).write_text(json.dumps(targets, indent=2) + "\n", encoding="utf-8")
    shipped = resources.folder("data") / "monitoring" / "prometheus.yml"
    configuration = yaml.safe_load(shipped.read_text(encoding="utf-8"))
    [job] = configuration["scrape_configs"]
    del job["static_configs"]
    job["file_sd_configs"] = [{"files": [_TARGETS]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration, sort_keys=False), encoding="utf-8")
