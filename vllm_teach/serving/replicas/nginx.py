"""nginx, the program: where it is, whether it takes a configuration, and whether it serves yet."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

from vllm_teach.errors import ReplicaError

HOW_TO_INSTALL = "install nginx (Debian and Ubuntu: apt-get install nginx-light; macOS: brew install nginx)"
CONFIGURATION = "nginx.conf"
PID_FILE = "nginx.pid"


def find_nginx() -> str | None:
    """Return the program's path, None where it is not installed."""
    # Debian puts it where only root looks.
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/opt/homebrew/bin")


def nginx_command(nginx: str, folder: Path) -> list[str]:
    """Return the command that runs nginx on the configuration in `folder`."""
    return [nginx, "-p", f"{folder}/", "-c", CONFIGURATION]


def check_configuration(nginx: str, folder: Path) -> None:
    """Let nginx read the configuration in `folder`; raises ReplicaError with its complaint."""
    closed = [each for each in (folder, *folder.parents) if not each.stat().st_mode & stat.S_IXOTH]
    if os.geteuid() == 0 and closed:
        raise ReplicaError(
            f"{folder} is no folder for nginx, whose workers, started by root, run as another user that cannot enter "
            f"{closed[0]}: use another."
        )
    try:
        done = subprocess.run(
            [*nginx_command(nginx, folder), "-t", "-q"], capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ReplicaError(f"{nginx} cannot be run ({error}): see that it is nginx.") from error
    if done.returncode:
        raise ReplicaError(f"{nginx} refuses {folder / CONFIGURATION}: {done.stderr.strip()}.")


def nginx_listens(folder: Path, pid: int) -> bool:
    """Whether the nginx that runs as `pid` on the configuration in `folder` has opened its sockets.

    That is when it writes its number to a file. A connection to its address says less: another program may listen
    there, and this nginx may be about to end for that reason.
    """
    try:
        return (folder / PID_FILE).read_text().strip() == str(pid)
    except OSError:
        return False
