"""YAML from anywhere: bounded, without code, one sentence for every fault."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from detector.errors import MissingFileError, UserError
from detector.io import MAX_BYTES, MAX_VALUES, parse_yaml, read_yaml

ROOT = Path(__file__).parents[2]
LAUGHS = "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}' if level else 'ha'] * 10)}]\n" for level in range(12)
)
MERGED = "a0: &a0 {k: 1}\n" + "".join(
    f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 10)}], k{level}: 1}}\n" for level in range(1, 12)
)
FAULTS = [
    ("[" * 100_000, "values are nested more than 50 deep"),
    ("- " * 100_000, "values are nested more than 50 deep"),
    ("{a: " * 100_000, "values are nested more than 50 deep"),
    ("? " * 100_000, "values are nested more than 50 deep"),
    (LAUGHS, f"there are more than {MAX_VALUES} values"),
    (MERGED, f"there are more than {MAX_VALUES} values"),
    ("[" + "1," * 100_000 + "]", f"there are more than {MAX_VALUES} values"),
    ("a: &x [1, *x]", "an alias stands inside of its own anchor"),
    ("a: *secret", "found undefined alias"),
    ("a: !!python/object/apply:os.system [secret]", "a value has a tag that is not read"),
    ("a: !!python/name:os.system", "a value has a tag that is not read"),
    ("a: !!timestamp secret", "a value has a tag that is not read"),
    ("a: !!binary c2VjcmV0", "a value has a tag that is not read"),
    ("a: !!set {secret}", "a value has a tag that is not read"),
    ("a: !!int secret", "a value cannot be read"),
    ("a: !!float secret", "a value cannot be read"),
    ("a: !!bool secret", "a value cannot be read"),
    ("secret: 1\nb: 2\nsecret: 3", "found duplicate key (line 3, column 1)"),
    ("1: a\n0x1: b", "found duplicate key (line 2, column 1)"),
    ("? [secret]\n: 1", "a key is not a plain text"),
    ("a: " + "9" * 5000, "a number has more than 60 characters"),
    ("a: " + ":".join(["1"] + ["59"] * 5000), "a number has more than 60 characters"),
    ("a: secret\0", "special characters are not allowed"),
    ("secret: 1\n---\nb: 2", "expected a single document in the stream, but found another document"),
    ("secret: a: b", "mapping values are not allowed here"),
    ("a: @secret", "found character '@' that cannot start any token"),
    ("<<: secret", "expected a mapping or list of mappings for merging"),
    ("a: [secret", "expected ',' or ']', but got '<stream end>'"),
    ('a: "\\secret"', "found unknown escape character 's'"),
    ("#" * (MAX_BYTES + 1), "it has more than"),
    ("%a\n" * 150_000, "expected '<document start>', but found '<stream end>'"),  # PyYAML's slowest
]


@pytest.mark.parametrize(("text", "problem"), FAULTS, ids=[problem[:30] for _, problem in FAULTS])
def test_a_fault_is_one_short_sentence_soon(text: str, problem: str):
    begin = time.process_time()
    with pytest.raises(UserError) as error:
        parse_yaml(text, "a.yaml")
    message = str(error.value)
    assert message.startswith(f"a.yaml is not valid YAML: {problem}") and message.endswith(".")
    assert "\n" not in message and len(message) < 200
    assert "secret" not in message  # it never quotes the text
    assert time.process_time() - begin < 20  # 3.5 s at most on one core


def test_files(tmp_path: Path):
    path = tmp_path / "a.yaml"
    with pytest.raises(MissingFileError, match=r"a\.yaml: no such settings file"):
        read_yaml(path)
    with pytest.raises(MissingFileError, match="no such settings file"):
        read_yaml(tmp_path)
    path.write_bytes(b"a: \xff\xfe")
    with pytest.raises(UserError, match=r"a\.yaml is not valid YAML: byte 3 is not utf-8 text; save it as UTF-8\.$"):
        read_yaml(path)
    path.write_bytes(b"a" * (MAX_BYTES + 1))
    with pytest.raises(UserError, match=r"a\.yaml is not a settings file: it has more than 524288 bytes"):
        read_yaml(path)
    path.write_bytes(b"")
    assert read_yaml(path) is None
    path.write_bytes("\ufeffa: ä".encode())
    assert read_yaml(path) == {"a": "ä"}


def test_plain_values():
    text = (
        "a: 1e-5\nb: 1E5\nc: -1.5e3\nd: .5e1\ne: 0x1f\nf: 1_000\ng: 1.0e-05\nh: e5\ni: 1e\nj: .inf\nk: ~\nl: yes\n"
        "m: 2001-01-01\nn: &n [1, {x: 2}]\no: *n\np: '1'\nq: !!str 1\nr: {<<: {y: 1, z: 2}, z: 3}\n1: one\n"
    )
    assert parse_yaml(text, "a.yaml") == {
        "a": 1e-5,
        "b": 1e5,
        "c": -1500.0,
        "d": 5.0,
        "e": 31,
        "f": 1000,
        "g": 1e-5,
        "h": "e5",
        "i": "1e",
        "j": float("inf"),
        "k": None,
        "l": True,
        "m": "2001-01-01",
        "n": [1, {"x": 2}],
        "o": [1, {"x": 2}],
        "p": "1",
        "q": "1",
        "r": {"y": 1, "z": 3},
        1: "one",
    }


def test_all_shipped_files_are_read_as_a_safe_loader_reads_them():
    files = [*ROOT.glob("configs/**/*.yaml"), *ROOT.glob("detector/published/*.yaml")]
    assert len(files) > 50
    for file in files:
        found, expected = read_yaml(file), yaml.safe_load(file.read_text(encoding="utf-8"))
        assert _numbers(found) == _numbers(expected), file


def _numbers(value):
    """YAML 1.1 takes 1e-5 for a text."""
    if isinstance(value, dict):
        return {key: _numbers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_numbers(one) for one in value]
    try:
        return float(value) if isinstance(value, str) and value[:1].isdigit() and "e" in value else value
    except ValueError:
        return value


def test_nothing_else_reads_yaml():
    names = ("yaml.load(", "yaml.safe_load(", "yaml.full_load(", "yaml.unsafe_load(", "OmegaConf.load(", "CLoader")
    for package in ("detector", "e2e_vl", "tools"):
        for file in (ROOT / package).rglob("*.py"):
            found = [name for name in names if name in file.read_text(encoding="utf-8")]
            assert not found or file.name == "yaml_text.py", f"{file}: {found}; use detector/io.py"
