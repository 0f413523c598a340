"""``make screenshots``: pages in headless Chromium, at the widths of a screen and of a phone, in light and in dark.

    python tests/support/screenshots.py build/docs/*.html [--out FOLDER] [--widths 1400 400] [--schemes light dark]
    make screenshots PAGES="build/docs/*.html"

Writes ``NAME-WIDTH-SCHEME.png``, the whole page. A page fails that writes an error to the console, asks any network for
something, is wider than the window, or cuts a text off. Its time is that from the request to the ``load`` event, or to
the mark ``rendered`` (``performance.mark``) of a page that draws what is in sight after it. It may take ``--seconds``.
While ``window.rendering`` is true the picture waits.

It needs Debian's package ``chromium`` (``--browser``: another path of it) and the Python package ``playwright``.
"""

import argparse
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Browser, Error, Page, sync_playwright

ROOT = Path(__file__).parents[2]
HEIGHTS = {400: 800}
"""Width of the window -> its height; others have 900."""
HIGHEST = 16_000
"""The most pixels of a picture from top to bottom, which Chromium can draw."""
LOCAL = ("file:", "data:", "blob:", "about:", "http://127.0.0.1", "http://localhost")

TIME = """() => {
    const mark = performance.getEntriesByName("rendered")[0]
    return (mark ? mark.startTime : performance.getEntriesByType("navigation")[0].loadEventEnd) / 1000
}"""
CUT = """() => {
    const found = []
    const width = document.documentElement.clientWidth
    if (document.documentElement.scrollWidth > width)
        found.push(`the page is ${document.documentElement.scrollWidth} pixels wide`)
    for (const one of document.querySelectorAll("body *")) {
        const text = [...one.childNodes].some(child => child.nodeType === 3 && child.data.trim())
        if (!text || !one.checkVisibility({checkOpacity: true, checkVisibilityCSS: true})) continue
        const style = getComputedStyle(one), box = one.getBoundingClientRect()
        if (box.width < 2 || box.height < 2) continue  // for screen readers
        const name = `<${one.tagName.toLowerCase()}> ${one.textContent.trim().slice(0, 40)}`
        if (one.scrollWidth > one.clientWidth + 1 && ["hidden", "clip"].includes(style.overflowX))
            found.push(`cut off: ${name}`)
        let scrolls = false
        for (let up = one; up && up !== document.body; up = up.parentElement)
            scrolls ||= ["auto", "scroll", "hidden"].includes(getComputedStyle(up).overflowX)
        if (!scrolls && box.right > width + 1) found.push(`beyond the right edge: ${name}`)
    }
    return [...new Set(found)].slice(0, 5)
}"""


def main(arguments: list[str]) -> int:
    """Take the screenshots; returns 1 if a page has a problem."""
    given = parse(arguments)
    executable = given.browser or shutil.which("chromium")
    if executable is None:
        print("error: no chromium on the path; apt-get install chromium, or give --browser PATH", file=sys.stderr)
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    num_problems = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        for name, address in named(given.pages).items():
            for width in given.widths:
                for scheme in given.schemes:
                    picture = given.out / f"{name}-{width}-{scheme}.png"
                    seconds, problems = show(browser, address, width, scheme, picture, given.open)
                    if given.seconds is not None and seconds > given.seconds:
                        problems.append(f"took {seconds:.2f} s, the most is {given.seconds:g} s")
                    num_problems += len(problems)
                    print("\n  ".join([f"{picture}: {seconds:.2f} s", *problems]), flush=True)
        browser.close()
    return 1 if num_problems else 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", metavar="PAGE", help="a file, or an address")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "screenshots", metavar="FOLDER")
    parser.add_argument("--widths", type=int, nargs="+", default=[1400, 400], metavar="PIXELS")
    parser.add_argument("--schemes", nargs="+", default=["light", "dark"], choices=["light", "dark"])
    parser.add_argument("--seconds", type=float, help="the most that a page may take")
    parser.add_argument("--open", action="store_true", help="open all <details> before the picture")
    parser.add_argument("--browser", metavar="PATH")
    return parser.parse_args(arguments)


def named(pages: list[str]) -> dict[str, str]:
    """A name for each of ``pages``, the shortest end of its path that no other has, and its address."""
    parts = {
        page: [part for part in page.removesuffix(".html").split("/") if part not in ("", ".", "..")] for page in pages
    }
    names: dict[str, str] = {}
    for page, own in parts.items():
        count = 1
        while count < len(own) and sum(other[-count:] == own[-count:] for other in parts.values()) > 1:
            count += 1
        is_address = "://" in page
        names["-".join(own[-count:])] = page if is_address else Path(page).resolve().as_uri()
    return names


def show(
    browser: Browser, address: str, width: int, scheme: str, picture: Path, opened: bool
) -> tuple[float, list[str]]:
    """Load a page and write its ``picture``; its seconds, and its problems, one line each."""
    page: Page = browser.new_page(
        viewport={"width": width, "height": HEIGHTS.get(width, 900)},
        color_scheme=scheme,  # type: ignore[arg-type]
        has_touch=width in HEIGHTS,
        is_mobile=width in HEIGHTS,
    )
    problems: list[str] = []
    page.on("console", lambda message: problems.append(f"console: {message.text}") if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.on("request", lambda sent: None if sent.url.startswith(LOCAL) else problems.append(f"a request to {sent.url}"))
    try:
        page.goto(address, wait_until="load", timeout=60_000)
        page.wait_for_timeout(300)
        page.wait_for_function("() => !window.rendering", timeout=60_000)
        seconds = float(page.evaluate(TIME))
        if opened:
            page.evaluate("() => document.querySelectorAll('details').forEach(one => one.open = true)")
        problems += page.evaluate(CUT)
        # A window as high as the page: a picture of the full page would forget that the window is a phone's.
        height = page.evaluate("() => document.documentElement.scrollHeight")
        page.set_viewport_size({"width": width, "height": min(height, HIGHEST)})
        page.wait_for_timeout(300)
        page.screenshot(path=picture)
    except Error as error:
        return float("nan"), [*problems, f"error: {error}"]
    finally:
        page.close()
    return seconds, problems


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
