from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from e2e_vl import config as settings
from e2e_vl.box_sources import BoxSource
from e2e_vl.config import (
    EvalSettings,
    RunConfig,
    TrainSettings,
    differences,
    load_config,
    save_config,
    saved_version,
    setting_names,
)
from e2e_vl.converter import check_choice, check_keys, check_numbers, from_dict, nearest

ROOT = Path(__file__).parents[1]

NAMES = "encoder: {name: vl_bert}\ntask: {name: refcoco}\n"
DATA = "data: {name: refcoco, root: data"  # to be closed
BASE = """
# a comment
output: runs/x
encoder: {name: vl_bert}
task: {name: refcoco}
data: {name: refcoco, root: data/x, files: {images: i, refs: r}}
train: {lr: 0.5, epochs: 3}
detector: {overrides: {MODEL: {RPN: {NMS_THRESH: 0.6}, RESNETS: {DEPTH: 18}}}}
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(tmp_path / "base.yaml", BASE)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_command_line_beats_file_beats_base_beats_defaults(base):
    child = write(base.parent / "deep" / "child.yaml", "base: ../base.yaml\ntrain: {epochs: 7, warmup_steps: 2}\n")
    config = load_config(child, ["train.warmup_steps=9", "data.eval_splits=[testA, testB]"])
    assert isinstance(config, RunConfig)
    assert (config.train.lr, config.train.epochs, config.train.warmup_steps) == (0.5, 7.0, 9)
    assert config.train.clip_norm == RunConfig.__dataclass_fields__["train"].default_factory().clip_norm
    assert config.data.eval_splits == ["testA", "testB"]


def test_nested_free_form_settings_are_merged(base):
    child = write(
        base.parent / "child.yaml", "base: base.yaml\ndetector: {overrides: {MODEL: {RESNETS: {NORM: GN}}}}\n"
    )
    overrides = load_config(child, ["detector.overrides.MODEL.RPN.NMS_THRESH=0.5"]).detector.overrides
    assert overrides == {"MODEL": {"RPN": {"NMS_THRESH": 0.5}, "RESNETS": {"DEPTH": 18, "NORM": "GN"}}}


def test_saved_settings_come_back_equal(base, tmp_path):
    config = load_config(base, ["train.max_steps=3", "data.texts_per_image=null", "train.betas=[0.8, 0.9]"])
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


def test_differences_name_the_setting():
    one = RunConfig(output="a")
    assert differences(one, RunConfig(output="a")) == []
    other = dataclasses.replace(
        one,
        train=dataclasses.replace(one.train, lr=1.0),
        detector=dataclasses.replace(one.detector, overrides={"MODEL": {"MASK_ON": True}}),
    )
    assert differences(one, other) == [
        "detector.overrides.MODEL: None -> {'MASK_ON': True}",
        "train.lr: 2.56e-05 -> 1.0",
    ]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("train.rl=1", r"Command line \(train.rl=1\): there is no setting 'train.rl'; did you mean 'train.lr'\?"),
        ("trian.lr=1", "there is no setting 'trian'; did you mean 'train'"),
        ("qqqq=1", "there is no setting 'qqqq'; see the classes"),
        ("lr=1", r"there is no setting 'lr'; did you mean 'train.lr'\?"),
        ("train.learning_rate=1", r"there is no setting 'train.learning_rate'; did you mean 'train.lr'\?"),
        ("encoder.hidden_size=8", r"there is no setting 'encoder.hidden_size'; did you mean 'encoder.config'\?"),
        ("version=3", "version is 3; this code reads settings of version 2"),
        ("eval.boxes=[detections+gt]", r"eval.boxes has 'detections\+gt'; it must be one of gt, detections, online"),
        (
            "data.boxes.train=own",
            r"data.boxes.train is 'own'; it must be one of gt, detections, detections\+gt, online",
        ),
        ("detector.loss_weight=-1", "detector.loss_weight is -1.0; it must not be negative"),
        ("data.texts_per_image=0", "data.texts_per_image is 0; it must be positive"),
        (
            "train.lr=fast",
            "setting 'train.lr' cannot be used: Value 'fast' of type 'str'",
        ),
        ("train.max_steps=1.5", "setting 'train.max_steps' cannot be used: Value '1.5'"),
        ("train.epochs=null", "setting 'train.epochs' cannot be used"),
        ("train=5", "a setting cannot be used: Merge error"),
        ("eval.boxes=gt", "setting 'eval.boxes' cannot be used"),
        ("eval.boxes=[gt, magic]", "eval.boxes has 'magic'; it must be one of gt, detections, online"),
        ("train.schedule=sudden", "train.schedule is 'sudden'; it must be one of linear, cosine, constant"),
        ("data.root=[1", r"Command line: the value in 'data.root=\[1' is not valid YAML"),
        ("data.root=${nothing}", "setting 'data.root' cannot be used: Interpolation key 'nothing' not found"),
        ("--fast", "'--fast' is not of the form key=value"),
        ("=3", "is not of the form key=value"),
        ("train.images_per_batch=0", "train.images_per_batch is 0; it must be positive"),
        ("train.log_every=0", "train.log_every is 0; it must be positive"),
        ("train.max_steps=0", "train.max_steps is 0; it must be positive"),
        ("train.keep_checkpoints=0", "train.keep_checkpoints is 0; it must be positive"),
        ("train.lr=-1", "train.lr is -1.0; it must not be negative"),
        ("train.lr=.nan", "train.lr is nan; it must not be negative"),
        ("train.lr=.inf", "train.lr is inf"),
        ("train.betas=[0.9]", r"train.betas is \[0.9\]; it must hold two numbers"),
        ("data.resize.short_edge=[]", r"data.resize.short_edge is \[\]"),
        ("train.accumulate=3", r"images_per_batch \(32\) must be a multiple of train.accumulate \(3\)"),
        ("data.boxes.train=detections", "boxes 'detections' need data.files.detections"),
        ("eval.boxes=[detections]", "boxes 'detections' need data.files.detections"),
    ],
)
def test_a_bad_word_on_the_command_line_is_one_sentence(base, word, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_config(base, [word])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {nosuch: 1}", "child.yaml: there is no setting 'train.nosuch'"),
        ("train: {lr: fast}", "child.yaml: setting 'train.lr' cannot be used"),
        ("train: [1", r"child.yaml is not valid YAML: .*line \d+"),
        ("seed: 1\nseed: 2", "child.yaml is not valid YAML: found duplicate key seed .line 2, column 1."),
        ("- 1\n- 2", "child.yaml must hold settings"),
        ("base: child.yaml", "leads back to the file itself"),
        ("base: [base.yaml]", "it must be the name of a file"),
        ("output: y", r"no value for data.name, data.root, encoder.name, task.name; set it"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path, text, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_config(write(tmp_path / "child.yaml", text))
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "child.yaml").write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(ValueError, match=r"child.yaml is not valid YAML: .*utf-8"):
        load_config(tmp_path / "child.yaml")


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"Config file .*nowhere.yaml does not exist"):
        load_config(tmp_path / "nowhere.yaml")
    with pytest.raises(FileNotFoundError, match=r"child.yaml: its `base:` file .*gone.yaml does not exist"):
        load_config(write(tmp_path / "child.yaml", "base: gone.yaml"))


@pytest.mark.parametrize("canvas", ["[600]", "[1200,600]", "[0,600]", "[1,2,3]"])
def test_a_canvas_is_a_short_and_a_long_edge(base, canvas):
    with pytest.raises(ValueError, match=r"data.canvas is \[.*\]; give its short and its long edge"):
        load_config(base, [f"data.canvas={canvas}"])
    assert load_config(base, ["data.canvas=[600,600]"]).data.canvas == [600, 600]


@pytest.mark.parametrize(
    "words",
    [
        ["train.schedule=steps"],
        ["train.decay_steps=[3]"],
        ["train.schedule=steps", "train.decay_steps=[5, 3]"],
        ["train.schedule=steps", "train.decay_steps=[0, 3]"],
    ],
)
def test_decay_steps_and_their_schedule_go_together(base, words):
    with pytest.raises(ValueError, match=r"train.decay_steps is \[.*\]; it must rise"):
        load_config(base, words)
    config = load_config(base, ["train.schedule=steps", "train.decay_steps=[3, 5]", "train.optimizer=sgd"])
    assert config.train.decay_steps == [3, 5]


# Frozen dataclasses that check themselves


def test_settings_cannot_be_changed_in_place(base):
    config = load_config(base)
    for part in (config, config.train, config.data.boxes.selection, config.data.resize, config.data.synthetic):
        name = dataclasses.fields(part)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, name, None)
    kinds = [kind for kind in vars(settings).values() if dataclasses.is_dataclass(kind)]
    assert len(kinds) > 10
    assert all(kind.__dataclass_params__.frozen for kind in kinds)


def test_what_replaces_a_setting_is_checked_too():
    with pytest.raises(ValueError, match=r"^train.lr is -1; it must not be negative\.$"):
        dataclasses.replace(TrainSettings(), lr=-1)
    with pytest.raises(ValueError, match=r"^eval.boxes has 'magic'; it must be one of gt"):
        EvalSettings(boxes=["gt", "magic"])
    with pytest.raises(ValueError, match=r"^boxes 'detections' need data.files.detections"):
        dataclasses.replace(RunConfig(output="a"), eval=EvalSettings(boxes=["detections"]))


def test_a_failed_check_names_the_file(tmp_path):
    text = f"{BASE}\nseed: -1\n"
    with pytest.raises(ValueError, match=r"^.*base.yaml: seed is -1; it must not be negative\.$"):
        load_config(write(tmp_path / "base.yaml", text))


def test_sizes_of_the_detector_file_are_left_open(base):
    child = write(base.parent / "child.yaml", "base: base.yaml\ndata: {resize: null}\n")
    assert load_config(child).data.resize is None
    grandchild = write(base.parent / "grandchild.yaml", "base: child.yaml\ndata: {resize: {long_edge: 7}}\n")
    assert load_config(grandchild).data.resize == settings.ResizeSettings(long_edge=7)


# Saved runs


def test_settings_that_an_earlier_version_saved_still_load(monkeypatch, tmp_path):
    """The file was written by `save_config` before settings had a version."""
    monkeypatch.chdir(ROOT)  # the paths in it are left as they are
    path = ROOT / "tests" / "golden" / "config" / "version_1.yaml"
    written = yaml.safe_load(path.read_text(encoding="utf-8"))
    config = load_config(path)
    new = {"version", "data.skip_broken", "data.mirror_precomputed", "data.mean_image_feature"}
    assert {line.split(":")[0] for line in differences(written, dataclasses.asdict(config))} == new
    assert saved_version(path) == 1
    save_config(config, tmp_path / "saved.yaml")
    assert saved_version(tmp_path / "saved.yaml") == 2
    assert load_config(tmp_path / "saved.yaml") == config


def test_the_version_of_what_is_not_there():
    with pytest.raises(FileNotFoundError, match=r"nowhere.yaml does not exist"):
        saved_version("nowhere.yaml")


# Files that a YAML file names


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A project folder with files, and another folder as the working directory."""
    for name in ("configs/detector/own.yaml", "weights/detector.pt", "vocabulary.txt", "data/images/a.jpg"):
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


# From a dict to a dataclass


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    sizes: tuple[int, int] = (1, 2)

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError(f"inner rate is {self.rate}")


@dataclass(frozen=True)
class Needed:
    number: int
    name: str = "a"


@dataclass(frozen=True)
class Outer:
    number: int = 1
    name: str = "a"
    switch: bool = False
    limit: int | None = 3
    words: list[str] = field(default_factory=list)
    names: tuple[str, ...] = ()
    mix: Mapping[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    kind: Literal["soft", "hard"] = "soft"
    answers: list[str] | str | None = None
    anything: Any = None
    inner: Inner = field(default_factory=Inner)
    maybe: Inner | None = None


def test_a_dict_becomes_a_dataclass():
    values = {
        "number": 3,
        "switch": True,
        "limit": None,
        "words": ["a", "b"],
        "names": ["c"],
        "mix": {"x": 1},
        "counts": {"y": 2},
        "kind": "hard",
        "answers": "file.txt",
        "anything": {1: object},
        "inner": {"rate": 2, "sizes": [3, 4]},
        "maybe": {"rate": 0.25},
    }
    made = from_dict(Outer, values, "task.config")
    expected = Outer(3, "a", True, None, ["a", "b"], ("c",), {"x": 1.0}, {"y": 2}, "hard", "file.txt", {1: object})
    assert made == dataclasses.replace(expected, inner=Inner(2.0, (3, 4)), maybe=Inner(0.25))
    assert type(made.mix["x"]) is type(made.inner.rate) is float
    assert from_dict(Outer, {}, "task.config") == Outer()
    assert from_dict(Outer, {"answers": ["x"]}, "task.config").answers == ["x"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"numbr": 3}, "x has the unknown key 'numbr'; it takes number, name, .*; did you mean 'x.number'?"),
        ({"qqqq": 3}, "x has the unknown key 'qqqq'; it takes number, .*, maybe."),
        ({"number": "3"}, "x.number is '3'; it must be a int."),
        ({"number": 3.0}, "x.number is 3.0; it must be a int."),
        ({"number": True}, "x.number is True; it must be a int."),
        ({"number": None}, "x.number is None; it must be a int."),
        ({"name": 3}, "x.name is 3; it must be a str."),
        ({"switch": 1}, "x.switch is 1; it must be a bool."),
        ({"limit": "3"}, "x.limit is '3'; it must be a int or None."),
        ({"words": "abc"}, "x.words is 'abc'; it must be a list of str."),
        ({"words": ["a", 3]}, "x.words[1] is 3; it must be a str."),
        ({"names": {"a": 1}}, "x.names is {'a': 1}; it must be a list of str."),
        ({"mix": {"x": "much"}}, "x.mix.x is 'much'; it must be a float."),
        ({"mix": {"x": True}}, "x.mix.x is True; it must be a float."),
        ({"mix": [1]}, "x.mix is [1]; it must be a dict of float."),
        ({"counts": {1: 1}}, "a key of x.counts is 1; it must be a str."),
        ({"kind": "firm"}, "x.kind is 'firm'; it must be one of soft, hard."),
        ({"answers": [1]}, "x.answers is [1]; it must be a list of str or str or None."),
        ({"inner": 3}, "x.inner is 3; it must hold settings as `key: value`."),
        (
            {"inner": {"rat": 3}},
            "x.inner has the unknown key 'rat'; it takes rate, sizes; did you mean 'x.inner.rate'?",
        ),
        ({"inner": {"sizes": [1, 2, 3]}}, "x.inner.sizes is [1, 2, 3]; it must be a list of 2 int."),
        ({"inner": {"rate": -1}}, "inner rate is -1.0"),
        ({"maybe": {"rate": "x"}}, "x.maybe.rate is 'x'; it must be a float."),
        ({"maybe": {"rate": -1}}, "inner rate is -1.0"),
    ],
)
def test_a_dict_that_does_not_fit_is_one_sentence(values, message):
    pattern = re.escape(message).replace(re.escape(".*"), ".*")
    with pytest.raises(ValueError, match=f"^{pattern}$"):
        from_dict(Outer, values, "x")


def test_a_field_without_a_default_must_be_given():
    assert from_dict(Needed, {"number": 2}, "x") == Needed(2)
    with pytest.raises(ValueError, match=r"^x.number has no value; set it\.$"):
        from_dict(Needed, {"name": "a"}, "x")


def test_what_is_no_dict():
    with pytest.raises(ValueError, match=r"^data.config is \[1\]; it must hold settings as `key: value`\.$"):
        from_dict(Inner, [1], "data.config")


def test_unknown_keys_are_named_with_the_nearest_and_all_known_ones():
    check_keys(["hidden_size", "layers"], ["layers"], "encoder.config")
    check_keys(iter(["layers"]), {"layers": 1}, "encoder.config")
    with pytest.raises(
        ValueError, match=r"^encoder.config has the unknown key 'hidden_sise'; it takes hidden_size, lay"
    ):
        check_keys(["hidden_size", "layers"], {"layers": 1, "hidden_sise": 2}, "encoder.config")
    with pytest.raises(ValueError, match=r"takes hidden_size, layers; did you mean 'encoder.config.hidden_size'\?$"):
        check_keys(["hidden_size", "layers"], ["hidden_sise"], "encoder.config")
    with pytest.raises(ValueError, match=r"^data.config has the unknown key 'x'; it takes nothing\.$"):
        check_keys([], ["x"], "data.config")
    with pytest.raises(ValueError, match=r"^data.files has the unknown key 'x'; refcoco takes images, refs\.$"):
        check_keys(["images", "refs"], ["x"], "data.files", who="refcoco")


def test_choices_and_numbers():
    check_choice("a.b", "x", ["x", "y"])
    with pytest.raises(ValueError, match=r"^a.b is 'z'; it must be one of x, y\.$"):
        check_choice("a.b", "z", iter(["x", "y"]))
    check_numbers(Inner(rate=0.0), "a.", not_negative=["rate"])
    for rate in (0.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=rf"^a.rate is {rate}; it must be positive\.$"):
            check_numbers(Inner(rate=rate), "a.", positive=["rate"])


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("train.lrr", "train.lr"),
        ("trian.lr", "train.lr"),
        ("train.rl", "train.lr"),
        ("data.vocab", "data.vocabulary"),
        ("data.box", "data.boxes"),
        ("data.resize.shortedge", "data.resize.short_edge"),
        ("trian", "train"),
        ("sed", "seed"),
        ("lr", "train.lr"),  # of another section
        ("data.lr", "train.lr"),
        ("train.seed", "seed"),
        ("train.num_workers", "data.workers"),
        ("train.learning_rate", "train.lr"),  # by initials
        ("train.wd", "train.weight_decay"),
        ("train.batch_size", "train.images_per_batch"),  # by words
        ("eval.batch_size", "eval.images_per_batch"),
        ("train.grad_accumulation_steps", "train.accumulate"),
        ("train.max_epochs", "train.epochs"),
        ("eval.box_source", "eval.boxes"),
        ("encoder.hidden_size", "encoder.config"),  # by section
        ("task.dropout", "task.config"),
        ("qqqq", None),
        ("train.qqqq", None),
    ],
)
def test_the_nearest_setting(key, expected):
    assert nearest(key, setting_names()) == expected


def test_the_nearest_of_nothing():
    assert nearest("lr", []) is None


# Sources of boxes


@pytest.mark.parametrize(
    ("name", "suffix", "needs"),
    [
        ("gt", "gt_boxes", ("instances",)),
        ("detections", "detected_boxes", ("detections",)),
        ("online", "own_boxes", ()),
        ("precomputed", "precomputed_boxes", ("features",)),
    ],
)
def test_box_sources_of_an_evaluation(name, suffix, needs):
    source = BoxSource(name)
    assert f"{source}" == source == name
    assert source in BoxSource.for_evaluation()
    assert (source.metric_suffix, source.needs) == (suffix, needs)


def test_boxes_beside_annotations_are_for_training():
    source = BoxSource("detections+gt")
    assert source not in BoxSource.for_evaluation()
    assert len(BoxSource.for_evaluation()) == len(BoxSource) - 1
    assert source.needs == ("instances", "detections")
