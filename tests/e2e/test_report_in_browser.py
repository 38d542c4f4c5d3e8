"""A run's page in a real browser: nothing is fetched, nothing is complained about, the figures are the run's."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from tests.browser import console_errors, open_browser, remote_requests
from tests.runs import again

WIDTH = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
PAPER = "return getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    with open_browser() as browser:
        yield browser


def values(browser: Chrome, section: str) -> list[str]:
    found = browser.find_elements(By.CSS_SELECTOR, f"#{section} data")
    return [str(element.get_attribute("value")) for element in found if element.is_displayed()]


def test_the_page_of_a_finished_run(browser: Chrome, tiny_run: Path) -> None:
    browser.get((tiny_run / "report.html").as_uri())
    summary: dict[str, Any] = json.loads((tiny_run / "summary.json").read_text())
    expected = [*summary["baselines"].values(), *summary["scores"].values()]
    scores = [str(score[name]) for score in expected for name in ("acc", "nmi", "ari") if name in score]
    assert sorted(values(browser, "scores")) == sorted(scores)
    quality = [branch[name] for branch in summary["pseudo_labels"].values() for name in ("precision", "recall")]
    assert {str(value) for value in quality} <= set(values(browser, "pseudo-labels"))
    opens_with = browser.find_elements(By.CSS_SELECTOR, ".found, .verdict, .verdict + details, .tiles")
    assert [part.tag_name for part in opens_with] == ["ol", "p", "details", "dl"]
    assert opens_with[1].text.startswith("Without labels: expect about") and opens_with[2].get_attribute("open") is None
    first = browser.find_element(By.CSS_SELECTOR, ".tiles .value").text
    assert first == f"{summary['scores']['unlabelled-train']['acc']:.3f}"

    sizes = [title.get_attribute("textContent") or "" for title in browser.find_elements(By.CSS_SELECTOR, "rect title")]
    assert sum(int(re.findall(r"\d+", size)[1]) for size in sizes) == 20 and len(sizes) == 5
    pictures = browser.find_elements(By.CSS_SELECTOR, ".picture img")
    assert [picture.get_property("naturalWidth") > 400 for picture in pictures] == [True, True]
    assert "--dataset glyphs" in browser.find_element(By.CSS_SELECTOR, "#made .command").text
    assert console_errors(browser) == [] and remote_requests(browser) == []


def test_evaluate_writes_it_again(browser: Chrome, tiny_run: Path, tmp_path: Path, ncd: Any) -> None:
    run = tmp_path / "copy"
    shutil.copytree(tiny_run, run)
    (run / "report.html").unlink()
    # As an epoch earlier: a run that somebody looks at before it has ended.
    config = run / "config.toml"
    config.write_text(re.sub(r"(?<=\[optim\]\n)(.*?)epochs = 2", r"\1epochs = 3", config.read_text(), flags=re.DOTALL))
    done = ncd("evaluate", run)
    assert done.returncode == 0, done.stderr
    browser.get((run / "report.html").as_uri())
    assert "2 of 3 epochs are done" in browser.find_element(By.CSS_SELECTOR, ".banner").text
    assert len(values(browser, "scores")) > 6
    assert console_errors(browser) == [] and remote_requests(browser) == []


def test_narrow_and_dark(tiny_run: Path) -> None:
    with open_browser(width=390, height=800, dark=True) as phone:
        phone.get((tiny_run / "report.html").as_uri())
        assert phone.execute_script(WIDTH) <= 0, "it does not scroll sideways"  # type: ignore[no-untyped-call]
        red, green, blue = map(int, re.findall(r"\d+", phone.execute_script(PAPER)))  # type: ignore[no-untyped-call]
        assert max(red, green, blue) < 64
        assert console_errors(phone) == []


def test_a_class_named_like_a_script(browser: Chrome, tiny_run: Path, tmp_path: Path) -> None:
    from ncd_training.base.run_dir import RunDir
    from ncd_training.summary.page import write_report

    folder = tmp_path / "it's <b>mine"
    shutil.copytree(tiny_run, folder)
    summary = json.loads((folder / "summary.json").read_text())
    name = "<script>document.title = 'ran'</script>"
    summary["scores"]["unlabelled-train"]["classes"][0]["class"] = name
    (folder / "summary.json").write_text(json.dumps(summary))
    run = RunDir.open(folder)
    write_report(again(run), run, epoch=2, scored=True)
    browser.get(run.report.as_uri())
    assert browser.title == "glyphs: it's <b>mine"
    assert name in browser.find_element(By.ID, "clusters").text
    assert browser.find_elements(By.TAG_NAME, "script") == []
    assert console_errors(browser) == [] and remote_requests(browser) == []
