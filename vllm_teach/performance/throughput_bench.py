"""`vllm-teach bench throughput`: useful output tokens a second of this engine, beside other systems' best.

All serve the same requests with the same weights, dtype and threads, in the same rounds; what is compared is the ratio
within a round (`race`). The clock runs beside the system, so that nobody pays for the way into another process. Static
batches are tuned first. One trial of each way to batch is no measurement on a machine that is never quite idle, so the
two fastest that ended run in every round, and the faster is what we are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_teach import data
from vllm_teach.engine.llm import LLM
from vllm_teach.errors import EngineError, InvalidArgumentError, ModelLoadError
from vllm_teach.models.resolve import resolve_model
from vllm_teach.performance.environment import describe_environment
from vllm_teach.performance.peer_choice import MissingPeer, check_peers, choose_peers
from vllm_teach.performance.peer_process.client import ProcessPeer
from vllm_teach.performance.peers import TransformersPeer, Trial
from vllm_teach.performance.side_by_side import race
from vllm_teach.performance.step_profile import measure_step_parts, profile_steps
from vllm_teach.performance.throughput_report import FULL, OUR_WAY, OURS, Mix, Row, ThroughputBench
from vllm_teach.performance.timing import Timing, check_calls, stopwatch
from vllm_teach.performance.workload import Workload, draw_workload

if TYPE_CHECKING:
    from tqdm import tqdm

TEXT = "texts/corran_sound.txt"  # what prompts are pieces of
_FINALISTS = 2
# The decode steps that are looked into: short prompts, as attention over long ones would hide the bookkeeping.
_STEP_SEQUENCES, _STEP_INPUTS = 64, (16, 64)


@dataclass(frozen=True)
class _Contestant:
    """A system in one of its ways to run; `run` serves the whole workload once and returns the seconds."""

    system: str
    how: str
    run: Callable[[], float]
    version: str | None = None


def bench_throughput(
    model: str | Path = "smollm2",
    *,
    compare: Sequence[str] = ("transformers",),
    peer_pythons: Mapping[str, str] | None = None,
    rounds: int = 3,
    dtype: str = "bfloat16",
    mix: Mix = FULL,
    progress: bool = True,
) -> ThroughputBench:
    """Measure on the CPU. Ours runs as `LLM` does by default, but for the prefix cache: rounds repeat their prompts.

    `compare` names systems of `peer_choice.PEERS`, none for ours alone; what cannot run here, or fails when it is
    loaded, is `missing` in the result. `peer_pythons` has the interpreters of those that live in another one. Raises
    InvalidArgumentError for an unknown system, `rounds` below 1 and a mix that is longer than the model's context;
    ModelNotFoundError if the model is not here; EngineError if a system fails while it is measured.
    """
    from tqdm import tqdm

    check_calls("rounds", rounds, 1, "measures nothing")
    check_peers(compare, peer_pythons)
    path = resolve_model(model)
    llm = LLM(path, dtype=dtype, device="cpu", enable_prefix_caching=False)
    if mix.inputs[1] + mix.outputs[1] > llm.engine.max_model_len:
        raise InvalidArgumentError(
            f"mix has requests of up to {mix.inputs[1] + mix.outputs[1]} tokens, but the model's context is "
            f"{llm.engine.max_model_len}: use shorter ones (--quick, --input-len, --output-len)."
        )
    text_ids = llm.tokenizer.encode(data.path(TEXT).read_text(encoding="utf-8"))
    workload = draw_workload(text_ids, mix.count, inputs=mix.inputs, outputs=mix.outputs, seed=mix.seed)
    peers, missing = choose_peers(compare, path, llm.model.dtype, peer_pythons)
    with ExitStack() as cleanup:
        total = _num_steps(peers, mix, rounds) + 1  # a bar is not full before the last has ended
        bar = cleanup.enter_context(tqdm(total=total, desc="bench throughput", disable=not progress))
        short = draw_workload(text_ids, _STEP_SEQUENCES, inputs=_STEP_INPUTS, outputs=(1, 1), seed=mix.seed)
        _tell(bar, "bookkeeping")
        step = measure_step_parts(llm, short, mix.profiled_steps)
        _tell(bar, "profile")
        profile = profile_steps(llm, short, max(1, mix.profiled_steps // 4))
        others, failed, trials = _gather(peers, workload, mix, llm, cleanup, bar)
        ours = partial(stopwatch("cpu"), partial(serve, llm, workload))
        contestants = [_Contestant(OURS, OUR_WAY, ours), *others]
        serve(llm, _sample(workload))  # warms up
        rows, speedups = _race(contestants, workload.num_output_tokens, rounds, bar)
        bar.update()
    return ThroughputBench(
        str(model),
        str(llm.model.dtype).removeprefix("torch."),
        mix,
        workload.num_input_tokens,
        workload.num_output_tokens,
        rounds,
        rows,
        speedups,
        missing + failed,
        trials,
        step,
        profile,
        asdict(describe_environment()),
    )


def serve(llm: LLM, workload: Workload) -> None:
    """Let `llm` generate what `workload` asks for, greedily. Raises EngineError if a request got another length."""
    prompts = [list(prompt) for prompt in workload.prompts]
    workload.check_served(llm.generate(prompts, workload.sampling_params(), use_tqdm=False))


def _num_steps(peers: Sequence[TransformersPeer | ProcessPeer], mix: Mix, rounds: int) -> int:
    """Return how often `_tell` is called, if every peer can be loaded and tuned."""
    sizes = {min(size, mix.count) for size in mix.batch_sizes}
    trials = len(sizes) + len(mix.orders) - 1
    own = [
        1 + trials + rounds * min(_FINALISTS, trials) if isinstance(peer, TransformersPeer) else 1 + rounds
        for peer in peers
    ]
    return 2 + rounds + sum(own)


def _tell(bar: tqdm, words: str) -> None:
    """Count a step that begins, and say which."""
    bar.update()
    bar.set_postfix_str(words)


def _gather(
    peers: list[TransformersPeer | ProcessPeer],
    workload: Workload,
    mix: Mix,
    llm: LLM,
    cleanup: ExitStack,
    bar: tqdm,
) -> tuple[list[_Contestant], list[MissingPeer], list[Trial]]:
    """Load, warm up and tune the peers; return them in their ways to run, those that failed, and what was tried.

    A peer in a process of its own has no less room for K and V than `llm`, as far as the mix can use it. Who failed is
    closed at once, so that nothing of it runs beside the others.
    """
    contestants: list[_Contestant] = []
    failed: list[MissingPeer] = []
    trials: list[Trial] = []
    max_len, max_seqs = mix.inputs[1] + mix.outputs[1], min(llm.engine.config.max_num_seqs, mix.count)
    cache_tokens = min(llm.engine.kv.num_blocks * llm.engine.kv.block_size, max_len * max_seqs)
    for peer in peers:
        _tell(bar, f"{peer.name} loads")
        cleanup.callback(peer.close)
        try:
            if isinstance(peer, TransformersPeer):
                contestants += _tune(peer, workload, mix, trials, bar)
                continue
            peer.load(max_len, max_seqs, cache_tokens * llm.model.config.kv_bytes_per_token(llm.model.dtype.itemsize))
            peer.run(_sample(workload))  # warms up
        except (EngineError, ModelLoadError) as error:
            peer.close()
            failed.append(MissingPeer(peer.name, str(error)))
        else:
            contestants.append(_Contestant(peer.name, peer.how, partial(peer.run, workload), peer.version))
    return contestants, failed, trials


def _tune(
    peer: TransformersPeer, workload: Workload, mix: Mix, trials: list[Trial], bar: tqdm
) -> Iterator[_Contestant]:
    """Yield the peer in its fastest batches, once all have been tried; the first call warms it up."""
    peer.run(_sample(workload))
    for trial in peer.tune(workload, mix.batch_sizes, mix.orders):
        trials.append(trial)
        _tell(bar, f"{peer.name} after {trial.batches}")
    ended = [trial for trial in trials if not trial.stopped]
    for trial in sorted(ended, key=lambda trial: trial.seconds)[:_FINALISTS]:
        yield _Contestant(peer.name, str(trial.batches), partial(peer.run_in, trial.batches, workload))


def _race(
    contestants: list[_Contestant], num_tokens: int, rounds: int, bar: tqdm
) -> tuple[list[Row], dict[str, Timing]]:
    """Serve the workload once by each contestant in each round; ours is the first."""
    by_name = {f"{each.system}, {each.how}": each for each in contestants}
    runners = {name: each.run for name, each in by_name.items()}
    announce = partial(_tell, bar)
    result = race(runners, next(iter(by_name)), rounds=rounds, warmup=0, measure=lambda run: run(), announce=announce)
    rows, speedups = [], dict[str, Timing]()
    for name, each in by_name.items():
        seconds, ratio = result.seconds[name], result.ratios[name]
        rates = Timing.of([num_tokens / sample for sample in seconds.samples])
        rows.append(Row(each.system, each.how, seconds, rates, each.version))
        if each.system != OURS:
            speedups[each.system] = min(ratio, speedups.get(each.system, ratio), key=lambda timing: timing.median)
    return rows, speedups


def _sample(workload: Workload) -> Workload:
    """The shortest few requests, to warm up with."""
    return workload.part(sorted(range(len(workload)), key=lambda i: workload.output_lens[i])[:4])
