"""A Ray cluster of two nodes on this machine, that serves `tiny` until standard input ends. Prints its address.

A process of its own, because Ray leaves threads, handlers and settings behind in the one that uses it.
"""

import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

SETTINGS = {
    "model": "tiny", "dtype": "float32", "min_replicas": "1", "max_replicas": "2", "target_ongoing_requests": "2",
    "upscale_delay": "0", "downscale_delay": "3600", "health_check_period": "0.5",
}  # fmt: skip


def main() -> None:
    """Serve, and end in good order."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "ray").mkdir()
        os.environ |= {
            "RAY_TMPDIR": folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            # Then Ray's own address is 127.0.0.1, and nobody else reaches it.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            # What the number of replicas follows is told every 10 s.
            "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
            "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
        }
        # Which read the environment when they are imported.
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        from vllm_teach.serving.ray_app import build_app

        node: dict[str, Any] = {
            "num_cpus": 1,  # what a replica takes, so that two cannot be on one node
            "object_store_memory": 80 << 20,
            "include_dashboard": False,
            "node_ip_address": "127.0.0.1",
        }
        cluster = Cluster(initialize_head=True, head_node_args=node)
        cluster.add_node(**node)
        ray.init(cluster.address, log_to_driver=False)
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        serve.run(build_app(SETTINGS))
        print(f"http://127.0.0.1:{port}", flush=True)
        sys.stdin.read()
        serve.delete("default")  # waits for what is in flight; a shutdown would cut it
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
