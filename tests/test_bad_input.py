"""Bad input ends a tool with exit code 2 and one sentence that names the file, the record and what to do."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e_vl.cli import evaluate as evaluation_tool
from e2e_vl.cli import train as training_tool

CONFIG = Path(__file__).parents[1] / "configs" / "tiny" / "refcoco.yaml"
INSTANCES = "refcoco+/instances.json"
REFS = "refcoco+/refs(unc).p"

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture
def data(tiny_words, tmp_path) -> Path:
    """A copy of the tiny data set to spoil."""
    [root] = [word.partition("=")[2] for word in tiny_words if word.startswith("data.root=")]
    return Path(shutil.copytree(root, tmp_path / "data"))


@pytest.fixture
def fails(tiny_words, data, tmp_path, capfd) -> Callable[..., str]:
    """`fails("train.lr=1")` runs the training tool, which must refuse, and returns its sentence."""

    def run(*words: str, options: tuple[str, ...] = (), config: Path = CONFIG) -> str:
        own = [*tiny_words, f"data.root={data}", f"output={tmp_path / 'run'}", "train.max_steps=6", *words]
        return refusal(lambda: training_tool.main(["--config", str(config), *options, *own]), capfd)

    return run


def refusal(call: Callable[[], int], capfd: pytest.CaptureFixture) -> str:
    capfd.readouterr()
    assert call() == 2
    err = capfd.readouterr().err
    assert "Traceback" not in err
    lines = err.splitlines()
    assert lines[-1].startswith("error: ")
    assert sum("error: " in line for line in lines) == 1
    return lines[-1]


def edit_json(path: Path, change: Callable) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def edit_refs(path: Path, change: Callable) -> None:
    content = pickle.loads(path.read_bytes())
    change(content)
    path.write_bytes(pickle.dumps(content, protocol=2))


def first_image(data: Path) -> Path:
    return min((data / "images" / "train2014").iterdir())


@pytest.fixture(params=[0, 1], ids=["no worker", "a worker"])
def workers(request) -> str:
    """Errors of workers must read like errors of the process itself."""
    return f"data.workers={request.param}"


# Data


def test_a_missing_image(data, fails, workers):
    path = first_image(data)
    path.unlink()
    sentence = fails(workers, "data.texts_per_image=null", "data.check_images=0")
    assert str(path) in sentence


def test_a_corrupt_image(data, fails, workers):
    path = first_image(data)
    path.write_bytes(path.read_bytes()[:400])
    assert str(path) in fails(workers, "data.texts_per_image=null")


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content["annotations"][2].update(bbox=[10, 10, 5]), [INSTANCES, "annotations[2].bbox"]),
        (lambda content: content["annotations"][2].update(bbox=[900, 10, 5, 5]), [INSTANCES, "annotation 3"]),
    ],
)
def test_annotations_that_cannot_be(data, fails, change, words):
    edit_json(data / INSTANCES, change)
    sentence = fails("data.texts_per_image=null")
    assert all(word in sentence for word in words), sentence


def test_expressions_about_no_annotation(data, fails):
    edit_refs(data / REFS, lambda refs: refs[3].update(ann_id=99999))
    sentence = fails()
    assert f"{data / REFS}: ref 3 " in sentence and "99999" in sentence


def test_missing_and_damaged_annotation_files(data, fails, tmp_path):
    content = (data / INSTANCES).read_text()
    (data / INSTANCES).write_text(content[: len(content) // 2])
    assert f"{data / INSTANCES}: not valid JSON" in fails()
    (data / INSTANCES).unlink()
    assert f"{data / INSTANCES}: no such file" in fails()
    edit_refs(data / REFS, lambda refs: refs.append(Payload(tmp_path / "ran")))
    assert str(data / REFS) in fails() and not (tmp_path / "ran").exists()


def test_an_unknown_split(fails, trained_run, capfd):
    assert "'nosuch'" in fails("data.train_split=nosuch")
    assert "'vall'" in fails("data.eval_splits=[vall]")  # before any training
    arguments = ["--run", str(trained_run.path), "--split", "testC"]
    assert "'testC'" in refusal(lambda: evaluation_tool.main(arguments), capfd)


# Settings


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("train.lrr=1", "did you mean 'train.lr'?"),
        ("detector.overrides.MODEL.NOSUCH=1", "MODEL.NOSUCH"),
        ("detector.config=nowhere.yaml", "nowhere.yaml"),
        ("data.files.detection=x", "did you mean 'detections'?"),
        ("data.files={images: x}", "data/x"),
        ("data.vocabulary=folder/nowhere.txt", "nowhere.txt"),
    ],
)
def test_settings_that_cannot_be_used(fails, word, names):
    assert names in fails(word)


# Weights and runs


@pytest.fixture
def saved(trained_run, tmp_path) -> Path:
    """A copy of a run directory to spoil."""
    return Path(shutil.copytree(trained_run.path, tmp_path / "run"))


def test_a_trained_model_keeps_its_own_weights(trained_run, capfd):
    arguments = ["--run", str(trained_run.path), "--boxes", "gt", "detector.weights=x.pth"]
    assert "detector.weights=x.pth" in refusal(lambda: evaluation_tool.main(arguments), capfd)


def test_weights_that_are_cut_off(saved, capfd):
    path = saved / "model" / "encoder" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    sentence = refusal(lambda: evaluation_tool.main(["--run", str(saved), "--boxes", "gt"]), capfd)
    assert f"{path}: cannot be read as weights" in sentence


def test_weights_of_another_architecture(saved, capfd):
    path = saved / "model" / "encoder" / "model.safetensors"
    arguments = ["--run", str(saved), "--boxes", "gt", "encoder.config.num_hidden_layers=3"]
    sentence = refusal(lambda: evaluation_tool.main(arguments), capfd)
    assert f"{path} does not fit" in sentence
    assert "missing" in sentence


def test_starting_where_a_run_already_is(saved, fails):
    before = (saved / "metrics.json").read_text()
    assert f"{saved} holds a run or other files; continue a run with --resume" in fails()
    assert (saved / "metrics.json").read_text() == before


def test_resuming_where_no_run_is(fails, tmp_path):
    assert f"Cannot resume: run directory {tmp_path / 'run'} does not exist" in fails(options=("--resume",))
    assert not (tmp_path / "run").exists()


def test_resuming_another_architecture(saved, fails):
    sentence = fails("encoder.config.num_hidden_layers=3", options=("--resume",))
    assert "differs from the settings (encoder.num_hidden_layers: 2 -> 3)" in sentence


def test_an_interrupted_run_says_how_to_go_on(tiny_words, tmp_path, monkeypatch, capfd):
    def interrupt(self, micro_batches):
        raise KeyboardInterrupt

    monkeypatch.setattr("e2e_vl.run.train.Trainer.train_step", interrupt)
    words = [*tiny_words, f"output={tmp_path / 'run'}"]
    assert training_tool.main(["--config", str(CONFIG), *words]) == 130
    err = capfd.readouterr().err
    assert "Traceback" not in err
    assert err.splitlines()[-1] == "interrupted; --resume continues from the newest checkpoint"
