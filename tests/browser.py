"""A real headless Chromium for the tests that look at pages, and what it fetched and complained about meanwhile."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from selenium.webdriver import ActionChains, Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

_FLAGS = ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "disable-background-networking")
_PATIENCE = 10  # s
_LOCAL = ("file:", "data:", "blob:", "about:", "chrome:")


@contextmanager
def open_browser(
    *, width: int = 1400, height: int = 1000, dark: bool = False, downloads: Path | None = None
) -> Iterator[Chrome]:
    """A browser of its own profile; where there is none the test is skipped, under CI it fails."""
    driver = shutil.which("chromedriver")
    if not driver and not os.environ.get("CI"):
        pytest.skip("no chromedriver here: apt-get install chromium chromium-driver")
    assert driver, "CI has to have chromedriver"
    with TemporaryDirectory(prefix="chromium.", ignore_cleanup_errors=True) as profile:
        browser = Chrome(options=_options(Path(profile), (width, height), downloads), service=ChromeService(driver))
        try:
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
            # Windows have a least width; a phone's is narrower.
            metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            yield browser
        finally:
            browser.quit()


def console_errors(browser: Chrome) -> list[str]:
    """What the console complained about since it was last asked."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def remote_requests(browser: Chrome) -> list[str]:
    """Addresses outside this machine's files that were asked for since this was last called."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    addresses = [
        message["params"]["request"]["url"] for message in messages if message["method"] == "Network.requestWillBeSent"
    ]
    return [address for address in addresses if not address.startswith(_LOCAL)]


def find(browser: Chrome, selector: str) -> WebElement:
    """The first element of a page that matches; pages fill themselves while they are looked at."""
    found: WebElement = WebDriverWait(browser, _PATIENCE).until(lambda b: b.find_element(By.CSS_SELECTOR, selector))
    return found


def words(browser: Chrome, selector: str) -> str:
    """An element's text in one line."""
    return " ".join(find(browser, selector).text.split())


def press(browser: Chrome, *keys: str) -> None:
    """Type, wherever the focus is."""
    ActionChains(browser).send_keys(*keys).perform()


def _options(profile: Path, size: tuple[int, int], downloads: Path | None) -> ChromeOptions:
    options = ChromeOptions()
    for flag in (*_FLAGS, f"user-data-dir={profile}", f"window-size={size[0]},{size[1]}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    if downloads:
        options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    return options
