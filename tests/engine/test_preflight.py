"""What is looked at before a run: all findings at once, and nothing that is not one."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from e2e_vl.config import RunConfig, load_config, save_config
from e2e_vl.run import preflight
from e2e_vl.run import preflight as hub_names
from e2e_vl.run.build import make_synthetic_data
from e2e_vl.run.preflight import Findings, look_ahead
from e2e_vl.run.train import train
from tests.engine.two_processes import start

ROOT = Path(__file__).parents[2]
REAL = ROOT / "configs" / "refcoco" / "vl_bert_base.yaml"
BIG = ROOT / "configs" / "pretraining" / "vl_bert_large_e2e.yaml"

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture(autouse=True)
def on_hub(monkeypatch) -> None:
    """Whatever the hub is asked for, it has."""
    monkeypatch.setattr(hub_names, "get_hf_file_metadata", lambda *a, **k: None)


@pytest.fixture
def data(tiny_words, tmp_path) -> Path:
    """A copy of the tiny data set to spoil."""
    [root] = [word.partition("=")[2] for word in tiny_words if word.startswith("data.root=")]
    return Path(shutil.copytree(root, tmp_path / "data"))


def changed(config: RunConfig, section: str, **values) -> RunConfig:
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})


def findings(config, processes: int = 1, **options) -> list[str]:
    """The sentences of a refusal, without their numbers."""
    with pytest.raises(ValueError) as caught:
        look_ahead(config, processes, **options)
    first, *more = str(caught.value).splitlines()
    if not more:
        return [first]
    assert first == f"the run cannot begin, for {len(more)} reasons:"
    assert all(line.startswith(f"  {number}. ") for number, line in enumerate(more, start=1))
    return [line.split(". ", 1)[1] for line in more]


def test_nothing_is_found_where_nothing_is_wrong(tiny_config):
    config = tiny_config()
    known = look_ahead(config, 2)
    assert known.config == config and known.resume_from is None
    assert set(known.datasets) == {
        ("train", "online", True),
        *(("val", boxes, False) for boxes in ("gt", "detections", "online")),
    }
    assert not Path(config.output).exists()


def test_a_run_uses_what_was_read(tiny_config, monkeypatch):
    read = []
    monkeypatch.setattr(
        preflight, "open_split", lambda *a, opened=preflight.open_split, **k: read.append(opened(*a, **k)) or read[-1]
    )
    monkeypatch.setattr("e2e_vl.run.build.open_split", lambda *a, **k: pytest.fail("a split is read twice"))
    train(tiny_config("train.max_steps=1", "eval.boxes=[gt]"))
    assert len(read) == 2


def test_all_findings_come_at_once_and_before_anything_else(data, tiny_config, monkeypatch):
    """Nothing is drawn, loaded or written; the hub is asked once, and last."""
    asked = []

    def refuse(url, **options):
        asked.append(url)
        raise RuntimeError("no connection\nin this test")

    monkeypatch.setattr(hub_names, "get_hf_file_metadata", refuse)
    for name in ("make_synthetic_data", "build_tokenizer", "build_model"):
        monkeypatch.setattr(f"e2e_vl.run.build.{name}", lambda *a, **k: pytest.fail("too early"))
    image = min((data / "images" / "train2014").iterdir())
    image.unlink()
    config = tiny_config(
        f"data.root={data}",
        "detector.weights=nowhere.pth",
        "encoder.weights=./nowhere",
        "task.weights=org/model-of-the-hub",
        "data.vocabulary=folder/vocab.txt",
        "train.images_per_batch=5",
        "train.trackers=[tensorboard, wandbb]",
    )
    found = findings(config, 2)
    expected = (
        "train.images_per_batch is 5; it must be a multiple of train.accumulate (1) x the number of processes (2)",
        "train.trackers has 'wandbb'; it must be some of",
        "detector.weights: nowhere.pth: no such weights file",
        "encoder.weights: nowhere: no such weights file or folder",
        "data.vocabulary: folder/vocab.txt: no tokenizer there",
        f"{image}: the file of image 1 is missing; check the image folder's path",
        "task.weights: org/model-of-the-hub: neither a local file or folder nor a model within reach on the hub (no "
        "connection); check the name",
    )
    assert len(asked) == 1 and "org/model-of-the-hub" in asked[0]
    assert len(found) == len(expected)
    assert all(sentence.startswith(start) for sentence, start in zip(found, expected, strict=True)), found
    with pytest.raises(ValueError, match="for 6 reasons"):
        train(config)  # one process can train with 5 images
    assert not Path(config.output).exists()


def test_data_that_will_be_drawn_are_not_missing(tiny_config, tmp_path):
    known = look_ahead(tiny_config(f"data.root={tmp_path / 'later'}"), 1)
    assert known.datasets == {} and not (tmp_path / "later").exists()
    # but what nobody draws is
    words = ("eval.boxes=[detections]", "data.files.detections=own/boxes.json")
    [sentence] = findings(tiny_config(f"data.root={tmp_path / 'later'}", *words))
    assert sentence.startswith(f"{tmp_path / 'later' / 'own' / 'boxes.json'}: cannot read the detections")


def test_formats_that_will_be_added_are_not_missing(data, tiny_config):
    shutil.rmtree(data / "detections")
    path = data / "synthetic.json"
    assert "cannot read the detections" in findings(tiny_config(f"data.root={data}"))[0]
    stamp = json.loads(path.read_text())
    path.write_text(json.dumps({**stamp, "formats": [name for name in stamp["formats"] if name != "detections"]}))
    assert look_ahead(tiny_config(f"data.root={data}"), 1).datasets == {}


def test_all_missing_files_of_a_data_set_are_named(tmp_path):
    (tmp_path / "refcoco+").mkdir()
    (tmp_path / "refcoco+" / "instances.json").write_text("{}")
    found = findings(load_config(REAL, [f"data.root={tmp_path}", f"output={tmp_path / 'run'}"]))
    names = (
        "images/train2014",
        "refcoco+/refs(unc).p",
        "detections/refcoco+_unc/res101_coco_minus_refer_notime_dets.json",
    )
    assert [sentence.partition(": ")[0] for sentence in found] == [str(tmp_path / name) for name in names]
    assert all(f"check data.root ({tmp_path})" in sentence for sentence in found)
    [sentence] = findings(load_config(REAL, [f"data.root={tmp_path / 'x'}", f"output={tmp_path / 'run'}"]))
    assert sentence == f"data.root is {tmp_path / 'x'}, and there is no such folder; set it to your data."


def test_files_that_no_split_reads_may_be_missing(data, tiny_config):
    shutil.rmtree(data / "detections")
    look_ahead(tiny_config(f"data.root={data}", "eval.boxes=[gt]"), 1)


@pytest.mark.parametrize("name", ["tiny/vqa", "tiny/vcr", "tiny/pretraining", "tiny/precomputed", "demo/detection"])
def test_every_kind_of_data_is_looked_at(name, tmp_path):
    own = [f"output={tmp_path / 'run'}", f"data.root={tmp_path / 'd'}"]
    config = load_config(ROOT / "configs" / f"{name}.yaml", own)
    few = dict.fromkeys(config.data.synthetic.scenes, 3)
    config = changed(config, "data", synthetic=dataclasses.replace(config.data.synthetic, scenes=few))
    if name == "tiny/precomputed":
        assert "cannot read the features" in findings(config)[0]
        return
    assert look_ahead(config, 1).datasets == {}  # nothing is drawn yet
    make_synthetic_data(config)
    assert len(look_ahead(config, 1).datasets) == 1 + len(config.eval.boxes)


def test_images_are_sampled_or_all_looked_for(data, tiny_config):
    images = sorted((data / "images" / "train2014").iterdir())
    images[1].unlink()  # the second of twelve training images
    config = [f"data.root={data}", "eval.boxes=[gt]"]
    look_ahead(tiny_config(*config, "data.check_images=0"), 1)
    look_ahead(tiny_config(*config, "data.check_images=2"), 1)  # the first and the seventh
    [sentence] = findings(tiny_config(*config, "data.check_images=null"))
    assert sentence.startswith(f"{images[1]}: the file of image 2 is missing") and "(" not in sentence
    look_ahead(tiny_config(*config, "data.skip_broken=true"), 1)
    for path in images[:9]:
        path.unlink(missing_ok=True)
    assert "(9 of 12 images of the split train are missing)" in findings(tiny_config(*config))[0]


def test_a_folder_that_holds_something_else_is_not_touched(tiny_config, tmp_path):
    config = tiny_config()
    run = tmp_path / "run"
    run.mkdir()
    for name, text in (("config.yaml", "task: mine\n"), ("model", "thesis")):
        (run / name).write_text(text)
        for resume in (False, True):
            with pytest.raises(ValueError, match=r"run is not empty and holds no run; choose another `output`"):
                train(config, resume=resume)
        assert (run / name).read_text() == text
    assert sorted(path.name for path in run.iterdir()) == ["config.yaml", "model"]
    shutil.rmtree(run)
    run.mkdir()
    (run / ".hidden").write_text("")
    look_ahead(config, 1)  # empty enough
    save_config(config, run / "config.yaml")
    (run / "log.jsonl").write_text("")
    look_ahead(config, 1)  # a run that was stopped before its first checkpoint


def test_a_run_that_goes_on_is_not_held_up_by_an_image_of_its_evaluation(data, tiny_config):
    sorted((data / "images" / "train2014").iterdir())[12].unlink()
    config = tiny_config(f"data.root={data}", "eval.boxes=[gt]", "data.check_images=null")
    assert "of image" in findings(config)[0]
    Path(config.output).mkdir()
    look_ahead(config, 1, resume=True)


def test_what_is_wrong_inside_the_annotations_is_a_finding_too(data, tiny_config):
    path = data / "refcoco+" / "instances.json"
    content = json.loads(path.read_text())
    content["annotations"][2]["bbox"] = [10, 10, 0, 5]
    path.write_text(json.dumps(content))
    found = findings(tiny_config(f"data.root={data}", "detector.weights=x.pth"))
    assert len(found) == 2, "the same sentence about each split is said once"
    assert "annotation 3" in found[1]


def test_checkpoints_must_have_room(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    [sentence] = findings(tiny_config("train.keep_checkpoints=5"))
    assert sentence.startswith(
        f"{tmp_path / 'run'}: the disk has 1 MiB left, and the checkpoints of this run (up to 6 at"
    )
    assert sentence.endswith("or lower train.keep_checkpoints (5).")
    [sentence] = findings(tiny_config("train.save_every_epochs=0"))
    assert "(up to 1 at a time)" in sentence


def test_what_a_checkpoint_takes(trained_run):
    """At least three quarters of it are foreseen; the head and the answers are not."""
    config = trained_run.config
    model, checkpoint = preflight._sizes(config, len(trained_run.run.tokenizer))
    for folder, foreseen in (("model", model), ("checkpoints/step_00000008", checkpoint)):
        files = [path for path in (trained_run.path / folder).rglob("*") if path.suffix in (".safetensors", ".bin")]
        assert 0.75 < foreseen / sum(path.stat().st_size for path in files) < 1.1


def test_the_size_of_a_large_model_is_known_without_building_it(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**30))
    found = findings(load_config(BIG, [f"data.root={tmp_path}", f"output={tmp_path / 'run'}"]), 16)
    assert any("(up to 3 at a time) and its models take at least 18." in sentence for sentence in found), found


def test_a_run_that_is_there_is_a_finding(trained_run, tiny_config):
    found = findings(tiny_config(f"output={trained_run.path}", "detector.weights=x.pth"))
    assert len(found) == 2 and "already holds a run; continue it with --resume" in found[0]
    assert look_ahead(trained_run.config, 1, resume=True).resume_from == trained_run.path / "checkpoints/step_00000008"


def test_a_name_that_does_not_exist_is_said_once(tiny_config):
    assert findings(tiny_config("encoder.name=nosuch")) == [
        "encoder.name is 'nosuch'; it must be one of vl_bert, visual_bert, lxmert, none."
    ]


def test_other_errors_are_not_findings():
    with pytest.raises(KeyError), Findings().noting():
        raise KeyError


def test_of_several_processes_one_speaks(tiny_words, tmp_path):
    words = [*tiny_words, f"output={tmp_path / 'run'}", "train.images_per_batch=5"]
    process = start([(ROOT / "configs" / "tiny" / "refcoco.yaml", words)], tmp_path)
    output, _ = process.communicate(timeout=240)
    assert process.returncode != 0
    assert output.count("train.images_per_batch is 5; it must be a multiple of train.accumulate (1) x") == 1, output
    assert not (tmp_path / "run").exists()


def test_a_name_that_is_too_long_is_a_finding_about_its_setting(tiny_config):
    found = findings(tiny_config(f"encoder.weights={'y' * 300}"))
    assert any(one.startswith("encoder.weights: ") and "file name too long" in one for one in found), found
