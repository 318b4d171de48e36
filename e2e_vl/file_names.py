"""Names that stand in files from outside, such as ids of images, as names of files and as paths inside a folder.

`name_of` is the only way from an id to the name of a file that is written, and `inside` the only way from a name in a
file to a path. An id keeps its slashes, which become folders, and everything else that is harmless on all systems;
what is not (`..`, a drive letter, a NUL, the device `con` of Windows) is written as `%` and two digits per byte.
"""

from __future__ import annotations

import os
import re
import string
import unicodedata
from collections.abc import Iterable
from pathlib import Path, PureWindowsPath
from urllib.parse import unquote_to_bytes

from detector.errors import UserError

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


def given_path(name: str | Path, what: str) -> Path:
    """A path as a user names it, with `~` for a home folder; whether there is a file is left to the reader.

    Args:
        what: begins the message.

    Raises:
        UserError: no file can have this name, its links lead to each other, or `~name` is nobody's home.
    """
    try:
        path = Path(name).expanduser()
        path.exists()
        path.resolve()
    except RuntimeError:
        reason = "its links lead to each other, or ~ stands before the name of nobody"
    except ValueError:  # a zero byte, half of a character
        reason = "no file can have this name"
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
    else:
        return path
    raise UserError(f"{what} {shown(str(name))} cannot be looked for ({reason}); give another path.")


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
