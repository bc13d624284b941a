"""Another system that serves a workload, in its own interpreter: this file needs that system and nothing of vllm_teach.

Each line of standard input is a JSON object and is answered by one on standard output. The first, {"system", "model",
"dtype", "threads", "max_len", "max_seqs", "cache_bytes"}, loads the model: {"version", "how"}. Every other one,
{"prompts", "output_lens"}, serves these requests, greedily and each to its full length: {"seconds"}. What fails is
answered with {"error"}. The end of the input ends the process. What the system itself prints goes to standard error.
With a module's name as its argument the file only prints True or False: whether this interpreter has that module.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

# Serves prompts (token ids) to their output lengths; returns how many tokens each got.
Serve = Callable[[Sequence[Sequence[int]], Sequence[int]], list[int]]

_BATCH_TOKENS = 2048  # of a step, at most; vllm_teach's own default
_VLLM_CACHE = "VLLM_CPU_KVCACHE_SPACE"  # vLLM's variable for the size of its KV cache, in whole GiB


def load_vllm(
    model: str, dtype: str, threads: int, max_len: int, max_seqs: int, cache_bytes: int
) -> tuple[Serve, str, str]:
    """Load vLLM with its own defaults, but for the prefix cache: rounds repeat their prompts."""
    # Unbound threads, as ours are: bound, vLLM would keep a core for its scheduler on some machines and not on others.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # Always some room more than asked for, as vLLM keeps a block for itself; a user may give it still more.
    os.environ[_VLLM_CACHE] = str(max(cache_bytes // 2**30 + 1, int(os.environ.get(_VLLM_CACHE) or 0)))
    import vllm  # type: ignore[import-not-found, unused-ignore]

    llm = vllm.LLM(model=model, dtype=dtype, max_model_len=max_len, enable_prefix_caching=False, seed=0)

    def serve(prompts: Sequence[Sequence[int]], output_lens: Sequence[int]) -> list[int]:
        params = [
            vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in output_lens
        ]
        outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return serve, str(vllm.__version__), f"its own scheduler, {dtype}"


def load_llama_cpp(
    model: str, dtype: str, threads: int, max_len: int, max_seqs: int, cache_bytes: int
) -> tuple[Serve, str, str]:
    """Load a GGUF file with llama.cpp; all requests share its batches, as its own server's do."""
    import llama_cpp  # type: ignore[import-not-found, unused-ignore]
    import numpy as np

    llama_cpp.llama_backend_init()
    weights = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_seq_max = max_len * max_seqs, max_seqs
    params.n_batch = max(_BATCH_TOKENS, max_len + max_seqs)  # a prompt fits beside all that decode
    params.n_threads = params.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(weights, params) if weights else None
    if not context:
        raise RuntimeError("llama.cpp cannot load this file")
    memory = llama_cpp.llama_get_memory(context)
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(weights))
    batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)

    def decode(entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute (slot, position, token, whether its successor is wanted) and return the likeliest successors."""
        batch.n_tokens = len(entries)
        for i, (slot, position, token, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, slot
        if (status := llama_cpp.llama_decode(context, batch)) != 0:
            raise RuntimeError(f"llama_decode ended with status {status}")
        wanting = [i for i, entry in enumerate(entries) if entry[3]]
        logits = (np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), (vocab_size,)) for i in wanting)
        return [int(row.argmax()) for row in logits]

    def free(slot: int) -> None:
        llama_cpp.llama_memory_seq_rm(memory, slot, -1, -1)

    def serve(prompts: Sequence[Sequence[int]], output_lens: Sequence[int]) -> list[int]:
        return serve_in_slots(prompts, output_lens, decode, free, max_seqs, params.n_batch)

    how = f"continuous batching, {max_seqs} slots, {dtype}, KV cache float16"
    return serve, str(llama_cpp.__version__), how


def serve_in_slots(
    prompts: Sequence[Sequence[int]],
    output_lens: Sequence[int],
    decode: Callable[[list[tuple[int, int, int, bool]]], list[int]],
    free: Callable[[int], None],
    num_slots: int,
    batch_tokens: int,
) -> list[int]:
    """Serve requests in the order they are given, each in a slot of the cache, and return how many tokens each got.

    A step takes one token of every request that decodes, and as many whole prompts as `batch_tokens` leaves room for.
    """
    waiting, slots = list(range(len(prompts)))[::-1], list(range(num_slots))[::-1]
    outputs: list[list[int]] = [[] for _ in prompts]
    slot_of: dict[int, int] = {}  # of the requests that run, in the order they began
    while waiting or slot_of:
        entries = [
            (slot, len(prompts[request]) + len(outputs[request]) - 1, outputs[request][-1], True)
            for request, slot in slot_of.items()
        ]
        while waiting and slots and len(entries) + len(prompts[waiting[-1]]) <= batch_tokens:
            request, slot = waiting.pop(), slots.pop()
            slot_of[request] = slot
            last = len(prompts[request]) - 1
            entries += [(slot, place, token, place == last) for place, token in enumerate(prompts[request])]
        for request, token in zip(list(slot_of), decode(entries), strict=True):
            outputs[request].append(token)
            if len(outputs[request]) == output_lens[request]:
                slots.append(slot_of.pop(request))
                free(slots[-1])
    return [len(output) for output in outputs]


LOADERS: dict[str, Callable[..., tuple[Serve, str, str]]] = {"vllm": load_vllm, "llama.cpp": load_llama_cpp}


def main() -> None:
    """Answer standard input, line by line."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve: Serve | None = None
    for line in sys.stdin:
        message: dict[str, Any] = json.loads(line)
        try:
            if serve is None:
                serve, version, how = LOADERS[message.pop("system")](**message)
                answer: dict[str, object] = {"version": version, "how": how}
            else:
                answer = {"seconds": _timed(serve, **message)}
        except Exception as error:  # noqa: BLE001  # the client says it
            words = str(error).strip().partition("\n")[0]
            answer = {"error": f"{type(error).__name__}: {words}"}
        print(json.dumps(answer), file=answers, flush=True)


def _timed(serve: Serve, prompts: list[list[int]], output_lens: list[int]) -> float:
    start = time.perf_counter()
    lengths = serve(prompts, output_lens)
    seconds = time.perf_counter() - start
    if lengths != output_lens:
        raise RuntimeError("requests ended before their last token")
    return seconds


if __name__ == "__main__":  # vLLM starts processes that import this file
    if len(sys.argv) > 1:
        print(importlib.util.find_spec(sys.argv[1]) is not None)
    else:
        main()
