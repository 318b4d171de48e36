"""The writer of files and folders: each is there as a whole or not at all. Everything that is kept is written by it.

What is written goes beside its place first, reaches the disk, and only then takes its name. A process that is killed,
or a disk that is full, therefore never leaves half of something under the name of the whole. What a killed process
left beside it has a name that begins with a dot and ends with `.part` or `.old`; `remove_leftovers` takes it away.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import yaml

from detector.errors import MissingFileError, UserError, reading

_PART, _OLD = ".part", ".old"
_STREAMS = (Path("/dev"), Path("/dev/fd"))


def write_text(path: Path, text: str) -> None:
    """Write a text file in one step."""
    with atomic_file(path) as part:
        part.write_text(text, encoding="utf-8", newline="\n")


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Gives the path to write to; at the end of the block the file takes its name. After an error nothing is left.

    Several may write it at once: each writes a file of its own, and who reads finds one of them, whole. A pipe or a
    device, such as `/dev/stdout`, is written as it is.
    """
    if _is_stream(path):
        yield path
        return
    part = _beside(path, f".{os.getpid()}.{threading.get_native_id()}{_PART}")
    try:
        yield part
        take_place(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def take_place(part: Path, path: Path) -> None:
    """Give a file that is complete its name, once it has reached the disk; both lie in one folder."""
    _reach_disk(part)
    part.replace(path)
    _reach_disk(path.parent)


def _is_stream(path: Path) -> bool:
    return path.parent in _STREAMS or (path.exists() and not path.is_file() and not path.is_dir())


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Gives an empty folder to write to; at the end of the block it takes the place of `folder`.

    After an error nothing is left of it, and the earlier folder is as it was.
    """
    part = begin_folder(folder)
    try:
        yield part
        finish_folder(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


@contextlib.contextmanager
def atomic_files(folder: Path, last: str) -> Iterator[Path]:
    """Gives an empty folder to write to; at the end of the block what is in it takes its place in `folder`.

    What `folder` holds besides stays. Until all is in place it does not hold `last`, so that nobody takes a mixture of
    new and earlier files for the whole.

    Args:
        last: name of the file without which a folder of this kind is not read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    part = begin_folder(folder / last)
    try:
        yield part
        _reach_disk_all(part)
        (folder / last).unlink(missing_ok=True)
        for made in sorted(part.iterdir(), key=lambda path: path.name == last):
            place = folder / made.name
            if place.is_dir():
                shutil.rmtree(place)
            made.replace(place)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    _reach_disk(folder)


def begin_folder(folder: Path) -> Path:
    """The empty folder beside `folder` in which it is written, for processes that write together; one of them calls."""
    part = part_of(folder)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    return part


def part_of(folder: Path) -> Path:
    """The folder that `begin_folder` makes."""
    return _beside(folder, _PART)


def finish_folder(folder: Path) -> None:
    """Give the folder that `begin_folder` made its name, once everything in it has reached the disk."""
    part, old = part_of(folder), _beside(folder, _OLD)
    _reach_disk_all(part)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    part.rename(folder)
    _reach_disk(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left of files and folders that they were writing into `folder`.

    Where only the old one of two folders is left under its other name, it gets its name back.
    """
    for old in folder.glob(f".*{_OLD}"):
        place = old.with_name(old.name[1 : -len(_OLD)])
        if place.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(place)
    for part in folder.glob(f".*{_PART}"):
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(f".{path.name}{ending}")


def _reach_disk_all(folder: Path) -> None:
    for path in folder.rglob("*"):
        _reach_disk(path)
    _reach_disk(folder)


def _reach_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Reading the JSON files of runs and saved models, wherever they come from, in bounded time and memory.


MAX_BYTES = 1 << 24  # of a file of settings or numbers
MAX_DEPTH = 50  # lists and objects in each other
LARGEST = 1 << 128  # transformers writes 1e30 for a length without a limit
_KINDS = {dict: "an object of names and values", list: "a list"}


def read_plain_json(
    path: str | Path, kind: type | None = dict, keys: tuple[str, ...] = (), *, max_bytes: int = MAX_BYTES
) -> Any:
    """The content of a JSON file.

    Args:
        path: the file.
        kind: dict or list, which the content must be; None: it may be anything.
        keys: an object must have these.
        max_bytes: a larger file is refused.

    Raises:
        MissingFileError: there is no such file.
        UserError: it is too large, not UTF-8 or not JSON, has lists or objects too deep in each other, NaN, infinity or
            a number beyond 128 bits, is of another kind, or lacks a key.
    """
    path = Path(path)
    if not path.is_file():
        raise MissingFileError(f"{path}: no such file; get the whole folder again.")
    with reading(path), path.open("rb") as file:
        # `read` takes as much memory as it is asked for, before it knows how much there is
        content = file.read(min(max_bytes, os.fstat(file.fileno()).st_size) + 1)
    if len(content) > max_bytes:
        raise UserError(f"{path} has more than {max_bytes} bytes, too many for such a file; get the file again.")
    found = parse_plain_json(content, f"{path}")
    if kind is not None and not isinstance(found, kind):
        raise UserError(f"{path} does not hold {_KINDS[kind]}; get the file again.")
    missing = [key for key in keys if key not in found]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}; get the file again.")
    return found


def parse_plain_json(text: str | bytes, name: str) -> Any:
    """The content of a JSON text; `name` begins the message.

    Raises:
        UserError: as for `read_plain_json`.
    """
    try:
        found = json.loads(
            text.decode("utf-8") if isinstance(text, bytes) else text,
            parse_constant=_refused,
            object_pairs_hook=_each_key_once,
        )
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not JSON: byte {error.start} is not utf-8 text; get the file again.") from error
    except json.JSONDecodeError as error:
        place = f"{error.msg.lower()} in line {error.lineno}, column {error.colno}"
        raise UserError(f"{name} is not JSON ({place}); get the file again.") from error
    except RecursionError:
        raise UserError(f"{name}: {_TOO_DEEP}; get the file again.") from None
    except _RefusedError as error:
        raise UserError(f"{name} holds {error}; get the file again.") from None
    except ValueError as error:  # Python reads no number of more than 4,300 digits
        raise UserError(f"{name} holds a number of too many digits; get the file again.") from error
    if has_half_characters(text, found):
        raise UserError(f"{name}: a text holds half of a character (a lone surrogate); get the file again.")
    problem = _out_of_bounds(found)
    if problem is not None:
        raise UserError(f"{name}: {problem}; get the file again.")
    return found


def has_half_characters(text: str | bytes, found: Any) -> bool:
    """Whether a text of a parsed JSON value has half of a character, which no tokenizer takes and no file can hold.

    Args:
        text: what was parsed; most texts hold nothing that may mean such a half, so that the value is not looked at.
        found: the value.
    """
    may_be = _HALVES[type(text) is not str].search(text)
    below = [found] if may_be else []
    while below:
        value = below.pop()
        if isinstance(value, str):
            if _HALF.search(value):
                return True
        elif isinstance(value, dict):
            below += [*value, *value.values()]
        elif isinstance(value, list):
            below += value
    return False


_HALF = re.compile("[\ud800-\udfff]")
# as an escape, or as it is; characters outside the basic plane are escaped as two halves
_HALVES = (re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]"), re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]"))
_TOO_DEEP = f"its lists and objects are more than {MAX_DEPTH} deep in each other"


class _RefusedError(Exception):
    """A constant that JSON does not have, or a name twice in one object."""


def _refused(constant: str) -> None:
    raise _RefusedError(f"{constant}, which is not JSON")


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise _RefusedError(f"the name {twice[:100]!r} twice")
    return found


def _out_of_bounds(found: Any) -> str | None:
    """What is too deep or too large in a parsed text, if anything."""
    level, depth = [found], 0
    while level:
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below.extend(value.values())
            elif isinstance(value, list):
                below.extend(value)
            elif isinstance(value, float):
                if not math.isfinite(value):
                    return "a number is too large"
            elif isinstance(value, int) and not -LARGEST <= value < LARGEST:
                return "a whole number has more than 128 bits"
        depth += any(isinstance(value, dict | list) for value in level)
        if depth > MAX_DEPTH:
            return _TOO_DEEP
        level = below
    return None


# Reading YAML from anywhere: all YAML of this project is read here, in bounded time and memory, and without any code.


MAX_BYTES_YAML_TEXT = 1 << 19
MAX_VALUES = 20_000  # an alias (`*name`) counts as many as it stands for
LONGEST_NUMBER = 60  # characters
_NO_TEXT = re.compile("[\ud800-\udfff]")  # halves of characters, which no UTF-8 file can hold
SUFFIX = ".yaml"  # of every file that another settings file names

_TAG = "tag:yaml.org,2002:"
_TAGS = tuple(_TAG + kind for kind in ("null", "bool", "int", "float", "str", "seq", "map", "merge"))
_EXPONENT = re.compile(r"(?:[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)[eE][-+]?[0-9]+)$")  # YAML 1.1: 1e-5 is a text


def _recognised(safe: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """First character -> tags and patterns of the values without a tag that are no texts."""
    found = {first: [pair for pair in pairs if pair[0] in _TAGS] for first, pairs in safe.items()}
    return found | {first: [*found.get(first, []), (f"{_TAG}float", _EXPONENT)] for first in "-+.0123456789"}


class PlainLoader(yaml.SafeLoader):
    """Gives texts, numbers, truth values, null, lists and mappings; nothing else, each key once.

    Dates stay texts. A value with another tag is refused; a subclass may read it.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._values = 0
        self._sizes: dict[int, int] = {}  # values below a node that is complete, by its identity

    def compose_node(self, parent: Any, index: Any) -> yaml.Node:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            node = super().compose_node(parent, index)
            if id(node) not in self._sizes:
                raise _problem("an alias stands inside of its own anchor", event.start_mark)
            self._count(self._sizes[id(node)], event.start_mark)
            return node
        before = self._values
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _problem(f"values are nested more than {MAX_DEPTH} deep", event.start_mark)
        self._count(1, event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        self._sizes[id(node)] = self._values - before
        return node

    def _count(self, number: int, mark: Any) -> None:
        self._values += number
        if self._values > MAX_VALUES:
            raise _problem(f"there are more than {MAX_VALUES} values, with what aliases stand for", mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        if isinstance(node, yaml.MappingNode):
            seen: set[Any] = set()
            for key, _ in node.value:
                if key.tag == f"{_TAG}merge":
                    continue
                if not isinstance(key, yaml.ScalarNode):
                    raise _problem("a key is not a plain text", key.start_mark)
                found = self.construct_object(key, deep=True)
                if found in seen:
                    raise _problem("found duplicate key", key.start_mark)
                seen.add(found)
        return super().construct_mapping(node, deep=deep)

    def construct_scalar(self, node: yaml.Node) -> Any:
        text = super().construct_scalar(node)
        if _NO_TEXT.search(text):
            raise _problem("a text holds half of a character, by an escape", node.start_mark)
        return text

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        return super().construct_yaml_int(_short(node))

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        return super().construct_yaml_float(_short(node))

    def construct_unread(self, node: yaml.Node) -> None:
        raise _problem("a value has a tag that is not read; write a plain value", node.start_mark)

    yaml_constructors: ClassVar[dict[Any, Any]] = {
        **{tag: make for tag, make in yaml.SafeLoader.yaml_constructors.items() if tag in _TAGS},
        f"{_TAG}int": construct_yaml_int,
        f"{_TAG}float": construct_yaml_float,
        None: construct_unread,
    }
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = _recognised(yaml.SafeLoader.yaml_implicit_resolvers)


def read_yaml(path: str | Path, loader: type[PlainLoader] = PlainLoader) -> Any:
    """The content of a YAML file; None for an empty one.

    Args:
        loader: for values with tags of their own.

    Raises:
        MissingFileError: there is no such file.
        UserError: it is not YAML, or has more of something than the limits at the top of this file allow.
    """
    path = Path(path)
    if not path.is_file():
        raise MissingFileError(f"{path}: no such settings file; check the path.")
    with reading(path), path.open("rb") as file:
        content = file.read(MAX_BYTES_YAML_TEXT + 1)
    if len(content) > MAX_BYTES_YAML_TEXT:
        raise UserError(f"{path} is not a settings file: it has more than {MAX_BYTES} bytes; name another file.")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not valid YAML: byte {error.start} is not utf-8 text; save it as UTF-8.") from error
    return parse_yaml(text, f"{path}", loader)


def parse_yaml(text: str, name: str, loader: type[PlainLoader] = PlainLoader) -> Any:
    """The content of a YAML text; `name` begins the message.

    Raises:
        UserError: as for `read_yaml`.
    """
    if len(text) > MAX_BYTES_YAML_TEXT:
        raise UserError(f"{name} is not valid YAML: it has more than {MAX_BYTES} characters; write less.")
    try:
        return yaml.load(text, Loader=loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, LookupError, OverflowError, AttributeError, RecursionError) as error:
        # PyYAML raises the others for values with a tag that they do not fit
        raise UserError(f"{name} is not valid YAML: {yaml_problem(error)}.") from None


def yaml_problem(error: Exception) -> str:
    """What the parser complains about and where, in one line without words of the text."""
    mark = getattr(error, "problem_mark", None)
    problem = str(getattr(error, "problem", None) or getattr(error, "reason", None) or "a value cannot be read")
    if problem.startswith("but found") and getattr(error, "context", None):
        problem = f"{error.context}, {problem}"
    problem = _QUOTED.sub(lambda found: found[0] if _says_a_kind(found[2]) else "", problem.splitlines()[0])
    problem = re.sub(r"; first occurrence.*| +(?=[,;]|$)", "", problem).strip().rstrip(".,;:")
    place = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
    return f"{problem}{place}"


_QUOTED = re.compile(r"""(['"])((?:(?!\1).)*)\1""")


def _says_a_kind(quoted: str) -> bool:
    """Whether it is a sign, or a kind of token such as <block end>; everything else may be words of the text."""
    return len(quoted) <= 1 or quoted in ("\\t", "\\n") or (quoted.startswith("<") and quoted.endswith(">"))


def _problem(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def _short(node: yaml.ScalarNode) -> yaml.ScalarNode:
    """The node of a number that takes no time to read."""
    if isinstance(node, yaml.ScalarNode) and len(node.value) > LONGEST_NUMBER:
        raise _problem(f"a number has more than {LONGEST_NUMBER} characters", node.start_mark)
    return node
