"""Published weights by name: their table `published_weights.yaml`, and downloads.

Names start with the publisher: `torchvision/...`, `detectron2/...` (as in its model zoo) and `bottom-up-attention/...`.
Detectron2's own addresses (`detectron2://ImageNetPretrained/MSRA/R-50.pkl`) and full URLs are also accepted.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import re
from pathlib import Path

from filelock import FileLock

from detector.config import NORM_EPS
from detector.downloads import download_file
from detector.errors import MissingFileError, UserError, first_line, user_path
from detector.io import read_text, read_yaml

PUBLISHED = Path(__file__).with_name("published")  # Detectron2 YAML files
CLASS_LISTS = Path(__file__).with_name("class_names")  # text files with one class name per line

DETECTRON2 = "https://dl.fbaipublicfiles.com/detectron2/"


@dataclasses.dataclass(frozen=True)
class PublishedWeights:
    """A published weights file."""

    name: str
    address: str  # URL
    file: str  # file name in the cache
    config: str  # stem of the YAML file in detector/published
    checksum: str = ""  # "sha256:" or "md5:" and the known first hexadecimal digits; "": unknown
    class_names: str = ""  # stem of a file in detector/class_names; "": unknown
    expect: str = "all"  # part of the detector in the file, see `detector.checkpoint.load_checkpoint`
    norm_eps: float = NORM_EPS  # epsilon of the frozen batch norms that the weights were trained with
    rounding: str = "detectron2"  # see `detector.images.ResizeRule`

    @property
    def config_path(self) -> Path:
        """Path of the config, which is installed with this package."""
        return PUBLISHED / f"{self.config}.yaml"

    def read_class_names(self) -> tuple[str, ...] | None:
        """Return the names of classes 0 .. K-1, or None if they are unknown.

        In "coco_ids", class c has the COCO id c + 1, and the ten unused ids are named "N/A", as in torchvision.
        """
        if not self.class_names:
            return None
        return tuple((CLASS_LISTS / f"{self.class_names}.txt").read_text(encoding="utf-8").splitlines())


@functools.cache
def published_weights() -> tuple[PublishedWeights, ...]:
    rows = []
    for row in read_yaml(Path(__file__).with_name("published_weights.yaml")):
        file = row["address"].rpartition("/")[2]
        rows.append(PublishedWeights(**{"file": file, **row}))
    return tuple(rows)


def resolve_weights(name: str | Path) -> Path | PublishedWeights:
    """Return the published weights with this name or URL, or else a path. Nothing is downloaded.

    Existing files and folders take precedence. The start of a name up to any slash may be omitted, and Detectron2's
    suffix `.yaml` is ignored. Anything else is returned as a path, even if it does not exist.
    """
    path = Path(name) if "://" in str(name) else user_path(name)
    if path.exists():
        return path
    key = _key(name)
    weights = _find(key)
    if weights is not None:
        return weights
    return user_path(key) if "://" in key else path


def find_published_weights(name: str | Path) -> PublishedWeights | None:
    """Return the published weights with this name, URL or file name, or None."""
    for weights in published_weights():
        if Path(name).name == weights.file:
            return weights
    if Path(name).exists():
        return None
    return _find(_key(name))


def suggest_names(name: str | Path) -> list[str]:
    """Return up to three names of published weights with a last part similar to that of `name`, best match first."""
    names = {_last(weights.name): weights.name for weights in published_weights()}
    return [names[last] for last in difflib.get_close_matches(_last(_key(name)), names, n=3, cutoff=0.7)]


def _find(key: str) -> PublishedWeights | None:
    """Find published weights by their URL, their name, or the end of their name after a slash."""
    end = f"/{key.removesuffix('.yaml')}"
    for weights in published_weights():
        if key == weights.address or f"/{weights.name}".endswith(end):
            return weights
    return None


def _last(key: str) -> str:
    return key.removesuffix(".yaml").rpartition("/")[2]


def _key(name: str | Path) -> str:
    """Normalise a name or URL: use forward slashes, and restore the "://" of a URL that was converted to a `Path`."""
    text = name.as_posix() if isinstance(name, Path) else name
    key = re.sub(r"^([\w-]{2,}):/+", r"\1://", text)
    if key.startswith("detectron2://"):
        return key.replace("detectron2://", DETECTRON2, 1)
    return key


def cache_folder() -> Path:
    import torch  # slow to import

    return Path(torch.hub.get_dir(), "checkpoints")


def download_weights(weights: PublishedWeights) -> Path:
    """Return the path of the file in torch.hub's cache. Download it if necessary, and verify its checksum.

    If several processes call this at once, only one of them downloads the file.
    """
    path = cache_folder() / weights.file
    by_hand = f"download it manually and save it as {path}, or use the path of your file instead of the name"
    if not path.is_file():
        reason = _download_once(weights.address, path)
        if reason:
            raise MissingFileError(f"{weights.name} cannot be downloaded from {weights.address} ({reason}); {by_hand}.")
    difference = file_difference(path, weights.checksum)
    if difference:
        raise UserError(f"{path} is not the published file: {difference}; delete it to load it again, or {by_hand}.")
    return path


def _download_once(address: str, path: Path) -> str:
    """Download a file unless another process does so meanwhile, and return why it failed, or ""."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            if path.is_file():  # another process has downloaded it in the meantime
                return ""
            return download_file(address, path)
    except OSError as error:
        return first_line(error)


def file_difference(path: Path, checksum: str, size: int | None = None) -> str:
    """Describe why a file cannot be the published one; "" if it can. A checksum may be the first digits only."""
    num_bytes = path.stat().st_size
    if num_bytes == 0:
        return "it is empty"
    with path.open("rb") as file:
        if file.read(512).lstrip()[:5].lower() in (b"<!doc", b"<html"):
            return "it is a web page"
        if size is not None and num_bytes != size:
            return f"it has {num_bytes:,} bytes instead of {size:,}"
        if checksum:
            algorithm, digits = checksum.split(":")
            file.seek(0)
            hexdigits = hashlib.file_digest(file, algorithm).hexdigest()
            if not hexdigits.startswith(digits):
                return f"its {algorithm} starts with {hexdigits[: len(digits)]} instead of {digits}"
    return ""


def read_vocabulary(path: str | Path, number: int, what: str) -> tuple[str, ...]:
    """Read class or attribute names from a text file such as `objects_vocab.txt` or `attributes_vocab.txt`.

    Line i contains the name of class i, from 0. Synonyms after a comma are dropped. There is no line for the background
    or for "no attribute". `number` of them are expected; `what` ("classes" or "attributes") names them in the message.
    """
    lines = read_text(path).splitlines()
    names = tuple(line.partition(",")[0].strip() for line in lines)
    if len(names) != number or not all(names):
        raise UserError(
            f"{path} has {len([*filter(None, names)])} names, but the detector has {number} {what}; use the file that "
            "belongs to its weights."
        )
    return names
