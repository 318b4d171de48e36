from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from e2e_vl import config as data_settings
from e2e_vl import config as settings
from e2e_vl.config import EvalSettings, RunConfig, TrainSettings, load_config

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
        ("train=5", "setting .train. is 5; it must be a mapping"),
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
        (
            "data.boxes.selection.min_regions=500",
            r"base.yaml: data.boxes.selection: min_regions 500 and max_regions 100",
        ),
        ("data.boxes.selection.min_score=.inf", r"base.yaml: data.boxes.selection: min_score inf must be a finite"),
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
        ("seed: 1\nseed: 2", "child.yaml is not valid YAML: found duplicate key .line 2, column 1."),
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.clip_tensor_norm=1"], "train.clip_tensor_norm needs train.optimizer=bert_adam"),
        (["train.optimizer=bert_adam", "train.clip_tensor_norm=0"], "train.clip_tensor_norm is 0.0; it must be posit"),
        (["train.decay_bn_scales=true"], "train.decay_bn_scales needs train.decay_norm_and_bias=false"),
        (["train.warmup_steps=3", "train.warmup_share=0.1"], "train.warmup_steps and train.warmup_share say the same"),
        (["train.warmup_share=1.5"], "train.warmup_share is 1.5; it must be from 0 to 1, or -1 with train.schedule"),
        (["train.warmup_share=-0.5"], "train.warmup_share is -0.5; it must be from 0 to 1, or -1"),
        (["train.warmup_share=-1", "train.schedule=cosine"], "train.warmup_share is -1.0; it must be from 0 to 1"),
    ],
)
def test_settings_of_the_optimiser_that_contradict_each_other(base, words, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load_config(base, words)


# Frozen dataclasses that check themselves


def test_settings_cannot_be_changed_in_place(base):
    config = load_config(base)
    for part in (config, config.train, config.data.boxes.selection, config.data.resize, config.data.synthetic):
        name = dataclasses.fields(part)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, name, None)
    modules = vars(settings), vars(data_settings)
    kinds = {kind for module in modules for kind in module.values() if dataclasses.is_dataclass(kind)}
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
    assert load_config(grandchild).data.resize == data_settings.ResizeSettings(long_edge=7)
