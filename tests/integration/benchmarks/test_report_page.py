"""The report in a real browser: on narrow and wide screens, light and dark."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from keyfront.benchmarks.report import page
from support.bench_results import experiment, gates

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
WIDTHS = (360, 800, 1600)

# The page has no script: another one holds it in frames of each width and looks inside.
_AROUND = """\
<!DOCTYPE html><meta charset="utf-8"><body>{frames}<pre id="found"></pre><script>
addEventListener("load", () => {{
  const found = {{}};
  for (const frame of document.querySelectorAll("iframe")) {{
    const inside = frame.contentDocument, root = inside.documentElement;
    const shown = (kind) => [...inside.querySelectorAll("figure ." + kind)].filter(
      (one) => one.getClientRects().length).length;
    const text = [...inside.querySelectorAll("figure svg text")].filter(
      (one) => one.getClientRects().length);
    found[frame.width] = {{
      over: root.scrollWidth - root.clientWidth,
      wide: shown("wide"),
      narrow: shown("narrow"),
      smallest: Math.min(...text.map((one) => one.getBoundingClientRect().height)),
      ground: getComputedStyle(inside.body).backgroundColor,
      ink: getComputedStyle(text[0]).fill,
    }};
  }}
  document.getElementById("found").textContent = JSON.stringify(found);
}});
</script></body>
"""

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt install chromium")


def looked_at(folder: Path, text: str, *options: str) -> dict[str, dict[str, object]]:
    """What a browser says of a page, by width."""
    frames = "".join(
        f'<iframe width="{width}" height="900" srcdoc="{html.escape(text)}"></iframe>'
        for width in WIDTHS
    )
    around = folder / "around.html"
    around.write_text(_AROUND.format(frames=frames), encoding="utf-8")
    assert BROWSER is not None
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += [f"--user-data-dir={folder / 'browser'}", "--virtual-time-budget=10000", *options]
    done = subprocess.run(
        [*command, "--dump-dom", around.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    match = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match, done.stderr[-1000:]
    found: dict[str, dict[str, object]] = json.loads(html.unescape(match[1]))
    return found


def luminance(color: str) -> float:
    """How light ``rgb(r, g, b)`` is, 0 to 1, as WCAG defines it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_every_screen_and_can_be_read(tmp_path: Path, scheme: str) -> None:
    # 0 is dark
    dark = ("--blink-settings=preferredColorScheme=0",) if scheme == "dark" else ()
    found = looked_at(tmp_path, page.page([experiment(quick=True), gates()]), *dark)
    assert set(found) == set(map(str, WIDTHS))
    for width, one in found.items():
        assert one["over"] == 0, width
        assert (one["narrow"], one["wide"]).count(0) == 1, width
        assert bool(one["narrow"]) == (width == "360")
        smallest = one["smallest"]
        assert isinstance(smallest, float | int)
        assert smallest >= 9, width
        ground, ink = luminance(str(one["ground"])), luminance(str(one["ink"]))
        assert (ground < ink) == (scheme == "dark")
        # WCAG's AAA for text
        low, high = sorted((ground, ink))
        assert (high + 0.05) / (low + 0.05) >= 7
