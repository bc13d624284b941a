"""Which systems are compared with, and what is said of those that are not."""

from pathlib import Path

import pytest
import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance import peers
from vllm_teach.performance.peer_choice import PEERS, choose_peers
from vllm_teach.performance.peer_process.client import ProcessPeer
from vllm_teach.performance.peers import TransformersPeer


def choose(names, pythons=None):
    return choose_peers(names, Path("a-model"), torch.float32, pythons)


def test_those_that_can_run_and_those_that_cannot(monkeypatch):
    asked = []

    def available(self: ProcessPeer) -> str | None:
        asked.append((self.name, self.python))
        return None if self.name == "vllm" else "It is not there."

    monkeypatch.setattr(ProcessPeer, "available", available)
    found, missing = choose(["llama.cpp", "vllm", "transformers", "vllm"], {"vllm": "/its/python"})
    assert [type(peer) for peer in found] == [ProcessPeer, TransformersPeer]
    assert [(each.system, each.reason) for each in missing] == [("llama.cpp", "It is not there.")]
    assert asked[1] == ("vllm", "/its/python")
    assert asked[0][1] != "/its/python"


def test_transformers_may_be_missing(monkeypatch):
    monkeypatch.setattr(peers, "installed_version", lambda name: None)
    found, [missing] = choose(["transformers"])
    assert found == []
    assert (missing.system, missing.reason) == ("transformers", "It is not installed: pip install transformers.")


def test_none_is_none():
    assert choose([]) == ([], [])


@pytest.mark.parametrize(
    ("names", "pythons", "words"),
    [
        (["vllm", "tensorrt"], None, "compare='tensorrt' is no system .* transformers, vllm, llama.cpp, or none"),
        (["none", "vllm"], None, "compare='none' is no system"),
        (["transformers"], {"transformers": "python"}, "peer_pythons has 'transformers', which is no system in a"),
        (["transformers"], {"vllm": "python"}, "peer_pythons has 'vllm', which is no"),
    ],
)
def test_names_that_are_none(names, pythons, words):
    assert PEERS == ("transformers", "vllm", "llama.cpp")
    with pytest.raises(InvalidArgumentError, match=words):
        choose(names, pythons)
