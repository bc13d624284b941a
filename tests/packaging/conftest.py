"""A copy of the working tree as a fresh clone would have it, uncommitted changes included."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def copy_tree(target: Path) -> Path:
    """Copy what git tracks or would track to `target`; without git, everything but environments and caches."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, check=True, capture_output=True, text=True,
        )  # fmt: skip
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target / name)
    else:
        ignored = shutil.ignore_patterns(".venv", "__pycache__", ".*_cache", "dist", "build")
        shutil.copytree(ROOT, target, ignore=ignored, dirs_exist_ok=True)
    return target


@pytest.fixture(scope="session")
def fresh_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the working tree that no test has touched; treat it as read-only, or copy it again."""
    return copy_tree(tmp_path_factory.mktemp("tree") / "vllm_teach")
