"""A real Chromium, driven by Playwright: what a page requested, and what its console showed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import TYPE_CHECKING

from tests.support.packages import missing

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

LIMIT_MS = 150_000


def why_not() -> str:
    """Why no Chromium can be started here; empty where it can. Installs Debian's package where that is possible."""
    return missing(("chromium",), ("chromium",))


@contextmanager
def chromium() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # No sandbox: Chromium refuses to start its own as root.
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"], timeout=LIMIT_MS
        )
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """A page at ``address`` with all that it requested and complained of."""

    def __init__(self, browser: Browser, address: str, width: int = 1280, scheme: str = "light") -> None:
        self.page: Page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page.set_default_timeout(LIMIT_MS)
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.problems.append(message.text) if message.type != "log" else None)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)

    def wait(self, expression: str, timeout_s: float = 120.0) -> None:
        """Until ``expression`` is true; Playwright's own way evaluates text in the page, whose policy forbids that."""
        deadline = time.monotonic() + timeout_s
        while not self.page.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {expression}"
            time.sleep(0.05)

    def charts(self, expression: str) -> object:
        """``expression`` of each drawn chart ``e``: {chart, plot, zoomed}."""
        return self.page.evaluate(f"[...drawn.values()].filter((e) => e.plot).map((e) => {expression})")

    def faults(self) -> list[str]:
        """Serious and critical ones that axe-core finds: its rule, the summary of what is wrong, where."""
        self.page.evaluate((files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8"))
        found = self.page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
        return [
            f"{fault['id']}: {node['target']}: {node['failureSummary']}"
            for fault in found
            if fault["impact"] in ("serious", "critical")
            for node in fault["nodes"]
        ]

    def scroll_through(self) -> None:
        """Open every part and bring every chart into view for a frame: they are drawn then."""
        self.page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        sent = "data.sections.some((section) => section.id === one.dataset.plots)"
        self.wait(f"[...document.querySelectorAll('details[data-plots]')].every((one) => {sent})")
        self.page.evaluate(
            "async () => { for (let y = 0; y < document.body.scrollHeight; y += 600)"
            " { scrollTo(0, y); await new Promise((r) => requestAnimationFrame(() => requestAnimationFrame(r))); } }"
        )
        self.wait("[...drawn.values()].every((e) => e.plot)")
