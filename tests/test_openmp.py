"""Threads wait some microseconds for each other, unless the environment says how long."""

import os
import subprocess
import sys

import pytest

from vllm_teach.openmp import WAIT_SHORTLY, wait_shortly, without_wait_shortly


@pytest.mark.parametrize("name", WAIT_SHORTLY)
def test_who_has_a_say_in_it_is_left_alone(name):
    assert wait_shortly({name: "of my own"}) == {}


def test_otherwise_all_variables_are_to_be_added():
    assert wait_shortly({"HOME": "/"}) == WAIT_SHORTLY


@pytest.mark.parametrize("own", [{}, {"OMP_WAIT_POLICY": "PASSIVE"}, {**WAIT_SHORTLY, "GOMP_SPINCOUNT": "6000"}])
def test_what_was_added_goes_again_and_a_users_own_stays(own):
    own = {"HOME": "/", **own}
    assert without_wait_shortly(own | wait_shortly(own)) == own


def test_the_command_line_sets_them_before_pytorch_is_imported():
    script = """
import os, sys
from vllm_teach.cli import main
assert "torch" not in sys.modules
main(["--version"])
"""
    show = f"import atexit, os; atexit.register(lambda: print([os.environ.get(n) for n in {list(WAIT_SHORTLY)}]));"
    clean = {name: value for name, value in os.environ.items() if name not in WAIT_SHORTLY}
    done = subprocess.run([sys.executable, "-c", show + script], env=clean, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == str(list(WAIT_SHORTLY.values()))
