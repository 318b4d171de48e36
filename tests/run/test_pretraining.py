"""Pre-training from synthetic scenes to a run directory, and what must hold on the way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from detector.structures import ImageBatch
from e2e_vl.config import BoxSource, RunConfig
from e2e_vl.config_files import load_config
from e2e_vl.data.batching import Request, collate
from e2e_vl.run.build import build_examples, build_model, build_run, build_tokenizer, make_synthetic_data
from e2e_vl.run.checkpoint import load_model, save_model
from e2e_vl.run.train import train
from e2e_vl.structures import Batch, TextBatch
from e2e_vl.synthetic.generate import make_scenes
from e2e_vl.tasks.objectives.texts import MatchTargets
from e2e_vl.tasks.objectives.words import WordLabels
from e2e_vl.tasks.pretraining import PretrainingTargets
from tests.conftest import ENCODERS
from tests.run.runs import ROOT, assert_same_run, first_texts, logged, lose_newest, tiny
from tests.weights.starts import options, replaced, same

OBJECTIVES = {"masked_words", "masked_text", "masked_regions", "relationship"}
COLOURS = ("red", "blue", "yellow", "green")
# Scenes of one circle: what colour it has is to be seen only.
ONE_CIRCLE = (
    "data.synthetic={scenes: {train: 300, val: 60}, config: {scene: {min_objects: 1, max_objects: 1, min_side: 64, "
    "max_side: 64, small: [24, 28], shapes: [circle], textures: [plain], colours: [red, blue, yellow, green]}}}",
    "data.resize={short_edge: [64], long_edge: 64}",
    "data.config.use_corpus=false",
    "data.texts_per_image=1",
    "task.config.objectives={masked_words: {probability: 0.3, always_mask: true}, masked_text: {weight: 0}, "
    "masked_regions: {weight: 0}, relationship: {weight: 0}}",
    "encoder.config={geometry_dim: 16}",
    "train={images_per_batch: 16, max_steps: 90, warmup_steps: 10, lr: 4.0e-3, betas: [0.9, 0.98], schedule: cosine, "
    "log_every: 10}",
    "eval={every_epochs: 0, boxes: [], report_pictures: 0}",
)

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pretraining") / "data"
    make_synthetic_data(tiny("pretraining", folder, Path("unused")))
    return folder


@pytest.fixture
def settings(data, tmp_path):
    def make(*more: str, output: str = "run") -> RunConfig:
        return tiny("pretraining", data, tmp_path / output, *more)

    return make


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("data.config.use_corpus=false", r"masked_text has the weight 1\.0, but the data have no text-only"),
        ("task.config.objectives.masked_regions.classes=8", r"classes is 8, the detector has 6 classes"),
    ],
)
def test_an_objective_without_its_data_ends_the_run_before_it_begins(settings, word, message):
    with pytest.raises(ValueError, match=message):
        build_run(settings(word))


def test_the_tiny_run_trains_evaluates_and_keeps_its_teacher(settings):
    config = settings("train.max_steps=2")
    metrics = train(config)
    run = Path(config.output)
    assert {f"val/{name}_gt_boxes" for name in OBJECTIVES - {"masked_text"}} <= set(metrics)
    assert all(0 <= metrics[f"val/{name}_gt_boxes"] <= 1 for name in OBJECTIVES - {"masked_text"})
    lines = logged(run)
    assert len(lines) == 2 and all(set(line) >= OBJECTIVES for line in lines)
    assert all(line[name] > 0 for line in lines for name in OBJECTIVES)
    assert (run / "report.html").is_file()

    _, model, _ = load_model(run)
    teacher = load_file(run / "model" / "teacher" / "model.safetensors")
    assert same(model.teacher, teacher)
    backbone = "backbone.res4.0.conv1.weight"
    assert not torch.equal(model.detector.get_parameter(backbone), teacher[backbone]), "the copy does not learn"


def named_colours(run: Path, *overrides: str) -> float:
    """Share of validation captions whose colour, which alone is masked, the model chooses among the colours."""
    config, model, tokenizer = load_model(run, overrides=list(overrides))
    data = build_examples(config, model, tokenizer, "val", boxes="gt")
    colours = torch.tensor(tokenizer.convert_tokens_to_ids(list(COLOURS)))
    examples, truth = [], []
    for number in range(len(data.groups)):
        for text in data.groups[number]:
            example = data[Request(number, (text,))]
            [own] = example.texts
            labels = own.targets.parts["masked_words"].labels
            ids = np.where(labels >= 0, labels, own.encoding.input_ids)
            is_colour = np.isin(ids, colours.numpy())
            if is_colour.sum() == 1:
                own.encoding.input_ids[:] = np.where(is_colour, tokenizer.mask_token_id, ids)
                labels[:] = np.where(is_colour, ids, -1)
                examples.append(example)
                truth.append(int(ids[is_colour][0]))
    assert len(examples) > 50
    with torch.no_grad():
        logits = model(collate(examples)).task.parts["masked_words"]
    return float((colours[logits[:, colours].argmax(dim=1)] == torch.tensor(truth)).float().mean())


@pytest.mark.timeout(600)  # on a machine that may be busy
def test_masked_words_are_learned_from_the_image(tmp_path):
    """On scenes that it did not train on; without pixels the same model guesses."""
    run = tmp_path / "run"
    train(tiny("pretraining", tmp_path / "data", run, *ONE_CIRCLE))
    losses = [line["masked_words"] for line in logged(run)]
    assert losses[-1] < 0.25 * losses[0]
    seen, blind = named_colours(run), named_colours(run, "data.blank_image=true")
    assert seen > 0.55 and seen > blind + 0.2, (seen, blind)


def test_the_backbone_learns_from_masked_regions(settings):
    """The loss of a region whose pixels are gone still reaches the backbone: through what is around it."""
    only = "task.config.objectives={masked_words: 0, masked_text: 0, relationship: 0}"
    always = "task.config.region_probability=1.0", "task.config.mask_probability=1.0"
    config = settings(only, *always, "data.config.use_corpus=false")
    run = build_run(config)
    run.model.train()
    output = run.model(first_texts(run, 4))
    loss = output.task.losses["masked_regions"]
    assert loss.count > 0
    assert all(bool(is_masked.all()) for is_masked in output.batch.masking.masked_regions.is_masked)
    loss.total.backward()
    gradient = run.model.detector.get_parameter("backbone.res4.0.conv1.weight").grad
    assert gradient is not None and gradient.abs().max() > 0
    assert not any(parameter.requires_grad for parameter in run.model.teacher.parameters())


SOURCES = {
    "shards": (
        "data.config.source=shards",
        *("data.files.shards='shards/{split}'", "data.boxes.train=online", "eval.boxes=[online]"),
        "detector.loss_weight=0.0",
        "detector.weights=WEIGHTS",
    ),
    "vl_bert_precomputed": (
        "data.config.source=json_lines",
        "data.files={captions: 'conceptual/{split}.json', detections: 'conceptual/{split}_frcnn.json', "
        "features: 'conceptual/{split}_frcnn.json'}",
        "detector.backend=precomputed",
        "detector.overrides.MODEL.RESNETS={RES2_OUT_CHANNELS: 4, WIDTH_PER_GROUP: 4}",  # features are 32 wide
        *("data.boxes.train=precomputed", "eval={boxes: [precomputed], report_pictures: 0}", "data.flip=0"),
        *("task.config={teacher: file, mask_pixels: false}", "encoder.config.masked_region_feature=true"),
    ),
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_step_on_every_source(source, settings):
    chosen = list(SOURCES[source])
    if source == "shards":  # the detector that finds its boxes is trained first, on COCO's
        detector = settings("train.max_steps=1", "detector.loss_weight=1", "eval.boxes=[online]", output="detector")
        assert "val/masked_words_predicted_boxes" in train(detector)
        chosen[-1] = f"detector.weights={detector.output}"
    config = settings("train.max_steps=1", "data.texts_per_image=1", *chosen)
    metrics = train(config)
    [line] = logged(config.output)
    assert line["masked_words"] > 0 and line["masked_text"] > 0 and line["relationship"] > 0
    assert f"val/masked_words_{BoxSource(config.eval.boxes[0]).metric_suffix}" in metrics


# LXMERT, from pixels and on the files of its official code, whose features are saved


LXMERT_OBJECTIVES = {
    "masked_words": {"weight": 1.0, "whole_words": False},
    "masked_text": 0.0,
    "masked_regions": 0.0,
    "relationship": 1.0,
    "object_labels": {"weight": 6.67, "classes": 6},
    "region_features": 6.67,
}


def with_lxmert(config: RunConfig, **task: object) -> RunConfig:
    """Settings with a small LXMERT and its objectives, and with more entries of `task.config`."""
    own = options(config.task.config) | {"objectives": LXMERT_OBJECTIVES} | task
    return replaced(config, encoder=ENCODERS["lxmert"], task={"config": own})


def test_a_step_of_lxmert_from_pixels(settings):
    config = settings("data.config.use_corpus=false", "train.max_steps=1", "eval.report_pictures=0")
    shares = {"mask_probability": 0.8, "replace_probability": 0.1, "region_probability": 0.5}
    train(with_lxmert(config, max_length=None, **shares))
    [losses] = logged(config.output)
    for name in ("masked_words", "relationship", "object_labels", "region_features"):
        assert 0 < losses[name] < 100


def test_a_saved_model_keeps_the_answers_of_pretraining(settings, tmp_path):
    """The list comes with the model, wherever the file of answers was."""
    listed = tmp_path / "all_ans.json"
    sources = {"cat": ["vqa"], "dog": ["gqa"], "red": ["vqa", "gqa"]}
    listed.write_text(json.dumps([{"ans": answer, "dsets": names} for answer, names in sources.items()]))
    answers = {"weight": 1.0, "answers": str(listed), "answer_sources": ["gqa"]}
    config = with_lxmert(settings("data.config.use_corpus=false"), objectives=LXMERT_OBJECTIVES | {"image_qa": answers})
    tokenizer = build_tokenizer(config)
    model = build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer)
    save_model(tmp_path / "saved", config, model, tokenizer)
    listed.unlink()
    _, loaded, _ = load_model(tmp_path / "saved")
    assert model.task.answer_vocabulary.answers == loaded.task.answer_vocabulary.answers == ["dog", "red"]
    assert same(loaded.task, model.task)


def test_lxmert_on_its_official_files(tmp_path):
    data = tmp_path / "data"
    make_scenes(data, scenes={"train": 8, "val": 4}, formats=["lxmert"])
    for path in (data / "images").rglob("*.jpg"):
        path.unlink()  # features are all that is read
    answers = data / "lxmert" / "all_ans.json"
    objectives = f"task.config.objectives.image_qa.answers={answers}", "task.config.region_probability=0.5"
    words = "train={max_steps: 2, images_per_batch: 2}", "eval.report_pictures=0"
    metrics = train(tiny("lxmert_files", data, tmp_path / "run", *objectives, *words))
    [*_, losses] = logged(tmp_path / "run")
    names = {"masked_words", "relationship", "object_labels", "attribute_labels", "region_features", "image_qa"}
    assert names <= set(losses) and all(0 <= losses[name] < 100 for name in names)
    assert {f"val/{name}_precomputed_boxes" for name in ("object_labels", "attribute_labels")} <= set(metrics)


def test_an_objective_that_begins_later(tmp_path):
    """Before, its head stays as it is. A run that is resumed in between goes on exactly."""
    data = tmp_path / "data"
    make_scenes(data, scenes={"train": 8, "val": 4}, formats=["lxmert"])
    words = (
        f"task.config.objectives.image_qa.answers={data / 'lxmert' / 'all_ans.json'}",
        "task.config.objectives.image_qa={weight: 2, start_fraction: 0.5}",
        "train={max_steps: 4, save_every_epochs: 0.01, save_total_limit: 4, weight_decay: 0}",
        "train.metric_for_best_model=null",
        "data.texts_per_image=8",
        "eval={every_epochs: 0, boxes: []}",
    )
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(tiny("lxmert_files", data, whole, *words))
    lines = logged(whole)
    assert [line["weight_image_qa"] for line in lines] == [0, 0, 2, 2]
    for line in lines:
        objectives = [name.removeprefix("weight_") for name in line if name.startswith("weight_")]
        total = sum(line[name] for name in objectives if line[f"weight_{name}"])
        assert line["loss"] == pytest.approx(total) and line["image_qa"] > 0
    heads = [load_file(path / "model" / "task" / "model.safetensors") for path in sorted(whole.glob("checkpoints/*"))]
    moved = [(one["image_qa.head.output.weight"] - heads[0]["image_qa.head.output.weight"]).any() for one in heads]
    assert moved == [False, False, True, True]
    lose_newest(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step_00000003")
    train(tiny("lxmert_files", data, resumed, *words), resume=True)
    assert_same_run(whole, resumed)


# VisualBERT learns from pixels


VISUAL_BERT = ROOT / "configs" / "tiny" / "visual_bert_pretraining.yaml"
CLS, SEP, MASK, RED, BLUE, A, BOX = 2, 3, 4, 5, 6, 7, 8
SIDE, STEPS = 32, 40


def red_and_blue() -> Batch:
    """A red image and a blue one, and about both: [CLS] a [MASK] box [SEP] red [SEP]; the labels differ."""
    pixels = torch.zeros(2, 3, SIDE, SIDE)
    pixels[0, 2], pixels[1, 0] = 100.0, 100.0
    sizes = torch.full((2, 2), SIDE)
    ids = torch.tensor([[CLS, A, MASK, BOX, SEP, RED, SEP]]).expand(2, -1)
    labels = torch.full((2, 7), -1)
    labels[:, 2] = torch.tensor([RED, BLUE])
    parts = {"masked_words": WordLabels(labels), "relationship": MatchTargets(torch.tensor([1, 0]))}
    return Batch(
        images=ImageBatch(pixels, sizes, sizes, ["red.jpg", "blue.jpg"]),
        boxes=[torch.tensor([[4.0, 4.0, 28.0, 28.0]])] * 2,
        texts=TextBatch(ids, torch.tensor([[0, 0, 0, 0, 0, 1, 1]]).expand(2, -1), torch.ones(2, 7, dtype=torch.bool)),
        image_index=torch.tensor([[0], [1]]),
        targets=PretrainingTargets(parts),
    )


def trained_losses(batch: Batch) -> dict[str, Tensor]:
    """Losses after a few steps on one batch, from the same start."""
    torch.manual_seed(0)
    dropout = [f"encoder.config.{name}=0" for name in ("hidden_dropout_prob", "attention_probs_dropout_prob")]
    norms = "detector.overrides.MODEL.RESNETS.NORM=FrozenBN"
    model = build_model(load_config(VISUAL_BERT, [*dropout, norms]), vocab_size=9).train()
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr=3e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        sum(loss.mean for loss in model(batch).losses.values()).backward()
        optimizer.step()
    with torch.no_grad():
        return {name: loss.mean for name, loss in model(batch).losses.items()}


def test_objectives_are_learned_from_pixels_and_their_labels_are_in_no_text():
    """On images without colours the same training finds nothing: two answers that are equally likely cost log 2."""
    batch = red_and_blue()
    seen = trained_losses(batch)
    batch.images.pixels.zero_()
    unseen = trained_losses(batch)
    assert set(seen) == set(unseen) == {"masked_words", "relationship"}
    for name in seen:
        assert seen[name] < 0.3, name
        assert unseen[name] > 0.99 * np.log(2), name
