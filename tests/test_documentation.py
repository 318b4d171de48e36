"""Paths, names, settings and commands in pages, config headers and docstrings of commands are valid."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import sys
import typing
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from e2e_vl.cli.main import COMMANDS as CONSOLE_COMMANDS
from e2e_vl.cli.main import main as console_main
from e2e_vl.config import RunConfig
from e2e_vl.config_files import load_config

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "configs" / "demo" / "refcoco.yaml"
DOCS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
PAGES = ("README.md", "CONTRIBUTING.md", *DOCS)
TOOLS = sorted(  # scripts, relative to tools/
    path.relative_to(ROOT / "tools").as_posix()
    for path in (ROOT / "tools").rglob("*.py")
    if '\nif __name__ == "__main__"' in path.read_text(encoding="utf-8")
)
CONSOLE = "e2e-vl"  # the console script, listed among the tools
COMMANDS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "e2e_vl" / "cli").glob("[a-z]*.py"))
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
FOLDERS = ("detector", "e2e_vl", "configs", "docs", "tests", "tools", ".ci")
SECTIONS = [name for name in RunConfig.__struct_fields__ if name not in ("output", "seed")]

CODE_BLOCK = re.compile(r"^ *```\w*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
SETTING = re.compile(r"[a-z_]+(\.\w+)*=\S.*")  # train.lr=1e-5
DOTTED = re.compile(rf"({'|'.join(SECTIONS)})(\.[a-z_]+)+")  # train.lr
FILE = re.compile(r"\w+\.(html|json|jsonl|md|toml|txt|yaml)")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*(\.\w+)*(\(.*\))?")  # ReferringTask, forward(batch, regions, encoded)
TOOL_CALL = re.compile(r"(?<![\w/])(?:tools/((?:\w+/)?\w+\.py)\b|(?<!`)(e2e-vl|-m (?:-- )?e2e_vl) (?=[a-z]))(.*)")


def read(path: str | Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def code_spans(page: str) -> list[str]:
    """The code spans of a page, outside of code blocks."""
    return CODE_SPAN.findall(CODE_BLOCK.sub("", read(page)))


def code_lines(file: str) -> list[str]:
    """The command lines of a file; continued lines are joined."""
    if file.endswith(".md"):
        text = "\n".join(CODE_BLOCK.findall(read(file)))
    elif file.endswith(".py"):
        strings = "\n".join(read(file).split('"""')[1::2])  # docstrings, and help of commands that share a file
        text = "\n".join(line for line in strings.splitlines() if line.startswith("    "))
    else:
        text = "\n".join(line[1:] for line in read(file).splitlines() if line.startswith("#   "))
    return re.sub(r"\\+\n", " ", text).splitlines()  # in a docstring the backslash is doubled


def calls_of_tools() -> list[tuple[str, str, list[str]]]:
    """(file, tool, arguments) of every command in pages, config headers and docstrings of commands."""
    configs = [path.relative_to(ROOT).as_posix() for path in CONFIGS]
    files = [*PAGES, *configs, *(f"tools/{tool}" for tool in TOOLS), *COMMANDS]
    found = [(file, *call) for file in files for line in code_lines(file) for call in TOOL_CALL.findall(line)]
    return [(file, tool or CONSOLE, shlex.split(rest, comments=True)) for file, tool, _, rest in found]


CALLS = calls_of_tools()


@pytest.fixture(scope="session")
def tool_mains() -> dict[str, Callable]:
    """Tool -> its `main`."""
    mains = {CONSOLE: console_main}
    for tool in TOOLS:
        path = ROOT / "tools" / tool
        spec = importlib.util.spec_from_file_location(f"documented_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        mains[tool] = module.main
    return mains


# Links, paths and names


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_relative_links_lead_to_files(page: str) -> None:
    targets = [target for target in LINK.findall(CODE_BLOCK.sub("", read(page))) if "://" not in target]
    missing = [target for target in targets if not (ROOT / Path(page).parent / target.partition("#")[0]).exists()]
    assert "TODO" not in read(page)
    assert not missing, f"{page} links to {', '.join(missing)}"


@pytest.mark.parametrize("page", PAGES)
def test_paths_names_and_settings_in_backticks_exist(page: str) -> None:
    spans = code_spans(page)
    paths = [span for span in spans if span.split("/")[0] in FOLDERS and "/" in span]
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing, f"{page} names {', '.join(missing)}"
    files = [path for folder in ("detector", "e2e_vl", "tools") for path in (ROOT / folder).rglob("*.py")]
    others = ["detector/published_weights.yaml", "tests/conftest.py", "pyproject.toml"]
    source = "\n".join(read(path) for path in [*files, *CONFIGS, *others])
    words = set(re.findall(r"\w+", source))
    names = [span for span in spans if IDENTIFIER.fullmatch(span) and not FILE.fullmatch(span)]
    unknown = [name for name in names if not words.issuperset(re.findall(r"\w+", name))]
    assert not unknown, f"{page} names {', '.join(unknown)}, which no source file has"
    keys = [span.partition("=")[0] for span in spans if SETTING.fullmatch(span)]
    keys = [key for key in keys if "." in key] + list(filter(DOTTED.fullmatch, spans))
    unknown = [key for key in keys if not is_setting(key)]
    assert not unknown, f"{page} names the settings {', '.join(unknown)}, which e2e_vl/config.py does not have"


def is_setting(key: str) -> bool:
    """Whether a dotted key leads to a field, or into settings that take any key."""
    kind: object = RunConfig
    for part in key.split("."):
        kinds = [kind, *typing.get_args(kind)]
        structs = [one for one in kinds if isinstance(one, type) and issubclass(one, msgspec.Struct)]
        if not structs:
            return kind is typing.Any or typing.get_origin(kind) is dict
        found = {field.name: field.type for field in msgspec.structs.fields(structs[0])}
        if part not in found:
            return False
        kind = found[part]
    return True


def test_pages_name_much_that_is_checked() -> None:
    assert is_setting("train.lr") and is_setting("data.files.refs")
    assert not any(map(is_setting, ("train.rate", "train.lr.x", "nothing.lr")))
    spans = [span for page in PAGES for span in code_spans(page)]
    assert len([span for span in spans if span.split("/")[0] in FOLDERS]) > 60
    assert len(list(filter(IDENTIFIER.fullmatch, spans))) > 100 and len(list(filter(DOTTED.fullmatch, spans))) > 20


# Commands


def test_the_pages_show_every_tool_and_every_tool_an_example() -> None:
    assert {"train.py", "benchmark.py", "experiments/compare.py"} <= set(TOOLS)
    assert {tool for file, tool, _ in CALLS if file == "docs/commands.md"} - {CONSOLE} == set(TOOLS)
    own = {tool for file, tool, _ in CALLS if file.startswith(("tools/", "e2e_vl/cli/"))}
    assert own - {CONSOLE} == set(TOOLS) - {"extract_demo.py"}  # its page of help is that of `e2e-vl extract`
    assert {words[0] for _, tool, words in CALLS if tool == CONSOLE} == set(CONSOLE_COMMANDS)


class ParsedError(Exception):
    """Raised instead of running a command whose arguments are valid."""


def only_parsed(parse: Callable) -> Callable:
    def parse_and_stop(parser: argparse.ArgumentParser, *args, **kwargs):
        parsed = parse(parser, *args, **kwargs)
        if parser.prog == CONSOLE:  # it knows the command, which parses its own arguments
            return parsed
        assert not isinstance(parsed, tuple) or not parsed[1], f"unknown: {parsed[1]}"
        raise ParsedError

    return parse_and_stop


@pytest.mark.parametrize(("file", "tool", "words"), CALLS, ids=[f"{call[0]}-{i}" for i, call in enumerate(CALLS)])
def test_a_call_of_a_tool_is_valid(file, tool, words, tool_mains, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    for name in ("parse_args", "parse_known_intermixed_args"):
        monkeypatch.setattr(argparse.ArgumentParser, name, only_parsed(getattr(argparse.ArgumentParser, name)))
    with pytest.raises(ParsedError):
        tool_mains[tool](["docs" if word == "FOLDER" else word for word in words])  # an existing folder
    for word in words:
        if word.startswith("configs/"):
            assert (ROOT / word).is_file(), f"{file}: there is no {word}"
    others = ("configs/detector/", "configs/accelerate/")
    options = ["", *words]  # the word before each
    named = [word for word, option in zip(words, options, strict=False) if option != "--variants"]
    runs = [word for word in named if word.startswith("configs/") and not word.startswith(others)]
    config = next(iter(runs), DEMO)
    if runs or not any(word.startswith(("task.config", "encoder.config", "data.config")) for word in words):
        load_config(config, [word for word in words if SETTING.fullmatch(word)])
