"""Files and folders that settings name are found from any working directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e_vl.config import load_config

ROOT = Path(__file__).parents[1]
NAMES = "encoder: {name: vl_bert}\ntask: {name: refcoco}\n"
DATA = "data: {name: refcoco, root: data"  # to be closed


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A project folder with files, and another folder as the working directory."""
    for name in (
        "configs/detector/own.yaml",
        "weights/detector.pt",
        "vocabulary.txt",
        "answers.json",
        "data/images/a.jpg",
    ):
        write(tmp_path / "project" / name, "")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "project"


INPUTS = """
output: runs/x
detector: {config: configs/detector/own.yaml, weights: weights/detector.pt}
encoder: {name: vl_bert, weights: bert-base-uncased}
task: {name: refcoco}
data: {name: refcoco, root: data, vocabulary: vocabulary.txt, files: {images: images}}
"""


def test_inputs_are_found_beside_and_above_the_file(project, tmp_path):
    config = load_config(write(project / "configs" / "deep" / "run.yaml", INPUTS))
    assert config.detector.config == str(project / "configs" / "detector" / "own.yaml")
    assert config.detector.weights == str(project / "weights" / "detector.pt")
    assert (config.data.root, config.data.vocabulary) == (str(project / "data"), str(project / "vocabulary.txt"))
    assert config.encoder.weights == "bert-base-uncased"  # found nowhere: the name of a hub
    assert config.data.files == {"images": "images"}  # relative to the root
    assert config.output == "runs/x"


@pytest.mark.parametrize(
    ("given", "expected"), [("answers.json", "{}/answers.json"), ("gone.txt", "gone.txt"), ("[red]", ["red"])]
)
def test_a_file_in_the_settings_of_the_task_is_found(project, given, expected):
    text = INPUTS.replace("task: {", f"task: {{config: {{answers: {given}}}, ")
    found = load_config(write(project / "configs" / "run.yaml", text)).task.config["answers"]
    assert found == (expected.format(project) if isinstance(expected, str) else expected)


def test_what_exists_in_the_working_directory_comes_first(project, tmp_path):
    write(tmp_path / "elsewhere" / "vocabulary.txt", "")
    assert load_config(write(project / "run.yaml", INPUTS)).data.vocabulary == "vocabulary.txt"


def test_the_nearest_folder_above_the_file_comes_first(project):
    write(project / "configs" / "vocabulary.txt", "")
    config = load_config(write(project / "configs" / "deep" / "run.yaml", INPUTS))
    assert config.data.vocabulary == str(project / "configs" / "vocabulary.txt")


def test_every_layer_finds_its_own_inputs(project, tmp_path):
    write(project / "run.yaml", INPUTS)
    write(tmp_path / "other" / "vocabulary.txt", "")
    child = write(tmp_path / "other" / "run.yaml", "base: ../project/run.yaml\ndata: {vocabulary: vocabulary.txt}\n")
    config = load_config(child)
    assert config.data.vocabulary == str(tmp_path / "other" / "vocabulary.txt")
    assert config.data.root == str(project / "data")


def test_words_of_the_command_line_are_relative_to_the_working_directory(project):
    path = write(project / "run.yaml", INPUTS)
    config = load_config(path, ["data.vocabulary=vocabulary.txt", "task.weights=weights/detector.pt"])
    assert (config.data.vocabulary, config.task.weights) == ("vocabulary.txt", "weights/detector.pt")


def test_an_output_is_not_looked_for(project):
    (project / "runs" / "x").mkdir(parents=True)
    assert load_config(write(project / "run.yaml", INPUTS)).output == "runs/x"


def test_configs_of_the_repository_find_their_detector_from_elsewhere(project, tmp_path):
    config = load_config(ROOT / "configs" / "tiny" / "refcoco.yaml")
    assert config.detector.config == str(ROOT / "configs" / "detector" / "tiny.yaml")
    own = write(tmp_path / "own.yaml", f"base: {ROOT / 'configs' / 'tiny' / 'refcoco.yaml'}\noutput: x\n")
    assert load_config(own).detector.config == config.detector.config


def test_the_default_detector_file_is_found_too(project):
    write(project / "configs" / "detector" / "R_101_C4.yaml", "")
    config = load_config(write(project / "configs" / "run.yaml", f"{NAMES}output: x\n{DATA}}}"))
    assert config.detector.config == str(project / "configs" / "detector" / "R_101_C4.yaml")


@pytest.mark.parametrize("name", ["${data.train_split}", "~/nowhere", "null"])
def test_what_is_no_relative_path_stays(project, name):
    config = load_config(write(project / "run.yaml", f"{NAMES}output: x\n{DATA}, vocabulary: '{name}'}}"))
    assert config.data.vocabulary == {"${data.train_split}": "train"}.get(name, name)


def test_a_settings_file_that_links_to_itself(tmp_path):
    (tmp_path / "c.yaml").symlink_to("c.yaml")
    with pytest.raises(FileNotFoundError, match=r"c\.yaml does not exist"):
        load_config(tmp_path / "c.yaml", [])
