"""The repository as a whole: what its files must and must not hold."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import e2e_vl

ROOT = Path(__file__).parents[1]
TOOLS = sorted([*(ROOT / "tools").glob("*/*.py"), *(ROOT / "e2e_vl" / "commands").glob("*.py")])
SCRIPTS = sorted((ROOT / "tools").glob("*.py"))
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))

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


def machine_bound(text: str) -> list[str]:
    """`line number: kind: match` of everything in a text that ties it to one machine."""
    return [
        f"{number}: {kind}: {match[0]}"
        for number, line in enumerate(text.splitlines(), start=1)
        for kind, pattern in MACHINE_BOUND.items()
        for match in pattern.finditer(line)
    ]


def tracked_files() -> list[Path]:
    try:
        listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [path for name in listing.decode().split("\0") if name and (path := ROOT / name).is_file()]


def test_tracked_text_is_not_bound_to_a_machine() -> None:
    found = []
    for path in tracked_files():
        content = path.read_bytes()
        if b"\0" in content:
            continue  # binary
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}:{line}" for line in machine_bound(text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "data: " + "/".join(["", "root", "data"]),
        "see " + "/".join(["", "tmp", "x.txt"]),
        "('" + "/".join(["", "home", "me"]) + "')",
        "pip install -" + "-index-url https://example.com/",
        "--find" + "-links wheels",
        "https://files.pythonhosted" + ".org/packages",
        "http://" + "10.0.0.1" + ":8080/",
    ],
)
def test_machine_bound_text_is_found(text: str) -> None:
    assert len(machine_bound(f"fine\n{text}\n")) == 1


@pytest.mark.parametrize("text", ["https://example.com/work/x", "frame/work/x", "#!/usr/bin/env bash", "$DIR/tmp/x"])
def test_portable_text_is_not_flagged(text: str) -> None:
    assert machine_bound(text) == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_config_is_yaml_with_a_comment_on_top(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("#"), f"{path.name} must start with a comment: what it is, the command, the expected result."
    assert isinstance(yaml.safe_load(text), dict)


@pytest.mark.parametrize("path", TOOLS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_command_has_a_docstring_and_a_main_that_takes_argv(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{path.relative_to(ROOT)} needs a module docstring: what it does."
    mains = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    if not mains:
        return  # a module that its neighbours share
    names = [argument.arg for node in mains for argument in node.args.args]
    assert names in (["argv"], ["argv", "prog"])
    assert len(mains[0].args.defaults) == len(names), "main() without arguments must read the command line"
    guards = [ast.unparse(node.test) for node in tree.body if isinstance(node, ast.If)]
    assert "__name__ == '__main__'" in guards or names == ["argv", "prog"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_script_calls_its_command(path: Path) -> None:
    """Three lines below a docstring; the logic is in e2e_vl/cli/."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported, guard = tree.body[1:]
    assert imported.module.startswith("e2e_vl.cli.") and imported.module.replace(".", "/") in ast.get_docstring(tree)
    assert [name.asname or name.name for name in imported.names] == ["main"]
    assert ast.unparse(guard) == "if __name__ == '__main__':\n    raise SystemExit(main())"


def test_readme_shows_the_two_commands() -> None:
    blocks = re.findall(
        r"^```\w*\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    commands = [line.strip() for block in blocks for line in block.splitlines()]
    assert DEMO_COMMAND in commands
    assert TEST_COMMAND in commands


def test_ci_runs_the_readme_test_command() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111, ".ci/run must be executable"
    subprocess.run(["bash", "-n", script], check=True)
    lines = script.read_text(encoding="utf-8").replace('"', "").replace("$venv", ".venv").splitlines()
    for step in TEST_COMMAND.replace('"', "").split(" && "):
        assert step in lines, f".ci/run must do what the README says: {step}"


def test_packages_have_an_init_file() -> None:
    folders = {path.parent for name in ("detector", "e2e_vl") for path in (ROOT / name).rglob("*.py")}
    assert folders
    missing = sorted(str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").is_file())
    assert not missing, f"setuptools would leave these folders out of the installed package: {missing}"


def test_version_is_the_same_everywhere() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" in settings["project"]["dynamic"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "e2e_vl.__version__"}
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == e2e_vl.__version__
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines() if line[:3] == "## "]
    assert any(e2e_vl.__version__ in heading for heading in headings)
