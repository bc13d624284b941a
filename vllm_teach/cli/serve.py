"""`vllm-teach serve`: a model behind HTTP."""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec
from typing import Any

from vllm_teach.cli.arguments import add_model, count
from vllm_teach.cli.output import write
from vllm_teach.cli.serve_replicas import add_replica_arguments
from vllm_teach.errors import MissingDependencyError, installs

API_KEY_VARIABLE = "VLLM_TEACH_API_KEY"

# The flags that are `LLM`'s arguments, with its defaults: those not given are not handed on.
_ENGINE_FLAGS: dict[str, dict[str, Any]] = {
    "dtype": {"choices": ["auto", "float32", "bfloat16", "float16"]},
    "device": {"help": "cpu, cuda, cuda:1 (default: a GPU if there is one)"},
    "quantization": {"choices": ["awq", "gptq", "rtn", "int8"], "help": "what the model's files must be"},
    "tensor-parallel-size": {"type": count, "help": "processes that compute the model together (default: 1)"},
    "max-model-len": {"type": count, "help": "tokens of a prompt and its answer (default: the model's context)"},
    "max-num-seqs": {"type": count, "help": "sequences in a step (default: 64)"},
    "max-num-batched-tokens": {"type": count, "help": "tokens in a step (default: 2048)"},
    "gpu-memory-utilization": {"type": float, "help": "share of a GPU's free memory for the cache (default: 0.9)"},
    "kv-cache-memory-bytes": {"type": int, "help": "memory for the cache"},
    "num-kv-blocks": {"type": count, "help": "blocks of the cache, whatever memory that takes"},
    "block-size": {"type": count, "help": "tokens of a block (default: 16)"},
    "kv-cache-dtype": {"choices": ["auto", "int8"]},
    "swap-space": {"type": float, "help": "GiB of host memory for swapped sequences (default: 0)"},
    "swap-file": {"help": "file to swap to"},
    "preemption-mode": {"choices": ["recompute", "swap", "auto"]},
    "scheduling-policy": {"choices": ["fcfs", "priority"]},
    "long-prefill-token-threshold": {"type": int, "help": "tokens of one long prompt in a step (default: 0, no limit)"},
    "attention-backend": {"help": "one for every call (default: auto)"},
    "seed": {"type": int, "help": "of requests without one of their own (default: 0)"},
}


def add_serve(commands: Any) -> None:
    """Add `serve` to the subparsers of `vllm-teach`."""
    serve = commands.add_parser(
        "serve",
        help="serve a model by HTTP, with OpenAI's protocol",
        description="Serve a model by HTTP, with OpenAI's protocol. SIGTERM or Ctrl-C lets what is in flight finish.",
    )
    add_model(serve)
    serve.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="what clients call the model (default: as --model)"
    )
    serve.add_argument(
        "--host", default="127.0.0.1", help="address to serve on (default: 127.0.0.1, this machine only)"
    )
    serve.add_argument("--port", type=port_or_any, default=8000, help="0 for any that is free (default: 8000)")
    serve.add_argument("--api-key", help=f"what clients have to send (default: the variable {API_KEY_VARIABLE})")
    serve.add_argument("--engine", choices=["process", "thread"], default="process", help="where it computes")
    serve.add_argument("--access-log", action="store_true", help="print a line for each request")
    _add_limits(serve.add_argument_group("limits"))
    engine = serve.add_argument_group("engine", "as the arguments of vllm_teach.LLM, which say more")
    for name, settings in _ENGINE_FLAGS.items():
        engine.add_argument(f"--{name}", **settings)
    engine.add_argument("--no-enable-prefix-caching", dest="enable_prefix_caching", action="store_false", default=None)
    add_replica_arguments(serve)
    serve.set_defaults(run=run_serve)


def _add_limits(limits: Any) -> None:
    limits.add_argument("--max-queue", type=count, default=256, help="requests that may wait (default: 256)")
    limits.add_argument("--queue-timeout", type=float, help="seconds that one may wait (default: no limit)")
    limits.add_argument("--request-timeout", type=float, help="seconds that one may take (default: no limit)")
    limits.add_argument(
        "--step-timeout", type=float, default=120.0, help="seconds after which a silent engine hangs (default: 120)"
    )
    limits.add_argument("--max-choices", type=count, default=128, help="completions of one request (default: 128)")
    limits.add_argument("--max-output-tokens", type=count, help="of a completion (default: what fits the context)")
    limits.add_argument("--max-logprobs", type=int, default=20, help="tokens beside the chosen one (default: 20)")
    limits.add_argument("--max-body-bytes", type=count, default=1 << 20, help="of a request (default: 1 MiB)")
    limits.add_argument("--body-timeout", type=float, default=30.0, help="seconds to send it in (default: 30)")
    limits.add_argument(
        "--send-timeout", type=float, default=60.0, help="seconds that a client may not read (default: 60)"
    )
    limits.add_argument(
        "--drain-timeout", type=float, default=30.0, help="seconds for what is in flight at the end (default: 30)"
    )


def port_or_any(text: str) -> int:
    """Return a port to serve on; 0 means any."""
    if text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= 65535:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no port: give a whole number from 0 to 65535")


def run_serve(arguments: argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT, then finish what is in flight and return."""
    _check_installed()
    if (arguments.tensor_parallel_size or 1) > 1 and os.environ.get("RANK", "0") != "0":
        from vllm_teach.engine.llm import LLM

        # torchrun's other ranks compute for rank 0, and end with it.
        LLM(arguments.model, **engine_arguments(arguments))
    if arguments.api_key is None:
        arguments.api_key = os.environ.get(API_KEY_VARIABLE) or None
    if arguments.replicas > 1:
        from vllm_teach.serving.replicas.serve_replicas import serve_replicas

        serve_replicas(arguments)
    else:
        _serve_one(arguments)


def engine_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return `LLM`'s keyword arguments that were given, and a short event log: a server would fill a long one."""
    names = [name.replace("-", "_") for name in _ENGINE_FLAGS] + ["enable_prefix_caching"]
    return {"max_events": 10_000} | {name: value for name in names if (value := getattr(arguments, name)) is not None}


def _serve_one(arguments: argparse.Namespace) -> None:
    from vllm_teach.serving.async_engine.async_engine import AsyncLLMEngine
    from vllm_teach.serving.async_engine.limits import ServingLimits
    from vllm_teach.serving.http import server
    from vllm_teach.serving.http.settings import AppSettings
    from vllm_teach.serving.metrics.server_metrics import ServerMetrics
    from vllm_teach.serving.report import report

    app_settings = AppSettings(
        served_model_names=tuple(arguments.served_model_name or (arguments.model,)),
        api_key=arguments.api_key,
        max_body_bytes=arguments.max_body_bytes,
        body_timeout=arguments.body_timeout,
        max_choices=arguments.max_choices,
        max_output_tokens=arguments.max_output_tokens,
        max_logprobs=arguments.max_logprobs,
    )
    server_settings = server.ServerSettings(
        drain_timeout=arguments.drain_timeout,
        header_timeout=arguments.header_timeout,
        send_timeout=arguments.send_timeout,
        access_log=arguments.access_log,
    )
    limits = ServingLimits(
        max_queue=arguments.max_queue,
        queue_timeout=arguments.queue_timeout,
        request_timeout=arguments.request_timeout,
        step_timeout=arguments.step_timeout,
    )
    sock = server.bind(arguments.host, arguments.port)
    if arguments.api_key is None and not server.is_loopback(sock):
        report(f"whoever reaches {arguments.host} can use it: an --api-key would ask them.")
    metrics = ServerMetrics(app_settings.served_model_names[0])
    watch: dict[str, Any] = {"on_report": metrics.on_report, "on_finished": metrics.on_finished}
    settings = engine_arguments(arguments)
    if arguments.engine == "process":
        engine = AsyncLLMEngine.spawn(arguments.model, settings, limits, **watch)
    else:
        from vllm_teach.engine.llm import LLM

        engine = AsyncLLMEngine.of(LLM(arguments.model, **settings), limits, **watch)
    started = f"{app_settings.served_model_names[0]} is served on {server.address_of(sock)}"
    tell: dict[str, Any] = {"on_serving": lambda _: write(started), "report": report}
    server.run(server.serve(engine, sock, app_settings, server_settings, metrics, **tell))


def _check_installed() -> None:
    for name in ("fastapi", "uvicorn", "httptools", "prometheus_client"):
        if find_spec(name) is None:
            raise MissingDependencyError(f"{name} is not installed: run {installs('serve')}.")
