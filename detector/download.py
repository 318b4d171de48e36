"""Published weights in the cache of torch.hub, downloaded once and verified.

The cache is `torch.hub.get_dir()/checkpoints` (TORCH_HOME moves it): torchvision keeps its own downloads there under
the same file names, so that nothing is downloaded twice. (The cache of the Hugging Face hub holds files of its
repositories only, and most of these files are in none.)
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import torch
from filelock import FileLock
from tqdm.auto import tqdm

from detector.errors import MissingFileError, UserError
from detector.named_weights import NamedWeights, known_weights
from detector.whole_writer import take_place

CHUNK = 1 << 20  # bytes
TIMEOUT = 30  # seconds without an answer


def cache_folder() -> Path:
    return Path(torch.hub.get_dir(), "checkpoints")


def cached_weights(weights: NamedWeights, folder: Path | None = None) -> Path:
    """The path of the file in the cache; it is downloaded if it is not there.

    Of several processes one downloads, and the others wait for it: a lock file beside the file says so while it lasts.
    A download has a name of its own until it is complete and verified, so that no process ever sees a part of a file.

    Args:
        folder: None = `cache_folder()`.

    Raises:
        FileNotFoundError: the file is not in the cache and cannot be downloaded.
        ValueError: the file in the cache, or the one that was downloaded, is not the published one.
    """
    path = (folder or cache_folder()) / weights.file
    if not path.is_file():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _alone(path):
                if not path.is_file():  # another process may have downloaded it meanwhile
                    _fetch(weights, path)
                    return path
        except (OSError, http.client.HTTPException) as error:
            reason = str(error).strip("<>") or type(error).__name__
            raise MissingFileError(
                f"{weights.name} cannot be downloaded from {weights.address} ({reason}); {_by_hand(path)}."
            ) from error
    difference = _difference(weights, path)
    if difference:
        raise UserError(f"{path}: {difference}; delete it, and {weights.name} is downloaded again.")
    return path


def remedy(path: Path) -> str:
    """What to do about a damaged weights file, as half a sentence."""
    published = known_weights(path)
    if published is not None and path.parent == cache_folder():
        return f"delete it, and {published.name} is downloaded again"
    return "copy or download it again"


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Waits until no other process holds the lock of this file.

    The lock ends with its process, so that a kill leaves none behind.
    """
    lock = path.with_name(f"{path.name}.lock")
    with FileLock(lock):
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # Windows removes no open file
                lock.unlink()


def _fetch(weights: NamedWeights, path: Path) -> None:
    """Download and verify; raises as `_download`, and a ValueError where another file was sent."""
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        _download(weights, part)
        difference = _difference(weights, part)
        if difference:
            raise UserError(
                f"{weights.name}: {weights.address} did not send the published file: {difference}; {_by_hand(path)}."
            )
        take_place(part, path)
    finally:
        part.unlink(missing_ok=True)


def _by_hand(path: Path) -> str:
    return f"download it by other means and save it as {path}, or give the path of your file instead of the name"


def _download(weights: NamedWeights, part: Path) -> None:
    """Raises OSError or HTTPException: no connection, no such file, an answer that is a web page or ends too early."""
    request = urllib.request.Request(weights.address, headers={"User-Agent": "torch.hub"})  # some servers want one
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer, part.open("xb") as file:
        if answer.headers.get_content_type() == "text/html":
            raise OSError("the server sent a web page instead of a file")
        length = answer.headers.get("Content-Length")
        total = None if length is None else int(length)
        bar = tqdm(total=total, desc=weights.file, unit="B", unit_scale=True, delay=1)
        with bar:
            while chunk := answer.read(CHUNK):
                file.write(chunk)
                bar.update(len(chunk))
        file.flush()
        os.fsync(file.fileno())
        if total is not None and file.tell() != total:
            raise OSError(f"the connection ended after {file.tell()} of {total} bytes")


def _difference(weights: NamedWeights, path: Path) -> str:
    """How a file differs from what is known of the published one; "" if it does not."""
    size = path.stat().st_size
    if size == 0 or (weights.size is not None and size != weights.size):
        return f"it has {size} bytes" + ("" if weights.size is None else f" instead of {weights.size}")
    if weights.checksum:
        algorithm, digits = weights.checksum.split(":")
        with path.open("rb") as file:
            found = hashlib.file_digest(file, algorithm).hexdigest()
        if not found.startswith(digits):
            return f"its {algorithm} begins with {found[: len(digits)]} instead of {digits}"
    return ""
