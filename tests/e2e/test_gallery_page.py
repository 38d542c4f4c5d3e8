"""The gallery in a real browser: what people see, click and type, and the file that comes of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from ncd_serve.fit import Fit
from ncd_serve.gallery import Collection, MapKind, build_gallery, read_source
from ncd_serve.gallery.collection import GivenNames
from ncd_serve.naming import WRONG
from ncd_serve.prediction import Prediction
from ncd_serve.rows.tables import write_rows
from ncd_serve.triton import TritonServer
from ncd_serve.verdict import Verdict
from tests.browser import console_errors, find, open_browser, press, remote_requests, words
from tests.serve.patterns import export, make_bundle
from tests.serve.small_gallery import CHECKPOINT, HOSTILE_CLASS, SCRIPT, make_page, make_run

HOSTILE_NAME = '"><img src=x onerror=alert(1)>'


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gallery in which cluster 2 has a name already."""
    return make_page(tmp_path_factory.mktemp("gallery"), names={2: "heron"})


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def one_browser(downloads: Path) -> Iterator[Chrome]:
    with open_browser(downloads=downloads) as browser:
        yield browser


@pytest.fixture
def browser(one_browser: Chrome, page: Path) -> Iterator[Chrome]:
    """The page as one sees it first; whatever a test does to it, nothing is fetched or complained about."""
    one_browser.get(page.as_uri())
    one_browser.execute_script("localStorage.clear()")
    one_browser.refresh()
    yield one_browser
    assert console_errors(one_browser) == []
    assert remote_requests(one_browser) == []


def shown_clusters(browser: Chrome) -> list[str]:
    cards = browser.find_elements(By.CSS_SELECTOR, ".card")
    return [str(card.get_attribute("data-cluster")) for card in cards if card.is_displayed()]


def saved(browser: Chrome, downloads: Path) -> Any:
    target = downloads / "names.json"
    target.unlink(missing_ok=True)
    find(browser, "#save").click()
    WebDriverWait(browser, 20).until(lambda _: target.exists())
    return json.loads(target.read_text())


def painted(browser: Chrome) -> bool:
    tiles = browser.find_elements(By.CSS_SELECTOR, ".card .tile")
    return bool(tiles) and all("blob:" in tile.value_of_css_property("background-image") for tile in tiles)


def matched_rows(browser: Chrome) -> list[WebElement]:
    """Rows of clusters and their classes; the page draws them when it is told that their part was opened."""
    rows = By.CSS_SELECTOR, "#matched tbody tr"
    return WebDriverWait(browser, 20).until(lambda page: page.find_elements(*rows))


def test_the_page_as_it_opens(browser: Chrome) -> None:
    assert browser.execute_script("return document.documentElement.dataset.ready") == "true"
    assert shown_clusters(browser) == ["1", "0", "2"]
    assert find(browser, "#summary").text == "24 images · 3 clusters, 1 named"
    assert "1 image could not be read" in find(browser, "#notes").text
    assert "1 cluster without an image" in find(browser, "#notes").text
    WebDriverWait(browser, 20).until(painted)
    facts = find(browser, "#cluster-0 .facts").text
    assert "8 images" in facts and "purity 75 % auk 6, tern 2" in facts and "cluster-1" in facts
    assert len(browser.find_elements(By.CSS_SELECTOR, "#cluster-1 .doubtful .tile")) == 3
    assert not find(browser, "#save").is_enabled()


def test_names_are_only_names(browser: Chrome) -> None:
    press(browser, "/", "alert(1)")
    assert shown_clusters(browser) == ["1"]
    tile = find(browser, "#cluster-1 .tile")
    assert SCRIPT in str(tile.get_attribute("aria-label"))
    tile.click()
    assert find(browser, "#detail .path").text == SCRIPT
    link = str(find(browser, "#detail a[target]").get_attribute("href"))
    assert link.startswith("file:///") and link.endswith("%3Cscript%3Ealert(1)%3C/script%3E.png")
    press(browser, Keys.ESCAPE)
    find(browser, "#clear").click()
    assert f"resembles {HOSTILE_CLASS} 100 %" in words(browser, "#cluster-0 .facts")
    assert not browser.find_elements(By.CSS_SELECTOR, ".facts button"), "what it is like is no name for it"
    find(browser, "#cluster-0 .name").send_keys(HOSTILE_CLASS)
    find(browser, "#cluster-1 .name").send_keys(HOSTILE_NAME)
    assert find(browser, ".legend-entry .label").text == HOSTILE_NAME
    browser.execute_script("document.querySelector('#confusion').open = true")
    assert any(HOSTILE_CLASS in row.text for row in matched_rows(browser))
    assert browser.execute_script("return document.images.length + document.querySelectorAll('b b').length") == 0


def test_classes_that_were_never_matched_are_shown_without_an_accuracy(browser: Chrome, tmp_path: Path) -> None:
    shown = replace(read_source(make_run(tmp_path / "run")), matched=[])
    browser.get(build_gallery(shown, tmp_path / "page.html", kind=MapKind.PCA).path.as_uri())
    assert "evaluate RUN" in find(browser, "#confusion-summary").text and "%" not in find(browser, "#confusion").text
    browser.execute_script("document.querySelector('#confusion').open = true")
    WebDriverWait(browser, 10).until(lambda page: find(page, "#matrix").size["height"] > 50)
    assert find(browser, "#matched").text == ""


def test_search_filter_and_sort(browser: Chrome) -> None:
    for text, clusters in (("#2", ["2"]), ("heron", ["2"]), ("green-0", ["0"]), ("auk", ["0"]), ("nothing such", [])):
        search = find(browser, "#search")
        search.clear()
        search.send_keys(text)
        assert shown_clusters(browser) == clusters
    assert find(browser, "#nothing").is_displayed()
    find(browser, "#nothing-clear").click()
    assert shown_clusters(browser) == ["1", "0", "2"]
    browser.execute_script(
        "const slider = document.querySelector('#confidence'); slider.value = 0.7;"
        "slider.dispatchEvent(new Event('input'))"
    )
    assert shown_clusters(browser) == ["1"] and find(browser, "#matches").text == "10 images in 1 cluster"
    assert len(browser.find_elements(By.CSS_SELECTOR, "#cluster-1 .matching .tile")) == 10
    find(browser, "#clear").click()
    for order, clusters in (("confidence", ["2", "0", "1"]), ("purity", ["0", "1", "2"]), ("name", ["0", "1", "2"])):
        find(browser, f"#sort option[value={order}]").click()
        assert shown_clusters(browser) == clusters


def test_the_map_answers_to_pointer_and_keyboard(browser: Chrome) -> None:
    press(browser, "g", Keys.ARROW_RIGHT)
    named = find(browser, "#map-selected .path").text
    ring, canvas = find(browser, "#ring").rect, find(browser, "#map").rect
    where = [
        ring[side] + ring[size] / 2 - canvas[side] - canvas[size] / 2
        for side, size in (("x", "width"), ("y", "height"))
    ]
    for tile in browser.find_elements(By.CSS_SELECTOR, ".card .tile"):
        if named not in str(tile.get_attribute("aria-label")):
            tile.click()
            break
    press(browser, Keys.ESCAPE)
    assert find(browser, "#map-selected .path").text != named
    offset = [round(value) for value in where]
    ActionChains(browser).move_to_element_with_offset(find(browser, "#map"), *offset).perform()
    assert find(browser, "#tip").is_displayed() and find(browser, "#tip .tile").is_displayed()
    ActionChains(browser).click().perform()
    chosen = find(browser, "#map-selected a")
    assert find(browser, "#tip .path").text == find(browser, "#map-selected .path").text
    assert find(browser, ".card.current").get_attribute("data-cluster") == chosen.get_attribute("data-cluster")
    before = browser.execute_script("return document.querySelector('#map').toDataURL()")
    press(browser, "g", "+", "+")
    assert browser.execute_script("return document.querySelector('#map').toDataURL()") != before
    press(browser, "0")
    assert browser.execute_script("return document.querySelector('#map').toDataURL()") == before
    find(browser, "#map-selected .tile").click()
    assert find(browser, "#detail").is_displayed() and not find(browser, "#detail [data-step='1']").is_enabled()


def test_what_is_said_becomes_names_json(browser: Chrome, downloads: Path) -> None:
    find(browser, "#cluster-1 .name").send_keys("  gull ")
    find(browser, "#cluster-0 .merge").click()
    find(browser, "#choose-list [data-cluster='1']").click()
    assert len(browser.find_elements(By.CSS_SELECTOR, "#choose-list section .tile")) == 8 + 12
    find(browser, "#merge-yes").click()
    assert len(browser.find_elements(By.CSS_SELECTOR, "#cluster-1 .group:last-child .tile")) == 8
    find(browser, "#cluster-2 .junk").click()
    assert find(browser, "#unsaved").text == "3 unsaved changes"
    assert words(browser, "#cluster-0 .state") == "merged into gull"
    assert words(browser, "#cluster-1 .guests") == "with cluster-0 8"
    entries = {"0": {"merge_into": 1}, "1": {"name": "gull"}, "2": {"junk": True}}
    assert saved(browser, downloads) == {"checkpoint": CHECKPOINT, "bundle": None, "clusters": entries}
    assert find(browser, "#unsaved").text == ""
    # What was saved and is taken back has to be said again; a name that is cleared restores the default.
    press(browser, "u")
    assert find(browser, "#unsaved").text == "1 unsaved change"
    assert saved(browser, downloads)["clusters"] == entries | {"2": {"name": "heron"}}
    find(browser, "#cluster-2 .name").send_keys(Keys.CONTROL, "a", Keys.NULL, Keys.BACKSPACE)
    assert saved(browser, downloads)["clusters"] == entries | {"2": {}}


def test_changes_wait_in_the_browser_until_they_are_saved(browser: Chrome) -> None:
    find(browser, "#cluster-1 .name").send_keys("gull")
    find(browser, "#cluster-0 .junk").click()
    browser.refresh()
    assert find(browser, "#cluster-1 .name").get_property("value") == "gull"
    assert "set-aside" in str(find(browser, "#cluster-0").get_attribute("class"))
    assert find(browser, "#unsaved").text == "2 unsaved changes"


def test_changes_that_were_saved_are_not_counted_again(browser: Chrome, downloads: Path, tmp_path: Path) -> None:
    find(browser, "#cluster-1 .name").send_keys("gull")
    find(browser, "#cluster-2 .name").send_keys("s")
    saved(browser, downloads)
    browser.refresh()
    assert find(browser, "#unsaved").text == "" and find(browser, "#summary").text.endswith("2 named")
    # A page of the same model, after somebody else said something about cluster 2.
    browser.get(make_page(tmp_path, names={2: "crane"}, merged={0: 1}).as_uri())
    values = [find(browser, f"#cluster-{number} .name").get_property("value") for number in (1, 2)]
    assert values == ["gull", "crane"] and words(browser, "#cluster-0 .state") == "merged into gull"


def test_a_new_batch_shows_first_what_fits_nowhere(one_browser: Chrome, tmp_path: Path) -> None:
    pictures = make_run(tmp_path) / "images" / "green"
    fits: list[Fit] = ["typical", "outlier", "unusual", "outlier"]
    rows = [
        Prediction(str(pictures / f"green-{number:02d}.png"), "ok", 1, "gull", 0.9 - number / 10, 0.1, fit)
        for number, fit in enumerate(fits)
    ]
    write_rows([*rows, Prediction.failed("<b>broken", "not an image")], tmp_path / "rows.csv")
    page = build_gallery(read_source(tmp_path / "rows.csv"), tmp_path / "rows.html").path
    one_browser.get(page.as_uri())
    assert find(one_browser, "#outliers h2").text == "Fits nowhere: 2 images"
    tiles = one_browser.find_elements(By.CSS_SELECTOR, "#outliers .tile.outlier")
    labels = [str(tile.get_attribute("aria-label")) for tile in tiles]
    assert [label.split(",")[0] for label in labels] == ["green-03.png", "green-01.png"]
    assert words(one_browser, "#cluster-1 .facts") == "4 images 100 % confidence 0.75 fit 1 unusual, 2 outliers"
    assert "Most confident" in find(one_browser, "#cluster-1").text and not find(one_browser, "#map").is_displayed()
    find(one_browser, "#failures summary").click()
    assert find(one_browser, "#failures table").text == "<b>broken not an image"
    find(one_browser, "#fit option[value=outlier]").click()
    assert find(one_browser, "#matches").text == "2 images in 1 cluster"
    assert console_errors(one_browser) == []


def test_a_long_list_has_tiles_near_the_window_alone(one_browser: Chrome, tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), "red").save(tmp_path / "red.png")
    shown = Collection(
        kind="run",
        source=tmp_path,
        naming=GivenNames(["cluster-0"]),
        root=tmp_path,
        paths=[f"{number}.png" for number in range(2000)],
        files=[tmp_path / "red.png"] * 2000,
        cluster_ids=np.zeros(2000, np.int64),
        confidences=np.linspace(1, 0, 2000, dtype=np.float32),
        counts=np.array([2000]),
    )
    one_browser.get(build_gallery(shown, tmp_path / "page.html").path.as_uri())
    press(one_browser, "j", "a")

    def paths() -> list[str]:
        tiles = "return [...document.querySelectorAll('#cluster-0 .tile')].map((tile) => tile.title.split(',')[0])"
        return [str(path) for path in one_browser.execute_script(tiles)]

    WebDriverWait(one_browser, 20).until(lambda _: 20 < len(paths()) < 1000 and paths()[0] == "0.png")
    one_browser.execute_script("scrollTo(0, document.body.scrollHeight)")
    WebDriverWait(one_browser, 20).until(lambda _: 20 < len(paths()) < 1000 and paths()[-1] == "1999.png")
    assert console_errors(one_browser) == []


def test_known_classes_keep_their_names(one_browser: Chrome, tmp_path: Path) -> None:
    one_browser.get(make_page(tmp_path, fixed=1, checkpoint="open world").as_uri())
    assert find(one_browser, "#cluster-0 .name").get_property("readOnly")
    assert words(one_browser, "#cluster-0 .state") == "a known class"
    assert not find(one_browser, "#cluster-0 .junk").is_displayed()


def test_corrected_images_become_names_json(browser: Chrome, downloads: Path) -> None:
    tiles = browser.find_elements(By.CSS_SELECTOR, "#cluster-0 .central .tile")
    paths = [str(tile.get_attribute("aria-label")).split(",")[0] for tile in tiles]
    ActionChains(browser).key_down(Keys.SHIFT).click(tiles[1]).click(tiles[3]).key_up(Keys.SHIFT).perform()
    assert find(browser, "#selection-count").text == "3 images selected"
    press(browser, "c")
    find(browser, "#category-name").send_keys("auk", Keys.ENTER)
    assert shown_clusters(browser) == ["4", "1", "0", "2"]
    assert words(browser, "#cluster-0 .facts").startswith("5 images") and "3 images" in words(
        browser, "#cluster-4 .facts"
    )
    ActionChains(browser).key_down(Keys.CONTROL).click(find(browser, "#cluster-0 .central .tile")).perform()
    ActionChains(browser).key_up(Keys.CONTROL).perform()
    press(browser, "w")
    content = saved(browser, downloads)
    assert content["clusters"] == {"4": {"name": "auk"}}
    assert content["images"] == {**dict.fromkeys(paths[1:4], 4), paths[0]: "wrong"}
    press(browser, "u", "u")
    assert shown_clusters(browser) == ["1", "0", "2"]
    assert saved(browser, downloads)["images"] == dict.fromkeys(paths[:4])


def test_clusters_of_one_name_are_offered_to_be_merged(browser: Chrome) -> None:
    find(browser, "#cluster-1 .name").send_keys("heron")
    find(browser, "#cluster-1 .chip").click()
    assert words(browser, "#cluster-1 .state") == "merged into heron"
    find(browser, "#undo").click()
    assert "also the name of #2" in words(browser, "#cluster-1 .state")
    find(browser, "#undo").click()
    assert find(browser, "#cluster-1 .name").get_property("value") == ""
    assert not find(browser, "#undo").is_enabled()
    find(browser, "#redo").click()
    assert find(browser, "#cluster-1 .name").get_property("value") == "heron"
    find(browser, "#redo").click()
    assert words(browser, "#cluster-1 .state") == "merged into heron" and not find(browser, "#redo").is_enabled()


def test_the_next_image_to_look_at_and_what_an_answer_does(browser: Chrome) -> None:
    assert words(browser, "#question .count") == "1 open question"
    own, other = (
        side.get_attribute("data-cluster") for side in browser.find_elements(By.CSS_SELECTOR, "#question .side")
    )
    assert "1 more image between these two" in words(browser, "#question .answers")
    find(browser, f"#question .side[data-cluster='{other}']").click()
    assert words(browser, "#question .effect").startswith("1 image like the last one is in ")
    find(browser, "#question .effect button").click()
    assert not find(browser, "#questions").is_displayed()
    assert len(browser.find_elements(By.CSS_SELECTOR, f"#cluster-{other} .tile.corrected")) == 2
    press(browser, "u", "u")
    assert find(browser, f"#question .side[data-cluster='{own}']").is_displayed()
    find(browser, f"#cluster-{own} .merge").click()
    find(browser, f"#choose-list [data-cluster='{other}']").click()
    find(browser, "#merge-yes").click()
    assert not find(browser, "#questions").is_displayed(), "of one cluster nobody asks which it is"
    press(browser, "u")
    assert find(browser, "#questions").is_displayed()


def test_the_verdict_leads_to_what_it_is_about(one_browser: Chrome, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    verdict = Verdict(
        images=24, clusters=3, expected=0.72, silhouette=0.1, agreement=0.9, tight=[1, 2], alike=[(0, 1)], nowhere=1
    )
    (run / "summary.json").write_text(json.dumps({"verdict": verdict.model_dump()}))
    shown = read_source(run)
    assert shown.fits is not None
    shown.fits[:] = [*[0] * 23, 2]
    one_browser.get(build_gallery(shown, tmp_path / "page.html", kind=MapKind.PCA).path.as_uri())
    assert words(one_browser, "#verdict p") == (
        "Expect about 7 of 10 images in the right cluster: 2 of 3 clusters are tight; "
        "cluster-0 and cluster-1 look like one; 1 image fits nowhere."
    )
    assert [words(one_browser, f"#cluster-{number} .tightness") for number in (0, 1)] == ["not tight", "tight"]
    compare, nowhere = one_browser.find_elements(By.CSS_SELECTOR, "#verdict button")
    assert compare.text == "Compare cluster-0 and cluster-1"
    nowhere.click()
    assert find(one_browser, "#matches").text == "1 image in 1 cluster"
    find(one_browser, "#clear").click()
    compare.click()
    assert len(one_browser.find_elements(By.CSS_SELECTOR, "#choose-list section .tile")) == 8 + 12
    find(one_browser, "#merge-yes").click()
    assert words(one_browser, "#cluster-0 .state") == "merged into cluster-1"
    assert len(one_browser.find_elements(By.CSS_SELECTOR, "#verdict button")) == 1
    assert console_errors(one_browser) == []


def test_images_that_a_generation_left_out_are_shown(one_browser: Chrome, tmp_path: Path) -> None:
    shown = read_source(make_run(tmp_path / "run"))
    (tmp_path / "run" / "images" / "old.png").write_bytes(shown.files[1].read_bytes())
    corrected = {"old.png": WRONG, shown.paths[1]: WRONG}  # the second one is in this generation
    shown = replace(shown, naming=replace(shown.naming, images=corrected))
    one_browser.get(build_gallery(shown, tmp_path / "page.html", kind=MapKind.PCA).path.as_uri())
    assert words(one_browser, "#left-out").startswith("Left out: 1 image in no cluster Somebody said so")
    tile = find(one_browser, "#left-out .tile")
    assert tile.get_attribute("aria-label") == "old.png" and words(one_browser, "#cluster-wrong .facts").startswith(
        "1 im"
    )
    one_browser.execute_script("arguments[0].scrollIntoView()", tile)
    WebDriverWait(one_browser, 20).until(lambda _: "blob:" in tile.value_of_css_property("background-image"))
    assert console_errors(one_browser) == []


def test_keyboard_alone(browser: Chrome, downloads: Path) -> None:
    press(browser, "j", "j", "n", "wren", Keys.ENTER, "j", "x", "k", "k", "m")
    assert find(browser, "#choose").is_displayed()
    press(browser, "wren", Keys.TAB, Keys.ENTER, Keys.ENTER)
    assert saved(browser, downloads)["clusters"] == {"0": {"name": "wren"}, "1": {"merge_into": 0}, "2": {"junk": True}}
    press(browser, "u", "a")
    assert len(browser.find_elements(By.CSS_SELECTOR, "#cluster-1 .matching .tile")) == 12
    press(browser, "?")
    assert "next cluster" in find(browser, "#help").text
    press(browser, Keys.ESCAPE)
    assert not find(browser, "#help").is_displayed()
    find(browser, "#cluster-1 .tile").click()
    first = find(browser, "#detail .path").text
    press(browser, Keys.ARROW_RIGHT)
    assert find(browser, "#detail .path").text != first
    press(browser, Keys.ESCAPE)


def test_light_and_dark(browser: Chrome) -> None:
    paper = "return getComputedStyle(document.body).backgroundColor"
    light = browser.execute_script(paper)
    find(browser, "#theme").click()
    dark = browser.execute_script(paper)
    assert dark != light
    browser.refresh()
    assert browser.execute_script(paper) == dark
    press(browser, "t")
    assert browser.execute_script(paper) == light


def test_the_confusion_matrix_leads_to_its_images(browser: Chrome) -> None:
    assert "92 % of the images" in find(browser, "#confusion summary").text
    find(browser, "#confusion summary").click()
    rows = [row.text for row in matched_rows(browser)]
    assert rows[:2] == ["cluster-1 tern 12 100 % 86 %", "cluster-0 auk 6 75 % 100 %"]


def test_a_phone(page: Path) -> None:
    with open_browser(width=390, height=800) as phone:
        phone.get(page.as_uri())
        wide = phone.execute_script("return document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0 and find(phone, "#map").is_displayed()


@pytest.mark.triton
def test_a_name_typed_in_the_page_is_what_triton_answers(
    triton: None,
    one_browser: Chrome,
    downloads: Path,
    tmp_path: Path,
    ncd: Any,
) -> None:
    export(make_bundle(tmp_path / "bundle"), tmp_path / "model_repository", "ncd_global")
    done = ncd("gallery", tmp_path / "bundle", "--map", "pca")
    assert done.returncode == 0, done.stderr
    one_browser.get(Path(done.stdout.strip()).as_uri())
    largest = shown_clusters(one_browser)[0]
    find(one_browser, f"#cluster-{largest} .name").send_keys("Möwe <b>")
    saved(one_browser, downloads)
    applied = ncd("name", "apply", downloads / "names.json", cwd=tmp_path)
    assert applied.returncode == 0, applied.stderr
    with TritonServer(tmp_path / "model_repository") as server:
        server.wait_ready(120)
        asked = ncd("query", tmp_path / "pile", "--url", f"grpc://{server.grpc_url}", "--out", tmp_path / "rows.jsonl")
    assert asked.returncode == 0, asked.stderr
    assert re.search(r"answered by .*ncd_global.*, version 2\b", asked.stderr), asked.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    named = {row["cluster_name"] for row in rows if row["cluster_id"] == int(largest)}
    assert named == {"Möwe <b>"}
    ncd("gallery", tmp_path / "bundle", "--map", "pca", "--out", tmp_path / "again.html")
    one_browser.get((tmp_path / "again.html").as_uri())
    assert find(one_browser, f"#cluster-{largest} .name").get_property("value") == "Möwe <b>"
    assert find(one_browser, "#unsaved").text == ""
