"""Pictures of gallery, studio and report for these pages, and a short film of the studio, each in light and dark.

    .venv/bin/python docs/screenshots.py [RUN]

RUN is a finished run in a folder of its own with the repository that it was exported to; without one it is
ncd-demo/run, which `make demo` makes. Headless Chromium takes the pictures, of a copy: the film gives names.
"""

from __future__ import annotations

import io
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from ncd_training.data.datasets.glyphs import draw_glyph
from PIL import Image
from selenium.webdriver import Chrome
from selenium.webdriver.support.wait import WebDriverWait

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the tests' browser

from tests.browser import open_browser  # noqa: E402

TARGET = ROOT / "docs" / "img"
COLOURS = 256  # fewer make smaller files, and the pictures are mostly paper and ink
SETTLED = 1.5  # s until pictures are painted
# Names a cluster after the true class that the page shows: letters have one.
NAME = """
const card = document.querySelectorAll('.card')[COUNT];
const [, truth] = card.querySelector('.facts').textContent.match(/purity \\S+ % (\\S+)/);
card.querySelector('.name').focus();
document.execCommand('insertText', false, `letter ${truth}`);
scrollTo(0, 0);
"""
NAME_ONE = NAME.replace("COUNT", "0")
NAMES = f"{NAME_ONE} document.querySelectorAll('.card')[2].querySelector('.junk').click();"
Step = str | Callable[[Chrome], None]  # a script, or what is done to the browser
SELECT = (
    "document.querySelector('.card .tile').click(); document.querySelector('#detail form button:last-child').click()"
)
CHOOSE = """document.querySelectorAll('.card .doubtful .tile').forEach((tile, at) => {
  if (at < 3) tile.dispatchEvent(new MouseEvent('click', { bubbles: true, ctrlKey: true }));
})"""


def ask_about(characters: str) -> Step:
    """Drop drawn letters on the page, and wait for its answers."""

    def drop(browser: Chrome) -> None:
        browser.execute_script("document.querySelector('#tab-new').click()")
        rng = np.random.default_rng(0)
        with TemporaryDirectory() as folder:
            files = [Path(folder) / f"{number:03d}.png" for number in range(len(characters))]
            for file, character in zip(files, characters, strict=True):
                draw_glyph(character, rng).save(file)
            browser.find_element("id", "files").send_keys("\n".join(map(str, files)))
            answered = "return /may be|no new/.test(document.querySelector('#new-summary').textContent)"
            WebDriverWait(browser, 60).until(lambda _: browser.execute_script(answered))
        browser.execute_script("document.querySelector('#new-groups').scrollIntoView(); scrollBy(0, -80)")

    return drop


def name_others(browser: Chrome) -> None:
    """Name the other clusters, each when it is in view: the page draws no others."""
    for number in range(1, 5):
        browser.execute_script(f"document.querySelectorAll('.card')[{number}].scrollIntoView()")
        time.sleep(SETTLED)
        browser.execute_script(NAME.replace("COUNT", str(number)))


def apply_names(browser: Chrome) -> None:
    """Write the names into the model, and wait until that is done."""
    browser.execute_script("document.querySelector('#save').click()")
    done = "return document.querySelector('#save').disabled && !/unsaved/.test(document.body.textContent)"
    WebDriverWait(browser, 60).until(lambda _: browser.execute_script(done))


# Each step of the film, and the seconds that its picture stays: clusters, names, answers.
FILM: list[tuple[Step, float]] = [
    ("", 2.0),
    (NAME_ONE, 2.0),
    (name_others, 2.0),
    (apply_names, 2.0),
    (ask_about("AEIOU" * 4), 4.0),
]


def main() -> int:
    """Build the gallery of the run and take all pictures; the sizes are printed."""
    run = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "ncd-demo" / "run"
    TARGET.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder:
        gallery = Path(folder) / "gallery.html"
        command = [sys.executable, "-m", "ncd_serve", "gallery", str(run), "--out", str(gallery), "--title", "Glyphs"]
        if code := subprocess.run(command, cwd=ROOT, check=False).returncode:
            return code
        take(gallery, "gallery", [SELECT])
        take(gallery, "gallery-naming", [NAMES])
    with studio(run) as address:
        take(address, "studio", [CHOOSE])
        take(address, "studio-new", [ask_about("2" * 40 + "AEO" * 8)])
    for dark in (False, True):
        with studio(run) as address:
            film(address, f"studio{'-dark' * dark}", dark=dark)
    take(run.resolve() / "report.html", "report", [])
    return 0


@contextmanager
def studio(run: Path) -> Iterator[str]:
    """A studio of a copy of the run with its repository; yields its address."""
    with TemporaryDirectory() as folder:
        copied = shutil.copytree(run.parent, Path(folder) / run.parent.name) / run.name
        command = [sys.executable, "-m", "ncd_serve", "studio", str(copied), "--no-browser", "--port", "0"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[1]
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def film(address: str, name: str, *, dark: bool) -> None:
    """A GIF of the steps in `FILM`."""
    frames = []
    with open_browser(width=1100, height=720, dark=dark) as browser:
        browser.get(address)
        for step, _ in FILM:
            time.sleep(SETTLED)
            do(browser, step)
            time.sleep(SETTLED)
            picture = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB").resize((880, 576))
            frames.append(picture.quantize(COLOURS // 2, dither=Image.Dither.NONE))
    target = TARGET / f"{name}.gif"
    durations = [int(1000 * seconds) for _, seconds in FILM]
    frames[0].save(target, save_all=True, append_images=frames[1:], duration=durations, loop=0, optimize=True)
    print(f"{target.relative_to(ROOT)}  {target.stat().st_size / 1000:.0f} kB")


def take(page: Path | str, name: str, steps: Iterable[Step]) -> None:
    """Two pictures of a page, in light and dark, after some steps in it."""
    for dark in (False, True):
        with open_browser(width=1400, height=900, dark=dark) as browser:
            browser.get(page.as_uri() if isinstance(page, Path) else page)
            time.sleep(SETTLED)
            for step in steps:
                do(browser, step)
                time.sleep(SETTLED)
            save(browser, TARGET / f"{name}{'-dark' * dark}.png")


def do(browser: Chrome, step: Step) -> None:
    if isinstance(step, str):
        browser.execute_script(step)
    else:
        step(browser)


def save(browser: Chrome, target: Path) -> None:
    """As a PNG of few colours."""
    picture = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    picture.quantize(COLOURS, kmeans=3, dither=Image.Dither.NONE).save(target, optimize=True)
    print(f"{target.relative_to(ROOT)}  {target.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    sys.exit(main())
