"""Files of a run directory: its log (`log.jsonl`, one JSON object per line), and which files a command may write."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import string
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import unquote_to_bytes

from msgspec import UNSET, Meta, UnsetType

from detector.errors import MissingFileError, UserError, reading, user_path
from detector.io import atomic_file, decode_json, json_text, read_json, write_json, write_text
from e2e_vl.records import Count, Record, checked

# Names that stand in files from outside, such as ids of images, as names of files and as paths inside a folder.


# bytes of a name; file systems take 255, of which "." and endings such as ".npz.4194304.4194304.part" need some
LONGEST_PART = 220
LONGEST_NAME = 1000  # bytes with all folders
_LONGEST_PATH = 4095  # bytes that Linux takes
_SIMPLE = re.compile(r"\w+[\w-]*(?:/\w+[\w-]*)*", re.ASCII)
_DEVICES = re.compile(r"(?:^|/)(?:con|prn|aux|nul|com\d|lpt\d)(?:/|$)", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_DRIVE = re.compile(r"[A-Za-z]:")
_WIDTH = re.compile(r"(?:.?[<>=^])?\d{0,3}[ds]?")
_EMPTY = "%"  # in the place of a part without any character
_NEVER = frozenset('%<>:"|?*\\')  # "%" begins what is written otherwise, and Windows takes none of the others
_DEVICE = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|clock\$|(com|lpt)[0-9¹²³])[ ]*(\.|$)", re.IGNORECASE)


def name_of(text: str, *, flat: bool = False) -> str:
    """The name of the file, without its ending, that belongs to an id; `id_of` reads it back.

    Two ids never have one name. Where they differ in upper and lower case only, a disk may still take their names for
    one; `require_distinct` refuses such ids.

    Args:
        text: an id, or another text such as the name of a split.
        flat: a slash is written as `%2F`, so that the name has no folder.

    Raises:
        UserError: the name would be too long for a disk.
    """
    if _is_simple(text) and not (flat and "/" in text):
        return text
    parts = [text] if flat else text.split("/")
    last = len(parts) - 1
    name = "/".join(_written(part, is_folder=number < last) for number, part in enumerate(parts))
    longest = max(len(part.encode("utf-8")) for part in name.split("/"))
    if longest > LONGEST_PART or len(name.encode("utf-8")) > LONGEST_NAME:
        raise UserError(
            f"The name {shown(text)} takes {longest} bytes in one part and {len(name.encode('utf-8'))} in all as the "
            f"name of a file, which may have {LONGEST_PART} and {LONGEST_NAME}; give the image a shorter id."
        )
    return name


def id_of(name: str) -> str:
    """The id that has this name; a name that `name_of` never gives, as of a file of an earlier version, is the id."""
    if _is_simple(name):
        return name
    try:
        text = "/".join("" if part == _EMPTY else _read(part) for part in name.split("/"))
        return text if name in (name_of(text), name_of(text, flat=True)) else name
    except (UnicodeDecodeError, UserError):
        return name


def require_distinct(texts: Iterable[str], where: str) -> None:
    """Check that ids also differ on disks that take upper and lower case, or two spellings of a letter, for the same.

    Args:
        where: begins the message, such as the file that lists the ids.

    Raises:
        UserError: two ids would share a file there.
    """
    seen: dict[str, str] = {}
    for text in texts:
        other = seen.setdefault(unicodedata.normalize("NFC", text.casefold()), text)
        if other != text:
            raise UserError(
                f"{where}: the ids {shown(other)} and {shown(text)} differ only in upper and lower case or in how an "
                "accent is written, and many disks would give them one file; rename one of them."
            )


def require_name(text: str, where: str) -> None:
    """Check that an image's id, to which a pattern adds an ending, can name a file inside a folder.

    Args:
        where: begins the message: the file and the record that hold the id.

    Raises:
        UserError: it leads out of the folder, or no file can have it.
    """
    if _is_simple(text):
        return
    reason = _why_not(text)
    if reason is None and max(len(part.encode("utf-8")) for part in text.split("/")) > LONGEST_PART:
        reason = f"has more than {LONGEST_PART} bytes between two slashes"
    if reason is not None:
        raise UserError(f"{where}: the image {shown(text)} cannot name a file: it {reason}; correct the record.")


def inside(root: str | Path, name: str, where: str = "", *, follows_links: bool = False) -> Path:
    """The path of a file that is named in another file, which lies in the folder `root` or below it.

    Args:
        root: the folder; it may be a link itself.
        name: with forward slashes, relative to the folder.
        where: begins the message: the file and the record that name it.
        follows_links: links inside the folder may lead out of it. For data that are only read: who owns the folder
            made them (photos are often linked from another disk), and no annotation file can make one.

    Raises:
        UserError: the name leads out of the folder, or no file can have it.
    """
    root = Path(root)
    reason = _why_not(name)
    if reason is None:
        path = root / name
        if len(os.fsencode(path)) > _LONGEST_PATH:
            reason = "is too long"
        elif follows_links or _is_below(path, root):
            return path
        else:
            reason = "leads out of it by a link"
    start = f"{where}: the" if where else "The"
    raise UserError(
        f"{start} name {shown(name)} is not of a file in the folder {root}: it {reason}; write it relative to that "
        "folder."
    )


def _is_below(path: Path, root: Path) -> bool:
    try:
        return path.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError):  # links that lead to each other
        return False


def is_name_pattern(pattern: str, *fields: str) -> bool:
    """Whether a pattern of `str.format` holds these fields at most, each as it is or filled up to some width."""
    try:
        found = list(string.Formatter().parse(pattern))
    except ValueError:
        return False
    kinds = {(field, conversion) for _, field, _, conversion in found if field is not None}
    return kinds <= {(field, None) for field in fields} and all(_WIDTH.fullmatch(spec or "") for _, _, spec, _ in found)


def shown(text: object) -> str:
    """A text from a file for a message: one line without control characters, cut off where it is long."""
    written = repr(text)
    return written if len(written) <= 80 else f"{written[:60]}... ({len(written)} characters)"


def _why_not(name: object) -> str | None:
    """Why a name is not of a file in a folder; None if it may be one."""
    if not isinstance(name, str) or not name:
        return "is not a text" if not isinstance(name, str) else "is empty"
    try:
        encoded = name.encode("utf-8")
    except UnicodeEncodeError:
        return "holds half of a character"
    if _CONTROL.search(name):
        return "holds a control character"
    if "\\" in name:
        return "holds a backslash"
    if name.startswith("/") or _DRIVE.match(name):
        return "does not begin in it"
    if ".." in name.split("/"):
        return "holds '..'"
    if max(map(len, encoded.split(b"/"))) > 255:
        return "has more than 255 bytes between two slashes"
    if os.name == "nt" and PureWindowsPath(name).is_reserved():
        return "is a device of Windows"
    return None


def _is_simple(text: str) -> bool:
    """Whether it is its own name, without a closer look: a folder of features may hold a million of them."""
    return len(text) <= LONGEST_PART and _SIMPLE.fullmatch(text) is not None and _DEVICES.search(text) is None


def _written(part: str, *, is_folder: bool) -> str:
    """A part of a name between two slashes as all file systems take it."""
    if not part:
        return _EMPTY
    letters = [_escaped(one) if one in _NEVER or one == "/" or not _is_plain(one) else one for one in part]
    if part[-1] in ". ":
        letters[-1] = _escaped(part[-1])
    if set(part) == {"."}:
        letters = [_escaped(one) for one in part]
    if _DEVICE.match(part):
        letters[0] = _escaped(part[0])
    if is_folder and part.lower().endswith(".npz"):  # the file of the id without this ending has that name
        letters[-4] = _escaped(".")
    return "".join(letters)


def _is_plain(letter: str) -> bool:
    return letter.isprintable() and not unicodedata.category(letter).startswith("C")


def _escaped(letter: str) -> str:
    return "".join(f"%{byte:02X}" for byte in letter.encode("utf-8", "surrogatepass"))


def _read(part: str) -> str:
    return unquote_to_bytes(part.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogatepass")


# Checksums of files, and JSON without NaN, beside the functions that write files as a whole.


if TYPE_CHECKING:
    from PIL import Image

CHECKSUMS = "checksums.json"


def without_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with None in place of NaN and infinities, whose names stand under `not_finite` if there are any."""
    lost = [name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
    return {**values, **dict.fromkeys(lost), **({"not_finite": lost} if lost else {})}


def write_png(path: Path, picture: Image.Image) -> None:
    """Write a picture as a PNG file in one step."""
    with atomic_file(path) as part:
        picture.save(part, "PNG")


# Checksums


def write_checksums(folder: Path) -> None:
    """Write `checksums.json` with the SHA-256 of every file in the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    write_json(folder / CHECKSUMS, {path.relative_to(folder).as_posix(): _digest(path) for path in files})


def find_damage(folder: Path) -> str | None:
    """Compare the files of a folder with its checksums; files that came later are not looked at.

    Returns:
        What is wrong with the first wrong file, in a few words; None if nothing is.
    """
    try:
        sums = read_json(folder / CHECKSUMS, dict[str, str])
        items = {name: (inside(folder, name, follows_links=True), value) for name, value in sums.items()}
    except (OSError, ValueError):  # a name may not lead out of the folder, either
        return f"its {CHECKSUMS} is missing or damaged"
    for name, (path, expected) in items.items():
        try:
            if path.exists() and not path.is_file():  # a pipe would be waited for, a device read, without end
                return f"{name} is not a file"
            if _digest(path) != expected:
                return f"{name} is not as it was written"
        except OSError as error:
            return f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name} cannot be read ({error})"
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


FILE_ENDS = (".txt", ".json", ".bin", ".model", ".safetensors", ".pth", ".pkl")  # no hub names
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class RunLog:
    """Appends to `log.jsonl`.

    Args:
        enabled: True on the main process only; the other processes write nothing.
        resume_step: drop the lines beyond this step and the evaluations of this step, because they are about to be
            computed again; None starts a new file.
    """

    def __init__(self, path: Path, *, enabled: bool, resume_step: int | None = None):
        self.path = path
        self.enabled = enabled
        if not enabled:
            return
        kept = [line for line in read_log(path) if _stays(line, resume_step)] if resume_step is not None else []
        write_text(path, "".join(json_text(line, str(path)) + "\n" for line in kept))

    def write(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Append one line; a value that is NaN or infinite becomes null, and its name stands under `not_finite`.

        Args:
            kind: "train"; "eval" for an evaluation of the images that all evaluations of the run look at, and "final"
                for the last one if it looks at more.
        """
        if self.enabled:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json_text({"step": step, "kind": kind, **without_nan(values)}, str(self.path)) + "\n")


def _stays(line: dict[str, Any], resume_step: int) -> bool:
    return line["step"] < resume_step or (line["step"] == resume_step and line["kind"] == "train")


def read_log(path: Path) -> list[dict[str, Any]]:
    """All lines of a `log.jsonl`. A missing file has no lines; a last line that was cut off is left out.

    Raises:
        UserError: a line is no JSON object with a step and a kind, or has values that are neither numbers nor null.
    """
    if not path.is_file():  # a pipe would be waited for without end
        if path.exists():
            raise UserError(f"{path} is not a file; remove it, or get the run again.")
        return []
    try:
        with reading(path):
            *lines, _ = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not JSON: byte {error.start} is not utf-8 text; get the file again.") from error
    return [_log_line(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


def _log_line(line: str, where: str) -> dict[str, Any]:
    found = decode_json(line, where, dict[str, Any])
    if not isinstance(found.get("step"), int) or not isinstance(found.get("kind"), str):
        raise UserError(f"{where} is not an object with a step and a kind; get the file again, or remove the line.")
    remedy = "get the file again, or remove the line."
    checked(_LogLine, found, where, remedy=remedy)
    checked(_Values, {"value": {name: one for name, one in found.items() if name not in _NAMED}}, where, remedy=remedy)
    return found


def read_settings_text(path: Path) -> str:
    """The text of a run's settings; raises UserError if there is no such file, or it is not UTF-8."""
    if not path.is_file():
        raise MissingFileError(f"{path}: no such settings file; get the whole run again.")
    try:
        with reading(path):
            return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}); get the file again.") from error


@contextlib.contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """A user's error about what a file holds begins with the file."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{path}: {error}") from error


_Value = Annotated[float, Meta(ge=-1e300, le=1e300)]  # differences of two can be drawn
_NAMED = ("step", "kind", "not_finite")


class _LogLine(Record):
    step: Count
    kind: str
    not_finite: tuple[str, ...] = ()


class _Values(Record):
    """All that a line has besides."""

    value: dict[str, _Value | None]


class _BestModel(Record):
    metric: str
    value: _Value | None
    step: Count
    images: Count
    metrics: dict[str, _Value | None] | UnsetType = UNSET


class _Metrics(Record):
    """What the page of a run needs of `metrics.json`."""

    steps: Count | None = None
    best: _BestModel | None = None


def read_metrics(path: Path) -> dict[str, Any]:
    """The content of a run's `metrics.json`: numbers or null by name, alone or in groups.

    Raises:
        MissingFileError: there is no such file.
        UserError: it is no JSON, holds a value of another kind, or lacks what it says of the best model.
    """
    found = read_json(path, dict[str, Any])
    remedy = "get the file again, or evaluate the run again"
    metrics = checked(_Metrics, found, f"{path}", remedy=remedy)
    if metrics.best is not None and metrics.steps is None:
        raise UserError(f"{path} has no 'steps'; {remedy}.")
    others = {name: one for name, one in found.items() if name not in ("best", "not_finite")}
    checked(dict[str, _Value | dict[str, _Value | None] | None], others, f"{path}", remedy=remedy)
    return found


def looks_like_hub_name(name: str) -> bool:
    """Only a text that cannot be a path is a hub name, so that a mistyped path never reaches for the network."""
    if not _HUB_ID.fullmatch(name) or name.endswith(FILE_ENDS):
        return False
    owner, slash, _ = name.partition("/")
    return not (slash and Path(owner).exists())  # "runs/old" beside an existing folder "runs" is a path


def is_shared_model(source: str | Path) -> bool:
    """Whether it can only be a model of the hub, `owner/name`; a name without an owner is taken for a folder.

    Raises:
        FileNotFoundError: it is a path without a trained model.
    """
    path = user_path(source, "The run")
    if not path.exists() and "/" in str(source) and looks_like_hub_name(str(source)):
        return True
    model_folder(path)
    return False


def check_output(path: Path, *, may_replace: bool = False) -> None:
    """Check a file that a command is about to write; to be called before anything is computed.

    Args:
        may_replace: an existing file inside of a run may be replaced.

    Raises:
        ValueError: the path is a folder, lies below a file, or is an existing file inside of a run or a saved model.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder; name the file that is to be written as --output.")
    place = next(folder for folder in path.absolute().parents if folder.exists())
    if not place.is_dir():
        raise UserError(f"{path}: {place} is a file, not a folder; choose another --output.")
    runs = [*filter(_holds_run, path.resolve().parents)]  # a saved model lies in the folder of its run
    if path.exists() and runs and not may_replace:
        raise UserError(f"{path} belongs to the run {runs[-1]} and is not replaced; choose another --output.")


def _holds_run(folder: Path) -> bool:
    """Whether a folder is a run directory, finished or not, or a saved model."""
    if (folder / "model" / "config.yaml").is_file():
        return True
    parts = ("metrics.json", "log.jsonl", "checkpoints", "encoder")
    return (folder / "config.yaml").is_file() and any((folder / part).exists() for part in parts)


def model_folder(folder: Path) -> Path:
    """The folder that `save_model` (e2e_vl/run/checkpoint.py) wrote: `folder` itself, or `model/` in a run directory.

    Raises:
        FileNotFoundError: no model there.
    """
    folder = Path(folder)
    if (folder / "config.yaml").is_file() and (folder / "encoder").is_dir():
        return folder
    if not (folder / "model" / "config.yaml").is_file():
        raise MissingFileError(
            f"{folder} holds no trained model (no model/config.yaml); give a run directory of tools/train.py."
        )
    return folder / "model"
