"""Reading YAML from anywhere: all YAML of this project is read here, in bounded time and memory, and without any code.

A message says what is wrong and in which line, and never quotes the file: a settings file may name any other file as
its base, and what is no settings file may hold secrets.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

from detector.errors import MissingFileError, UserError
from detector.file_faults import reading

MAX_BYTES = 1 << 19
MAX_DEPTH = 50  # values in values
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
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
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
    if len(text) > MAX_BYTES:
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
