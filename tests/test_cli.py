"""The command line: what each command prints, and that errors are one line."""

import subprocess
import sys

import pytest

from vllm_teach import backends, cli
from vllm_teach.teaching import lab


def test_info_names_every_backend_and_why_it_is_not_usable(capsys):
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    for name, reason in backends.availability().items():
        assert f"{name:<14}{f'no: {reason}' if reason else 'usable'}" in printed
    assert "torch threads" in printed
    assert "smollm2" in printed


@pytest.mark.real_model
def test_generate_streams_the_prompt_and_its_continuation(smollm2_path, capsys):
    prompt = "The capital of France is"
    arguments = ["generate", prompt, "--model", str(smollm2_path), "--max-tokens", "8", "--dtype", "float32"]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(prompt)
    assert "Paris" in printed


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("prompt", "form", "complaint"),
    [
        # What Python makes of a byte in a terminal's argument that is no UTF-8.
        ("caf\udce9", [], "no valid text"),
        ("caf\udce9", ["--chat"], "no valid text"),
        ("", [], "empty"),
        ("word " * 9000, [], "max_model_len"),
        ("word " * 9000, ["--chat"], "max_model_len"),
    ],
)
def test_a_bad_prompt_is_one_line_on_stderr_and_is_not_printed(smollm2_path, capsys, prompt, form, complaint):
    assert cli.main(["generate", prompt, *form, "--model", str(smollm2_path), "--dtype", "float32"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    line = printed.err.strip().splitlines()[-1]  # transformers may warn about a long prompt before
    assert line.startswith("vllm-teach: ")
    assert complaint in line


@pytest.mark.real_model
def test_generate_chat_streams_the_answer_alone(smollm2_path, capsys):
    arguments = ["generate", "What is the capital of France?", "--chat", "--model", str(smollm2_path)]
    assert cli.main([*arguments, "--max-tokens", "12", "--dtype", "float32"]) == 0
    printed = capsys.readouterr().out
    assert "Paris" in printed
    assert "What is" not in printed


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--model", "no/such/folder/anywhere"], "no/such/folder/anywhere"),
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "0"], "top_p"),
        (["--max-tokens", "0"], "max_tokens"),
    ],
)
def test_a_bad_argument_is_one_line_on_stderr(arguments, complaint):
    command = [sys.executable, "-m", "vllm_teach.cli", "generate", "Hello", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    [line] = done.stderr.strip().splitlines()
    assert line.startswith("vllm-teach: ")
    assert complaint in line


def test_lab_command_without_a_screen(tmp_path):
    command = lab.lab_command(tmp_path, browser=False, port=8899, extra=["--quiet"])
    assert str(tmp_path / "00_start_here.ipynb") in command
    assert {"--no-browser", "--port=8899", "--quiet"} <= set(command)
    assert command[1:3] == ["-m", "jupyterlab"]


def test_lessons_are_copied_once_and_never_over_the_readers_work(tmp_path):
    folder = lab.prepare_lessons(tmp_path / "mine")
    assert sorted(path.name for path in folder.glob("*.ipynb")) == lab.list_lessons()
    first = folder / lab.FIRST_LESSON
    first.write_text("my own work")
    lab.prepare_lessons(folder)
    assert first.read_text() == "my own work"
