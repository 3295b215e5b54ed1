import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # cases.py, for every folder
torch.set_num_threads(1)
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")  # some virtual machines announce AMX and stop at it

BROWSER = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if (path := shutil.which("chromium")) is None:
        pytest.skip("no chromium on the PATH to open the page with")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=BROWSER)
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser):
    """Opens a folder's page; afterwards there has been no error, no dialog and no request but the file itself."""
    contexts, errors, requests = [], [], []

    def go(folder, width=1280, scheme="light", media="screen"):
        context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(120_000)  # milliseconds: a busy machine is no failure
        page.on(
            "console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", lambda dialog: (errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: requests.append(request.url))
        page.goto((folder / "report.html").as_uri())
        page.emulate_media(media=media, color_scheme=scheme)
        page.wait_for_selector("html[data-charts=drawn]")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        return page

    yield go
    for context in contexts:
        context.close()
    assert errors == []
    assert [url for url in requests if not url.startswith("data:") and not url.endswith("/report.html")] == []
