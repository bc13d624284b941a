"""A JupyterLab server on a scratch copy of the lessons, and a page of headless Chromium. Only what is started here is
ended here.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from vllm_teach import resources

TOKEN = "lessons"
START_LIMIT_S = 60
PAGE_LIMIT_MS = 120_000

# windowingMode "none": otherwise cells outside the window are not attached, and their widgets never drawn.
SETTINGS = {
    "@jupyterlab/notebook-extension/tracker": '{"windowingMode": "none"}',
    "@jupyterlab/apputils-extension/notification": '{"fetchNews": "false", "checkForUpdates": false}',
}


@dataclass(frozen=True)
class Lab:
    """A running server: its address and the folder it serves."""

    address: str
    folder: Path

    def page_of(self, notebook: str) -> str:
        """The address of one notebook alone, without file browser, launcher or a restored layout."""
        return f"{self.address}/doc/tree/{notebook}?token={TOKEN}&reset"


def chromium_path() -> str | None:
    """Debian's chromium, or another Chrome on the PATH."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for path in map(shutil.which, names) if path), None)


def environment(scratch: Path) -> dict[str, str]:
    """Jupyter's own folders go to the scratch folder, so that a reader's settings neither matter nor change."""
    settings = scratch / "settings"
    for name, text in SETTINGS.items():
        path = settings / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    folders = {
        "JUPYTER_CONFIG_DIR": scratch / "config",
        "JUPYTER_DATA_DIR": scratch / "data",
        "JUPYTER_RUNTIME_DIR": scratch / "runtime",
        "JUPYTERLAB_SETTINGS_DIR": settings,
        "JUPYTERLAB_WORKSPACES_DIR": scratch / "workspaces",
        "IPYTHONDIR": scratch / "ipython",
    }
    quiet = {"OMP_NUM_THREADS": "2", "NO_PROXY": "127.0.0.1,localhost"}
    return {**os.environ, **{name: str(path) for name, path in folders.items()}, **quiet}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab on a free port of this machine, serving a copy of notebooks/ (it saves what it opens)."""
    scratch = tmp_path_factory.mktemp("lab")
    folder = scratch / "notebooks"
    shutil.copytree(resources.folder("notebooks"), folder, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"]
    command += ["--ServerApp.port_retries=0", f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={folder}"]
    command += ["--LabApp.expose_app_in_browser=True", "--LabApp.news_url=None"]
    command += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    log = scratch / "server.log"
    with log.open("w") as stream:
        server = subprocess.Popen(
            command, stdout=stream, stderr=stream, env=environment(scratch), start_new_session=True
        )
    try:
        wait_until_up(server, port, log)
        yield Lab(f"http://127.0.0.1:{port}", folder)
    finally:
        stop(server)


def wait_until_up(server: subprocess.Popen, port: int, log: Path) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end:
        assert server.poll() is None, f"JupyterLab ended: {log.read_text()[-2000:]}"
        try:
            opener.open(f"http://127.0.0.1:{port}/api/status?token={TOKEN}", timeout=2).close()
            return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.2)
    raise AssertionError(f"JupyterLab did not answer within {START_LIMIT_S} s: {log.read_text()[-2000:]}")


def stop(server: subprocess.Popen) -> None:
    """End the server's own process group, its kernels included: first politely, so that it ends the kernels itself."""
    for ending in (signal.SIGTERM, signal.SIGKILL):
        if server.poll() is None:
            os.killpg(server.pid, ending)
            try:
                server.wait(15)
            except subprocess.TimeoutExpired:
                continue


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium of the machine; Playwright's own download is not needed.

    Closed with its module: while Playwright is open, this thread has a running event loop, and no other test's
    `asyncio.run` works.
    """
    path = chromium_path()
    if path is None:
        pytest.skip(
            "NO CHROMIUM: the lessons were NOT tried in JupyterLab; apt-get install chromium to have them tried"
        )
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # --no-sandbox: a container's root may not make one. --no-proxy-server: the server is on this machine.
        options = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-proxy-server"]
        chromium = playwright.chromium.launch(executable_path=path, headless=True, args=options)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser):
    """A fresh page; whatever it throws on its own fails the test."""
    thrown: list[str] = []
    page = browser.new_page(viewport={"width": 1280, "height": 1400})
    page.set_default_timeout(PAGE_LIMIT_MS)
    page.on("pageerror", lambda error: thrown.append(str(error)))
    yield page
    page.close()
    assert thrown == []
