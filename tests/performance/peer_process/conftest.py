import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# A stand-in for vLLM: it writes to standard output, gives each prompt its tokens, and fails when it is told to.
FAKE_VLLM = """
import json, os, subprocess, sys
__version__ = "9.9"
print("a library that talks")

class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos, detokenize):
        assert (temperature, ignore_eos, detokenize) == (0.0, True, False)
        self.max_tokens = max_tokens

class Output:
    def __init__(self, count):
        self.token_ids = [0] * count
        self.outputs = [self]

class LLM:
    def __init__(self, **arguments):
        if os.environ.get("FAKE") == "refuses":
            raise ValueError("this model is not mine\\nmore words")
        if os.environ.get("FAKE") == "dies":
            print("Fatal: no such processor", file=sys.stderr)
            os._exit(3)
        if os.environ.get("FAKE") == "starts another":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            open(os.environ["FAKE_FILE"], "w").write(str(child.pid))
        else:
            settings = {"threads": "OMP_NUM_THREADS", "cache": "VLLM_CPU_KVCACHE_SPACE"}
            settings |= {"policy": "OMP_WAIT_POLICY", "spins": "GOMP_SPINCOUNT"}
            told = arguments | {name: os.environ.get(variable) for name, variable in settings.items()}
            json.dump(told, open(os.environ["FAKE_FILE"], "w"))

    def generate(self, prompts, params, use_tqdm):
        print("serving", file=sys.stdout, flush=True)
        assert not use_tqdm
        assert all(isinstance(prompt["prompt_token_ids"], list) for prompt in prompts)
        if len(prompts) == 13:
            os._exit(1)
        short = len(prompts) == 3
        return [Output(each.max_tokens - short) for each in params]
"""


@pytest.fixture
def make_interpreter(tmp_path: Path) -> Callable[..., str]:
    """make(**environment) -> an interpreter of its own that has the stand-in for vLLM, and with the environment."""

    def make(**environment: str) -> str:
        (tmp_path / "there" / "vllm").mkdir(parents=True)
        (tmp_path / "there" / "vllm" / "__init__.py").write_text(FAKE_VLLM)
        settings = {"PYTHONPATH": str(tmp_path / "there"), "FAKE_FILE": str(tmp_path / "told"), **environment}
        exports = "".join(f"export {name}='{value}'\n" for name, value in settings.items())
        program = tmp_path / "python-of-its-own"
        program.write_text(f'#!/bin/sh\n{exports}exec "{sys.executable}" "$@"\n')
        program.chmod(0o755)
        return str(program)

    return make
