"""What README says is there, is there."""

import re

from vllm_teach import cli, resources
from vllm_teach.teaching.lab import list_lessons

ROOT = resources.checkout_root()
README = (ROOT / "README.md").read_text(encoding="utf-8")
INLINE_CODE = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", README, flags=re.DOTALL))


def test_every_path_named_in_the_readme_exists():
    folders = tuple(f"{path.name}/" for path in ROOT.iterdir() if path.is_dir())
    paths = [code for code in INLINE_CODE if code.startswith(folders) and " " not in code]
    assert len(paths) > 8
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_table_of_lessons_calls_ready_what_is_there():
    rows = re.findall(r"^\| `(\d\d_\w+)` \|.*\| (ready|planned) \|$", README, flags=re.MULTILINE)
    assert [name for name, state in rows if state == "ready"] == [
        name.removesuffix(".ipynb") for name in list_lessons()
    ]
    assert [name[:2] for name, _ in rows] == [f"{number:02}" for number in range(14)]


def test_every_command_named_in_the_readme_parses():
    whole = README.replace("\\\n", " ")
    lines = re.findall(r"^vllm-teach (.+?)(?:\s+#.*)?$", whole, flags=re.MULTILINE)
    assert len(lines) >= 3
    for line in lines:
        words = [quoted or plain for quoted, plain in re.findall(r'"([^"]*)"|(\S+)', line)]
        assert cli.build_parser().parse_args(words).run is not None


def test_every_make_target_named_in_the_readme_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {code.split()[1] for code in INLINE_CODE if code.startswith("make ")}
    assert named
    assert named <= targets
