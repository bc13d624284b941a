"""The configuration that is written for nginx: read by nginx itself, and by eye for what it has to say."""

import re
import resource
from pathlib import Path

import pytest

from vllm_teach.errors import InvalidArgumentError, ReplicaError
from vllm_teach.serving.replicas import nginx
from vllm_teach.serving.replicas.nginx import check_configuration, find_nginx, nginx_listens
from vllm_teach.serving.replicas.nginx_configuration import NginxSettings, nginx_configuration

needs_nginx = pytest.mark.skipif(find_nginx() is None, reason=nginx.HOW_TO_INSTALL)
HERE = [("127.0.0.1", 8000)]


def directives(text: str) -> dict[str, list[str]]:
    """The arguments of each directive, comments apart."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        match = re.match(r"\s*([a-z_]+) (.+);$", line)
        if match:
            found.setdefault(match[1], []).append(match[2])
    return found


@needs_nginx
@pytest.mark.parametrize(
    ("settings", "listen", "ports", "drain"),
    [
        (NginxSettings(), HERE, [9001], 30.0),
        (NginxSettings(policy="round_robin"), HERE, [9001, 9002], 0.0),
        (NginxSettings(workers=8, connections=100_000_000), HERE, list(range(9000, 9200)), 1e6),
        (NginxSettings(header_timeout=0.001, read_timeout=1e6, body_timeout=0.25), [("0.0.0.0", 8000)], [9001], 0.25),
        (NginxSettings(), [("::1", 8000), ("127.0.0.1", 8000)], [9001], 30.0),
    ],
)
def test_nginx_takes_what_is_written(settings, listen, ports, drain, folder):
    (folder / nginx.CONFIGURATION).write_text(nginx_configuration(settings, listen, ports, drain))
    check_configuration(find_nginx(), folder)


@needs_nginx
def test_a_folder_of_any_name_will_do(folder):
    odd = folder / "a 'b' \"c\" $d {e}; #é"
    odd.mkdir()
    (odd / nginx.CONFIGURATION).write_text(nginx_configuration(NginxSettings(), HERE, [9001]))
    check_configuration(find_nginx(), odd)
    assert (odd / "error.log").exists(), "its paths are relative to the folder"


@needs_nginx
def test_what_nginx_refuses_is_said_in_its_words(folder):
    (folder / nginx.CONFIGURATION).write_text("no_such_directive on;\nevents {}\n")
    with pytest.raises(ReplicaError, match="unknown directive"):
        check_configuration(find_nginx(), folder)


def test_a_folder_that_the_workers_of_root_cannot_enter_is_refused(monkeypatch, folder):
    monkeypatch.setattr(nginx.os, "geteuid", lambda: 0)
    folder.chmod(0o700)
    with pytest.raises(ReplicaError, match=f"cannot enter {folder}"):
        check_configuration("/bin/false", folder)


def test_streams_pass_unbuffered_over_connections_that_are_kept():
    found = directives(nginx_configuration(NginxSettings(keepalive=7, keepalive_timeout=2.5), HERE, [9001, 9002]))
    assert found["proxy_buffering"] == ["off"]
    assert found["proxy_http_version"] == ["1.1"]
    assert 'Connection ""' in found["proxy_set_header"]
    assert found["keepalive"] == ["7"]
    assert found["keepalive_timeout"] == ["2500ms"]


def test_the_replicas_are_counted_in_a_zone_that_all_workers_share():
    text = nginx_configuration(NginxSettings(max_fails=2, fail_timeout=9, workers=3), HERE, [9001, 9002])
    found = directives(text)
    assert found["zone"] == ["replicas 256k"]
    assert found["worker_processes"] == ["3"]
    assert found["server"] == [f"127.0.0.1:{port} max_fails=2 fail_timeout=9s" for port in (9001, 9002)]
    # nginx takes only this order: what balances comes before what keeps connections.
    assert text.index("least_conn;") < text.index("keepalive 64;")
    assert "least_conn;" not in nginx_configuration(NginxSettings(policy="round_robin"), HERE, [9001, 9002])


def test_a_request_that_may_not_be_repeated_is_not():
    found = directives(nginx_configuration(NginxSettings(), HERE, [9001]))
    assert found["proxy_next_upstream"] == ["error timeout http_503"], "non_idempotent would send a POST twice"
    assert found["proxy_ignore_client_abort"] == ["off"]


def test_nothing_is_written_outside_the_folder():
    paths = [
        path
        for name, values in directives(nginx_configuration(NginxSettings(), HERE, [9001])).items()
        if name in ("pid", "error_log", "access_log") or name.endswith("_temp_path")
        for path in values
    ]
    assert len(paths) == 8
    assert not [path for path in paths if path.startswith(("/", ".."))]


def test_an_nginx_listens_when_it_has_written_its_own_number(tmp_path):
    assert not nginx_listens(tmp_path, 17)
    (tmp_path / "nginx.pid").write_text("16\n")  # of one that was killed, or of another one on the same port
    assert not nginx_listens(tmp_path, 17)
    (tmp_path / "nginx.pid").write_text("17\n")
    assert nginx_listens(tmp_path, 17)


def test_connections_stay_below_what_the_system_allows(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1000))
    found = directives(nginx_configuration(NginxSettings(connections=4096), HERE, [9001]))
    assert (found["worker_connections"], found["worker_rlimit_nofile"]) == (["936"], ["1000"])
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    found = directives(nginx_configuration(NginxSettings(connections=4096), HERE, [9001]))
    assert (found["worker_connections"], found["worker_rlimit_nofile"]) == (["4096"], ["4160"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("policy", "ip_hash"),
        ("workers", 0),
        ("max_fails", 0),
        ("fail_timeout", 1.5),
        ("max_body_bytes", 0),
        ("header_timeout", 0),
        ("read_timeout", float("inf")),
        ("body_timeout", "5s"),
    ],
)
def test_a_bad_setting_is_named(name, value):
    with pytest.raises(InvalidArgumentError, match=f"{name}="):
        NginxSettings(**{name: value})


def test_nginx_is_found_where_only_root_looks(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    there = [path for path in ("/usr/sbin/nginx", "/usr/local/sbin/nginx") if Path(path).exists()]
    assert find_nginx() == (there[0] if there else None)
