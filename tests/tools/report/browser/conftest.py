"""A headless Chromium for all tests of pages, where there is one: Debian packages it as chromium
and chromium-driver, and ``pip install paceline[browser]`` has what talks to it."""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tools.report.browser.pages import compared, doctored, planned


class Browser:
    """What tests do with a page."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def show(
        self, address: str, *, width: int = 1280, scheme: str = "light", media: str = ""
    ) -> None:
        """Open *address* in a window of that *width*, for people who want that *scheme*."""
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.command("Emulation.setEmulatedMedia", media=media, features=features)
        self.driver.get(address)

    def command(self, name: str, **arguments: object) -> Any:
        return self.driver.execute_cdp_cmd(name, arguments)

    def run(self, script: str, *arguments: object) -> Any:
        """What a function's body of JavaScript returns."""
        return self.driver.execute_script(script, *arguments)

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        actions = ActionChains(self.driver)
        actions.send_keys(*keys).perform()

    def complaints(self) -> list[str]:
        """Of the console, since it was asked last."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One for the session."""
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ImportError:
        pytest.skip("selenium is not installed: pip install paceline[browser]")
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in programs:
        pytest.skip("no chromium, chromedriver: apt install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for word in ("headless=new", "disable-gpu", "disable-dev-shm-usage"):
        options.add_argument(f"--{word}")
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # it refuses to be root in one
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(programs[1]))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


class Site:
    """Pages at an address, and every request that came."""

    def __init__(self, folder: Path) -> None:
        self.requests: list[str] = []
        requests = self.requests

        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_request(self, *_: object) -> None:
                requests.append(self.path)

        handler = functools.partial(Handler, directory=str(folder))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """``compare/``, ``plan/`` and ``doctor/``, each a page."""
    folder = tmp_path_factory.mktemp("pages")
    compared(folder / "compare")
    planned(folder / "plan")
    doctored(folder / "doctor")
    site = Site(folder)
    thread = threading.Thread(target=site.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield site
    finally:
        site.server.shutdown()
        site.server.server_close()
        thread.join()
