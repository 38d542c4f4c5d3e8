"""The site builds without a warning and opens offline; its commands are run, and print what the pages show."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import typer
from ncd_training.config.schema import TrainConfig
from selenium.webdriver.support.ui import WebDriverWait

from ncd_serve.cli.app import app
from ncd_serve.errors import NcdError
from ncd_serve.triton import find_triton
from tests.browser import find, open_browser, remote_requests

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
BLOCK = re.compile(
    r"(?:^<!-- (?P<note>[^>]*) -->\n)?^```(?P<kind>[\w-]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
START = re.compile(r"^<!-- starts from: (\S+) -->$", re.MULTILINE)
README = "../README.md"  # checked like a page of the site
FEW = 13  # blocks that are shown and not run
# Makes the README's `train`, which is for hundreds of photographs, a matter of seconds on small letters.
SMALL = (
    " --recipe glyphs --novel-classes 3 --cache-views 2 --set rotations.epochs=1 --set optim.epochs=1"
    " --set optim.labelled_batch=32 --set optim.unlabelled_batch=32"
)


@dataclass(frozen=True)
class Block:
    note: str
    kind: str
    text: str

    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """Each command with the lines that it is shown to print."""
        for part in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]:
            lines = part.splitlines()
            end = next(number for number, line in enumerate(lines) if not line.endswith("\\"))
            yield "\n".join(lines[: end + 1]), lines[end + 1 :]


def blocks(page: str) -> list[Block]:
    text = START.sub("", (DOCS / page).read_text())
    return [Block(found["note"] or "", found["kind"], found["text"]) for found in BLOCK.finditer(text)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    for command in (["docs/pages.py"], ["-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]):
        line = [sys.executable, *command]
        built = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_pages_need_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"(https?:)?//", page.read_text())
        assert not loaded, page
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()[^)]{0,9}https?:", style.read_text()), style


def test_pictures_are_there_in_light_and_dark() -> None:
    for page in PAGES:
        shown = re.findall(r"!\[(.*)\]\((.*img/.*)\)", (DOCS / page).read_text())
        light = [(words, name) for words, name in shown if name.endswith("#only-light")]
        dark = [(words, re.sub(r"(\.\w+)#only-light$", r"-dark\1#only-dark", name)) for words, name in light]
        assert sorted(shown) == sorted([*light, *dark]), page


def test_pages_fit_on_a_phone_and_are_searched_without_a_server(site: Path) -> None:
    with open_browser(width=390, dark=True) as browser:
        for page in ("howto/install", "howto/backbones", "benchmarks/quality", "index"):
            browser.get((site / f"{page}.html").as_uri())
            assert browser.execute_script("return document.documentElement.scrollWidth") <= 390, page  # type: ignore[no-untyped-call]
        browser.get((site / "reference" / "commands.html").as_uri())
        widths: Any = browser.execute_script(
            "return [...document.querySelectorAll('table')].map((one) => one.offsetWidth)"
        )  # type: ignore[no-untyped-call]
        assert len(widths) > 20 and max(widths) <= 390
        find(browser, "label.md-header__button[for=__search]").click()
        WebDriverWait(browser, 10).until(lambda _: find(browser, ".md-search__input").is_displayed())
        find(browser, ".md-search__input").send_keys("outlier")
        found = find(browser, ".md-search-result__item h1")
        assert found.get_attribute("textContent") == "Find images that fit nowhere"
        assert remote_requests(browser) == []


def test_what_is_copied_of_a_session_is_what_was_typed(site: Path) -> None:
    with open_browser() as browser:
        browser.get((site / "tutorials" / "embedded.html").as_uri())
        copied: Any = browser.execute_script("""
            const [first] = document.querySelectorAll('.highlight code');
            first.dataset.mdCopying = '';  // as the theme does while it copies
            return first.innerText;
        """)  # type: ignore[no-untyped-call]
    assert copied.split() == next(blocks("tutorials/embedded.md")[0].commands())[0].split()


def test_every_command_and_option_is_in_the_reference(site: Path) -> None:
    text = (site / "reference" / "commands.html").read_text()

    def check(command: Any, path: str) -> None:
        for name, inner in getattr(command, "commands", {}).items():
            check(inner, f"{path}-{name}")
        if not hasattr(command, "commands"):
            section = text.partition(f'<h2 id="{path}">')[2].partition("</table>")[0]
            for parameter in command.params:
                names = parameter.opts if parameter.param_type_name == "option" else []
                assert all(f"<code>{name}</code>" in section for name in names), (path, names)
            assert section.count("<tr>") - 1 == len(command.params) or not command.params, path

    check(typer.main.get_command(app), "ncd-serve")


def test_every_setting_is_in_the_reference(site: Path) -> None:
    text = (site / "reference" / "settings.html").read_text()
    sections = {name: getattr(field.annotation, "model_fields", {}) for name, field in TrainConfig.model_fields.items()}
    keys = [key for name, fields in sections.items() if name != "method" for key in fields]
    assert len(keys) > 80 and [key for key in keys if f"<td><code>{key}</code>" not in text] == []
    shown = " ".join(unescape(re.sub("<[^>]+>", "", text)).split())
    assert "heads integer, ≥ 1 cluster heads, and as many finer ones; the one with the lowest loss is served." in shown


def test_directives_are_filled_in(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert "<p>::: " not in page.read_text(), page
    method = (site / "method.html").read_text()
    assert method.count('<div class="highlight') >= 30 and method.count("<math") > 40
    assert r"\(" not in method
    python = (site / "reference" / "python.html").read_text()
    names = ("discover", "Run.clusters", "Run.export", "Client.assign", "AsyncClient.connect", "Server.client")
    assert all(f' id="{name.lower().replace(".", "")}"' in python for name in names)
    assert python.index(' id="ncd_training"') < python.index(' id="ncd_serve"')


def test_the_python_reference_shows_examples_and_signatures_as_they_are_typed(site: Path) -> None:
    text = unescape(re.sub("<[^>]+>", "", (site / "reference" / "python.html").read_text()))
    assert '\n    for row in client.assign(["photos/", "more.zip"]):\n        print(row.path' in text
    assert "\n    repository: str | Path = 'model_repository',\n" in text
    assert "labelled: str | Path | None = None," in text and "AnyPath" not in text


def test_a_name_that_is_gone_fails_the_build(tmp_path: Path) -> None:
    shutil.copytree(DOCS, tmp_path / "docs")
    for name in ("training", "export", "ncd_serve"):
        (tmp_path / name).symlink_to(ROOT / name)
    with (tmp_path / "docs" / "method.md").open("a") as page:
        page.write("\n::: training/ncd_training/objective/losses.py loss_that_nobody_wrote\n")
    command = [sys.executable, "docs/pages.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0 and "has no loss_that_nobody_wrote" in done.stderr
    assert not (tmp_path / "build").exists()


def test_a_notebook_becomes_a_page_with_its_outputs(tmp_path: Path) -> None:
    outputs = [
        {"output_type": "stream", "text": ["six ", "clusters\n"]},
        {"output_type": "display_data", "data": {"image/png": b64encode(b"picture").decode(), "text/plain": "<Image>"}},
        {"output_type": "execute_result", "data": {"text/html": "<div><table border=1><tr></tr></table></div>"}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title"]},
        {"cell_type": "code", "source": ["run.clusters"], "outputs": outputs},
    ]
    (tmp_path / "walk.ipynb").write_text(json.dumps({"cells": cells}))
    spec = importlib.util.spec_from_file_location("pages", DOCS / "pages.py")
    assert spec and spec.loader
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    text, pictures = pages.as_page(tmp_path / "walk.ipynb")
    assert pictures == {"walk-1.png": b"picture"}
    assert text.split("\n\n") == [
        "# Title",
        "```python\nrun.clusters\n```",
        "```text\nsix clusters\n```",
        "![What the cell shows](walk-1.png)",
        "<table><tr></tr></table>\n",
    ]


def test_blocks_that_are_not_run_are_few_and_say_why() -> None:
    shown = [(page, block) for page in (*PAGES, README) for block in blocks(page) if block.kind == "shell"]
    assert len(shown) <= FEW
    for page, block in shown:
        assert block.note.startswith("not run: "), (page, block.text)
    for page in (*PAGES, README):
        for block in blocks(page):
            assert block.kind in ("console", "shell", "python", "json"), page
            assert block.kind == "shell" or not re.search("^ncd-serve ", block.text, re.MULTILINE), page


Run = Callable[[str, Path], None]


@pytest.fixture(scope="module")
def run_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs the commands of a page in a folder; servers that it leaves are stopped."""
    runtime = tmp_path_factory.mktemp("runtime")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "XDG_RUNTIME_DIR": str(runtime), "COLUMNS": "80", "LINES": "40"}

    def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )

    def run(page: str, folder: Path) -> None:
        ports: dict[str, str] = {}
        for block in blocks(page):
            for command, shown in block.commands() if block.kind == "console" else ():
                for documented, actual in ports.items():
                    command = command.replace(documented, actual)
                if page == README:
                    # Its figures are those of photographs; here are letters.
                    command += SMALL if "train" in command else ""
                    shown = [re.sub(r"\d[\d,. ]*", "…", line) for line in shown]
                    if "name apply" in command:
                        save_names(folder)
                done = shell(command, folder)
                expected = re.match(r"exit code (\d+)", block.note)
                assert done.returncode == int(expected[1] if expected else 0), f"{page}: {command}\n{done.stdout}"
                check_shown(shown, done.stdout, f"{page}: {command}")
                if command.startswith("ncd-serve serve"):
                    # The usual ports may be taken on this machine; the page's reader looks at what was printed.
                    (server,) = json.loads(shell("ncd-serve status --json", folder).stdout)
                    ports = {"127.0.0.1:8001": server["grpc_url"], "127.0.0.1:8000": server["http_url"]}

    yield run
    shell("ncd-serve stop --all", runtime)


def save_names(folder: Path) -> None:
    """Save what the page of the gallery would: the model's id, and a name for each cluster."""
    found = re.search(r'"checkpoint": ?"(\w+)"', (folder / "runs" / "birds" / "gallery.html").read_text())
    assert found
    names = {"checkpoint": found[1], "bundle": None, "clusters": {key: {"name": "gull"} for key in "012"}}
    (folder / "names.json").write_text(json.dumps(names))


def check_shown(shown: list[str], printed: str, where: str) -> None:
    """Every shown line was printed, in this order; `…` stands for anything, and spaces count for little."""
    lines = iter(" ".join(line.split()) for line in printed.splitlines())
    for line in filter(lambda text: text.strip(" …"), shown):
        wanted = re.compile(
            ".*".join(re.escape(" ".join(part.split())) for part in line.split("…")).replace(r"\ ", r"\s*")
        )
        assert any(wanted.match(candidate) for candidate in lines), f"{where} does not print: {line}\n{printed}"


def needs_server(page: str) -> None:
    if any("ncd-serve serve" in block.text for block in blocks(page) if block.kind == "console"):
        try:
            find_triton()
        except NcdError as error:
            pytest.skip(f"no Triton here: {error}")


@pytest.fixture(scope="module")
def after(run_page: Run, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None], Path]:
    """A fresh copy of the folder that a page leaves, or an empty one; each page is run once."""
    left: dict[str, Path] = {}

    def folder(page: str | None) -> Path:
        fresh = tmp_path_factory.mktemp("page") / "work"
        if page is None:
            fresh.mkdir()
            return fresh
        if page not in left:
            needs_server(page)
            started = folder(start_of(page))
            run_page(page, started)
            left[page] = started
        shutil.copytree(left[page], fresh)
        return fresh

    return folder


def start_of(page: str) -> str | None:
    found = START.search((DOCS / page).read_text())
    return found[1] if found else None


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_commands_of_the_readme_work_one_after_another(after: Any, run_page: Run) -> None:
    """On the letters of a tutorial; after `train`, the commands find the newest run by themselves."""
    needs_server(README)
    folder = after("tutorials/folders.md")
    shutil.copytree(folder / "pile", folder / "new")
    shutil.rmtree(folder / "model_repository")  # which has the model of another run
    run_page(README, folder)
    rows = (folder / "rows.csv").read_text()
    assert rows.count("\n") == 61 and rows.count(",gull,") == 60
    assert (folder / "runs" / "birds" / "bundle").is_dir()


RUN = [page for page in PAGES if any(block.kind == "console" for block in blocks(page))]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", RUN)
def test_commands_of_a_page_do_what_it_says(page: str, after: Any, run_page: Run) -> None:
    needs_server(page)
    if any(start_of(other) == page for other in RUN):
        after(page)  # run once, for itself and for the pages that go on from there
    else:
        run_page(page, after(start_of(page)))
