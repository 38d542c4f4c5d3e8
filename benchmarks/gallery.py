"""Cost of a gallery of 10,000 images: build time, file size, and time to open in headless Chromium.

    .venv/bin/python benchmarks/gallery.py [--images N]

The images are drawn (96 to 160 px, JPEG), 100 clusters of uneven sizes; the map is PCA, since t-SNE would
measure scikit-learn. Time until interactive is from the start of the navigation until the page responds, the median of
three new browsers. Exit code 1 if it is 3 seconds or more.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ncd_serve.gallery import MapKind, build_gallery, read_source
from ncd_serve.memory import peak_memory
from ncd_serve.reference import Reference
from tests.browser import console_errors, open_browser

CLUSTERS, DIM, MOST_SECONDS, OPENINGS = 100, 128, 3.0, 3
MARKED = "return performance.getEntriesByName('interactive')[0].startTime"
PAINTED = """return [...document.querySelectorAll('.tile')].filter((tile) => {
  const { top, bottom } = tile.getBoundingClientRect();
  return bottom > 0 && top < innerHeight;
}).every((tile) => tile.style.backgroundImage)"""
HEAP = "return performance.memory.usedJSHeapSize"
SEARCH = """const start = performance.now(), field = document.querySelector('#search');
field.value = 'image-01'; field.dispatchEvent(new Event('input')); document.body.offsetHeight;
return performance.now() - start"""
SCROLL = """const done = arguments[0], gaps = []; let last = performance.now(), left = 60;
requestAnimationFrame(function step(now) {
  gaps.push(now - last); last = now; scrollBy(0, 400);
  if (left--) requestAnimationFrame(step); else done(Math.max(...gaps.slice(1)));
})"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000)
    images = parser.parse_args().images
    with TemporaryDirectory() as folder:
        run = draw_run(Path(folder), images)
        start = time.perf_counter(), time.process_time()
        page = build_gallery(read_source(run), run / "gallery.html", kind=MapKind.PCA).path
        wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
        peak = peak_memory() / 2**20
        print(f"images                  {images:>9,}")
        print(f"file                    {page.stat().st_size / 1e6:>9.1f} MB")
        print(f"time to build           {wall:>9.1f} s ({cpu:.1f} s of CPU), at most {peak:.0f} MB of memory")
        seconds = statistics.median(open_page(page) for _ in range(OPENINGS))
    verdict = "ok" if seconds < MOST_SECONDS else "too slow"
    print(
        f"until interactive       {seconds:>9.2f} s, median of {OPENINGS} (less than {MOST_SECONDS:.0f} s: {verdict})"
    )
    return int(seconds >= MOST_SECONDS)


def draw_run(folder: Path, images: int) -> Path:
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.full(CLUSTERS, 2.0))
    ids = rng.choice(CLUSTERS, images, p=shares)
    (folder / "images").mkdir()
    for number, cluster in enumerate(ids.tolist()):
        draw(cluster, rng).save(folder / "images" / f"image-{number:05d}.jpg", quality=85)
    centres = rng.normal(size=(CLUSTERS, DIM))
    Reference(
        checkpoint="0" * 12,
        root=folder / "images",
        paths=[f"image-{number:05d}.jpg" for number in range(images)],
        cluster_ids=ids,
        confidences=rng.beta(8, 2, images).astype(np.float32),
        embeddings=(centres[ids] + rng.normal(size=(images, DIM))).astype(np.float32),
        known_ids=rng.integers(0, 20, images),
        known_classes=[f"known {number}" for number in range(20)],
        known_clusters=0,
        counts=np.bincount(ids, minlength=CLUSTERS),
        truth=[f"class {cluster}" for cluster in ids],
    ).write(folder / "reference.npz")
    return folder


def draw(cluster: int, rng: np.random.Generator) -> Image.Image:
    """Draw noise with a polygon, which compresses about as well as a photograph."""
    width, height = (int(side) for side in rng.integers(96, 161, 2))
    small = rng.integers(0, 255, (height // 6, width // 6, 3), dtype=np.uint8)
    picture = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    corners = (width / 2, height / 2, min(width, height) / 3)
    colour = tuple(int(value) for value in np.random.default_rng(cluster).integers(0, 255, 3))
    ImageDraw.Draw(picture).regular_polygon(corners, 3 + cluster % 6, int(rng.integers(0, 90)), fill=colour)
    return picture


def open_page(page: Path) -> float:
    """Return the seconds until the page responds; print the other figures."""
    with open_browser() as browser:
        start = time.perf_counter()
        browser.get(page.as_uri())
        loaded = time.perf_counter() - start
        seconds = float(browser.execute_script(MARKED)) / 1000
        wait(lambda: bool(browser.execute_script(PAINTED)))
        visible = time.perf_counter() - start
        scroll, search = browser.execute_async_script(SCROLL), browser.execute_script(SEARCH)
        heap = browser.execute_script(HEAP) / 1e6
        print(
            f"  opened: interactive after {seconds:.2f} s, whole file read after {loaded:.2f} s, thumbnails "
            f"within {visible:.2f} s;\n          longest frame while scrolling {scroll:.0f} ms, "
            f"search {search:.0f} ms, {heap:.0f} MB of script memory"
        )
        assert console_errors(browser) == []
    return seconds


def wait(done: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
