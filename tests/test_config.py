"""Configs: files and overrides are decoded strictly, and errors name the source and the key."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from detector.errors import MissingFileError, UserError
from e2e_vl.config import BoxSource, ResizeConfig, RunDetectorConfig, TrainConfig
from e2e_vl.config_files import CONFIGS, differences, find_config, load_config, read_detector_config, save_config
from e2e_vl.encoders.visual_bert import PretrainedVisualBertConfig
from e2e_vl.encoders.vl_bert import PretrainedVLBertConfig
from e2e_vl.registry import ENCODERS, OBJECTIVES
from e2e_vl.tasks.config import PretrainingConfig, VQAConfig

ROOT = Path(__file__).parents[1]
BASE = """
# a comment
output: runs/x
encoder: {name: vl_bert, config: {hidden_size: 24}}
task: {name: vqa, config: {answers: [a, b]}}
data: {name: vqa, root: data/x, files: {images: i, questions: r}}
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


# Layers


def test_command_line_beats_file_beats_base_beats_defaults(base):
    norm = "detector: {overrides: {MODEL: {RESNETS: {NORM: GN}}}}"
    text = f"base: ../base.yaml\ntrain: {{epochs: 7, warmup_steps: 2}}\n{norm}\n"
    child = write(base.parent / "deep" / "child.yaml", text)
    words = ["data.eval_splits=[testA, testB]", "detector.overrides.MODEL.RPN.NMS_THRESH=0.5"]
    config = load_config(child, ["train.warmup_steps=9", *words])
    assert (config.train.lr, config.train.epochs, config.train.warmup_steps) == (0.5, 7.0, 9)
    assert config.train.max_grad_norm == TrainConfig().max_grad_norm
    assert config.data.eval_splits == ["testA", "testB"]
    assert config.detector.overrides == {"MODEL": {"RPN": {"NMS_THRESH": 0.5}, "RESNETS": {"DEPTH": 18, "NORM": "GN"}}}


def test_a_section_that_is_null_can_be_set_again(base):
    write(base.parent / "child.yaml", "base: base.yaml\ndata: {resize: null}\n")
    grandchild = write(base.parent / "grandchild.yaml", "base: child.yaml\ndata: {resize: {long_edge: 7}}\n")
    assert load_config(grandchild).data.resize == ResizeConfig(long_edge=7)


def test_the_settings_of_parts_are_structs(base):
    config = load_config(base, ["eval.boxes=[gt, online]"])
    assert config.task.config == VQAConfig(answers=["a", "b"])
    assert config.encoder.config == ENCODERS["vl_bert"].config_class(hidden_size=24)
    assert config.eval.boxes == [BoxSource.GT, BoxSource.ONLINE]
    assert BoxSource.DETECTIONS_GT not in BoxSource.for_evaluation(), "the truth is never mixed into evaluation"


def test_objectives_may_be_given_by_their_weights():
    objectives = PretrainingConfig(objectives={"masked_words": 0.5, "relationship": {"weight": 2}}).objectives
    assert list(objectives) == list(OBJECTIVES)
    assert (objectives["masked_words"].weight, objectives["masked_regions"].weight) == (0.5, 1.0)
    assert (objectives["relationship"].weight, objectives["relationship"].probability) == (2.0, 0.5)


# Errors


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("train.rl=1", "'train.rl'; did you mean 'train.lr'?"),
        ("encoder.hidden_size=8", "'encoder.hidden_size'; did you mean 'encoder.config.hidden_size'?"),
        ("task.config.dropuot=0.1", "'task.config.dropuot'; did you mean 'task.config.dropout'?"),
        ("encoder.name=bert", f"there is {', '.join(ENCODERS)}"),
        ("eval.boxes=[detections+gt]", "detections+gt"),
        ("train.lr=fast", "Command line: train.lr=fast: Expected `float`, got `str`"),
        ("train={lr: fast}", "train.lr: Expected `float`"),
        ("train.betas=0.9", "Expected `list`"),
        ("task.name=refcoco", "base.yaml sets 'task.config.answers', which this task does not have"),
        ("encoder.config.hidden_size=25", "hidden_size 25 must be a multiple of num_attention_heads 12"),
        ("data.boxes.train=own", "data.boxes.train=own: Invalid enum value 'own'; it must be one of gt, detections"),
        ("train.lr=.nan", "train.lr"),
        ("data.root=[1", "not valid YAML"),
        ("--fast", "'--fast' is not of the form key=value"),
        (
            "train.gradient_accumulation_steps=3",
            "images_per_batch 32 must be a multiple of gradient_accumulation_steps 3",
        ),
        ("data.boxes.train=detections", "data.files.detections"),
        ("data.boxes.selection={min_regions: 5, max_regions: 4}", "data.boxes.selection"),
        ("train.schedule=steps", "milestones"),
        ("train.max_grad_norm_per_tensor=1", "max_grad_norm_per_tensor needs optimizer=bert_adam"),
        ("train.decay_bn_scales=true", "decay_bn_scales needs decay_norm_and_bias=false"),
        ("train.warmup_ratio=-0.5", "warmup_ratio is -0.5"),
        ("train.patience=2", "patience needs metric_for_best_model"),
        ("data.synthetic.config.scene.small=[40, 50]", "data.synthetic.config.scene"),
    ],
)
def test_a_bad_word_is_one_sentence(base, word, named):
    with pytest.raises(ValueError, match=r"^Command line|base\.yaml: (eval\.)?boxes") as caught:
        load_config(base, [word])
    assert named in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "file", "named"),
    [
        ("base: base.yaml\nseed: -1", "child", "seed"),
        ("base: base.yaml\ntrain: {nosuch: 1}", "child", "there is no setting 'train.nosuch'"),
        ("base: base.yaml\ntask: {config: {dropuot: 1}}", "child", "did you mean 'task.config.dropout'?"),
        ("base: base.yaml\ntask: {name: refcoco}", "child", "base.yaml sets 'task.config.answers', which this task"),
        ("base: bad.yaml\nseed: 3", "bad", "train.epochs"),  # the file that set the key
        ("base: gone.yaml", "gone", ""),
        ("output: y", "child", "encoder has no value"),
        ("output: y\nencoder: {config: {}}", "child", "encoder.name has no value"),
        (
            "base: base.yaml\ntask: {name: pretraining, config: {answers: [], objectives: {masked_word: 1}}}",
            "child",
            "there is no setting 'task.config.answers'; task.config has objectives, ",
        ),
    ],
)
def test_a_bad_file_is_one_sentence(base, text, file, named):
    write(base.parent / "bad.yaml", BASE.replace("epochs: 3", "epochs: none"))
    with pytest.raises(ValueError, match=rf"{file}\.yaml") as caught:
        load_config(write(base.parent / "child.yaml", text))
    assert named in str(caught.value) and "\n" not in str(caught.value)


# Files and folders that settings name are found from any working directory.

INPUTS = """
output: runs/x
detector: {config: configs/detector/own.yaml, weights: weights/detector.pt}
encoder: {name: vl_bert, weights: bert-base-uncased}
task: {name: vqa, config: {answers: answers.json}}
data: {name: vqa, root: data, vocabulary: vocabulary.txt, files: {images: images}}
"""


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A project folder with files, and another folder as the working directory."""
    for name in ("configs/detector/own.yaml", "weights/detector.pt", "vocabulary.txt", "answers.json", "data/a.jpg"):
        write(tmp_path / "project" / name, "")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "project"


def test_inputs_are_found_beside_and_above_the_file(project, tmp_path, monkeypatch):
    config = load_config(write(project / "configs" / "deep" / "run.yaml", INPUTS))
    assert config.detector.config == str(project / "configs" / "detector" / "own.yaml")
    assert config.detector.weights == str(project / "weights" / "detector.pt")
    assert (config.data.root, config.data.vocabulary) == (str(project / "data"), str(project / "vocabulary.txt"))
    assert config.task.config.answers == str(project / "answers.json")
    assert config.encoder.weights == "bert-base-uncased"  # found nowhere: the name of a hub
    assert config.data.files == {"images": "images"}  # relative to the root
    assert config.output == "runs/x"
    # every layer finds its own inputs; a word is relative to the working directory
    write(tmp_path / "other" / "vocabulary.txt", "")
    text = "base: ../project/configs/deep/run.yaml\ndata: {vocabulary: vocabulary.txt}\n"
    layered = load_config(write(tmp_path / "other" / "run.yaml", text), ["task.weights=weights/detector.pt"])
    assert layered.data.vocabulary == str(tmp_path / "other" / "vocabulary.txt")
    assert (layered.data.root, layered.task.weights) == (config.data.root, "weights/detector.pt")
    # so is the default detector file
    write(project / "configs" / "detector" / "R_101_C4.yaml", "")
    text = "output: x\nencoder: {name: none}\ntask: {name: refcoco}\ndata: {name: refcoco, root: data}\n"
    config = load_config(write(project / "configs" / "run.yaml", text))
    assert config.detector.config == str(project / "configs" / "detector" / "R_101_C4.yaml")
    # the data in a clone may be drawn for another run: its configs read those of the working directory
    monkeypatch.setattr("e2e_vl.config_files.CONFIGS", project / "configs")
    assert load_config(project / "configs" / "run.yaml").data.root == "data"


# Saving and comparing


@pytest.mark.parametrize("name", ["refcoco", "pretraining", "lxmert_files"])
def test_saved_settings_come_back_equal(name, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    words = ["train.max_steps=3", "data.texts_per_image=null", "train.betas=[0.8, 0.9]", "data.root=not_drawn_yet"]
    config = load_config(f"configs/tiny/{name}.yaml", words)
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


def test_differences_name_the_setting(base):
    one, other = load_config(base), load_config(base, ["train.lr=1", "detector.overrides.MODEL.MASK_ON=true"])
    assert differences(one, load_config(base)) == []
    assert differences(one, other) == ["detector.overrides.MODEL.MASK_ON: None -> True", "train.lr: 0.5 -> 1.0"]


# The configs of transformers have the settings of the encoders.


def test_an_encoder_config_has_the_fields_and_checks_of_its_settings():
    config = PretrainedVLBertConfig(vocab_size=9, feature_dim=8, hidden_size=24)
    assert (config.type_vocab_size, config.visual_size, config.model_type) == (3, 24, "vl_bert")
    assert PretrainedVLBertConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
    assert PretrainedVisualBertConfig().region_types == [0, 1]
    with pytest.raises(ValueError, match="hidden_dropout_prob"):
        PretrainedVLBertConfig(hidden_dropout_prob=1.0)


# The detector's settings of a run


def test_the_detector_file_with_overrides():
    tiny = str(ROOT / "configs" / "detector" / "tiny.yaml")
    three = {"MODEL": {"ROI_HEADS": {"NUM_CLASSES": 3}}}
    plain, changed = (read_detector_config(RunDetectorConfig(config=tiny, overrides=one)) for one in ({}, three))
    assert plain.roi_heads.num_classes != 3 and changed.roi_heads.num_classes == 3
    assert changed.resnet == plain.resnet
    published = read_detector_config(RunDetectorConfig(config="torchvision/fasterrcnn_resnet50_fpn_v2-coco"))
    assert published.input.format == "RGB" and published.roi_heads.num_classes == 90


@pytest.mark.parametrize(
    "name", ["demo/refcoco", "demo/refcoco.yaml", "configs/demo/refcoco", CONFIGS / "demo/refcoco"]
)
def test_configs_that_come_along_are_found_by_name_from_anywhere(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config(name) == CONFIGS / "demo" / "refcoco.yaml"
    own = write(tmp_path / "own" / "run.yaml", "base: demo/refcoco\ndetector: {config: configs/detector/tiny_fpn.yaml}")
    config = load_config(own)
    assert config.encoder.config.hidden_size == 128 and config.detector.config == f"{CONFIGS}/detector/tiny_fpn.yaml"
    read_detector_config(load_config(own, ["detector.config=detector/tiny"]).detector)


@pytest.mark.parametrize(
    ("name", "near"),
    [("demo/refcco", "demo/refcoco"), ("configs/demo/refcco.yaml", "demo/refcoco"), ("refcoco.yml", "demo/refcoco")],
)
def test_a_mistyped_config_says_what_is_close(name, near):
    with pytest.raises(MissingFileError, match=f"{name}: there is no such config; did you mean .*{near}"):
        find_config(name)


def test_several_base_files_override_each_other_in_their_order(tmp_path):
    for name, epochs, lr in (("first", 1, 0.1), ("second", 2, 0.2)):
        (tmp_path / f"{name}.yaml").write_text(f"train: {{epochs: {epochs}, lr: {lr}}}\n")
    (tmp_path / "run.yaml").write_text(
        f"base: [{ROOT / 'configs/tiny/refcoco.yaml'}, first.yaml, second.yaml]\ntrain: {{lr: 0.3}}\n"
    )
    train = load_config(tmp_path / "run.yaml").train
    assert (train.epochs, train.lr) == (2, 0.3)
    assert train.betas == (0.9, 0.98), "of the first base file"


@pytest.mark.parametrize(
    ("folders", "library"),
    [
        # VL-BERT's code and R2C's read pixels with PIL; VisualBERT's other tasks and LXMERT read saved features
        (("refcoco", "vcr", "visual_bert_paper"), "pil"),
        (("demo", "tiny", "pairs", "own_data", "gqa", "nlvr2"), "torch"),
    ],
)
def test_configs_of_papers_that_read_pixels_resize_with_pil(folders: tuple[str, ...], library: str):
    for folder in folders:
        libraries = set()
        for file in (CONFIGS / folder).glob("*.yaml"):
            with contextlib.suppress(UserError):  # what configs share, and lists of runs
                config = load_config(file, ["data.root=data", "detector.weights=weights"])
                if config.detector.backend != "precomputed":
                    libraries.add(config.data.resize.library)
        assert libraries == {library}, folder


def test_what_configs_share_is_not_suggested_as_a_run():
    with pytest.raises(MissingFileError) as error:
        find_config("demo/commo")
    assert "common" not in str(error.value)
