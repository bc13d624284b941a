"""Ranks that torchrun started, as on two machines: two addresses of this one."""

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from vllm_teach import LLM, SamplingParams
from vllm_teach.errors import InvalidArgumentError

SCRIPT = textwrap.dedent(
    """
    import os, sys
    import psutil
    from vllm_teach import LLM, SamplingParams

    model = "no/such/folder" if sys.argv[1] == "lost" and os.environ["RANK"] == "1" else "tiny"
    llm = LLM(model, tensor_parallel_size=2, dtype="float32", device="cpu", max_model_len=64)
    addresses = {each.laddr.ip for each in psutil.Process().net_connections("inet") if each.status == "LISTEN"}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    if sys.argv[1] == "die":
        os.kill(os.getpid(), 9)
    ids = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids
    print("ADDRESSES", *addresses)
    print("TOKENS", ids)
    """
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def torchrun(tmp_path: Path, argument: str) -> list[subprocess.Popen]:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    port = free_port()
    return [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
                *(f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}"),
                *(f"--local-addr={address}", str(file), argument),
            ],
            env={**os.environ, "VLLM_TEACH_HOST_IP": address, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node, address in enumerate(["127.0.0.1", "127.0.0.2"])
    ]


def test_two_nodes_answer_as_one(tmp_path: Path) -> None:
    first, second = torchrun(tmp_path, "live")
    (out, err), (other_out, other_err) = first.communicate(timeout=120), second.communicate(timeout=120)
    assert (first.returncode, second.returncode) == (0, 0), err + other_err
    llm = LLM("tiny", dtype="float32", device="cpu", max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids
    assert f"TOKENS {expected}\n" in out
    assert "TOKENS" not in other_out, "rank 1 serves, and never comes out of LLM()"
    assert "ADDRESSES 127.0.0.1\n" in out


def test_the_other_node_ends_when_the_driver_dies(tmp_path: Path) -> None:
    nodes = torchrun(tmp_path, "die")
    errors = [node.communicate(timeout=120)[1] for node in nodes]
    assert all(node.returncode for node in nodes)
    assert "EngineDeadError" in errors[1]


def test_what_fails_on_one_node_is_told_to_the_other(tmp_path: Path) -> None:
    """Which would wait half an hour for the model that is not there."""
    nodes = torchrun(tmp_path, "lost")
    errors = [node.communicate(timeout=120)[1] for node in nodes]
    assert all(node.returncode for node in nodes)
    assert "ModelNotFoundError: rank 1: " in errors[0]


def test_serve_on_another_rank_computes_for_rank_0_and_opens_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_teach import cli

    def serves(model: str, **arguments: object) -> None:
        assert (model, arguments["tensor_parallel_size"]) == ("tiny", 2)
        raise SystemExit(0)

    monkeypatch.setattr("vllm_teach.engine.llm.LLM", serves)
    monkeypatch.setattr("vllm_teach.serving.http.server.bind", None)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--model", "tiny", "--tensor-parallel-size", "2"])
    assert ended.value.code == 0


def test_another_size_than_torchruns_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgumentError, match=r"^tensor_parallel_size=2 is not the number of ranks .* 4: make"):
        LLM("tiny", tensor_parallel_size=2)
