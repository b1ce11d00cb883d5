"""Open a report in headless Chromium, narrow and wide, light and dark, and say which of its texts lie over one another.

    paged simulate azure --policy paged,vllm --blocks 1200 --limit 300 --html report.html
    python tools/report_overlaps.py report.html --pictures FOLDER

Compares the boxes of all texts that are drawn, of the page and of its plots, and looks for what is wider than the page. Status 1
where there is anything. Needs Chromium (`--browser`), and nothing of ours. A page is shown in a frame, because a window has a least width.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated

import typer

WIDTHS = (360, 800, 1400)
THEMES = {"light": "1", "dark": "0"}
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--virtual-time-budget=20000",
)
LOOK = """
<script>
setTimeout(() => {
  const texts = [];
  let number = 0;
  const boxes = (element, what) => {
    if (!what.trim()) return;
    number += 1;
    const range = document.createRange();
    range.selectNodeContents(element);
    for (const box of range.getClientRects())
      if (box.width > 1 && box.height > 1) texts.push({ number, what, x: box.x, y: box.y, right: box.right, bottom: box.bottom });
  };
  for (const element of document.querySelectorAll("svg text")) {
    const lines = element.querySelectorAll("tspan");
    if (getComputedStyle(element).visibility !== "hidden" && element.getBoundingClientRect().width > 1)
      for (const line of lines.length ? lines : [element]) boxes(line, line.textContent);
  }
  for (const element of document.querySelectorAll("h1, h2, p, dt, dd, td, th, label, button"))
    if (element.offsetParent && !element.closest("[hidden]") && !element.closest("#controls")) boxes(element, element.textContent.slice(0, 40));
  const found = [];
  texts.forEach((one, i) => texts.slice(i + 1).forEach((other) => {
    const across = Math.min(one.right, other.right) - Math.max(one.x, other.x);
    const down = Math.min(one.bottom, other.bottom) - Math.max(one.y, other.y);
    // Lines of type overlap by their leading.
    if (one.number !== other.number && across > 1.5 && down > 4) found.push(`"${one.what}" and "${other.what}" by ${across.toFixed(0)} x ${down.toFixed(0)}`);
  }));
  const wide = document.documentElement.scrollWidth - innerWidth;
  if (wide > 1) found.push(`the page is ${wide} pixels wider than its window`);
  parent.postMessage({ found, height: document.documentElement.scrollHeight, texts: texts.length }, "*");
}, 3000);
</script>
"""
FRAME = """<!doctype html><body style="margin:0"><iframe src="page.html" style="border:0;width:{width}px;height:{height}px"></iframe>
<script>addEventListener("message", (event) => {{ document.body.dataset.said = JSON.stringify(event.data); }});</script>"""


def opened(browser: str, folder: Path, theme: str, *arguments: str) -> str:
    """Show the frame, and return what the browser writes."""
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser,
            *FLAGS,
            f"--user-data-dir={profile}",
            f"--blink-settings=preferredColorScheme={THEMES[theme]}",
        ]
        done = subprocess.run(
            [*command, *arguments, (folder / "frame.html").as_uri()], capture_output=True, text=True, timeout=120
        )
    return done.stdout


def main(
    report: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A page that `--html` wrote.")],
    pictures: Annotated[Path | None, typer.Option(help="A folder for a picture of each.")] = None,
    browser: Annotated[str, typer.Option(help="Chromium.")] = "chromium",
) -> None:
    """Say which texts of a report overlap, at three widths in two themes."""
    page = report.read_text(encoding="utf-8")
    num_found = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "page.html").write_text(page.replace("</body></html>", f"{LOOK}</body></html>"), encoding="utf-8")
        for width in WIDTHS:
            for theme in THEMES:
                (folder / "frame.html").write_text(FRAME.format(width=width, height=1000))
                found = re.search(r"data-said=\"([^\"]*)\"", opened(browser, folder, theme, "--dump-dom"))
                if found is None:
                    raise SystemExit(f"{width} {theme}: the page said nothing")
                said = json.loads(
                    found[1].replace("&quot;", '"').replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
                )
                num_found += len(said["found"])
                print(f"{width} pixels, {theme}: {said['texts']} texts, {len(said['found'])} overlaps")
                for line in said["found"][:12]:
                    print(f"  {line}")
                if pictures is not None:
                    pictures.mkdir(parents=True, exist_ok=True)
                    (folder / "frame.html").write_text(FRAME.format(width=width, height=said["height"]))
                    size = f"--window-size={width},{said['height']}"
                    opened(browser, folder, theme, size, f"--screenshot={pictures / f'{width}-{theme}.png'}")
    raise SystemExit(bool(num_found))


if __name__ == "__main__":
    typer.run(main)
