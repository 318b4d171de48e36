"""Downloads into a cache, from a server of the test."""

from __future__ import annotations

import hashlib
import multiprocessing
import pickle
import re
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

import detector.weight_files
import detector.zoo
from detector.weight_files import find_weights, read_weights
from detector.zoo import NamedWeights, cache_folder, cached_weights

CONTENT = bytes(range(256)) * 20_000  # 5 MB: several chunks
SHA256 = hashlib.sha256(CONTENT).hexdigest()
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """`/file` is the whole content, `/short` ends too early, `/page` is a web page; others do not exist."""

    requests: list[str]
    gate: threading.Event | None = None  # the second half of a file is sent after it is set

    def address(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{path}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        if self.path not in ("/file", "/short", "/page"):
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if self.path == "/page" else "application/octet-stream")
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        half = len(CONTENT) // 2
        self.wfile.write(CONTENT[:half])
        if self.path == "/short":
            return
        if self.server.gate is not None:
            self.wfile.flush()
            self.server.gate.wait(60)
        self.wfile.write(CONTENT[half:])

    def log_message(self, format: str, *args: object) -> None:
        """Tests are silent."""


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    server.requests = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def entry(address: str, **fields: object) -> NamedWeights:
    fields = {"checksum": f"sha256:{SHA256}", **fields}
    return NamedWeights("torchvision/test", address, "test.pth", "R_50_C4", "none", **fields)


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"checksum": f"sha256:{SHA256[:8]}"},
        {"checksum": f"md5:{MD5[:6]}"},
        {"checksum": "", "size": len(CONTENT)},
        {"checksum": ""},
    ],
)
def test_a_file_is_downloaded_once(server: Server, tmp_path: Path, fields: dict[str, object]) -> None:
    weights = entry(server.address("file"), **fields)
    folder = tmp_path / "new" / "folder"
    for _ in range(2):
        assert cached_weights(weights, folder) == folder / "test.pth"
    assert (folder / "test.pth").read_bytes() == CONTENT
    assert listing(folder) == ["test.pth"]
    assert server.requests == ["/file"]


def test_a_file_that_is_there_needs_no_connection(tmp_path: Path) -> None:
    (tmp_path / "test.pth").write_bytes(CONTENT)
    assert cached_weights(entry("https://nowhere.invalid/file"), tmp_path) == tmp_path / "test.pth"


def test_files_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(CONTENT)
    weights = entry((tmp_path / "source").as_uri())
    assert cached_weights(weights, tmp_path / "cache").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("fields", "difference"),
    [
        ({"checksum": "sha256:00000000"}, f"its sha256 begins with {SHA256[:8]} instead of 00000000"),
        ({"checksum": "md5:000000"}, f"its md5 begins with {MD5[:6]} instead of 000000"),
        ({"size": 7}, f"it has {len(CONTENT)} bytes instead of 7"),
    ],
)
def test_another_file_is_refused(server: Server, tmp_path: Path, fields: dict[str, object], difference: str) -> None:
    weights = entry(server.address("file"), **fields)
    path = tmp_path / "test.pth"
    message = f"torchvision/test: {weights.address} did not send the published file: {difference}; download it by other"
    with pytest.raises(ValueError, match=f"^{re.escape(message)} means and save it as {re.escape(str(path))}"):
        cached_weights(weights, tmp_path)
    assert listing(tmp_path) == []

    path.write_bytes(CONTENT)  # from an earlier time
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: {difference}; delete it')}"):
        cached_weights(weights, tmp_path)
    assert path.read_bytes() == CONTENT, "a user's file is not touched"


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test.pth").touch()
    with pytest.raises(ValueError, match="it has 0 bytes; delete it"):
        cached_weights(entry("https://nowhere.invalid/file", checksum=""), tmp_path)


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ("short", f"the connection ended after {len(CONTENT) // 2} of {len(CONTENT)} bytes"),
        ("page", "the server sent a web page instead of a file"),
        ("missing", "HTTP Error 404: Not Found"),
        (None, "Connection refused"),
    ],
)
def test_a_failed_download_leaves_nothing(server: Server, tmp_path: Path, page: str | None, reason: str) -> None:
    weights = entry(server.address(page) if page else f"http://127.0.0.1:{closed_port()}/file", checksum="")
    with pytest.raises(FileNotFoundError) as caught:
        cached_weights(weights, tmp_path / "cache")
    message = str(caught.value)
    assert message.startswith(f"torchvision/test cannot be downloaded from {weights.address} (")
    assert reason in message
    assert f"save it as {tmp_path / 'cache' / 'test.pth'}, or give the path of your file" in message
    assert listing(tmp_path / "cache") == []


def test_an_interrupted_download_leaves_nothing(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted:
        def __init__(self, **options: object) -> None:
            assert options["total"] == len(CONTENT)

        def __enter__(self) -> Interrupted:
            return self

        def __exit__(self, *error: object) -> None: ...

        def update(self, size: int) -> None:
            assert [name for name in listing(tmp_path) if re.fullmatch(r"test\.pth\.[0-9a-f]{32}\.part", name)]
            raise KeyboardInterrupt

    monkeypatch.setattr(detector.zoo, "tqdm", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        cached_weights(entry(server.address("file")), tmp_path)
    assert listing(tmp_path) == []


def fetch(address: str, folder: Path, results: multiprocessing.Queue) -> None:
    results.put("begins")
    results.put(hashlib.sha256(cached_weights(entry(address), folder).read_bytes()).hexdigest())


def start(number: int, server: Server, folder: Path) -> tuple[list[multiprocessing.Process], multiprocessing.Queue]:
    """Processes that want the file; one of them is in the middle of it, held by the server's gate."""
    server.gate = threading.Event()
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=fetch, args=(server.address("file"), folder, results)) for _ in range(number)]
    for process in processes:
        process.start()
    assert [results.get(timeout=60) for _ in processes] == ["begins"] * number
    while not any(name.endswith(".part") for name in listing(folder)):
        assert all(process.is_alive() for process in processes)
        time.sleep(0.01)
    return processes, results


def test_of_several_processes_one_downloads_and_all_see_the_whole_file(server: Server, tmp_path: Path) -> None:
    processes, results = start(3, server, tmp_path)
    time.sleep(0.5)  # the others would have asked the server by now
    assert server.requests == ["/file"]
    assert not (tmp_path / "test.pth").exists()
    server.gate.set()
    assert [results.get(timeout=60) for _ in processes] == [SHA256] * 3
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert server.requests == ["/file"]
    assert listing(tmp_path) == ["test.pth"]


def test_a_process_that_is_killed_holds_up_no_other(server: Server, tmp_path: Path) -> None:
    [process], _ = start(1, server, tmp_path)
    process.kill()
    process.join(60)
    server.gate.set()
    path = cached_weights(entry(server.address("file")), tmp_path)
    assert path.read_bytes() == CONTENT
    assert server.requests == ["/file", "/file"]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("bottom-up-attention/frcnn-vg-finetuned", "frcnn-vg-finetuned.bin"),
        ("bottom-up-attention/faster_rcnn_from_caffe", "faster_rcnn_from_caffe.pkl"),
    ],
)
@pytest.mark.parametrize("kind", ["cut off", "no weights", "other content"])
def test_a_damaged_file_in_the_cache_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, file: str, kind: str
) -> None:
    """Of weights without a published checksum."""
    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    path = cache_folder() / file
    path.parent.mkdir(parents=True)
    content = {"cut off": {"model": torch.ones(999)}, "no weights": [1], "other content": {"model": {"epoch": 3}}}[kind]
    if file.endswith(".pkl"):
        path.write_bytes(pickle.dumps(content if kind != "cut off" else list(range(999))))
    else:
        torch.save(content, path)
    if kind == "cut off":
        path.write_bytes(path.read_bytes()[:-100])
    for given, remedy in ((name, f"delete it, and {name} is downloaded again"), (path, "delete it, and bottom-up-")):
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: .*[;:] {re.escape(remedy)}") as caught:
            read_weights(given)
        assert "\n" not in str(caught.value)
    own = path.rename(tmp_path / file)
    with pytest.raises(ValueError, match=f"^{re.escape(str(own))}: .*[;:] copy or download it again"):
        read_weights(own)


def test_the_cache_is_the_one_of_torch_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "hub" / "checkpoints"


def test_readers_of_weights_take_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, and by a path whose last part is the name of a published file."""
    name, file = "torchvision/fasterrcnn_resnet50_fpn-coco", "fasterrcnn_resnet50_fpn_coco-258fb6c6.pth"
    asked = []

    def cached(weights: NamedWeights) -> Path:
        asked.append(weights.name)
        return tmp_path / file

    monkeypatch.setattr(detector.weight_files, "cached_weights", cached)
    torch.save({"x": torch.ones(2)}, tmp_path / file)
    assert find_weights(name) == tmp_path / file
    for given in (name, tmp_path / file):
        found = read_weights(given)
        assert found.norm_eps == 0.0
        assert found.path == tmp_path / file
        assert found.tensors["x"].tolist() == [1, 1]
    assert asked == [name, name]

    (tmp_path / file).rename(tmp_path / "own.pth")
    assert read_weights(tmp_path / "own.pth").norm_eps == 1e-5
