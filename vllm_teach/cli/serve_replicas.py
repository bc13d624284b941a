"""The flags of `vllm-teach serve` that are about several replicas."""

import argparse
from pathlib import Path

from vllm_teach.cli.arguments import count


def add_replica_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--replicas` and what only counts with it, and `--header-timeout`, which nginx and the servers have alike."""
    parser.add_argument(
        "--header-timeout", type=float, default=15.0, help="seconds that a client has for its headers (default: 15)"
    )
    group = parser.add_argument_group("replicas", "several servers behind nginx; the first flag switches the others on")
    group.add_argument(
        "--replicas",
        type=count,
        default=1,
        help="servers, each with an engine, a cache and a share of the cores (OMP_NUM_THREADS, unless set; default: 1)",
    )
    group.add_argument(
        "--balance",
        choices=["least_conn", "round_robin"],
        default="least_conn",
        help="a request goes to the replica with the fewest in flight (least_conn, the default), or to the next one",
    )
    group.add_argument(
        "--replica-devices",
        nargs="+",
        metavar="DEVICES",
        help="CUDA_VISIBLE_DEVICES of each replica: 0 1, or 0,1 2,3 (default: all see all)",
    )
    group.add_argument(
        "--run-folder",
        type=Path,
        metavar="DIR",
        help="for configuration, logs and Prometheus' targets (default: a temporary one)",
    )
    group.add_argument("--nginx-workers", type=count, default=2, help="processes of nginx (default: 2)")
    group.add_argument(
        "--read-timeout", type=float, default=3600.0, help="seconds that a replica may be silent (default: 3600)"
    )
    group.add_argument(
        "--max-fails",
        type=count,
        default=3,
        help="failed attempts within the fail timeout that leave a replica out (default: 3)",
    )
    group.add_argument(
        "--fail-timeout", type=count, default=5, help="seconds that a replica is left out for (default: 5)"
    )
    group.add_argument(
        "--start-timeout", type=float, default=600.0, help="seconds in which a replica must serve (default: 600)"
    )
    group.add_argument(
        "--max-restarts", type=int, default=5, help="times in a row that a replica is started again (default: 5)"
    )
