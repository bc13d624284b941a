"""What nginx before several replicas is told. In its own words:

- `least_conn` gives a request to the replica with the fewest in flight, which balances long streams; nginx's default,
  `round_robin`, counts requests and not how long they last. With a `zone` the counts lie in memory that all workers
  share; without one each worker counts its own, and two workers can send everything to one replica.
- `proxy_buffering off` passes each token on when it comes. `proxy_ignore_client_abort off` closes the connection to the
  replica when the client goes, which aborts the request there.
- `proxy_next_upstream error timeout http_503`: what a replica refused at once goes to the next. A POST of which a byte
  was sent is never repeated; it may have been computed. The client is told, and repeats it or not. By `http_503` a GET
  goes on from a replica whose engine is dead: `/health` is that of all of them, 200 as long as one is well.
- `max_fails` in `fail_timeout` seconds leave a replica out for `fail_timeout`: the passive health check. A replica that
  dies in a stream is no such fail, the refused connection after it is.
- `keepalive` connections to the replicas are closed by nginx before a replica would (ours: after 75 s), or a request
  could meet a connection that is just being closed.
- A request's body is read whole before a replica hears of it, so a slow sender costs no replica anything.
- `X-Request-ID` is the client's own or a new one. The replica gives it back; so does nginx, in what it says itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_teach.engine.field_checks import check_choice, check_number, check_whole
from vllm_teach.serving.replicas.nginx import PID_FILE
from vllm_teach.serving.replicas.nginx_answers import own_answers

POLICIES = ("least_conn", "round_robin")


@dataclass(frozen=True)
class NginxSettings:
    """Settings of nginx, checked on construction; times in seconds, sizes in bytes.

    `policy` is "least_conn" or "round_robin". A worker has at most `connections` open, two for each request in flight.
    A client has `header_timeout` for all of its headers, and `body_timeout` between two pieces of its body, of at
    most `max_body_bytes`; one that takes nothing for `send_timeout` is cut off. A replica may be silent for
    `read_timeout`: an answer that is not streamed has to be complete by then.
    """

    policy: str = "least_conn"
    workers: int = 2
    connections: int = 4096
    max_fails: int = 3
    fail_timeout: int = 5
    keepalive: int = 64
    keepalive_timeout: float = 60.0
    header_timeout: float = 15.0
    body_timeout: float = 15.0
    send_timeout: float = 60.0
    connect_timeout: float = 5.0
    read_timeout: float = 3600.0
    max_body_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        check_choice("policy", self.policy, POLICIES)
        for name in ("workers", "connections", "max_fails", "fail_timeout", "keepalive", "max_body_bytes"):
            check_whole(name, getattr(self, name), 1)
        for name in _TIMES:
            check_number(name, getattr(self, name), 0.001, 1e6, hint="use a number of seconds from 0.001 to 1e6")


_TIMES = (
    "keepalive_timeout", "header_timeout", "body_timeout", "send_timeout", "connect_timeout", "read_timeout",
)  # fmt: skip


def nginx_configuration(
    settings: NginxSettings,
    listen: Sequence[tuple[str, int]],
    replica_ports: Sequence[int],
    drain_timeout: float = 30.0,
) -> str:
    """Return the text of `nginx.conf`: serve on the (address, port) pairs, pass on to the replicas on 127.0.0.1.

    On SIGQUIT nginx takes nothing new, and what is in flight has `drain_timeout` seconds to end.

    Every path in it is relative to the folder that `nginx -p` names, so nothing of the folder's name must be escaped,
    and nothing is written outside it: no rights are needed but those of who starts it.
    """
    connections, files = _room_for(settings.connections)
    times = {name: _duration(getattr(settings, name)) for name in _TIMES}
    servers = "\n        ".join(
        f"server 127.0.0.1:{port} max_fails={settings.max_fails} fail_timeout={settings.fail_timeout}s;"
        for port in replica_ports
    )
    addresses = "\n        ".join(
        f"listen [{address}]:{port};" if ":" in address else f"listen {address}:{port};" for address, port in listen
    )
    policy = {"least_conn": "least_conn;", "round_robin": "# Round robin: what nginx does when it is told nothing."}
    return f"""\
# Written by `vllm-teach serve --replicas`. To run it by hand: nginx -p THIS_FOLDER -c nginx.conf
daemon off;
worker_processes {settings.workers};
worker_rlimit_nofile {files};
worker_shutdown_timeout {_duration(drain_timeout)};
pid {PID_FILE};
error_log error.log warn;

events {{
    worker_connections {connections};
}}

http {{
    # A JSON object a line. One upstream after another, with commas, where a request was passed on from a dead replica.
    log_format replicas escape=json '{{"time": "$time_iso8601", "client": "$remote_addr", "request": "$request", '
        '"status": "$status", "bytes": "$body_bytes_sent", "seconds": "$request_time", "upstream": "$upstream_addr", '
        '"upstream_status": "$upstream_status", "connect": "$upstream_connect_time", '
        '"header": "$upstream_header_time", "response": "$upstream_response_time", "request_id": "$named"}}';
    access_log access.log replicas;
    default_type application/json;
    server_tokens off;
    client_body_temp_path body_temp;
    proxy_temp_path proxy_temp;
    fastcgi_temp_path fastcgi_temp;
    uwsgi_temp_path uwsgi_temp;
    scgi_temp_path scgi_temp;

    # A client of HTTP/1.0 may name no host; HTTP/1.1, which the replicas are spoken to in, has to.
    map $http_host $host_for_replica {{
        "" $server_addr:$server_port;
        default $http_host;
    }}

    # What the servers themselves take for a name.
    map $http_x_request_id $named {{
        "~^[!-~]{{1,128}}$" $http_x_request_id;
        default req-$request_id;
    }}

    upstream replicas {{
        zone replicas 256k;
        {policy[settings.policy]}
        {servers}
        keepalive {settings.keepalive};
        keepalive_timeout {times["keepalive_timeout"]};
    }}

    server {{
        {addresses}
        client_header_timeout {times["header_timeout"]};
        client_body_timeout {times["body_timeout"]};
        send_timeout {times["send_timeout"]};
        client_max_body_size {settings.max_body_bytes};
        client_body_buffer_size 128k;
        keepalive_requests 10000;

        location / {{
            proxy_pass http://replicas;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Host $host_for_replica;
            proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
            proxy_set_header X-Forwarded-Proto $scheme;
            proxy_set_header X-Request-ID $named;
            proxy_buffering off;
            proxy_buffer_size 8k;
            proxy_ignore_client_abort off;
            proxy_next_upstream error timeout http_503;
            proxy_connect_timeout {times["connect_timeout"]};
            proxy_send_timeout {times["send_timeout"]};
            proxy_read_timeout {times["read_timeout"]};
        }}

{own_answers(settings.max_body_bytes, settings.read_timeout, replica_ports)}
    }}
}}
"""


def _duration(seconds: float) -> str:
    """Return a time as nginx reads it: whole seconds, or milliseconds, at least one, as 0 would be no limit."""
    milliseconds = max(1, round(seconds * 1000))
    return f"{milliseconds}ms" if milliseconds % 1000 else f"{milliseconds // 1000}s"


def _room_for(connections: int) -> tuple[int, int]:
    """Return how many connections a worker may have, and files: fewer where the system's hard limit is lower."""
    import resource  # Windows has none

    others = 64  # logs, sockets that listen, bodies on disk
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = connections + others
    if hard != resource.RLIM_INFINITY:
        files = min(files, hard)
    return max(files - others, 16), files
