"""`vllm-teach bench serve`: the load client's arguments."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_teach.cli.arguments import add_json, add_lengths, count
from vllm_teach.cli.measurement import provenance
from vllm_teach.cli.output import check_output_file, write, write_json
from vllm_teach.cli.serve import API_KEY_VARIABLE
from vllm_teach.errors import InvalidArgumentError

if TYPE_CHECKING:
    from vllm_teach.performance.load_test.arrivals import Arrivals
    from vllm_teach.performance.load_test.bench import ServeBenchOptions
    from vllm_teach.performance.load_test.plan import LoadPlan
    from vllm_teach.performance.load_test.record import RequestRecord


def add_bench_serve(parser: argparse.ArgumentParser) -> None:
    """Add the arguments, and `run`."""
    parser.description = (
        "Put an OpenAI-compatible server under load. Latencies count from when a request was due, so that no waiting "
        "is left out. Ctrl-C ends the test and shows what there is."
    )
    _add_server(parser.add_argument_group("the server"))
    _add_load(parser.add_argument_group("the load"))
    _add_requests(parser.add_argument_group("the requests"))
    _add_faults(parser.add_argument_group("what goes wrong on purpose"))
    results = parser.add_argument_group("the result")
    for name, what in {"ttft": "time to first token", "tpot": "time per output token", "e2e": "whole time"}.items():
        results.add_argument(f"--slo-{name}", type=float, metavar="MS", help=f"{what} that a good answer keeps to")
    results.add_argument("--records", type=Path, metavar="FILE", help="write a JSON line for each request")
    results.add_argument("--record-text", action="store_true", help="the answers' texts in them, too")
    add_json(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run_bench_serve)


def _add_server(group: Any) -> None:
    group.add_argument("--base-url", default="http://127.0.0.1:8000", help="(default: http://127.0.0.1:8000)")
    group.add_argument(
        "--api-key", default=os.environ.get(API_KEY_VARIABLE), help=f"(default: the variable {API_KEY_VARIABLE})"
    )
    group.add_argument("--model", help="by the name the server gives it (default: the first that it lists)")
    group.add_argument(
        "--tokenizer", metavar="MODEL", help="alias, folder or hub id (default: the server's, by /tokenize)"
    )


def _add_load(group: Any) -> None:
    group.add_argument("--requests", "--num-prompts", type=count, default=100, help="to send (default: 100)")
    group.add_argument("--duration", type=float, metavar="S", help="send no more after so many seconds")
    pace = group.add_mutually_exclusive_group()
    pace.add_argument("--concurrency", type=count, help="closed loop: clients that wait for answers (default: 16)")
    pace.add_argument("--rate", type=float, help="open loop: requests a second, however slow the answers are")
    group.add_argument("--arrivals", choices=["poisson", "fixed"], help="of an open loop (default: poisson)")
    group.add_argument("--burst", type=count, help="requests of an open loop that come at once (default: 1)")
    group.add_argument("--max-in-flight", type=count, help="the most of an open loop's at once (default: 4096)")
    group.add_argument("--warm-up", type=count, default=0, help="requests before the clock starts (default: none)")
    group.add_argument("--seed", type=int, default=0, help="of times, lengths, prompts, faults (default: 0)")
    group.add_argument("--timeout", type=float, default=600.0, metavar="S", help="for one request (default: 600)")


def _add_requests(group: Any) -> None:
    group.add_argument("--chat", action="store_true", help="chats rather than completions")
    group.add_argument("--no-stream", action="store_true", help="whole answers: no TTFT, ITL and TPOT")
    group.add_argument("--mix", choices=["sharegpt", "alpaca"], help="draw lengths as users bring them")
    add_lengths(group, 128, 128)
    group.add_argument("--max-total", type=count, help="prompt and answer together (default: the model's context)")
    group.add_argument("--shared-prefix", type=int, default=0, metavar="TOKENS", help="all prompts begin with the same")
    group.add_argument(
        "--prompts",
        choices=["ids", "text"],
        default="ids",
        help="how they are sent (default: ids, which not all servers take; chats: text)",
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for answers as long as planned, with a field that vLLM and vllm-teach know (default: yes)",
    )
    group.add_argument("--extra-body", metavar="JSON", help="""more fields, as '{"temperature": 0.8}'""")


def _add_faults(group: Any) -> None:
    group.add_argument("--abort-share", type=float, default=0.0, help="of the requests, 0 to 1 (default: 0)")
    group.add_argument("--abort-within", type=float, default=1.0, metavar="S", help="of sending them (default: 1)")
    group.add_argument("--malformed-share", type=float, default=0.0, help="of the requests, 0 to 1 (default: 0)")


def run_bench_serve(arguments: argparse.Namespace) -> None:
    """Measure, print the table, and write the files that are asked for; a Ctrl-C ends the command after them."""
    from vllm_teach.performance.load_test.bench import ServeBench, run_until_interrupted
    from vllm_teach.performance.load_test.report import format_load
    from vllm_teach.performance.load_test.target import Target

    if arguments.json:
        check_output_file(arguments.json)
    target, plan, options = Target(arguments.base_url, arguments.api_key), _plan(arguments), _options(arguments)
    tokenizer = None
    if arguments.tokenizer is not None:
        from vllm_teach.models import load_tokenizer, resolve_model

        tokenizer = load_tokenizer(resolve_model(arguments.tokenizer))
    with _listeners(arguments, plan.num_requests) as on_record:
        bench = ServeBench(target, plan, options, tokenizer=tokenizer, on_record=on_record)
        report = run_until_interrupted(bench)
    write(format_load(report))
    if arguments.json:
        from vllm_teach.performance.environment import describe_environment

        report = replace(report, environment=asdict(describe_environment()))
        write_json(arguments.json, report.to_json() | provenance(_without_key(arguments)))
    if report.interrupted:
        raise KeyboardInterrupt


def _arrivals(arguments: argparse.Namespace) -> Arrivals:
    from vllm_teach.performance.load_test.arrivals import ClosedLoop, OpenLoop

    open_loop = {"pattern": arguments.arrivals, "burst": arguments.burst, "max_in_flight": arguments.max_in_flight}
    given = {name: value for name, value in open_loop.items() if value is not None}
    if arguments.rate is not None:
        return OpenLoop(arguments.rate, **given)
    if given:
        raise InvalidArgumentError(f"{', '.join(given)} belong to an open loop: give --rate, too.")
    return ClosedLoop(arguments.concurrency or 16)


def _plan(arguments: argparse.Namespace) -> LoadPlan:
    from vllm_teach.kvcache.length_mix import MIXES
    from vllm_teach.performance.load_test.plan import LoadPlan

    fixed = (arguments.input_len, arguments.output_len)
    if arguments.mix is not None and fixed != (None, None):
        raise InvalidArgumentError(f"--mix {arguments.mix} draws the lengths: leave --input-len and --output-len out.")
    return LoadPlan(
        arrivals=_arrivals(arguments),
        num_requests=arguments.requests,
        lengths=MIXES[arguments.mix] if arguments.mix is not None else (fixed[0] or 128, fixed[1] or 128),
        seed=arguments.seed,
        duration=arguments.duration,
        warm_up=arguments.warm_up,
        abort_share=arguments.abort_share,
        abort_within=arguments.abort_within,
        malformed_share=arguments.malformed_share,
    )


def _options(arguments: argparse.Namespace) -> ServeBenchOptions:
    from vllm_teach.performance.load_test.bench import ServeBenchOptions
    from vllm_teach.performance.load_test.tally import Slo

    given = {name: getattr(arguments, f"slo_{name}") for name in ("ttft", "tpot", "e2e")}
    limits = {name: value / 1e3 for name, value in given.items() if value is not None}
    return ServeBenchOptions(
        model=arguments.model,
        chat=arguments.chat,
        stream=not arguments.no_stream,
        texts=arguments.prompts == "text",
        ignore_eos=arguments.ignore_eos,
        extra=_extra_body(arguments.extra_body),
        shared_prefix=arguments.shared_prefix,
        max_total=arguments.max_total,
        timeout=arguments.timeout,
        slo=Slo(**limits) if limits else None,
        keep_text=arguments.record_text,
    )


def _extra_body(text: str | None) -> dict[str, Any]:
    try:
        fields = {} if text is None else json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise InvalidArgumentError(f"--extra-body is {text!r:.80}, which is no JSON object: give one in braces.")
    return fields


@contextmanager
def _listeners(arguments: argparse.Namespace, total: int) -> Iterator[Callable[[RequestRecord], None]]:
    """Yield what is told each record: it moves the progress bar, and writes the line if a file is asked for."""
    from tqdm import tqdm

    path = arguments.records
    try:
        with ExitStack() as stack:
            bar = stack.enter_context(tqdm(total=total, desc="bench serve", disable=arguments.quiet))
            file = None if path is None else stack.enter_context(path.open("w", encoding="utf-8"))

            def note(record: RequestRecord) -> None:
                if file is not None:
                    file.write(json.dumps(record.to_json()) + "\n")
                bar.update()

            yield note
    except OSError as error:
        if path is None or error.filename not in (None, str(path)):
            raise
        raise InvalidArgumentError(
            f"--records is {str(path)!r}, which cannot be written ({error}): give a file."
        ) from error


def _without_key(arguments: argparse.Namespace) -> str:
    """The command as it was given, but for the key, which is nobody's business."""
    key, words = arguments.api_key, shlex.split(arguments.command_line)
    if key:
        words = ["***" if word == key else word.replace(f"={key}", "=***") for word in words]
    return shlex.join(words)
