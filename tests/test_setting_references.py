"""What settings may refer to: each other, and nothing else."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from detector.errors import UserError
from e2e_vl.config import load_config, load_overrides, read_detector_config, save_config, saved_version
from e2e_vl.setting_references import check_references

MINIMAL = """
output: runs/x
encoder: {name: vl_bert}
task: {name: refcoco}
data: {name: refcoco, root: data/x, files: {images: i, refs: r}}
"""
SECRET = "E2E_VL_TEST_SECRET"
OTHER_USES = [
    "${oc.env:E2E_VL_TEST_SECRET}",
    "x${oc.env:E2E_VL_TEST_SECRET,default}y",
    "${oc.decode:${oc.env:E2E_VL_TEST_SECRET}}",
    "${oc.create:{a: 1}}",
    "${oc.select:data.root}",
    "${oc.dict.keys:data}",
    "${oc.deprecated:data.root}",
    "${data.${task.name}}",
    "${.root}",
    "${..output}",
    "${data[root]}",
    "${ data.root }",
    "${}",
    "${",
    "\\${data.root}",
    "${data.root",
    "$${oc.env:E2E_VL_TEST_SECRET}",
    "${data.root}${oc.env:E2E_VL_TEST_SECRET}",
]


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "do not tell")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(tmp_path / "base.yaml", MINIMAL)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def refused(path: Path, words: list[str] | None = None) -> str:
    with pytest.raises(UserError) as error:
        load_config(path, words)
    assert "\n" not in str(error.value) and "do not tell" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("value", OTHER_USES)
def test_every_other_use_is_refused_in_a_file_a_base_and_a_word(value: str, base: Path, tmp_path: Path):
    child = write(tmp_path / "child.yaml", f"base: base.yaml\ndata: {{files: {{images: {json.dumps(value)}}}}}\n")
    sentence = "data.files.images has '${' in another use than ${section.setting}, the value of another setting; write"
    assert refused(child).startswith(f"{child}: {sentence}")
    grandchild = write(tmp_path / "grandchild.yaml", "base: child.yaml\n")
    assert refused(grandchild).startswith(f"{child}: {sentence}")
    assert "data.files.images has '${' in another use" in refused(base, [f"data.files.images={json.dumps(value)}"])
    with pytest.raises(UserError):
        load_overrides([f"detector.overrides.X={json.dumps(value)}"])


@pytest.mark.parametrize("text", ["data: {files: {'${oc.env:HOME}': a}}", "base: ${oc.env:HOME}.yaml"])
def test_keys_and_bases_too(text: str, tmp_path: Path):
    assert "${" in refused(write(tmp_path / "a.yaml", text))


def test_lists_and_what_is_nested():
    with pytest.raises(UserError, match=r"^a\.yaml: a\.b\[1\]\.c\[0\] has "):
        check_references({"a": {"b": [1, {"c": ["${oc.env:HOME}"]}]}}, "a.yaml")
    check_references({"a": ["${b.c} and ${d}", "$5", "{x}", "$"]}, "a.yaml")


def test_a_reference_to_another_setting_is_its_value(base: Path, tmp_path: Path):
    child = write(tmp_path / "child.yaml", "base: base.yaml\noutput: runs/${task.name}_${seed}\nseed: 7\n")
    config = load_config(child, ["data.files.x=${data.root}"])
    assert config.output.endswith("_7") and "$" not in config.output
    assert config.data.files["x"] == config.data.root
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("output: ${data}", "output refers to data, which is not one plain value"),
        ("output: ${data.files}", "output refers to data.files, which is not one plain value"),
        ("output: ${output}", "output refers to output, which is not one plain value"),
        ("output: ${data.files.a}\ndata: {files: {a: '${seed}'}}", "output refers to data.files.a, which is not one"),
        (f"output: ${{data.files.a}}\ndata: {{files: {{a: {'x' * 1001}}}}}", "a text of more than 1000 characters"),
        ("data: {files: {" + ", ".join(f"a{n}: '{'${seed}' * 11}'" for n in range(100)) + "}}", "more than 1000 times"),
        ('output: "${data.files.a}{oc.env:HOME}"\ndata: {files: {a: $}}', "output becomes a text with '${'"),
    ],
)
def test_references_stay_small_and_are_resolved_once(text: str, message: str, base: Path, tmp_path: Path):
    child = write(tmp_path / "child.yaml", f"base: base.yaml\n{text}\n")
    assert message in refused(child) and refused(child).startswith(f"{child}: ")


def test_doubling_references_take_no_time(base: Path, tmp_path: Path):
    files = ", ".join(f"a{n}: '${{data.files.a{n + 1}}}${{data.files.a{n + 1}}}'" for n in range(60)) + ", a60: x"
    child = write(tmp_path / "child.yaml", f"base: base.yaml\ndata: {{files: {{{files}}}}}\n")
    begin = time.process_time()
    assert "which is not one plain value" in refused(child)
    assert time.process_time() - begin < 10


def test_settings_of_detectors(tmp_path: Path, base: Path):
    """Their YAML knows no references, so they stay texts, which no setting takes."""
    own = write(tmp_path / "detector.yaml", "MODEL: {BACKBONE: {NAME: '${oc.env:E2E_VL_TEST_SECRET}'}}\n")
    config = load_config(base, [f"detector.config={own}"])
    with pytest.raises(ValueError) as error:
        read_detector_config(config.detector)
    assert "do not tell" not in str(error.value)


# Bases


@pytest.mark.parametrize("name", ["/etc/passwd", "secret.txt", "../.ssh/id_rsa", ".env", "a.yaml\0", "x.yml", "", "3"])
def test_a_base_is_a_yaml_file(name: str, tmp_path: Path):
    write(tmp_path / "secret.txt", "secret: 1\n")
    message = refused(write(tmp_path / "child.yaml", f"base: {json.dumps(name)}\n"))
    assert "it must be the name of a file (.yaml), relative to this one" in message
    with pytest.raises(ValueError, match=r"must be the path of a YAML file") as error:
        read_detector_config(
            load_config(
                write(tmp_path / "b.yaml", MINIMAL),
                [f"detector.config={write(tmp_path / 'detector.yaml', f'_BASE_: {json.dumps(name)}')}"],
            ).detector
        )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content",
    [
        "root:x:0:0:do not tell\nb: do not tell: c\n",
        "do not tell\n",
        "- do not tell\n",
        "apiVersion: do not tell\nkind: Secret\n",
        "a: !do not tell\n",
        "a: *do_not_tell\ndo not tell",
        "\x00do not tell",
        "'do not tell': 1\n'do not tell': 1\n",
        "{do not tell",
    ],
)
def test_a_base_that_is_no_settings_file_is_never_quoted(content: str, tmp_path: Path, base: Path):
    write(tmp_path / "secret.yaml", content)
    message = refused(write(tmp_path / "child.yaml", "base: secret.yaml\n"))
    assert "secret.yaml" in message and "tell" not in message and "apiVersion" not in message
    own = write(tmp_path / "detector.yaml", "_BASE_: secret.yaml\n")
    with pytest.raises(ValueError) as error:
        read_detector_config(load_config(base, [f"detector.config={own}"]).detector)
    assert "do not tell" not in str(error.value) and "\n" not in str(error.value)


def test_many_bases(tmp_path: Path, base: Path):
    for number in range(30):
        write(tmp_path / f"{number}.yaml", f"base: {number + 1}.yaml\nseed: 1\n")
        write(tmp_path / f"d{number}.yaml", f"_BASE_: [d{number + 1}.yaml, d{number + 1}.yaml]\n")
    write(tmp_path / "d30.yaml", "{}")
    assert "20 files above each other" in refused(tmp_path / "0.yaml")
    with pytest.raises(UserError, match="its _BASE_ files are more than 50 in all"):
        read_detector_config(load_config(base, [f"detector.config={tmp_path}/d0.yaml"]).detector)
    with pytest.raises(UserError, match=r"detector\.config is .*; it must be a Detectron2 YAML file"):
        read_detector_config(load_config(base, ["detector.config=/etc/passwd"]).detector)


@pytest.mark.parametrize("version", ["[1]", "abc", "1.5"])
def test_a_version_that_is_no_number(version: str, tmp_path: Path):
    with pytest.raises(UserError, match="version is not a whole number"):
        saved_version(write(tmp_path / "a.yaml", f"version: {version}\nseed: 1\n"))


HOSTILE = {
    "base: ${seed}": "`base:` is '${seed}'; it must be the name of a file",
    "base: ???": "`base:` is '???'; it must be the name of a file",
    "data: {files: [a]}": "setting 'data.files' must be a mapping, {key: value}; write it so",
    "data: {name: refcoco, root: x, files: {images: [null]}}": "setting 'data.files.images' cannot be used",
    "eval: {boxes: {a: 1}}": "setting 'eval.boxes' must be a list, [a, b]; write it so",
    "data: {name: refcoco, root: x, files: {}, canvas: {a: 1}}": "setting 'data.canvas' must be another kind of value",
    'output: "a\\0b"': "output holds a zero byte",
    'output: "\\ud800"': "a text holds half of a character",
    '"\\udc80": 1': "a text holds half of a character",
    "output: ~nobody-of-this-name/x": "output '~nobody-of-this-name/x' cannot be looked for",
    'train: {lr: "\\x1b[31m"}': "Value '\\x1b[31m' of type 'str'",
    "eval: {boxes: [gt, '${eval.boxes.²}']}": "eval.boxes",
}


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_settings_are_one_sentence(text: str, tmp_path: Path):
    others = [line for line in MINIMAL.splitlines() if line.partition(":")[0] != text.partition(":")[0]]
    path = write(tmp_path / "hostile.yaml", "\n".join([*others, text]))
    with pytest.raises(UserError) as told:
        load_config(path)
    assert HOSTILE[text] in str(told.value) and str(path) in str(told.value)
    assert str(told.value).isprintable()


def test_words_with_line_breaks_are_one_sentence(base: Path):
    for word in ("seed=|\n  x", "a\nb", "output=a\n b: c", "data.files=[a]", "\nseed=1", "eval.boxes={a: \n1}"):
        with pytest.raises(UserError, match="Command line") as told:
            load_config(base, [word])
        assert str(told.value).isprintable()


def test_paths_of_bytes_that_are_not_utf8(tmp_path: Path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    (folder / "data").mkdir(parents=True)
    path = write(folder / "a.yaml", MINIMAL.replace("data/x", "data"))
    with pytest.raises(UserError, match=r"data\.root holds a zero byte or bytes that are not UTF-8; rename"):
        load_config(path)
