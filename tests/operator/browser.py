"""A real Chromium, without a window, that keeps what its console says.

`chromium` and `chromedriver` have to be on the PATH (Debian: chromium, chromium-driver); `scripts/test` puts them there
where it may.
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions, ChromeService


def missing() -> str | None:
    """Why there is no browser here; None: there is one."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return (
        f"no {' and no '.join(absent)} on the PATH (Debian: apt-get install chromium chromium-driver)"
        if absent
        else None
    )


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Chrome]:
    """One browser with a profile of its own."""
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in (
        "--headless=new",
        "--no-sandbox",  # tests may run as root
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={folder / 'profile'}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = ChromeService(shutil.which("chromedriver"), log_output=str(folder / "chromedriver.log"))
    driver = Chrome(options, service)
    try:
        yield driver
    finally:
        driver.quit()


def look(driver: Chrome, url: str, *, width: int, height: int, scheme: str) -> None:
    """Load a page as a screen of this size with this colour scheme shows it."""
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    driver.get(url)


def console(driver: Chrome) -> list[Any]:
    """What the page's console said since the last call."""
    return list(driver.get_log("browser"))
