"""The studio in a real browser: names and corrections reach a real Triton, images are answered, runs are trained."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from ncd_serve.bundle import Bundle
from ncd_serve.client.client import Client
from ncd_serve.inputs.images import find_images
from tests.browser import console_errors, find, open_browser, press, remote_requests, words
from tests.conftest import TINY
from tests.serve.patterns import CLUSTERS, KNOWN, export, make_bundle, save

TOKEN = "a-token-of-the-tests"
SMALL = (
    "model.backbone=small_resnet",
    "model.weights=none",
    "data.resolution=32",
    "data.resize=32",
    "optim.onnx_trunk=false",
    "optim.milestones=[]",
    *TINY,
    "optim.labelled_batch=2",  # so small that an epoch takes seconds, and the page sees what precedes the first
    "optim.unlabelled_batch=2",
    "optim.epochs=4",  # it has not ended before it is stopped
)


@contextmanager
def studio(*arguments: object, cwd: Path) -> Iterator[str]:
    """A studio in a process of its own; yields HOST:PORT."""
    command = [sys.executable, "-m", "ncd_serve", "studio", *map(str, arguments), "--no-browser", "--port", "0"]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(cwd), "NCD_SERVE_TOKEN": ""}
    process = subprocess.Popen(
        [*command, "--token", TOKEN],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stderr
    try:
        line = process.stdout.readline()
        assert line.startswith("studio: http://"), process.stderr.read()
        yield line.split("//")[1].split("/")[0]
    finally:
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=90)[1]  # closes both pipes
        assert process.returncode in (0, 130), errors


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images, a bundle of three clusters, and the repository that it was exported to."""
    folder = tmp_path_factory.mktemp("studio")
    folder.chmod(0o700)
    export(make_bundle(folder / "bundle"), folder / "model_repository", "ncd_global")
    return folder


@pytest.fixture(scope="module")
def address(place: Path) -> Iterator[str]:
    with studio("bundle", cwd=place) as host:
        yield host


@pytest.fixture(scope="module")
def one_browser() -> Iterator[Chrome]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def browser(one_browser: Chrome, address: str) -> Iterator[Chrome]:
    """The page; nothing is complained about, and nothing is asked of anyone but the studio."""
    one_browser.get(f"http://{address}/?token={TOKEN}")
    wait(one_browser, lambda: one_browser.execute_script("return document.documentElement.dataset.ready") == "true")
    yield one_browser
    one_browser.get("about:blank")  # it asks nothing more
    assert console_errors(one_browser) == []
    assert [each for each in remote_requests(one_browser) if not each.startswith(f"http://{address}/")] == []


def wait(browser: Chrome, condition: Any, seconds: float = 60) -> Any:
    return WebDriverWait(browser, seconds).until(lambda _: condition())


def ask(address: str, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes, str | None]:
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    with closing(http.client.HTTPConnection(address, timeout=60)) as connection:
        connection.request(method, path, content, {name.replace("_", "-"): text for name, text in headers.items()})
        response = connection.getresponse()
        return response.status, response.read(), response.getheader("Content-Security-Policy")


def cards(browser: Chrome) -> list[str]:
    found = browser.find_elements(By.CSS_SELECTOR, ".card")
    return [str(card.get_attribute("data-cluster")) for card in found if card.is_displayed()]


def tiles(browser: Chrome, cluster: object) -> list[Any]:
    return browser.find_elements(By.CSS_SELECTOR, f"#cluster-{cluster} .tile")


def apply(browser: Chrome) -> str:
    find(browser, "#save").click()
    wait(browser, lambda: "Applied" in find(browser, "#toast").text)
    return find(browser, "#toast").text


SHIFTS = """const [done, found] = [arguments[0], []];
new PerformanceObserver((list) => found.push(...list.getEntries())).observe({ type: "layout-shift", buffered: true });
setTimeout(() => done(found.filter((each) => !each.hadRecentInput).reduce((sum, each) => sum + each.value, 0)), 100);"""


def layout_shift(browser: Chrome) -> float:
    """How much of the page has moved by itself since it was loaded, not in answer to a click or a key."""
    shift: float = browser.execute_async_script(SHIFTS)
    return shift


def drop(browser: Chrome, path: Path) -> None:
    """Drag a file or a folder of this machine over the page, and let go."""
    data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        browser.execute_cdp_cmd("Input.dispatchDragEvent", {"type": kind, "x": 300, "y": 300, "data": data})


BEARER = {"Authorization": f"Bearer {TOKEN}"}


def test_nothing_is_answered_without_the_token_or_to_others(address: str) -> None:
    paths = ("/", "/studio.js", "/api/serving", "/api/folders?path=/", "/p/x/sheets/0.jpg", "/no/such/page")
    for path in paths:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": f"ncd-studio={TOKEN}"}):
            assert ask(address, "GET", path, **headers)[0] == 401
        assert ask(address, "GET", f"{path}?token=wrong")[0] == 401
    name, port = address.split(":")
    for headers in (
        {"Host": f"evil.example:{port}"},
        {"Origin": "https://evil.example"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ):
        assert ask(address, "GET", "/", **BEARER, **headers)[0] == 403
        assert ask(address, "POST", "/api/serving/stop", {}, **BEARER, **headers)[0] == 403
    assert ask(address, "GET", "/?token=wrong", Sec_Fetch_Site="cross-site")[0] == 403
    assert ask(address, "GET", "/", **BEARER, Origin=f"http://{address}")[0] == 200
    status, body, policy = ask(address, "GET", "/", **BEARER)
    assert status == 200 and policy is not None and "default-src 'none'" in policy and "'unsafe" not in policy
    assert name == "127.0.0.1" and TOKEN.encode() in body  # for the lines to copy, on a page that needs it


def test_a_link_in_another_page_that_has_the_token_opens_it(one_browser: Chrome, address: str, tmp_path: Path) -> None:
    other = tmp_path / "notebook.html"
    other.write_text(f'<a href="http://{address}/?token={TOKEN}">studio</a><a href="http://{address}/?token=x">x</a>')
    one_browser.get(other.as_uri())
    find(one_browser, "a").click()
    wait(one_browser, lambda: find(one_browser, "#clusters-panel").is_displayed())
    one_browser.execute_cdp_cmd("Network.clearBrowserCookies", {})
    one_browser.get(other.as_uri())
    find(one_browser, "a:last-child").click()
    wait(one_browser, lambda: "not here" in one_browser.page_source)
    one_browser.get_log("browser")


def test_a_page_of_another_port_can_do_nothing_with_the_cookie(one_browser: Chrome, address: str, place: Path) -> None:
    class Evil(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            field = 'name=\'{"clusters": {"0": {"name": "evil\' value=\'"}}}\''
            form = f"<form method=post enctype=text/plain action=http://{address}/api/apply><input {field}><button>"
            self.wfile.write(f"HTTP/1.0 200 OK\r\nContent-Type: text/html\r\n\r\n{form}".encode())

    one_browser.get(f"http://{address}/?token={TOKEN}")
    before = Bundle.read(place / "bundle").digest
    with ThreadingHTTPServer(("127.0.0.1", 0), Evil) as other:
        Thread(target=other.serve_forever, daemon=True).start()
        one_browser.get(f"http://127.0.0.1:{other.server_port}/")
        find(one_browser, "button").click()
        wait(one_browser, lambda: "not here" in one_browser.page_source)
        other.shutdown()
    assert Bundle.read(place / "bundle").digest == before
    assert console_errors(one_browser) and remote_requests(one_browser)  # which later tests do not expect


def test_paths_outside_are_not_served(address: str) -> None:
    _, page, _ = ask(address, "GET", "/", **BEARER)
    (key,) = set(re.findall(rb'"studio": "/p/([0-9a-f]+)"', page))
    root = f"/p/{key.decode()}"
    status, body, _ = ask(address, "GET", f"{root}/images/0", **BEARER)
    assert status == 200 and body[:4] == b"\x89PNG"
    for path in (
        "/images/../../../etc/passwd",
        "/images/%2e%2e%2fbundle.json",
        "/images/-1",
        "/images/99999",
        "/sheets/99999.jpg",
    ):
        assert ask(address, "GET", root + path, **BEARER)[0] in (404, 422)
    assert ask(address, "POST", "/api/category?category=../x&name=a.png", b"x", **BEARER)[0] == 422
    assert ask(address, "DELETE", "/api/category?category=..", **BEARER)[0] == 422
    assert ask(address, "POST", "/predict", b"no image", **BEARER)[1].find(b'"status":"error"') > 0
    status, body, _ = ask(address, "POST", "/api/apply", {"clusters": {"99": {"name": "x"}}}, **BEARER)
    assert status == 422 and "is not in the model" in json.loads(body)["error"]
    assert ask(address, "POST", "/api/apply", b"{", **BEARER)[0] == 422


@pytest.mark.triton
def test_a_name_typed_reaches_the_answers_of_a_real_triton(triton: None, browser: Chrome, place: Path) -> None:
    find(browser, "#tab-serving").click()
    wait(browser, lambda: find(browser, "#serving-start").is_displayed())
    find(browser, "#serving-start").click()
    try:
        wait(browser, lambda: "answers on" in find(browser, "#serving-words").text, 120)
        url = re.findall(r"answers on (\S+)", find(browser, "#serving-words").text)[0]
        assert f"--url grpc://{url}" in words(browser, "#serving-lines")
        assert words(browser, "#serving-figures").split()[:2] == ["requests", "0"]  # warm-up and probes do not count
        find(browser, "#tab-clusters").click()
        cluster = cards(browser)[0]
        find(browser, f"#cluster-{cluster} .name").send_keys("grey heron")
        said = apply(browser)
        assert "of model ncd_global in model_repository" in said
        wait(browser, lambda: "answers with it" in find(browser, "#toast").text)
        with Client(f"grpc://{url}") as client:
            assert client.cluster_names[int(cluster)] == "grey heron"
            assert len(list(client.assign(find_images([place / "pile"])[:2]))) == 2
        find(browser, "#tab-serving").click()
        wait(browser, lambda: int(words(browser, "#serving-figures").split()[1]) in (1, 2, 3))  # its names, and images
        assert Bundle.read(place / "bundle").manifest.cluster_names[int(cluster)] == "grey heron"
    finally:
        find(browser, "#tab-serving").click()
        wait(browser, lambda: find(browser, "#serving-stop").is_displayed())
        find(browser, "#serving-stop").click()
        wait(browser, lambda: "No server runs" in find(browser, "#serving-words").text, 90)


HOLD_APPLY = """const ask = fetch;
window.fetch = async (...request) => {
  if (request[0] === "/api/apply") await new Promise((go) => { window.goOn = go; });
  return ask(...request);
};"""


def test_what_is_said_while_apply_goes_on_is_not_lost(browser: Chrome, place: Path) -> None:
    first, second = cards(browser)[:2]
    browser.execute_script(HOLD_APPLY)
    find(browser, f"#cluster-{first} .name").send_keys(" one")
    press(browser, Keys.ESCAPE, "s")
    wait(browser, lambda: browser.execute_script("return Boolean(window.goOn)"))
    find(browser, f"#cluster-{second} .name").send_keys(" two")
    press(browser, Keys.ESCAPE, "s")  # twice is once
    browser.execute_script("window.goOn()")
    wait(browser, lambda: "Applied" in find(browser, "#toast").text)
    assert find(browser, "#unsaved").text == "1 unsaved change" and find(browser, "#save").text == "Apply"
    browser.refresh()
    apply(browser)
    names = Bundle.read(place / "bundle").manifest.cluster_names
    assert names[int(first)].endswith("one") and names[int(second)].endswith("two")


def test_moved_images_and_a_split_survive_reload_restart_and_the_next_round(browser: Chrome, place: Path) -> None:
    first, second = cards(browser)[:2]
    (ActionChains(browser).key_down(Keys.CONTROL).click(tiles(browser, first)[0]).key_up(Keys.CONTROL)).perform()
    tiles(browser, first)[1].click()
    assert find(browser, "#selection-count").text == "2 images selected"
    press(browser, "v")
    find(browser, f"#choose-list [data-cluster='{second}']").click()
    assert len(browser.find_elements(By.CSS_SELECTOR, f"#cluster-{second} .tile.corrected")) == 2
    for key, count in (("u", 0), ("r", 2)):
        press(browser, key)
        assert len(browser.find_elements(By.CSS_SELECTOR, f"#cluster-{second} .tile.corrected")) == count
    assert_bar_stays(browser)
    ActionChains(browser).key_down(Keys.CONTROL).click(tiles(browser, first)[0]).key_up(Keys.CONTROL).perform()
    press(browser, "w")
    assert "belong to none" in words(browser, "#cluster-wrong")
    before = len(cards(browser))
    find(browser, f"#cluster-{second} .name").click()
    press(browser, Keys.ESCAPE, "d")
    wait(browser, lambda: browser.find_elements(By.CSS_SELECTOR, ".proposal"))
    three = next(each for each in browser.find_elements(By.CSS_SELECTOR, ".proposal") if "3 groups," in each.text)
    three.find_element(By.CSS_SELECTOR, ".split-yes").click()
    made = [card for card in cards(browser) if card.isdigit() and int(card) >= CLUSTERS]
    assert len(made) == 2
    for key, count in (("u", before), ("r", before + len(made))):
        press(browser, key)
        assert len(cards(browser)) == count
    ActionChains(browser).key_down(Keys.CONTROL).click(tiles(browser, first)[0]).key_up(Keys.CONTROL).perform()
    press(browser, "v")  # a category of one image would wait for more
    find(browser, f"#choose-list [data-cluster='{made[0]}']").click()
    find(browser, f"#cluster-{made[0]} .name").send_keys("tern")
    browser.refresh()
    assert find(browser, f"#cluster-{made[0]} .name").get_property("value") == "tern"  # kept by the browser
    apply(browser)
    manifest = Bundle.read(place / "bundle").manifest
    assert list(manifest.images.values()).count("wrong") == 1
    assert manifest.new_names[int(made[0])] == "tern" and len(manifest.cluster_names) == CLUSTERS
    with studio("bundle", cwd=place) as restarted:
        browser.get(f"http://{restarted}/?token={TOKEN}")
        assert find(browser, f"#cluster-{made[0]} .name").get_property("value") == "tern"
        assert find(browser, "#cluster-wrong").is_displayed() and find(browser, "#unsaved").text == ""
        next_round(browser)
        assert not browser.find_elements(By.CSS_SELECTOR, "#cluster-wrong"), "it is in no cluster of this generation"
        assert find(browser, "#left-out-title").text == "Left out: 1 image in no cluster"
        picture = find(browser, "#left-out .tile")
        browser.execute_script("arguments[0].scrollIntoView()", picture)
        wait(browser, lambda: "/sheets/" in picture.value_of_css_property("background-image"))
        assert console_errors(browser) == [] and remote_requests(browser)
        browser.get("about:blank")  # it would ask a studio that has ended
    grown = Bundle.read(place / "bundle-2").manifest
    assert grown.cluster_names[:CLUSTERS] == manifest.cluster_names and "tern" in grown.cluster_names[CLUSTERS:]
    assert list(grown.images.values()).count("wrong") == 1
    assert list(grown.images.values()).count(int(second)) == list(manifest.images.values()).count(int(second))


def assert_bar_stays(browser: Chrome) -> None:
    """With and without a change, at every width, the bar is as high: the page below does not jump."""
    heights = set()
    for width in (390, 1100, 1400):
        metrics = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        for key in "ur":
            press(browser, key)
            heights.add((width, browser.execute_script("return document.querySelector('#top').offsetHeight")))
    assert len(heights) == 3, heights


def next_round(browser: Chrome) -> None:
    """Make clusters of the categories that wait, and look at them."""
    find(browser, "#tab-new").click()
    wait(browser, lambda: find(browser, "#round-start").is_displayed())
    assert "tern" in words(browser, "#round-words")
    find(browser, "#round-start").click()
    wait(browser, lambda: find(browser, "#round-open").is_displayed())
    added = [row.text for row in browser.find_elements(By.CSS_SELECTOR, "#round-changes tr.new")]
    assert any("tern" in row for row in added) and len(browser.find_elements(By.CSS_SELECTOR, "#round-changes tr")) > 4
    find(browser, "#round-open").click()
    wait(
        browser,
        lambda: "tern" in [each.get_property("value") for each in browser.find_elements(By.CSS_SELECTOR, ".name")],
    )


def test_images_are_selected_on_the_map_by_lasso_and_by_keys(browser: Chrome) -> None:
    find(browser, "#lasso").click()
    canvas = find(browser, "#map")
    width, height = canvas.size["width"] / 2 - 9, canvas.size["height"] / 2 - 9  # its corners are round
    corners = [(-width, -height), (width, -height), (width, height), (-width, height)]
    chain = ActionChains(browser).move_to_element_with_offset(canvas, *map(int, corners[0])).click_and_hold()
    for corner in corners[1:]:
        chain.move_to_element_with_offset(canvas, *map(int, corner))
    chain.release().perform()
    total = int(words(browser, "#summary").split()[0])
    assert find(browser, "#selection-count").text == f"{total} images selected"
    press(browser, Keys.ESCAPE)
    assert not find(browser, "#selection").is_displayed()
    press(browser, "g", Keys.ARROW_RIGHT, Keys.SPACE)
    assert find(browser, "#selection-count").text == "1 image selected"
    press(browser, Keys.ESCAPE)


def test_keys_open_the_tabs_and_change_no_cluster_from_another_one(browser: Chrome) -> None:
    press(browser, "j")
    for key, tab in (("3", "training"), ("4", "serving"), ("2", "new")):
        press(browser, key)
        assert find(browser, f"#{tab}-panel").is_displayed()
        assert browser.switch_to.active_element.get_attribute("id") == f"tab-{tab}"
        press(browser, "x", "u")
    press(browser, Keys.ARROW_LEFT)
    assert find(browser, "#clusters-panel").is_displayed() and find(browser, "#unsaved").text == ""
    press(browser, "?")
    assert "divide it into groups" in words(browser, "#keys") and "open the tab Training" in words(browser, "#keys")
    press(browser, Keys.ESCAPE)


def test_nothing_jumps_while_the_page_is_looked_at(browser: Chrome) -> None:
    for tab, seconds in {"new": 0.6, "training": 1.6, "serving": 1.6, "clusters": 0.6}.items():
        find(browser, f"#tab-{tab}").click()
        time.sleep(seconds)  # some ask again and again how things are
    assert layout_shift(browser) < 0.02  # web vitals call 0.1 good


def test_every_tab_on_a_phone(browser: Chrome) -> None:
    metrics = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    for tab in ("clusters", "new", "training", "serving"):
        find(browser, f"#tab-{tab}").click()
        assert browser.execute_script("return document.documentElement.scrollWidth - innerWidth") <= 0, tab
        assert find(browser, "#save").rect["y"] > 600, "what acts is where the thumb is"
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {**metrics, "width": 1400, "height": 1000})


def test_new_images_are_answered_and_a_candidate_among_them_becomes_a_cluster(
    one_browser: Chrome, tmp_path: Path
) -> None:
    browser, bundle = one_browser, make_bundle(tmp_path / "bundle", cluster_names=["auk", "gull", "cluster-2"])
    tmp_path.chmod(0o700)
    export(bundle, tmp_path / "models", "patterns")
    save(tmp_path / "new", 20, 25)
    old = save(tmp_path / "old", KNOWN, 12, seed=1)
    with studio(bundle, cwd=tmp_path) as address:
        browser.get(f"http://{address}/?token={TOKEN}#new")
        (tmp_path / "old" / "broken.png").write_text("no")
        (tmp_path / "old" / "notes.txt").write_text("no")
        drop(browser, tmp_path / "old")
        wait(browser, lambda: "20 images or more" in find(browser, "#new-summary").text)
        assert re.match(
            r"\S+ auk \d\.\d\d, typical$", words(browser, "#new-groups .answer")
        )  # file, cluster, confidence, fit
        assert "Cannot be read 1 image" in words(browser, "#new-groups")
        find(browser, "#folder").send_keys(str(tmp_path / "new"))
        wait(browser, lambda: "one group may be a new category" in find(browser, "#new-summary").text)
        assert find(browser, "#new-summary").text.startswith("38 images answered; ")
        group = find(browser, "#new-groups section:first-child")
        assert "Perhaps a new category 25 images that are alike, nearest to" in group.text.replace("\n", " ")
        assert len(group.find_elements(By.CSS_SELECTOR, ".answer img")) == 25
        group.find_element(By.CSS_SELECTOR, "input").send_keys("tern")
        group.find_element(By.CSS_SELECTOR, "form button").click()
        wait(browser, lambda: "kept for the next round" in find(browser, "#toast").text)
        kept = tmp_path / "bundle.new_categories" / "tern"
        assert len(list(kept.iterdir())) == 25
        wait(browser, lambda: "tern: 25 new images" in words(browser, "#round-kept"))
        find(browser, "#round-kept button").click()
        wait(browser, lambda: find(browser, "#new-groups h2").text.startswith("Perhaps a new category"))
        assert not kept.exists() and find(browser, "#round-kept").text == ""
        for name, said in (("auk", "a cluster is called 'auk' already"), ("tern", "kept for the next round")):
            field = find(browser, "#new-groups section:first-child input")
            field.clear()
            field.send_keys(name, Keys.ENTER)
            wait(browser, lambda said=said: said in find(browser, "#toast").text)
        assert all("422" in each for each in console_errors(browser))  # Chromium's own words about a refusal
        assert len(list(kept.iterdir())) == 25
        assert "tern, for the next round" in words(browser, "#new-groups")
        status, body, _ = ask(address, "POST", "/predict", old[0].read_bytes(), **BEARER)
        row = json.loads(body)
        assert status == 200 and (row["status"], row["cluster_name"]) == ("ok", "auk") and row["fit"]
        (curl, _) = browser.find_elements(By.CSS_SELECTOR, "#predict-lines pre")
        line = str(curl.get_property("textContent")).replace("bird.jpg", str(old[1]))
        if shutil.which("curl"):
            copied = subprocess.run(line, shell=True, capture_output=True, check=True)
            assert json.loads(copied.stdout)["cluster_name"] == "auk"
        next_round(browser)
        assert console_errors(browser) == []
        assert [each for each in remote_requests(browser) if not each.startswith((f"http://{address}/", "blob:"))] == []
        browser.get("about:blank")  # it would ask a studio that has ended
    assert Bundle.read(tmp_path / "bundle-2").manifest.cluster_names == ["auk", "gull", "cluster-2", "tern"]


def assert_axe_content(browser: Chrome, where: object) -> None:
    browser.execute_script((files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8"))
    result = browser.execute_async_script("axe.run().then(arguments[0])")
    assert len(result["passes"]) > 10
    serious = [each for each in result["violations"] if each["impact"] in ("serious", "critical")]
    assert [(each["id"], each["nodes"][0]["html"]) for each in serious] == [], where


def test_axe_finds_no_serious_violation(browser: Chrome) -> None:
    for tab in ("clusters", "new", "training", "serving"):
        find(browser, f"#tab-{tab}").click()
        for theme in ("light", "dark"):
            browser.execute_script("document.documentElement.dataset.theme = arguments[0]", theme)
            assert_axe_content(browser, (tab, theme))


def test_axe_finds_no_serious_violation_in_windows(browser: Chrome) -> None:
    for opener, window in ((".card .tile", "detail"), (".card .merge", "choose"), ("#help-open", "help")):
        find(browser, opener).click()
        assert find(browser, f"#{window}").is_displayed()
        assert_axe_content(browser, window)
        press(browser, Keys.ESCAPE)
    find(browser, "#tab-training").click()
    find(browser, "[data-browse]").click()
    wait(browser, lambda: find(browser, "#browse").is_displayed())
    assert_axe_content(browser, "browse")
    press(browser, Keys.ESCAPE)
    assert find(browser, "[data-browse]") == browser.switch_to.active_element


def choose_folder(browser: Chrome, name: str) -> None:
    """Choose it by keys alone; the field has a path beside it that does not exist."""
    find(browser, "[data-browse='labelled']").send_keys(Keys.ENTER)
    wait(browser, lambda: find(browser, "#browse").is_displayed())
    entries = [entry.text.split("\n") for entry in browser.find_elements(By.CSS_SELECTOR, "#browse-list button")]
    assert ["known", "3 folders"] in entries and ["pile", "2 folders"] in entries
    find(browser, f"#browse-list button:nth-child({1 + [entry[0] for entry in entries].index(name)})").send_keys(
        Keys.ENTER
    )
    wait(browser, lambda: find(browser, "#browse-path").text.endswith(name))
    assert find(browser, "#browse-words").text == "3 folders" and "30 images" in find(browser, "#browse-list").text
    find(browser, "#browse-take").send_keys(Keys.ENTER)
    assert not find(browser, "#browse").is_displayed()


@pytest.mark.slow
def test_a_run_of_the_page_is_stopped_resumed_by_another_studio_and_exported(
    one_browser: Chrome, tmp_path: Path
) -> None:
    from ncd_training.data.datasets.glyphs import write_glyphs

    tmp_path.chmod(0o700)
    glyphs = write_glyphs(tmp_path / "glyphs", train=30, test=1)
    known, pile = tmp_path / "known", tmp_path / "pile"
    for folder in sorted((glyphs / "train").iterdir())[:3]:
        shutil.copytree(folder, known / folder.name)
    for folder in sorted((glyphs / "train").iterdir())[3:5]:
        shutil.copytree(folder, pile / folder.name)
    browser = one_browser
    with studio(pile, cwd=tmp_path) as host:
        browser.get(f"http://{host}/?token={TOKEN}")
        assert find(browser, "#training-form").is_displayed()
        press(browser, "1")
        find(browser, "#notes button").click()  # there is nothing else to do
        form = find(browser, "#training-form")
        assert form.find_element(By.NAME, "unlabelled").get_property("value") == str(pile)
        form.find_element(By.NAME, "labelled").send_keys(str(tmp_path / "nowhere"))
        form.find_element(By.NAME, "clusters").send_keys("2")
        form.find_element(By.NAME, "name").send_keys("letters")
        find(browser, "#plan").click()
        wait(browser, lambda: "no such folder" in find(browser, "#toast").text)
        assert all("422" in each for each in console_errors(browser))  # Chromium's own words about a refusal
        form.find_element(By.CSS_SELECTOR, "summary").click()
        form.find_element(By.NAME, "settings").send_keys("\n".join(SMALL))
        choose_folder(browser, "known")
        assert form.find_element(By.NAME, "labelled").get_property("value") == str(known)
        find(browser, "#plan").click()
        wait(browser, lambda: "60 unlabelled" in words(browser, "#plan-busy"))
        assert "about" in words(browser, "#plan-busy") and not find(browser, "#plan-text").is_displayed()
        find(browser, "#train").click()
        wait(browser, lambda: (tmp_path / "runs" / "letters" / "config.toml").is_file(), 90)
        wait(browser, lambda: words(browser, "#forming").startswith("Clusters before training"), 90)
        strips = [strip.get_attribute("style") for strip in browser.find_elements(By.CSS_SELECTOR, "#forming .strip")]
        assert len(strips) == 2 and all("/forming.jpg?" in style for style in strips)
        wait(browser, lambda: re.match(r"epoch \d/4, step \d+: \d+ of \d+", words(browser, "#training-step")))
        bar = find(browser, "#training-progress")
        assert bar.is_displayed() and 0 < float(str(bar.get_property("value"))) < float(str(bar.get_property("max")))
        find(browser, "#training-stop").click()
        wait(browser, lambda: find(browser, "#training-resume").is_displayed(), 90)
        assert console_errors(browser) == []
    wait(browser, lambda: find(browser, "#offline").is_displayed())
    browser.get("about:blank")
    assert console_errors(browser) != []  # it could not ask
    with studio(cwd=tmp_path) as host:  # another one, which is told nothing
        browser.get(f"http://{host}/?token={TOKEN}")
        assert words(browser, "#training-title") == "runs/letters was stopped, and can be resumed"
        find(browser, "#training-resume").click()
        wait(browser, lambda: find(browser, "#training-open").is_displayed(), 180)
        assert "Clusters after epoch" in words(browser, "#forming") and find(browser, "#curves").is_displayed()
        verdict = words(browser, "#training-words")
        assert "clusters" in verdict and verdict.endswith(".")
        find(browser, "#training-open").click()
        wait(browser, lambda: find(browser, "h1").text == "letters" and cards(browser))  # one may have no image
        assert words(browser, "#verdict p").split(":")[0] == verdict.split(":")[0]
        find(browser, "#tab-serving").click()
        wait(browser, lambda: "is exported to model_repository first" in words(browser, "#serving-words"))
        find(browser, "#tab-new").click()
        find(browser, "#files").send_keys(str(next(pile.glob("*/*.png"))))  # which exports the model
        wait(browser, lambda: words(browser, "#new-summary").startswith("1 image answered"), 120)
        find(browser, "#tab-clusters").click()
        named = cards(browser)[0]
        find(browser, f"#cluster-{named} .name").send_keys("tern")
        assert "model_repository" in apply(browser)
        assert Bundle.read(tmp_path / "runs/letters/bundle").manifest.cluster_names[int(named)] == "tern"
        train_again(browser, named)
        assert console_errors(browser) == []
        browser.get("about:blank")


def train_again(browser: Chrome, named: str) -> None:
    """Say of an image that it is where it is, which a training learns; the cluster keeps id and name."""
    ActionChains(browser).key_down(Keys.CONTROL).click(tiles(browser, named)[0]).key_up(Keys.CONTROL).perform()
    press(browser, "w")
    find(browser, "#tab-new").click()
    wait(browser, lambda: find(browser, "#round-again").is_displayed())
    find(browser, "#round-again").click()
    wait(browser, lambda: words(browser, "#training-title") == "runs/letters-2 is being trained")
    wait(browser, lambda: find(browser, "#training-open").is_displayed(), 180)
    rows = [row.text for row in browser.find_elements(By.CSS_SELECTOR, "#training-changes tr")]
    (tern,) = (row for row in rows if row.startswith(f"{named} tern "))
    find(browser, "#training-open").click()
    wait(browser, lambda: find(browser, "h1").text == "letters-2" and cards(browser), 120)
    names = [each.get_property("value") for each in browser.find_elements(By.CSS_SELECTOR, ".name")]
    assert ("tern" in names) == ("as before" in tern), "the name of a cluster that is gone is nobody's"
    find(browser, "#tab-training").click()
    wait(browser, lambda: words(browser, "#runs-list").startswith("runs/letters-2 is open runs/letters of "))
    find(browser, "#runs-list p:last-child button").click()
    wait(browser, lambda: find(browser, "h1").text == "letters" and cards(browser))
