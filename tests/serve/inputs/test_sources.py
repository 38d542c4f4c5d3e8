"""What is meant by files, folders, patterns, archives, lists and URLs, and what their bad members cost."""

from __future__ import annotations

import gc
import gzip
import io
import socket
import sys
import tarfile
import threading
import time
import tracemalloc
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import Request

import pytest
from PIL import Image

from ncd_serve.errors import DataError, UsageError
from ncd_serve.inputs import archives, download
from ncd_serve.inputs.images import Source
from ncd_serve.inputs.sources import find_sources


def picture(shade: int = 0) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), (shade,) * 3).save(stream, "PNG")
    return stream.getvalue()


def read(source: Source) -> bytes:
    found = source.read()
    return found if isinstance(found, bytes) else found.read_bytes()


def outcomes(*words: str | Path, **options: bool) -> dict[str, bytes | str]:
    """What every row would be made of: the bytes, or the reason why there are none."""
    found: dict[str, bytes | str] = {}
    for source in find_sources(words, **options).images:
        try:
            found[source.path] = read(source)
        except DataError as error:
            found[source.path] = str(error)
    return found


def write_tar(path: Path, members: dict[str, bytes], mode: Any = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def write_zip(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def test_files_folders_and_patterns_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b.png", "a.png", "deep/er/c.png", "deep/notes.txt", "[odd].png"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(picture())
    found = find_sources(["b.png", "deep", "?.png", str(tmp_path / "**" / "c.png"), "[odd].png"])
    paths = ["b.png", "deep/er/c.png", "a.png", "b.png", str(tmp_path / "deep/er/c.png"), "[odd].png"]
    assert found.total == len(paths)
    assert [source.path for source in found.images] == paths
    with pytest.raises(DataError, match=r"no such file or folder: \*\.gif"):
        find_sources(["*.gif"])


def test_a_name_that_is_not_text_still_has_a_row(tmp_path: Path) -> None:
    path = tmp_path / b"caf\xe9.png".decode(errors="surrogateescape")
    path.write_bytes(picture())
    (source,) = find_sources([tmp_path]).images
    assert source.path.endswith("caf\\udce9.png") and read(source) == picture()


@pytest.mark.parametrize("name", ["x.zip", "x.tar", "x.tar.gz", "x.tgz", "x.tar.bz2", "x.tar.xz"])
def test_archives_of_every_kind(tmp_path: Path, name: str) -> None:
    members = {
        "b/2.png": picture(2),
        "./1.PNG": picture(1),
        "notes.txt": b"",
        ".hidden.png": b"",
        "__MACOSX/1.png": b"",
    }
    path = tmp_path / name
    if name == "x.zip":
        write_zip(path, members)
    else:
        write_tar(path, members, {"tar": "w", "tgz": "w:gz"}.get(name.partition(".")[2], f"w:{path.suffix[1:]}"))
    assert outcomes(path) == {f"{path}/b/2.png": picture(2), f"{path}/1.PNG": picture(1)}
    assert find_sources([path]).total == (2 if name == "x.zip" else None)
    assert sorted(tmp_path.iterdir()) == [path], "nothing is unpacked"


def test_a_member_whose_path_leaves_the_archive_is_refused_alone(tmp_path: Path) -> None:
    members = {"../up.png": picture(), "/etc/root.png": picture(), "a/..\\..\\b.png": picture(), "good.png": picture()}
    for path in (write_zip(tmp_path / "x.zip", members), write_tar(tmp_path / "x.tar", members)):
        *bad, good = outcomes(path).values()
        assert good == picture()
        assert bad == ["cannot be read: its path leaves the archive"] * 3


def test_links_and_devices_in_a_tar_are_never_followed(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
            info = tarfile.TarInfo(f"{kind!r}.png")
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
    assert set(outcomes(tmp_path / "x.tar").values()) == {"cannot be read: a link or a device, not a file"}


def peak_of(words: list[Path]) -> int:
    tracemalloc.start()
    try:
        outcomes(*words)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_zip_bomb_is_a_row_and_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_BYTES", 1 << 20)
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("zeros.png", "w") as stream:
            for _ in range(40):
                stream.write(bytes(1 << 20))
        archive.writestr("good.png", picture())
    assert path.stat().st_size < 1 << 20
    assert list(outcomes(path).values()) == ["cannot be read: 41,943,040 bytes are more than 1,048,576", picture()]
    assert peak_of([path]) < 4 << 20


def test_a_zip_bomb_that_lies_about_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_BYTES", 1 << 20)
    path = write_zip(tmp_path / "liar.zip", {"zeros.png": bytes(50 << 20)})
    honest = (50 << 20).to_bytes(4, "little")
    path.write_bytes(path.read_bytes().replace(honest, (1000).to_bytes(4, "little")))
    (reason,) = outcomes(path).values()
    assert "cannot be read: Bad CRC-32" in str(reason)
    assert peak_of([path]) < 4 << 20


def test_a_zip_member_in_a_method_that_unpacks_without_limit(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("zeros.png", bytes(50 << 20))
    assert list(outcomes(tmp_path / "x.zip").values()) == ["cannot be read: compression method 12 is not supported"]


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE])
def test_a_tar_bomb_ends_in_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: bytes) -> None:
    """Also where the size is that of a header, which Python's tarfile reads in one piece."""
    monkeypatch.setattr(archives, "MAX_BYTES", 1 << 20)
    path, size = tmp_path / "bomb.tar.gz", 60 << 20
    info = tarfile.TarInfo("zeros.png")
    info.type, info.size = kind, size
    good = tarfile.TarInfo("good.png")
    good.size = len(picture())
    with gzip.open(path, "wb", compresslevel=9) as stream:
        stream.write(good.tobuf() + picture() + bytes(-len(picture()) % tarfile.BLOCKSIZE) + info.tobuf())
        for _ in range(size >> 20):
            stream.write(bytes(1 << 20))
    found = outcomes(path)
    assert found[f"{path}/good.png"] == picture()
    assert "it unpacks to more than 200 times its size" in str(found[str(path)])
    assert peak_of([path]) < 4 << 20


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz"])
def test_a_tar_that_is_cut_off_says_so_after_its_good_rows(tmp_path: Path, name: str) -> None:
    members = {f"{number}.png": picture(number) for number in range(20)}
    path = write_tar(tmp_path / name, members, "w" if name == "x.tar" else "w:gz")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    *good, last = outcomes(path).items()
    assert good and all(value == members[Path(path).name] for path, value in good if isinstance(value, bytes))
    assert last[0] == str(path) and "nothing more can be read" in str(last[1])


def test_a_tar_cut_between_two_members_is_not_taken_for_whole(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", {"1.png": picture(), "2.png": picture()})
    path.write_bytes(path.read_bytes()[:1024])
    assert list(outcomes(path)) == [f"{path}/1.png", str(path)]


@pytest.mark.parametrize("name", ["x.zip", "x.tar", "x.tar.gz"])
def test_what_is_no_archive_is_refused_before_any_work(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"hello" * 200)
    with pytest.raises(DataError, match="is not a readable archive"):
        find_sources([tmp_path / name])


def test_archives_without_images(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no images in"):
        find_sources([write_zip(tmp_path / "x.zip", {"notes.txt": b""})])
    path = write_tar(tmp_path / "x.tar", {"notes.txt": b""})
    assert "no images in" in str(outcomes(path)[str(path)])


def test_a_list_on_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    lines = f"{tmp_path}/a.png\r\n\nnone.png\nhttp://127.0.0.1:1/x.png\n{tmp_path}/a.png".encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    sources = list(find_sources(["-"]).images)
    first, *others, last = [source.path for source in sources]
    assert first == last == f"{tmp_path}/a.png"
    assert others == ["none.png", "http://127.0.0.1:1/x.png"]
    with pytest.raises(DataError, match="no --allow-urls"):
        sources[2].read()


class Site(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/there":
            self.send_response(302)
            self.send_header("Location", "/good.png")
            self.end_headers()
        elif self.path == "/file":
            self.send_response(302)
            self.send_header("Location", "ftp://127.0.0.1/x.png")
            self.end_headers()
        elif self.path in ("/good.png", "/endless.png", "/slow.png"):
            self.send_response(200)
            self.end_headers()
            self.answer()
        else:
            self.send_error(404)

    def answer(self) -> None:
        if self.path == "/good.png":
            self.wfile.write(picture())
            return
        try:
            while True:  # until the client hangs up
                self.wfile.write(bytes(1 << 16 if self.path == "/endless.png" else 1))
                time.sleep(0.02)
        except OSError:
            pass

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_urls_are_fetched_only_when_allowed_and_within_limits(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="is a URL") as refused:
        find_sources([f"{site}/good.png"])
    assert "--allow-urls" in str(refused.value.hint)
    monkeypatch.setattr(download, "MAX_BYTES", 200_000)
    monkeypatch.setattr(download, "DOWNLOAD_SECONDS", 0.5)
    names = ["good.png", "there", "none.png", "file", "endless.png", "slow.png"]
    found = outcomes(*[f"{site}/{name}" for name in names], "http://127.0.0.1:1/x.png", allow_urls=True)
    good, redirected, *bad = found.values()
    assert good == redirected == picture()
    reasons = ("Not Found", "ftp", "more than 200,000 bytes", "not complete after 0.5 s", "Connection refused")
    for reason, text in zip(reasons, bad, strict=True):
        assert reason in str(text), text


RAW = {
    "headers": b"HTTP/1.1 200 OK\r\n",
    "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    "short": b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nabc",
    "short chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nabc",
    "nothing": b"",
    "garbage": b"\0\1\2\r\n\r\n",
}
ENDLESS = {"headers": b"X-A: " + b"y" * 60_000 + b"\r\n", "chunks": b"1;" + b"x" * 60_000 + b"\r\na\r\n"}
TRICKLED = {"headers": b"X", "chunks": b"1"}


def answer_raw(listener: socket.socket, start: bytes, more: bytes, pause: float) -> None:
    """Answer one request with these bytes, then with more of them until the client hangs up."""
    with listener, suppress(OSError):
        connection, _ = listener.accept()
        with connection:
            connection.recv(10_000)
            connection.sendall(start)
            while more:
                connection.sendall(more)
                time.sleep(pause)


@pytest.mark.parametrize(
    ("kind", "more", "reason"),
    [
        ("headers", ENDLESS, r"more than|got more than"),
        ("headers", TRICKLED, "not complete after 0.5 s"),
        ("chunks", ENDLESS, "more than 200,000 bytes"),
        ("chunks", TRICKLED, "not complete after 0.5 s"),
        ("short", {}, "cut off: 997 bytes are missing"),
        ("short chunk", {}, "cannot be fetched: IncompleteRead"),
        ("nothing", {}, "cannot be fetched: Remote end closed"),
        ("garbage", {}, "cannot be fetched"),
    ],
)
def test_limits_hold_for_all_that_a_server_sends(
    kind: str, more: dict[str, bytes], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "MAX_BYTES", 200_000)
    monkeypatch.setattr(download, "DOWNLOAD_SECONDS", 0.5)
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/x.png"
    arguments = (listener, RAW[kind], more.get(kind, b""), 0.01 if more is TRICKLED else 0)
    server = threading.Thread(target=answer_raw, args=arguments)
    server.start()
    start = time.monotonic()
    with pytest.raises(DataError, match=reason):
        download.fetch(url)
    assert time.monotonic() - start < 3
    server.join(10)
    assert not server.is_alive(), "the connection was closed"


def test_redirects_stay_public_and_encrypted() -> None:
    limits = download._Limits(time.monotonic() + 9)
    limits.check_peer("93.184.216.34")
    for address in ("127.0.0.1", "10.0.0.8", "169.254.169.254", "::1", "fe80::1%eth0"):
        with pytest.raises(DataError, match="redirects to the private address"):
            limits.check_peer(address)
    limits.check_peer("93.184.216.34")
    named = download._Limits(time.monotonic() + 9)
    for address in ("192.168.1.5", "127.0.0.1", "93.184.216.34"):  # who names a private address asks for it
        named.check_peer(address)
    handler, message = download._RedirectHandler(), HTTPMessage()
    with pytest.raises(DataError, match="it redirects from https to http://"):
        handler.redirect_request(Request("https://a.org/x"), io.BytesIO(), 302, "", message, "http://a.org/y")
    for start, end in (("http://a.org/x", "https://a.org/y"), ("https://a.org/x", "https://b.org/y")):
        assert handler.redirect_request(Request(start), io.BytesIO(), 302, "", message, end)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_many_archives_are_open_one_after_the_other(tmp_path: Path, kind: str) -> None:
    write = write_zip if kind == "zip" else write_tar
    words = [write(tmp_path / f"{number:03d}.{kind}", {"a.png": picture(), "b.png": picture()}) for number in range(50)]
    gc.collect()  # files that earlier tests have dropped
    before, most = open_files(), 0
    found = find_sources(words)
    assert open_files() == before, "all are looked at, none is left open"
    assert found.total == (100 if kind == "zip" else None)
    paths = []
    for source in found.images:
        read(source)
        most = max(most, open_files() - before)
        paths.append(source.path)
    assert paths == [f"{word}/{name}.png" for word in words for name in "ab"]
    assert most <= 2
    del source, found
    assert open_files() == before


def test_images_of_an_archive_can_be_read_late(tmp_path: Path) -> None:
    """Threads read behind the one that lists: an archive stays open for the images that were listed."""
    words = [write_zip(tmp_path / f"{number}.zip", {"a.png": picture(number)}) for number in range(3)]
    assert [read(source) for source in list(find_sources(words).images)] == [picture(number) for number in range(3)]


def test_a_bad_archive_after_good_ones_is_an_error_at_once(tmp_path: Path) -> None:
    good = write_zip(tmp_path / "good.zip", {"a.png": picture()})
    (tmp_path / "bad.zip").write_bytes(b"no archive")
    empty = write_zip(tmp_path / "empty.zip", {"notes.txt": b""})
    for bad, text in ((tmp_path / "bad.zip", "is not a readable archive"), (empty, "no images in")):
        with pytest.raises(DataError, match=text):
            find_sources([good, bad])


def test_an_archive_that_is_damaged_before_its_turn_is_a_row(tmp_path: Path) -> None:
    words = [write_zip(tmp_path / f"{number}.zip", {"a.png": picture()}) for number in range(2)]
    found = find_sources(words)
    words[1].write_bytes(b"gone")
    first, second = found.images
    assert read(first) == picture() and second.path == str(words[1])
    with pytest.raises(DataError, match="nothing more can be read"):
        second.read()


def test_a_pattern_of_archives_means_the_images_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_zip(Path("1.zip"), {"a.png": picture(), "notes.txt": b""})
    write_tar(Path("2.tar"), {"b.png": picture()})
    Path("3.png").write_bytes(picture())
    assert list(outcomes("*.*")) == ["1.zip/a.png", "2.tar/b.png", "3.png"]
    assert (find_sources("*.zip").total, find_sources("*.*").total) == (1, None)
