"""What Prometheus reads to find the replicas."""

import json

import yaml

from vllm_teach import resources
from vllm_teach.serving.replicas.prometheus_files import write_prometheus_files


def test_prometheus_is_pointed_at_each_replica_and_else_told_what_the_shipped_file_says(tmp_path):
    write_prometheus_files(tmp_path, ["127.0.0.1:9001", "127.0.0.1:9002"])
    shipped = yaml.safe_load((resources.folder("data") / "monitoring" / "prometheus.yml").read_text())
    written = yaml.safe_load((tmp_path / "prometheus.yml").read_text())
    [job] = written["scrape_configs"]
    [read] = job.pop("file_sd_configs")
    del shipped["scrape_configs"][0]["static_configs"]
    assert written == shipped
    [file] = read["files"]  # relative to the configuration's folder
    assert json.loads((tmp_path / file).read_text()) == [
        {"targets": ["127.0.0.1:9001"], "labels": {"replica": "0"}},
        {"targets": ["127.0.0.1:9002"], "labels": {"replica": "1"}},
    ]


def test_a_new_start_leaves_no_target_of_the_one_before(tmp_path):
    for port in (9001, 9003):
        write_prometheus_files(tmp_path, [f"127.0.0.1:{port}"])
    assert [each["targets"] for each in json.loads((tmp_path / "targets.json").read_text())] == [["127.0.0.1:9003"]]
