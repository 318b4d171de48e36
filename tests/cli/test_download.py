"""`e2e-vl download` against a local server with faults: what arrives, the sentence for each fault, what is left."""

from __future__ import annotations

import concurrent.futures
import fnmatch
import hashlib
import importlib.util
import io
import re
import tarfile
import threading
import time
import zipfile
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from detector import downloads
from e2e_vl.cli import download
from e2e_vl.cli.download import PublishedFile, Table, main, read_table
from e2e_vl.cli.reproduce import PAPERS, read_paper
from e2e_vl.config_files import CONFIGS, load_config

CONTENT = bytes(range(256)) * 5000  # 1.28 MB: more than a block of a download
SHA256 = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
QUOTA = b'<html><p class="uc-error-subcaption">Too many users have viewed this file recently.</p></html>'
CONFIRM = b'<form id="download-form" action="%s/yes"><input type="hidden" name="confirm" value="t"></form>'


def zipped(files: dict[str, bytes]) -> bytes:
    with zipfile.ZipFile(buffer := io.BytesIO(), "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def tarred(files: dict[str, bytes]) -> bytes:
    with tarfile.open(fileobj=(buffer := io.BytesIO()), mode="w:gz") as archive:
        for name, content in files.items():
            (info := tarfile.TarInfo(name)).size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


PHOTOS = {f"a/b/photos/{number}.jpg": b"photo" * number for number in (1, 2, 3)}
BODIES = {
    "file": CONTENT,
    "zip": zipped({**PHOTOS, "a/b/one/list.json": b"1", "a/b/two/list.json": b"2", "__MACOSX/photos/x": b""}),
    "tar": tarred(PHOTOS),
    "damaged": zipped({"photos/1.jpg": CONTENT}).replace(CONTENT[:999], b"x" * 999, 1),
    "leaves": zipped({**PHOTOS, "../../outside": b"x"}),
    "tar_leaves": tarred({"../../outside": b"x"}),
    "page": b"<!DOCTYPE html><html>Sign in</html>",
    "quota": QUOTA,
}


class Handler(BaseHTTPRequestHandler):
    """/BODY/FAULT: breaks (the first time), breaks_always, no_ranges (and breaks once), missing, redirect, silent."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        server = self.server
        name, _, fault = self.path.partition("?")[0].strip("/").partition("/")
        first, start = self.path not in [path for path, _ in server.seen], self.headers["Range"]
        server.seen.append((self.path, start))
        if name == "uc":  # Google Drive: its id says what comes
            name = "quota" if "quota" in self.path else "confirm"
        if fault == "silent":
            server.stop.wait(20)
        elif fault == "missing":
            self.send_error(404)
            return
        elif fault == "redirect":
            self.send_response(302)
            self.send_header("Location", "/file")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body = CONFIRM % server.address.encode() if name == "confirm" else BODIES.get(name, CONTENT)
        begin = int(start[6:-1]) if start and fault != "no_ranges" else 0
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(body) - begin))
        self.send_header("Content-Type", "text/html" if b"<" in body[:1] else "application/octet-stream")
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(body) - 1}/{len(body)}")
        if name == "yes":
            self.send_header("Content-Disposition", 'attachment; filename="model.bin"')
        self.end_headers()
        is_broken = fault == "breaks_always" or (fault in ("breaks", "no_ranges") and first)
        self.wfile.write(body[begin : begin + len(body) // 2] if is_broken else body[begin:])
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch) -> Iterator[ThreadingHTTPServer]:
    pytest.importorskip("gdown")
    import requests

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.address, server.seen, server.stop = f"http://127.0.0.1:{server.server_port}", [], threading.Event()
    server.handle_error = lambda *_: None  # a client that went away
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    get = requests.Session.get
    to_server = lambda self, url, **more: get(self, url.replace("https://drive.google.com", server.address), **more)  # noqa: E731
    monkeypatch.setattr(requests.Session, "get", to_server)
    monkeypatch.setattr("random.uniform", lambda *_: 0.0)  # no waiting between retries
    monkeypatch.setattr(downloads, "RETRIES", 1)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield server
    server.stop.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def run(server, tmp_path, monkeypatch, capsys):
    """Call the command with a table of one file, whose addresses are paths of the server; status and stderr."""

    def run(*options: str, **fields) -> tuple[int, str]:
        words = [one if "://" in one else f"{server.address}/{one}" for one in fields.pop("address", ["file"])]
        fields = {"path": "to/model.bin"} | fields if "holds" not in fields else fields
        file = PublishedFile(source="https://project.example", address=tuple(words), **fields)
        monkeypatch.setattr(download, "read_table", lambda: Table(files={"it": file}, sets={}))
        status = main(["it", "--data", str(tmp_path), *options])
        return status, capsys.readouterr().err

    return run


def files_in(folder: Path) -> list[str]:
    """All files but locks."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return sorted(path.relative_to(folder).as_posix() for path in files)


@pytest.mark.parametrize(
    "address", [["file"], ["file/redirect"], ["file/breaks"], ["file/no_ranges"], ["file/missing", "page", "file"]]
)
def test_a_file_arrives_whole_and_is_not_fetched_twice(address, run, server, tmp_path):
    assert run(address=address, size=len(CONTENT), checksum=SHA256)[0] == 0
    assert files_in(tmp_path) == ["to/model.bin"] and (tmp_path / "to/model.bin").read_bytes() == CONTENT
    ranges = [one for path, one in server.seen if one]
    assert bool(ranges) == (address[0] in ("file/breaks", "file/no_ranges"))
    number = len(server.seen)
    assert run(address=address)[0] == 0 and len(server.seen) == number


def test_the_next_call_goes_on_where_the_last_one_stopped(run, server, tmp_path):
    status, message = run(address=["file/breaks_always"])
    [part] = (tmp_path / "downloads").iterdir()
    assert status == 2 and "Download is incomplete" in message and not (tmp_path / "to").exists()
    begin = part.stat().st_size
    assert begin > len(CONTENT) / 2 and run(checksum=SHA256)[0] == 0
    assert server.seen[-1] == ("/file", f"bytes={begin}-") and files_in(tmp_path) == ["to/model.bin"]


@pytest.mark.parametrize("kind", ["zip", "tar", "leaves"])
def test_archives_are_unpacked_into_the_layout_of_the_configs(kind, run, tmp_path):
    holds = {"images/photos": 3} | ({"x/one/list.json": None, "x/two/list.json": None} if kind == "zip" else {})
    assert run(address=[kind], holds=holds, links={"other/photos": "images/photos"})[0] == 0
    assert (tmp_path / "other/photos/2.jpg").read_bytes() == PHOTOS["a/b/photos/2.jpg"]
    if kind == "zip":
        assert [(tmp_path / f"x/{name}/list.json").read_text() for name in ("one", "two")] == ["1", "2"]
    assert not (tmp_path.parent / "outside").exists() and not any((tmp_path / "downloads").iterdir())
    (tmp_path / "images").rename(tmp_path / "gone")  # a folder under the name of the link counts, and stays
    (tmp_path / "other/photos").unlink()
    (tmp_path / "gone/photos").rename(tmp_path / "other/photos")
    assert run(address=["file/missing"], holds={"images/photos": 3}, links={"other/photos": "images/photos"})[0] == 0
    assert (tmp_path / "images/photos").is_symlink()


def test_google_drive_asks_whether_large_files_are_wanted(run, tmp_path):
    assert run("--dry-run", address=["https://drive.google.com/file/d/large"])[0] == 0
    assert run(address=["https://drive.google.com/file/d/large"], checksum=SHA256)[0] == 0
    assert files_in(tmp_path) == ["to/model.bin"]


FOLDER = {"holds": {"images/photos": 4}}
FAULTS = {
    "no such file": ({"address": ["file/missing"]}, "404 Client Error"),
    "no server": ({"address": ["http://127.0.0.1:9/x"]}, "Connection refused"),
    "a server that says nothing": ({"address": ["file/silent"]}, "Read timed out"),
    "a page to sign in": ({"address": ["page"]}, "it is a web page"),
    "Google Drive's quota": ({"address": ["https://drive.google.com/file/d/quota"]}, "Too many users"),
    "another size": ({"size": 5}, "it has 1,280,000 bytes instead of 5"),
    "another checksum": ({"checksum": "sha256:1234"}, "its sha256 starts with .... instead of 1234"),
    "a damaged archive": ({"address": ["damaged"], **FOLDER}, "was damaged .* and is deleted"),
    "no archive": ({"address": ["file"], **FOLDER}, "was damaged .* and is deleted"),
    "an archive of something else": ({"address": ["zip"], "holds": {"x.json": None}}, "holds no x.json"),
    "an archive with fewer photos": ({"address": ["zip"], **FOLDER}, "holds no photos with 4 files"),
    "an archive that leaves its folder": ({"address": ["tar_leaves"], **FOLDER}, "outside the destination"),
    "a form": ({"address": [], "form": "sign the form"}, "sign the form, as .*model.bin; see https://project.example"),
    "what may help": ({"address": ["page"], "note": "do without it"}, "repeat it; do without it"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_sentence_and_leaves_nothing_under_the_final_name(fault, run, tmp_path, monkeypatch):
    import gdown

    timeout = {"timeout": 0.5, "retries": 0} if "says nothing" in fault else {}
    real = gdown.download
    monkeypatch.setattr(gdown, "download", lambda *words, **options: real(*words, **options | timeout))
    fields, message = FAULTS[fault]
    status, printed = run(**fields)
    [line] = printed.splitlines()  # not one for each retry
    assert status == 2 and line.startswith("error: ")
    assert re.search(message, line), line
    left = [name for name in files_in(tmp_path) if not name.endswith(".part")]
    assert left == (["downloads/it"] if "holds no" in message else [])  # the user decides about a whole archive


def test_without_its_library_the_command_names_the_extra(run, server, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    status, message = run()
    remedy = 'downloads need gdown; install it with pip install "e2e-vl[download]"'
    assert (status, message) == (2, f"error: it is not fetched: {remedy}.\n")
    assert not server.seen


def test_a_full_disk_is_one_sentence(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "downloads").mkdir()
    part = tmp_path / "downloads/it12345678.part"
    part.symlink_to("/dev/full")
    status, message = run()
    assert status == 2 and message.splitlines()[-1] == (
        f"error: {tmp_path}: the disk is full; free some space and repeat the command, which goes on."
    )
    part.unlink()
    status, message = run(size=10**18)
    assert status == 2 and "needs 2000000000.0 GB, and" in message and not list((tmp_path / "downloads").iterdir())


def test_two_downloads_at_once_fetch_a_file_once(run, server, tmp_path, monkeypatch):
    """Both would write to the same partial file."""
    download_file, calls = download.download_file, []

    def slow(*arguments: object) -> str:
        calls.append(arguments)
        time.sleep(0.3)
        return download_file(*arguments)

    monkeypatch.setattr(download, "download_file", slow)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        statuses = [future.result()[0] for future in [pool.submit(run), pool.submit(run)]]
    assert (statuses, len(calls), files_in(tmp_path)) == ([0, 0], 1, ["to/model.bin"])


def test_a_stopped_download_says_that_it_goes_on(run, tmp_path, monkeypatch):
    def stop(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(download, "download_file", stop)
    assert run() == (130, "stopped by SIGINT. Repeat the command to continue.\n")


def test_what_is_there_and_odd_is_kept(run, server, tmp_path):
    (tmp_path / "images/photos").mkdir(parents=True)
    (tmp_path / "images/photos/mine.jpg").touch()
    status, message = run(**FOLDER)
    assert status == 2 and "has 1 files instead of 4; move it away to download it again." in message
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads/it").write_bytes(CONTENT[1:])  # saved by hand
    status, message = run(size=len(CONTENT))
    assert status == 2 and "is not the published file: it has 1,279,999 bytes" in message and not server.seen
    (tmp_path / "downloads/it").write_bytes(CONTENT)
    assert run(size=len(CONTENT), address=["file/missing"])[0] == 0 and files_in(tmp_path)[-1] == "to/model.bin"


def test_check_and_dry_run_change_nothing(run, server, tmp_path, capsys):
    file = {"size": len(CONTENT), "checksum": SHA256}
    assert run("--check", **file)[0] == 1 and not server.seen
    assert run("--dry-run", **file)[0] == 0 and run("--dry-run", size=1)[0] == 1
    assert run("--dry-run", address=["file/missing"])[0] == 1 and not list(tmp_path.iterdir())
    (tmp_path / "to").mkdir()
    for content, status in ((CONTENT, 0), (CONTENT[::-1], 1), (b"", 1)):
        (tmp_path / "to/model.bin").write_bytes(content)
        assert run("--check", **file)[0] == status


# the table

TABLE = read_table()


def places_of(files: Iterable[PublishedFile]) -> set[str]:
    """All paths under DATA, and their folders."""
    places = {one for file in files for one in (*(file.holds or [file.path]), *file.links)}
    return places | {one.rpartition("/")[0] for one in places}


def test_every_name_leads_to_files_that_say_where_they_are_published(capsys):
    names = (
        "coco refcoco refcoco+ refcocog grefcoco vqa gqa nlvr2 flickr30k vcr visual_genome captions vl_bert visual_bert"
    )
    assert set(names.split()) <= set(TABLE.sets) and not set(TABLE.sets) & set(TABLE.files)
    assert (
        main([]) == 0
        and "> 14.0 GB  train2014, refcoco+_refs (?), mattnet_detections (?), bert-base-uncased"
        in capsys.readouterr().out
    )
    assert {file for one in TABLE.sets.values() for file in one.files} <= set(TABLE.downloads)
    assert not set(TABLE.models) & {*TABLE.sets, *TABLE.files}
    for file in TABLE.files.values():
        assert bool(file.address) != bool(file.form) and bool(file.path) != bool(file.holds)
        assert all(one.startswith("http") for one in (*file.address, file.source))
        assert set(file.links.values()) <= set(file.holds)


@pytest.mark.parametrize("name", [name for name, one in TABLE.sets.items() if one.configs])
def test_files_lie_where_the_configs_look_for_them(name):
    for config in TABLE.sets[name].configs:
        data = load_config(CONFIGS / f"{config}.yaml", ["data.root=DATA"]).data
        files = [data.files, *(part.files for part in getattr(data.config, "datasets", {}).values())]
        paths = [path for one in files for path in one.values() if path]
        own = {re.sub(r"\{\w+\}", "*", one) for path in paths for one in re.split(r"\+(?=en_corpus)", path)}
        missing = {one for one in own if not fnmatch.filter(places_of(TABLE.files.values()), one)}
        assert all(one.startswith("features/") for one in missing), (config, missing)


@pytest.mark.parametrize("paper", sorted(path.stem for path in PAPERS.glob("*.yaml")))
def test_the_chains_of_papers_find_downloads(paper):
    for file in read_paper(paper).files.values():
        assert bool(file.download) != bool(file.address)
        downloads = TABLE.named([file.download] if file.download else []).values()
        files = [published for published in downloads if isinstance(published, PublishedFile)]
        assert not file.download or file.path in places_of(files)
