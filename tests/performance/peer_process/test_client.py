"""A peer in another interpreter: its seconds, its errors, its end."""

import errno
import json
import sys
from pathlib import Path

import psutil
import pytest
import torch

from vllm_teach.errors import EngineError, ModelLoadError
from vllm_teach.models.gguf_reader import GGUFModel
from vllm_teach.models.resolve import resolve_model
from vllm_teach.openmp import WAIT_SHORTLY
from vllm_teach.performance.peer_process import client
from vllm_teach.performance.peer_process.client import ProcessPeer
from vllm_teach.performance.workload import Workload

WORKLOAD = Workload(((1, 2, 3), (4,)), (5, 2))


def peer_in(python: str) -> ProcessPeer:
    return ProcessPeer("vllm", Path("some-model"), torch.bfloat16, python)


def test_requests_are_served_there_and_its_own_output_is_no_answer(make_interpreter, tmp_path):
    peer = peer_in(make_interpreter())
    assert peer.available() is None
    peer.load(max_len=99, max_seqs=8, cache_bytes=5 * 2**30 + 1)
    try:
        assert (peer.version, peer.how) == ("9.9", "its own scheduler, bfloat16")
        told = json.loads((tmp_path / "told").read_text())
        assert (told["model"], told["dtype"], told["max_model_len"]) == ("some-model", "bfloat16", 99)
        assert told["threads"] == str(torch.get_num_threads())
        assert told["enable_prefix_caching"] is False
        assert told["cache"] == "6"  # whole GiB, and no less than it was told
        assert 0 <= peer.run(WORKLOAD) < 60
        assert 0 <= peer.run(WORKLOAD) < 60
    finally:
        peer.close()
    peer.close()
    with pytest.raises(EngineError, match="vllm is not loaded"):
        peer.run(WORKLOAD)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(WAIT_SHORTLY, (None, None)), ({**WAIT_SHORTLY, "OMP_WAIT_POLICY": "ACTIVE"}, ("ACTIVE", "5000"))],
)
def test_its_threads_wait_as_it_likes_unless_the_user_says_otherwise(
    make_interpreter, tmp_path, monkeypatch, ours, theirs
):
    """What our command line sets suits our own OpenMP; another one's threads would sleep at once."""
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    peer = peer_in(make_interpreter())
    peer.load(99, 8, 0)
    peer.close()
    told = json.loads((tmp_path / "told").read_text())
    assert (told["policy"], told["spins"]) == theirs


@pytest.mark.parametrize(("own", "cache"), [("1", "6"), ("9", "9"), ("", "6")])
def test_a_users_smaller_cache_takes_no_room_from_it(make_interpreter, tmp_path, own, cache):
    peer = peer_in(make_interpreter(VLLM_CPU_KVCACHE_SPACE=own))
    peer.load(99, 8, 5 * 2**30)
    peer.close()
    assert json.loads((tmp_path / "told").read_text())["cache"] == cache


def test_a_disk_that_is_full_when_its_file_is_written_is_its_failure(monkeypatch):
    def write(*_: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setitem(client.SYSTEMS, "vllm", client.System("vllm", "vllm", write))
    peer = peer_in(sys.executable)
    with pytest.raises(
        EngineError, match=r"^vllm cannot be started \(.*No space left on device\): see that .* has room"
    ):
        peer.load(99, 8, 0)
    peer.close()


def test_an_interpreter_that_has_vanished_is_its_failure(tmp_path):
    peer = peer_in(str(tmp_path / "nowhere"))
    with pytest.raises(EngineError, match=rf"^vllm cannot be started .* and that {tmp_path / 'nowhere'} is there\.$"):
        peer.load(99, 8, 0)
    peer.close()


def test_requests_that_end_early_are_an_error_and_the_next_ones_run(make_interpreter):
    peer = peer_in(make_interpreter())
    peer.load(99, 8, 0)
    try:
        with pytest.raises(EngineError, match=r"vllm failed: RuntimeError: requests ended before their last token\.$"):
            peer.run(Workload(((1,), (2,), (3,)), (2, 2, 2)))
        assert peer.run(WORKLOAD) >= 0
    finally:
        peer.close()


def test_a_model_that_it_refuses_is_its_own_words(make_interpreter):
    peer = peer_in(make_interpreter(FAKE="refuses"))
    with pytest.raises(EngineError, match=r"^vllm failed: ValueError: this model is not mine\.$"):
        peer.load(99, 8, 0)
    peer.close()


def test_a_process_that_dies_leaves_its_last_words(make_interpreter):
    peer = peer_in(make_interpreter(FAKE="dies"))
    with pytest.raises(EngineError, match=r"vllm failed: its process ended \(Fatal: no such processor\)\."):
        peer.load(99, 8, 0)
    peer.close()


def test_a_process_that_dies_while_it_serves(make_interpreter):
    peer = peer_in(make_interpreter())
    peer.load(99, 8, 0)
    for _ in range(2):
        with pytest.raises(EngineError, match="vllm failed: its process ended"):
            peer.run(Workload(((1,),) * 13, (1,) * 13))
    peer.close()


def test_what_it_started_ends_with_it(make_interpreter, tmp_path):
    peer = peer_in(make_interpreter(FAKE="starts another"))
    peer.load(99, 8, 0)
    started = psutil.Process(int((tmp_path / "told").read_text()))
    assert started.is_running()
    peer.close()
    assert is_gone(started)


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_what_outlives_a_process_that_died_ends_too(make_interpreter, tmp_path):
    peer = peer_in(make_interpreter(FAKE="starts another"))
    peer.load(99, 8, 0)
    started = psutil.Process(int((tmp_path / "told").read_text()))
    with pytest.raises(EngineError, match="its process ended"):
        peer.run(Workload(((1,),) * 13, (1,) * 13))
    peer.close()
    psutil.wait_procs([started], timeout=5)
    assert is_gone(started)


def test_one_more_ctrl_c_while_it_ends_leaves_nothing_behind(make_interpreter, monkeypatch):
    peer = peer_in(make_interpreter())
    peer.load(99, 8, 0)
    process, scratch = peer._process, peer._log.parent
    real = process.wait

    def interrupted(timeout: float | None = None) -> int:
        if timeout is not None:
            raise KeyboardInterrupt
        return real()

    monkeypatch.setattr(process, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        peer.close()
    assert process.returncode is not None
    assert not scratch.exists()


def write_program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_line_that_is_no_answer_is_an_error(make_interpreter, tmp_path):
    peer = peer_in(write_program(tmp_path / "talks", f'echo welcome\nexec {make_interpreter()} "$@"'))
    assert peer.available() is None
    with pytest.raises(EngineError, match=r"vllm failed: its process printed 'welcome' where an answer was due\.$"):
        peer.load(99, 8, 0)
    peer.close()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("true", "exit status 0"),
        ("echo it", "exit status 0"),
        ("echo no module encodings >&2; exit 1", "no module enc"),
    ],
)
def test_an_interpreter_that_is_none_is_not_taken_for_one_without_it(program, words, tmp_path):
    reason = peer_in(write_program(tmp_path / "program", program)).available()
    assert reason is not None
    assert reason.startswith(f"{tmp_path / 'program'} is no Python that works ({words}")


def test_why_it_is_not_there(tmp_path, monkeypatch):
    (tmp_path / "no_such_module").mkdir()  # a folder of that name where one happens to be is no installation
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(client.SYSTEMS, "vllm", client.System("no_such_module", "vllm", client._as_it_is))
    reason = ProcessPeer("vllm", Path("m"), torch.float32).available()
    assert reason is not None
    assert reason.startswith(f"It is not installed in {sys.executable}: pip install vllm there")
    reason = peer_in(str(tmp_path / "nowhere")).available()
    assert reason is not None
    assert reason.startswith(f"{tmp_path / 'nowhere'} cannot be run (")
    assert "--peer-python vllm=PATH" in reason


def test_llama_cpp_gets_the_same_weights(tmp_path):
    """The stand-in refuses to serve: what counts is the file that it was given."""
    folder = resolve_model("tiny")
    file = client.SYSTEMS["llama.cpp"].prepare(folder, tmp_path, torch.bfloat16)
    assert GGUFModel(file).storage_dtype() is torch.bfloat16


def test_a_model_that_cannot_be_given_to_it_starts_nothing(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["MistralForCausalLM"], "model_type": "mistral"}')
    peer = ProcessPeer("llama.cpp", tmp_path, torch.float32)
    with pytest.raises(ModelLoadError, match="cannot be written as GGUF"):
        peer.load(99, 8, 0)
    assert peer._process is None
    peer.close()
