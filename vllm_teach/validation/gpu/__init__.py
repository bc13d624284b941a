"""Check and time the GPU kernels on the machine at hand: `python -m vllm_teach.validation.gpu`.

- How a run goes: `script` (the command line), `plan` (which sections, and their time), `sections` (runs them within
  the limit), `setting` (sizes of a full, quick or dry run), `machine` (what it ran on), `result` (the file it writes),
  `table` (the same as text).
- Is it right? `checks` (the conformance table, softmax, determinism), `tile_checks` (every tile of every kernel).
- How fast is it? `times` (FlashAttention), `decode`, `sparse`, `article` (the articles' layer), `tiles` (what tuning
  measured), `ceilings` (what the GPU attains at best); all of them with `clock`, beside the `rivals`.
"""

from vllm_teach.validation.gpu.result import load_result
from vllm_teach.validation.gpu.script import main

__all__ = ["load_result", "main"]
