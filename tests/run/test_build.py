"""Parts from settings: sizes of images, lists of answers, vocabularies, and starting weights of every kind."""

from __future__ import annotations

import pickle
import shutil
import types
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel

from detector.errors import UserError
from e2e_vl.api.model import load
from e2e_vl.config import ResizeConfig, RunConfig, SyntheticDataConfig
from e2e_vl.config_files import load_config, read_detector_config, save_config
from e2e_vl.data import batching
from e2e_vl.data.batching import Request
from e2e_vl.data.config import NoDatasetConfig
from e2e_vl.metrics.vqa import vocabulary_answer
from e2e_vl.model import VisionLanguageModel
from e2e_vl.registry import DATASETS, TASKS, Entry
from e2e_vl.run import build as building
from e2e_vl.run.build import (
    build_examples,
    build_model,
    build_run,
    build_tokenizer,
    count_frequent_answers,
    load_answers,
    make_synthetic_data,
    resolve_config,
)
from e2e_vl.run.checkpoint import load_model, save_model
from e2e_vl.run.evaluate import evaluate_run
from e2e_vl.run.train import train
from e2e_vl.tasks.config import VQAConfig
from e2e_vl.tasks.gqa import GQATask
from e2e_vl.tasks.vqa import VQATask
from e2e_vl.text import load_tokenizer
from e2e_vl.weights.vl_bert import OfficialVLBert
from tests.data.helpers import plain
from tests.run.runs import tiny
from tests.weights.starts import OFFICIAL_DETECTOR, options, replaced, same

TESTED_AT_96 = "{MIN_SIZE_TRAIN: [96, 112, 128], MAX_SIZE_TRAIN: 160, MIN_SIZE_TEST: 96, MAX_SIZE_TEST: 160}"


def test_examples_can_be_sent_to_workers_that_are_spawned(trained_run):
    """Python 3.14 forks no workers on Linux; macOS and Windows never did."""
    config, model, tokenizer = load_model(trained_run.path)
    for boxes, training in (("gt", True), ("online", False)):
        examples = build_examples(config, model, tokenizer, "val", boxes=boxes, training=training)
        sent = pickle.loads(ForkingPickler.dumps(examples))
        request = Request(0, tuple(examples.groups[0]))
        expected, example = plain(examples[request]), plain(sent[request])
        assert repr(example) == repr(expected)


# Sizes of images; `data.resize: null` means those of the detector's YAML file


def test_the_sizes_are_those_of_the_yaml_file_and_are_saved_with_the_run(tiny_config, on_cpu):
    config = tiny_config("data.resize=null", f"detector.overrides.INPUT={TESTED_AT_96}")
    resolved = resolve_config(config)
    assert resolved.data.resize == ResizeConfig([112, 128, 96], 160, "detectron2", "pil")  # testing takes the last
    assert resolve_config(resolved) == resolved
    train(replaced(config, train={"max_steps": 1}, eval={"boxes": []}))
    assert load_config(Path(config.output) / "model/config.yaml").data.resize == resolved.data.resize


@pytest.mark.parametrize(
    ("old", "new", "sizes"),
    [
        ("TRAIN: [96, 112, 128]", "TRAIN_SAMPLING: range, MIN_SIZE_TRAIN: [94, 97]", [94, 95, 97, 96]),
        ("MIN_SIZE_TEST: 96", "MIN_SIZE_TEST: 100", None),
        ("MAX_SIZE_TEST: 160", "MAX_SIZE_TEST: 200", None),
    ],
)
def test_ranges_of_sizes_and_tests_at_other_sizes(tiny_config, old, new, sizes):
    config = tiny_config("data.resize=null", f"detector.overrides.INPUT={TESTED_AT_96.replace(old, new)}")
    if sizes is not None:
        assert resolve_config(config).data.resize.short_edge == sizes
    else:
        with pytest.raises(ValueError, match=r"set data\.resize"):
            resolve_config(config)


def test_a_trained_model_sees_images_on_the_canvas_of_its_settings(trained_run, tmp_path, monkeypatch, on_cpu):
    """In evaluation, and when it is asked about one image."""
    run = tmp_path / "run"
    shutil.copytree(trained_run.path / "model", run / "model")
    config = load_config(run / "model" / "config.yaml", ["data.canvas=[200, 240]"])
    save_config(config, run / "model" / "config.yaml")
    seen, make = [], batching.make_image_batch

    def made(*words, **more):
        seen.append(make(*words, **more))
        return seen[-1]

    monkeypatch.setattr(batching, "make_image_batch", made)
    evaluate_run(run, split="val", boxes="gt")
    evaluated = len(seen)
    load(run).ask(next((Path(config.data.root) / "images" / "train2014").iterdir()), "the circle")
    assert 0 < evaluated < len(seen)
    assert {tuple(images.pixels.shape[2:]) for images in seen} <= {(200, 240), (240, 200), (240, 240)}


# Lists of answers, in the spelling of the task


GIVEN = dict(enumerate(["Two, three"] * 3 + ["2 3"] * 3 + ["the box"] * 2))


def test_a_list_is_ordered_by_count_then_alphabet():
    given = dict(enumerate(["yes"] * 3 + ["no"] * 3 + ["Two"] + ["2"] + ["rare"]))
    assert count_frequent_answers(given, 2, vocabulary_answer) == ["no", "yes", "2"]
    assert count_frequent_answers(given, 1, str) == ["no", "yes", "2", "Two", "rare"]
    with pytest.raises(ValueError, match="no answer occurs in at least 4 of the 9 questions"):
        count_frequent_answers(given, 4, vocabulary_answer)


@pytest.mark.parametrize(
    ("task", "built", "read"),
    [
        (VQATask, ["2 3", "box"], ["<unk>", "t  shirt"]),
        (GQATask, ["2 3", "Two, three", "the box"], ["<unk>", "t - shirt"]),  # as any task without a spelling
    ],
)
def test_the_task_spells_the_answers(tiny_config, monkeypatch, tmp_path, task, built, read):
    config = tiny_config()
    dataset = types.SimpleNamespace(answers_of=lambda *_: GIVEN)
    monkeypatch.setitem(DATASETS, config.data.name, Entry(NoDatasetConfig, dataset))
    monkeypatch.setitem(TASKS, config.task.name, Entry(VQAConfig, task))
    monkeypatch.setattr(building, "open_options", lambda *_: (None, None))
    (tmp_path / "a.txt").write_text("<unk>\nT - shirt\n")
    for answers, expected in ((None, built), (str(tmp_path / "a.txt"), read), (["x", "y"], ["x", "y"])):
        given = replaced(config, task={"config": {"answers": answers, "min_answer_count": 2}})
        assert load_answers(given) == expected


# Parts


def test_data_under_the_home_folder(monkeypatch, tmp_path):
    """A shell leaves the ~ of data.root=~/data as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    config = tiny("refcoco", Path("~/drawn"), tmp_path / "run", "data.synthetic.scenes={train: 3}")
    make_synthetic_data(config)
    assert (tmp_path / "drawn" / "synthetic.json").is_file()
    assert len(build_tokenizer(config)) > 20


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("detector.weights=gone.pth", "gone.pth: no such weights file"),
        ("encoder.weights=gone/run.pth", "no weights for `encoder`"),
        ("task.fallback_weights=gone/run.pth", "no weights for `task`"),
        ("phrases={weight: 1, weights: gone/run.pth}", "no weights for `phrases`"),
    ],
)
def test_missing_inputs_are_named_before_anything_is_drawn(tmp_path, word, named):
    config = tiny("refcoco", tmp_path / "drawn", tmp_path / "run", word)
    with pytest.raises(FileNotFoundError, match=named):
        build_run(config)
    assert not (tmp_path / "drawn").exists()
    unset = replaced(config, data={"synthetic": SyntheticDataConfig()})
    with pytest.raises(FileNotFoundError, match=r"data.root .*drawn: no such folder"):
        build_run(unset)


def test_data_of_ones_own_is_not_mixed_with_drawn_scenes(tmp_path):
    (tmp_path / "photo.jpg").write_bytes(b"")
    config = tiny("refcoco", tmp_path, tmp_path / "run")
    with pytest.raises(UserError, match=r"data.root .* has files that were not drawn here.* data.synthetic.scenes to"):
        make_synthetic_data(config)
    make_synthetic_data(tiny("refcoco", tmp_path, tmp_path / "run", "data.synthetic.scenes=null"))
    assert [path.name for path in tmp_path.iterdir()] == ["photo.jpg"]


# Starting weights of the detector


@pytest.mark.usefixtures("on_cpu")
def test_a_run_trains_with_detectron2_and_its_weights_load_in_the_built_in_detector(tiny_config, tmp_path):
    pytest.importorskip("detectron2", reason="Detectron2 is not installed")
    short = ("train.max_steps=2", "eval.boxes=[online]", "eval.max_images=2", "eval.report_pictures=0")
    metrics = train(tiny_config("detector.backend=detectron2", *short))
    assert 0 <= metrics["val/accuracy_predicted_boxes"] <= 1
    _, theirs, _ = load_model(tmp_path / "run")
    _, ours, _ = load_model(tmp_path / "run", overrides=["detector.backend=builtin"])
    assert [type(one.detector).__name__ for one in (theirs, ours)] == ["Detectron2Detector", "FasterRCNN"]
    assert same(ours.detector, theirs.detector)


# `encoder.weights` and `task.weights` from a run, an official file or a BERT


# The official architecture, small: the tiny config's own departs from it.
ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
ENCODER |= {"max_position_embeddings": 64, "geometry_dim": 64}
save_official = OfficialVLBert().export


@pytest.fixture
def config_of(tiny_config: Callable[..., RunConfig]) -> Callable[..., RunConfig]:
    """`config_of(task, words, encoder fields)`: a tiny run of the official architecture."""

    def make(task: str, *words: str, **encoder: object) -> RunConfig:
        config = replaced(tiny_config(*words), detector={"overrides": OFFICIAL_DETECTOR})
        more, settings = {}, {}
        if task == "pretraining":
            more = {"text_only_embedding": True, "masked_region_embedding": True}
            classes = read_detector_config(config.detector).roi_heads.num_classes + 1
            settings = {"objectives": {"masked_regions": {"classes": classes}}}
        fields = {"config": {**ENCODER, **more, **encoder}}
        return replaced(config, encoder=fields, task={"name": task, "config": settings})

    return make


def with_options(config: RunConfig, **changed: object) -> RunConfig:
    """Settings with more entries of `task.config`."""
    return replaced(config, task={"config": options(config.task.config) | changed})


def build(config: RunConfig, seed: int = 0) -> VisionLanguageModel:
    torch.manual_seed(seed)
    tokenizer = build_tokenizer(config)
    return build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer)


@pytest.fixture
def pretrained(config_of: Callable[..., RunConfig], tmp_path: Path) -> tuple[VisionLanguageModel, dict[str, Path]]:
    """A pre-trained model, and the same as a run directory and as an official file."""
    config = config_of("pretraining")
    model = build(config, seed=1)
    save_model(tmp_path / "pretrained" / "model", config, model, build_tokenizer(config))
    save_official(model, "pretraining", tmp_path / "pretrained.model")
    return model, {"run": tmp_path / "pretrained", "file": tmp_path / "pretrained.model"}


def test_class_names_come_with_the_weights_of_the_detector(tiny_config, trained_run):
    names = trained_run.model.detector.class_names
    assert len(names) == trained_run.model.detector.num_classes and "star" in names
    for path in (trained_run.path, trained_run.path / "model" / "detector"):
        assert build(tiny_config(f"detector.weights={path}")).detector.class_names == names
    other_classes = (f"detector.weights={trained_run.path}", "detector.expect=backbone")
    for overrides in ((), other_classes):
        assert build(tiny_config(*overrides)).detector.class_names is None


@pytest.mark.parametrize("kind", ["run", "folders", "file"])
def test_fine_tuning_starts_from_pre_training(config_of, pretrained, kind):
    source, paths = pretrained
    path = paths["file" if kind == "file" else "run"]
    encoder, task = (path / "model" / name if kind == "folders" else path for name in ("encoder", "task"))
    words = [f"detector.weights={path}", f"encoder.weights={encoder}", f"task.weights={task}"]
    started = build(config_of("refcoco", *words, *(["detector.expect=backbone"] if kind == "file" else [])), seed=2)
    own = build(config_of("refcoco"), seed=2)
    for a, b in (
        (source.detector.roi_heads.res5, started.detector.roi_heads.res5),
        (source.encoder.layers, started.encoder.layers),
        (source.encoder.embeddings.region_projection, started.encoder.embeddings.region_projection),
        (source.task.masked_regions.transform, started.task.head.transform),
        (own.task.head.output, started.task.head.output),
    ):
        assert same(a, b)


def test_pre_training_goes_on_from_its_own_files_but_learns_from_the_new_detector(config_of, pretrained):
    source, paths = pretrained
    for path in paths.values():
        started = build(config_of("pretraining", f"encoder.weights={path}", f"task.weights={path}"), seed=2)
        assert same(started.task, source.task)
        assert same(started.teacher, started.detector)


@pytest.mark.parametrize(
    ("kind", "more", "moved"),
    [
        ("run", {"background": "first"}, 1),
        ("file", {"teacher": "file"}, 1),
        ("run", {"teacher": "current"}, 0),
        ("file", {"teacher": "current"}, 0),
    ],
)
def test_region_classes_keep_their_meaning_where_the_background_has_another_place(
    config_of, pretrained, tmp_path, kind, more, moved
):
    """The source has it last, and files of class distributions have it first; there and back again."""
    source, paths = pretrained
    config = with_options(config_of("pretraining", f"task.weights={paths[kind]}"), **more)
    first = build(config, seed=2)
    output = source.task.masked_regions.output.state_dict()
    for name, value in first.task.masked_regions.output.state_dict().items():
        assert torch.equal(value, output[name].roll(moved, dims=0)), name
    save_model(tmp_path / "first" / "model", config, first, build_tokenizer(config))
    config = replaced(config, task={"weights": str(tmp_path / "first")})
    back = with_options(config, teacher="frozen", background="last")
    assert same(build(back, seed=3).task.masked_regions.output, output)


def test_a_fine_tuned_model_comes_back_without_its_starting_weights(config_of, pretrained, tmp_path):
    _, paths = pretrained
    config = config_of("refcoco", f"encoder.weights={paths['run']}", f"task.weights={paths['run']}")
    model = build(config)
    save_model(tmp_path / "tuned", config, model, build_tokenizer(config))
    (paths["run"] / "model" / "config.yaml").unlink()  # the start is not read again
    again, loaded, _ = load_model(tmp_path / "tuned")
    assert again.task.weights is again.encoder.weights is None
    assert same(loaded, model)


def test_bert_fills_what_the_weights_lack(config_of, pretrained, tmp_path):
    source, paths = pretrained
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    fields = {name: getattr(source.encoder.config, name) for name in (*sizes, "max_position_embeddings")}
    bert = BertModel(BertConfig(**fields))
    bert.save_pretrained(tmp_path / "bert")
    words = [f"encoder.weights={paths['run']}", f"encoder.fallback_weights={tmp_path / 'bert'}"]
    started = build(config_of("refcoco", *words, with_pooler=True)).encoder
    assert torch.equal(started.layers[0].output.dense.weight, source.encoder.layers[0].output.dense.weight)
    assert torch.equal(started.pooler.dense.weight, bert.pooler.dense.weight)


def test_another_vocabulary_of_the_same_size_is_no_start(config_of, pretrained, tmp_path):
    run = pretrained[1]["run"]
    vocabulary = load_tokenizer(run / "model" / "tokenizer").get_vocab()
    words = sorted(vocabulary, key=vocabulary.get)
    own = sorted(words[5:], reverse=True)
    (tmp_path / "vocab.txt").write_text("\n".join([*words[:5], *own]) + "\n")
    config = config_of("refcoco", f"encoder.weights={run}", f"data.vocabulary={tmp_path / 'vocab.txt'}")
    with pytest.raises(ValueError, match=rf"set data.vocabulary={run / 'model' / 'tokenizer'}\."):
        build(config)
    build(replaced(config, data={"vocabulary": str(run / "model" / "tokenizer")}))


def test_a_head_for_the_same_answers_in_another_order_is_no_start(config_of, tmp_path):
    config = with_options(config_of("vqa"), answers=["yes", "no"])
    model = build(config)
    save_model(tmp_path / "vqa" / "model", config, model, build_tokenizer(config))
    config = replaced(config, task={"weights": str(tmp_path / "vqa")})
    assert torch.equal(build(config, seed=1).task.head.output.weight, model.task.head.output.weight)
    with pytest.raises(ValueError, match=r"answers.json: the head was trained with other answers"):
        build(with_options(config, answers=["no", "yes"]))


def test_an_official_head_needs_the_list_of_its_answers(config_of, tmp_path, monkeypatch):
    model, order = build(with_options(config_of("vqa"), answers=["yes", "no"])), tmp_path / "order.txt"
    save_official(model, "vqa", tmp_path / "vqa.model")
    order.write_text("yes\nno\n")
    words = "vqa", f"task.weights={tmp_path / 'vqa.model'}", f"data.vocabulary={tmp_path / 'run' / 'tokenizer'}"
    in_data = config_of(*words, f"data.files.answers={order}")
    for config in (with_options(config_of(*words), answers=str(order)), in_data):
        assert torch.equal(build(config, seed=1).task.head.output.weight, model.task.head.output.weight)
    monkeypatch.setattr("e2e_vl.run.build.load_answers", lambda *_: ["no", "yes"])
    with pytest.raises(ValueError, match=r"vqa\.model: .* built from annotations.*task\.config\.answers"):
        build(config_of(*words))
