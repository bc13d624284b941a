"""The command line: what each command prints, and that errors are one line."""

import io
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_teach import backends, cli
from vllm_teach.quantization.quantization_config import read_config
from vllm_teach.teaching import lab


def test_info_names_every_backend_and_why_it_is_not_usable(capsys):
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    for name, reason in backends.availability().items():
        assert f"{name:<18}{f'no: {reason}' if reason else 'usable'}" in printed
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
    [line] = printed.err.strip().splitlines()
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


def run_in_shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = f"set -o pipefail; {shlex.quote(sys.executable)} -m vllm_teach.cli {line}"
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=variables)


needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
needs_dev_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


@needs_bash
def test_a_reader_that_goes_away_ends_the_command_in_silence():
    done = run_in_shell("info | head -c1")
    assert (done.returncode, len(done.stdout), done.stderr) == (141, 1, "")


@needs_bash
@pytest.mark.real_model
def test_generate_ends_in_silence_with_its_reader(smollm2_path):
    done = run_in_shell(f"generate Hello --max-tokens 30 --model {shlex.quote(str(smollm2_path))} | head -c1")
    assert (done.returncode, done.stdout, done.stderr) == (141, "H", "")


@needs_bash
@needs_dev_full
@pytest.mark.parametrize("line", ["info", "--help", "--version"])
def test_an_output_that_is_full_is_one_line(line):
    done = run_in_shell(f"{line} > /dev/full")
    assert done.returncode == 1
    [printed] = done.stderr.splitlines()
    assert printed.startswith("vllm-teach: the output cannot be written (")


@needs_bash
def test_a_closed_output_is_no_error():
    done = run_in_shell("info >&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_what_the_terminal_cannot_show_is_escaped(monkeypatch):
    def print_an_accent(_: object) -> None:
        cli.write("Café 東")

    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr(cli, "run_info", print_an_accent)
    assert cli.main(["info"]) == 0
    assert raw.getvalue() == b"Caf\\xe9 \\u6771\n"


@pytest.mark.parametrize("port", ["0", "-5", "65536", "99999999", "x", "8e3", "²"])
def test_a_port_that_is_none_is_refused_before_anything_runs(port, capsys, monkeypatch):
    monkeypatch.setattr(cli, "run_lab", lambda _: pytest.fail("ran"))
    with pytest.raises(SystemExit) as ended:
        cli.main(["lab", "--port", port])
    assert ended.value.code == 2
    assert f"--port: {port!r} is no port: give a whole number from 1 to 65535" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["0", "-1", "1.5", "x", "", "1" + "0" * 30, "9" * 5000])
def test_a_number_that_counts_nothing_is_refused(number, capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "linear", "--tokens", number])
    assert "is not valid: give a whole number from 1 to 999999999" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ("serve smollm2", "unrecognized arguments: smollm2; to name a model, give --model smollm2\n"),
        ("serve smollm2 --port 0", "unrecognized arguments: smollm2; to name a model, give --model smollm2\n"),
        ("bench serve tiny", "unrecognized arguments: tiny; to name a model, give --model tiny\n"),
        ("bench throughput tiny", "unrecognized arguments: tiny; to name a model, give --model tiny\n"),
        ("tune tiny", "unrecognized arguments: tiny; to name a model, give --model tiny\n"),
        ("simulate tiny", "the following arguments are required: --model, --hardware\n"),
        ("serve --modle tiny", "unrecognized arguments: --modle tiny\n"),
        ("bench memory tiny", "unrecognized arguments: tiny\n"),
        ("generate hello world", "unrecognized arguments: world\n"),
        ("quantize tiny int8 --method int8 --output new", "unrecognized arguments: int8\n"),
    ],
)
def test_a_model_without_its_flag_is_told_of_the_flag(arguments, hint, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: {hint}")


def test_a_lab_folder_that_cannot_be_written_is_named(tmp_path, capsys):
    file = tmp_path / "taken"
    file.write_text("x")
    for target in (file, file / "below"):
        assert cli.main(["lab", "--no-browser", "--dir", str(target)]) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"vllm-teach: the lessons cannot be copied to {str(target)!r}")
        assert "--dir" in line


def test_lab_command_without_a_screen(tmp_path):
    command = lab.lab_command(tmp_path, browser=False, port=8899, extra=["--quiet"])
    assert str(tmp_path / "00_start_here.ipynb") in command
    assert {"--no-browser", "--port=8899", "--quiet"} <= set(command)
    assert "--LabApp.default_url=/lab/tree/00_start_here.ipynb" in command
    assert command[1:3] == ["-m", "jupyterlab"]


def test_lessons_are_copied_once_and_never_over_the_readers_work(tmp_path):
    folder = lab.prepare_lessons(tmp_path / "mine")
    assert sorted(path.name for path in folder.glob("*.ipynb")) == lab.list_lessons()
    first = folder / lab.FIRST_LESSON
    first.write_text("my own work")
    lab.prepare_lessons(folder)
    assert first.read_text() == "my own work"


QUANTIZE = ["quantize", "tiny", "--quiet", "--output"]


def test_quantize_writes_a_folder_and_prints_what_it_holds(tmp_path, capsys):
    out = tmp_path / "out"
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 60)
    calibration = ["--calibration", str(text), "--samples", "4", "--length", "32"]
    assert cli.main([*QUANTIZE, str(out), "--method", "gptq", "--group-size", "32", *calibration]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{out}\n  gptq, 4 bits, groups of 32, layout: GPTQ's, version 1\n")
    assert "whole model" in printed
    config = read_config(out)
    assert (config.method, config.bits, config.group_size, config.layout) == ("gptq", 4, 32, "gptq")
    assert (out / "tokenizer.json").is_file()


def test_quantize_options_reach_the_config(tmp_path):
    assert (
        cli.main([*QUANTIZE, str(tmp_path / "a"), "--method", "rtn", "--bits", "3", "--head-bits", "8", "--symmetric"])
        == 0
    )
    config = read_config(tmp_path / "a")
    assert (config.method, config.bits, config.head_bits, config.symmetric) == ("rtn", 3, 8, True)
    assert cli.main([*QUANTIZE, str(tmp_path / "b"), "--method", "int8"]) == 0
    assert (read_config(tmp_path / "b").bits, read_config(tmp_path / "b").group_size) == (8, None)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--method", "gptq", "--group-size", "96"], "use 8 or 16 or 32 or 64 or"),
        (["--method", "int8", "--bits", "4"], "bits=4"),
        (["--method", "rtn", "--samples", "8"], "--samples chooses from a text, and 'rtn' reads none without"),
        (["--method", "rtn", "--length", "64"], "leave --length out"),
        (["--method", "int8", "--seed", "0"], "--seed chooses from a text, and 'int8' reads none"),
        (["--method", "awq", "--act-order"], "act_order=True"),
        (["--method", "gptq", "--calibration", "no/such/file"], "calibration='no/such/file'"),
        (["--method", "gptq", "--calibration", __file__, "--samples", "1", "--length", "600"], "use a shorter length"),
    ],
)
def test_quantize_refuses_what_cannot_work_in_one_line(tmp_path, capsys, arguments, complaint):
    assert cli.main([*QUANTIZE, str(tmp_path / "out"), *arguments]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    [line] = printed.err.strip().splitlines()
    assert line.startswith("vllm-teach: ")
    assert complaint in line
    assert list(tmp_path.iterdir()) == []


def test_quantize_never_writes_over_a_folder(tmp_path, capsys):
    (tmp_path / "mine").write_text("x")
    assert cli.main([*QUANTIZE, str(tmp_path), "--method", "rtn"]) == 1
    assert "is there already: give a new folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_measurement_that_no_memory_holds_is_refused(capsys):
    assert cli.main(["bench", "norms", "--tokens", "999999999", "--size", "999999999", "--quiet"]) == 1
    assert "the tensors to measure with do not fit into memory: ask for less." in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("The kernel could not allocate its working memory."),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ],
)
def test_a_kernel_without_room_to_work_in_is_no_traceback(error, monkeypatch, capsys):
    from vllm_teach.performance import norm_bench

    def fail(**arguments):
        raise error

    monkeypatch.setattr(norm_bench, "bench_norms", fail)
    assert cli.main(["bench", "norms"]) == 1
    assert capsys.readouterr().err == "vllm-teach: the tensors to measure with do not fit into memory: ask for less.\n"
