"""The repository as a whole: README's commands, shipped configs, and what no tracked file may hold."""

from __future__ import annotations

import ast
import re
import subprocess
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import e2e_vl

ROOT = Path(__file__).parents[1]
DEMO_COMMAND = (
    "python3.11 -m venv .venv && .venv/bin/pip install -q -e . && "
    ".venv/bin/accelerate launch tools/train.py --config configs/demo/refcoco.yaml"
)
TEST_COMMAND = (
    'python3.11 -m venv .venv && .venv/bin/pip install -q -e ".[test]" && .venv/bin/pytest -q -n 2 --dist loadfile'
)

# What only means something on one machine. None of these expressions matches its own source.
MACHINE_BOUND = {
    "absolute path": re.compile(r"(?<![\w.~$}-])/(?:work|root|opt|srv|home|Users|tmp)/\w"),
    "package index": re.compile(r"--(?:extra-)?index-url|--find[-]links|pythonhosted[.]org|pypi[.]org/simple"),
    "private address": re.compile(r"\b(?:10|192[.]168)(?:[.]\d{1,3}){2,3}:\d+"),
}


def test_tracked_text_is_not_bound_to_a_machine() -> None:
    try:
        listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    found = []
    for path in (ROOT / name for name in listing.decode().split("\0") if name):
        content = path.read_bytes() if path.is_file() else b"\0"
        if b"\0" in content:
            continue  # binary
        for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), start=1):
            found += [f"{path}:{number}: {kind}" for kind, pattern in MACHINE_BOUND.items() if pattern.search(line)]
    assert not found, "\n".join(found)


def test_readme_and_ci_have_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert DEMO_COMMAND in readme and TEST_COMMAND in readme
    assert len(readme) <= 140
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert DEMO_COMMAND in script and f"\n{TEST_COMMAND}\n" in script
    assert script.index(DEMO_COMMAND) < script.index(TEST_COMMAND)


def test_packages_have_an_init_file() -> None:
    folders = {path.parent for name in ("detector", "e2e_vl") for path in (ROOT / name).rglob("*.py")}
    missing = sorted(str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").is_file())
    assert not missing, f"setuptools would leave these folders out of the installed package: {missing}"


def test_version_is_the_same_everywhere() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "e2e_vl.__version__"}
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == e2e_vl.__version__
    assert f": {e2e_vl.__version__}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


PLACEHOLDERS = {
    "{split}",  # users write it in data.files
    "{id}", "{images}", "{id:0>12}",  # names of image files, filled in with str.format
    "{dim}", "{wavelengths}",  # filled in by jaxtyping
}  # fmt: skip


def names_something(placeholder: str) -> bool:
    """Whether the inside of the braces is an expression with a name in it, as in an f-string."""
    expression = re.split(r"[:!]", placeholder[1:-1])[0].strip()
    try:
        tree = ast.parse(expression, mode="eval")
    except SyntaxError:
        return False
    return any(isinstance(node, ast.Name) for node in ast.walk(tree))


def plain_strings(path: Path) -> Iterator[tokenize.TokenInfo]:
    """Yield the string literals that are no f-strings, also those beside one in a message of several; no docstrings."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            prefix = token.string.partition('"')[0].lower()
            if token.type == tokenize.STRING and "f" not in prefix and '"""' not in token.string:
                yield token


@pytest.mark.parametrize("folder", ["detector", "e2e_vl", "tools"])
def test_no_message_lacks_the_f_of_its_placeholders(folder: str) -> None:
    """Ruff's RUF027 misses those with quotes inside the braces, and finds what is meant as it is."""
    unfilled = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for token in plain_strings(path):
            for placeholder in re.findall(r"\{[^{}]+\}", token.string):
                if placeholder not in PLACEHOLDERS and names_something(placeholder):
                    unfilled.append(f"{path}:{token.start[0]}: {placeholder}")
    assert not unfilled, "\n".join(unfilled)


def test_the_workflow_runs_the_commands_of_ci() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    commands = []
    for line in script.splitlines():
        for command in line.split(" && "):
            name, is_in_environment, words = command.strip().partition(".venv/bin/")
            if is_in_environment and not name:
                commands.append(words)
    assert len(commands) >= 10
    assert not [command for command in commands if command not in workflow]
    matrix = yaml.safe_load(workflow)["jobs"]["tests"]["strategy"]["matrix"]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    versions = [name.rpartition(" ")[2] for name in settings["project"]["classifiers"] if ":: Python :: 3." in name]
    assert len(matrix["os"]) == 3 and set(versions) <= set(matrix["python"])


def test_issue_forms_have_what_github_requires() -> None:
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        if path.stem == "config":
            continue
        assert form["name"] and form["description"]
        ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
        assert ids and len(ids) == len(set(ids))
        assert all("label" in part["attributes"] for part in form["body"] if part["type"] != "markdown")
