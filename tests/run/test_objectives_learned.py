"""Each objective of pre-training is learned on drawn data: what is found on held-out scenes beats guessing by far.

Guessing is the share of the most frequent truth, or of features their mean. What was learned by heart does not help:
the scenes are others than in training. `test_pretraining.py` has the test of masked words.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from detector.structures import ImageBatch
from e2e_vl.config import RunConfig, SyntheticSettings, load_config
from e2e_vl.data.batching import Request
from e2e_vl.model import VisionLanguageModel
from e2e_vl.run.build import build_collate, build_examples, build_model
from e2e_vl.run.checkpoint import load_model
from e2e_vl.run.train import train
from e2e_vl.structures import Batch, ModelOutput, TextBatch
from e2e_vl.synthetic import make_scenes
from e2e_vl.synthetic.config import ImitatedDetectorConfig, SceneConfig
from e2e_vl.tasks.objectives.words import WordLabels
from e2e_vl.tasks.pretraining import PretrainingTargets
from e2e_vl.text import build_vocabulary, load_tokenizer
from tests.weights.starts import replaced

ROOT = Path(__file__).parents[2]
LOOKS = {
    "min_side": 64,
    "max_side": 64,
    "small": (16, 20),
    "big": (24, 28),
    "shapes": ("circle", "square", "triangle", "star"),
    "colours": ("red", "blue", "yellow", "green"),
    "textures": ("plain",),
}
NO_ERRORS = ImitatedDetectorConfig(missed=0, wrong_category=0, false_alarms=0)
# Comes first: every objective is switched off, and those that a run learns are switched on behind it.
OFF = (
    "task.config.objectives={masked_words: {weight: 0}, masked_text: {weight: 0}, masked_regions: {weight: 0}, "
    "relationship: {weight: 0}, object_labels: {weight: 0}, attribute_labels: {weight: 0}, region_features: "
    "{weight: 0}, image_qa: {weight: 0}}"
)
TRAIN = (
    "train={optimizer: adamw, betas: [0.9, 0.98], schedule: cosine, clip_norm: 1.0, epochs: 1000, "
    "save_every_epochs: 1000, keep_best: null, log_every: 50, lr: 1.0e-3}"
)
NARROW = (
    "hidden_size: 64, num_attention_heads: 4, intermediate_size: 128, hidden_dropout_prob: 0.0, "
    "attention_probs_dropout_prob: 0.0"
)

pytestmark = [pytest.mark.usefixtures("on_cpu"), pytest.mark.timeout(600)]  # a machine may be busy


@pytest.fixture(scope="module")
def one_thing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scenes of one thing each, and what is said and asked about them."""
    folder = tmp_path_factory.mktemp("one_thing") / "data"
    config = SceneConfig(min_objects=1, max_objects=1, **LOOKS)
    formats = ["conceptual", "lxmert"]
    make_scenes(folder, scenes={"train": 300, "val": 100}, config=config, detections=NO_ERRORS, formats=formats)
    return folder


@pytest.fixture(scope="module")
def two_things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scenes of two things each, with several regions of either."""
    folder = tmp_path_factory.mktemp("two_things") / "data"
    config = SceneConfig(min_objects=2, max_objects=2, **LOOKS)
    make_scenes(folder, scenes={"train": 200, "val": 60}, config=config, formats=["lxmert"])
    return folder


def learned(config: RunConfig) -> dict[str, tuple[float, float]]:
    """Train, and look at the validation scenes: of each objective the share that is found, and what guessing finds.

    Of `region_features` the share of the variance that is explained, and 0.
    """
    config = replaced(config, data={"synthetic": SyntheticSettings()})  # the data are there
    train(config)
    config, model, tokenizer = load_model(Path(config.output))
    [boxes] = config.eval.boxes
    data = build_examples(config, model, tokenizer, "val", boxes=boxes)
    collate = build_collate(config, model)
    count, right = Counter(), Counter()
    truths: dict[str, list[Tensor]] = {name: [] for name in model.task.objectives}
    errors: list[Tensor] = []
    with torch.no_grad():
        for first in range(0, len(data.groups), 25):
            numbers = range(first, min(first + 25, len(data.groups)))
            output = model(collate([data[Request(number, tuple(data.groups[number]))] for number in numbers]))
            for name, own in truths.items():
                own.append(TRUTHS[name](output))
                is_right = output.task.details[name].is_right
                count[name] += len(is_right)
                right[name] += int(is_right.sum())
                assert len(own[-1]) == len(is_right)
            if "region_features" in truths:
                errors.append(output.task.parts["region_features"] - truths["region_features"][-1])
    found = {}
    for name, own in truths.items():
        truth = torch.cat(own)
        assert len(truth) == count[name] > 80, name
        if name == "region_features":
            found[name] = 1 - float(torch.cat(errors).square().sum() / (truth - truth.mean(dim=0)).square().sum()), 0.0
        else:
            found[name] = right[name] / count[name], Counter(truth.tolist()).most_common(1)[0][1] / len(truth)
    print(found)  # shown when a test fails
    return found


def of_texts(name: str, field: str) -> Callable[[ModelOutput], Tensor]:
    def labels(output: ModelOutput) -> Tensor:
        found = getattr(output.batch.targets.parts[name], field)
        return found[found >= 0]

    return labels


def of_regions(field: str) -> Callable[[ModelOutput], Tensor]:
    """What is known of the regions that are predicted; of class distributions the best class."""

    def labels(output: ModelOutput) -> Tensor:
        regions = output.text_regions
        is_predicted = regions.gather(output.batch.masked_regions.is_labelled, fill=False)
        found = regions.gather(getattr(output.batch.region_labels, field), fill=0)[is_predicted]
        return found.argmax(dim=1) if field == "class_probs" else found

    return labels


TRUTHS = {
    "masked_regions": of_regions("class_probs"),
    "relationship": of_texts("relationship", "is_match"),
    "image_qa": of_texts("image_qa", "answer"),
    "object_labels": of_regions("detected_classes"),
    "attribute_labels": of_regions("detected_attributes"),
    "region_features": of_regions("features"),
}


def on_saved_features(data: Path, output: Path, objectives: str, *words: str) -> RunConfig:
    """LXMERT on the files of its official code, without an image. Of what is predicted nothing is seen."""
    return load_config(
        ROOT / "configs" / "tiny" / "lxmert_files.yaml",
        [
            f"detector.config={ROOT / 'configs' / 'detector' / 'tiny.yaml'}",
            f"data.root={data}",
            f"output={output}",
            *(OFF, f"task.config.objectives={{{objectives}}}"),
            "task.config={mask_probability: 1.0, replace_probability: 0.0}",
            f"encoder.config={{{NARROW}, x_layers: 2, initializer_range: 0.2}}",
            "eval={boxes: [precomputed], every_epochs: 0, images_per_batch: 50}",
            TRAIN,
            "train.warmup_share=0.1",
            *words,
        ],
    )


def of_hidden_regions(data: Path, output: Path) -> RunConfig:
    """LXMERT's three objectives of regions together; other regions of the same thing are seen."""
    masked = "{weight: 1.0, regions: masked}"
    return on_saved_features(
        *(data, output),
        f"object_labels: {masked}, attribute_labels: {masked}, "
        "region_features: {weight: 40.0, average: masked}",  # a mean over 64 numbers, most of them noise
        "task.config.region_probability=0.3",
        "data.config.sources=[mscoco]",
        "data.boxes.max_precomputed=12",
        "encoder.config={x_layers: 1, initializer_range: 0.08}",
        "train={images_per_batch: 24, max_steps: 110, lr: 2.0e-3}",
    )


def test_objects_attributes_and_features_of_hidden_regions(two_things, tmp_path):
    found = learned(of_hidden_regions(two_things, tmp_path / "run"))
    assert set(found) == {"object_labels", "attribute_labels", "region_features"}
    for name in ("object_labels", "attribute_labels"):
        assert found[name][1] < 0.4 and found[name][0] > 0.62, found
    assert found["region_features"][0] > 0.08, found  # about a quarter is not noise


def test_answers_to_questions(one_thing, tmp_path):
    answers = one_thing / "lxmert" / "all_ans.json"
    found = learned(
        on_saved_features(
            *(one_thing, tmp_path / "run"),
            f"image_qa: {{weight: 1.0, answers: {answers}}}",
            "data.config.sources=[vqa]",
            "data.boxes.max_precomputed=3",
            "data.texts_per_image=3",
            "train={images_per_batch: 12, max_steps: 120, lr: 2.0e-3}",
        )
    )
    assert found["image_qa"][0] > found["image_qa"][1] + 0.2, found


def test_captions_of_other_images(one_thing, tmp_path):
    """VisualBERT tells them apart. What one says can be true of another image, so some are not to be told."""
    config = on_saved_features(
        *(one_thing, tmp_path / "run"),
        "relationship: {weight: 1.0}",
        "data.config.sources=[mscoco]",
        "data.boxes.max_precomputed=3",
        "data.texts_per_image=3",
        "train={images_per_batch: 16, max_steps: 250}",
    )
    sizes = ("hidden_size", "num_attention_heads", "intermediate_size", "initializer_range")
    own = {name: getattr(config.encoder.config, name) for name in sizes}
    own |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_hidden_layers": 2}
    encoder = {"name": "visual_bert", "config": own | {"train_pooler": True}}  # it starts at random
    found = learned(replaced(config, encoder=encoder))
    assert found["relationship"][1] < 0.56 and found["relationship"][0] > 0.64, found


def with_vl_bert(data: Path, output: Path, *words: str) -> RunConfig:
    """VL-BERT on the files of its official code, whose class distributions are the truth."""
    return load_config(
        ROOT / "configs" / "tiny" / "pretraining.yaml",
        [
            f"detector.config={ROOT / 'configs' / 'detector' / 'tiny.yaml'}",
            f"data.root={data}",
            f"output={output}",
            "data.config={source: json_lines, use_corpus: false}",
            "data.files={captions: 'conceptual/{split}.json', detections: 'conceptual/{split}_frcnn.json', "
            "features: 'conceptual/{split}_frcnn.json'}",
            "data.texts_per_image=1",
            "task.config.teacher=file",
            *(OFF, TRAIN, "train={lr: 2.0e-3, warmup_steps: 10}"),
            f"encoder.config={{{NARROW}, region_dropout_prob: 0.0, norm_first: false, visual_scale_text_init: 0.5, "
            "visual_scale_object_init: 0.5, image_feature_on_words: false}",
            "eval={every_epochs: 0, images_per_batch: 50, report_pictures: 0}",
            *words,
        ],
    )


def test_hidden_regions(one_thing, tmp_path):
    """VL-BERT from pixels: what is hidden in the image is said in the caption."""
    config = with_vl_bert(
        *(one_thing, tmp_path / "run"),
        "task.config.objectives={masked_regions: {weight: 1.0}}",
        "task.config={region_probability: 1.0, mask_probability: 1.0}",
        "data.resize={short_edge: [64], long_edge: 64}",
        "data.boxes.train=detections",
        "eval.boxes=[detections]",
        "encoder.config={embedding_init_std: 0.08, initializer_range: 0.08}",
        "train={images_per_batch: 12, max_steps: 90, detector_lr: 2.0e-4}",
    )
    found = learned(config)
    assert found["masked_regions"][1] < 0.4 and found["masked_regions"][0] > 0.7, found


def corpus_batch(lines: list[list[int]], mask: int, generator: torch.Generator) -> Batch:
    """64 lines of a corpus with a fifth of their wordpieces masked, beside an image that no text looks at."""
    ids = torch.zeros(64, max(map(len, lines)), dtype=torch.int64)
    for row, line in enumerate(torch.randint(len(lines), (64,), generator=generator).tolist()):
        ids[row, : len(lines[line])] = torch.tensor(lines[line])
    is_masked = (torch.rand(ids.shape, generator=generator) < 0.2) & (ids > mask)  # special tokens come first
    size = torch.full((1, 2), 32)
    return Batch(
        images=ImageBatch(torch.zeros(1, 3, 32, 32), size, size, ["blank.jpg"]),
        boxes=[torch.tensor([[4.0, 4.0, 28.0, 28.0]])],
        texts=TextBatch(ids.masked_fill(is_masked, mask), torch.zeros_like(ids), ids > 0),
        image_index=torch.full((64, 1), -1),
        targets=PretrainingTargets({"masked_text": WordLabels(torch.where(is_masked, ids, -1))}),
    )


def test_words_of_texts_without_images(tmp_path):
    """VL-BERT on other lines of the corpus than it was trained on; its most frequent word is a tenth of all."""
    make_scenes(tmp_path / "data", scenes={"train": 300}, formats=["corpus"])
    lines = [line for line in (tmp_path / "data/corpus/corpus.doc").read_text().splitlines() if line]
    build_vocabulary(lines, tmp_path / "vocab.txt")
    tokenizer = load_tokenizer(tmp_path / "vocab.txt")
    ids = [tokenizer(line)["input_ids"][:24] for line in lines]
    masked_text = "task.config.objectives={masked_text: {weight: 1.0}}"
    start = "encoder.config={embedding_init_std: 0.08, initializer_range: 0.08}"
    torch.manual_seed(0)
    config = with_vl_bert(tmp_path / "data", tmp_path / "run", masked_text, start)
    model = build_model(config, vocab_size=len(tokenizer)).train()
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    for step in range(250):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 20)
        [loss] = model(corpus_batch(ids[100:], tokenizer.mask_token_id, generator)).losses.values()
        optimizer.zero_grad()
        loss.mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    right, truths = 0, []
    with torch.no_grad():
        for _ in range(4):
            batch = corpus_batch(ids[:100], tokenizer.mask_token_id, generator)
            right += int(model.eval()(batch).task.details["masked_text"].is_right.sum())
            labels = batch.targets.parts["masked_text"].labels
            truths += labels[labels >= 0].tolist()
    share = Counter(truths).most_common(1)[0][1] / len(truths)
    assert share < 0.15 and right / len(truths) > 0.35, (right / len(truths), share)


# LXMERT from raw pixels, with the detector trained along. Of each drawn thing four regions are given, its quarters, and
# what is masked of them is masked in the pixels. All texts are alike, so the colour of a masked quarter can be told
# from the visible pixels of the others and from nothing else.


QUARTERS = np.array([[0, 0, 0.5, 0.5], [0.5, 0, 1, 0.5], [0, 0.5, 0.5, 1], [0.5, 0.5, 1, 1]], dtype=np.float32)
TYPES = (np.int64, np.float32, np.int64, np.float32)  # classes and attributes, each with its confidences
BOXES, FEATURES = 8, 9  # columns


def in_quarters(line: str) -> str:
    """A line of a file of features with the four quarters of its first box, and what was found in that box."""
    cells = line.split("\t")

    def first(column: int, kind: type, width: int = 1) -> np.ndarray:
        return np.frombuffer(base64.b64decode(cells[column]), dtype=kind).reshape(-1, width)[:1]

    def write(column: int, values: np.ndarray) -> None:
        cells[column] = base64.b64encode(np.ascontiguousarray(values)).decode()

    box = first(BOXES, np.float32, 4)
    features = len(base64.b64decode(cells[FEATURES])) // (4 * int(cells[BOXES - 1]))
    for column, kind in enumerate(TYPES, start=3):
        write(column, first(column, kind).repeat(4, axis=0))
    write(FEATURES, first(FEATURES, np.float32, features).repeat(4, axis=0))
    corner, size = np.tile(box[:, :2], 2), np.tile(box[:, 2:] - box[:, :2], 2)
    write(BOXES, corner + QUARTERS * size)
    cells[BOXES - 1] = "4"
    return "\t".join(cells)


@pytest.fixture(scope="module")
def quarters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scenes of one thing each, in quarters, with the same caption about all."""
    folder = tmp_path_factory.mktemp("quarters") / "data"
    config = SceneConfig(min_objects=1, max_objects=1, **LOOKS)
    make_scenes(folder, scenes={"train": 200, "val": 100}, config=config, formats=["lxmert"])
    for split in ("train", "val"):
        features, sentences = (folder / "lxmert" / f"{split}{end}" for end in ("_obj36.tsv", ".json"))
        features.write_text("\n".join(map(in_quarters, features.read_text().splitlines())) + "\n")
        images = json.loads(sentences.read_text())
        sentences.write_text(json.dumps([{**one, "sentf": {"mscoco": ["A shape."]}, "labelf": {}} for one in images]))
    return folder


def from_pixels(data: Path, output: Path, *words: str) -> RunConfig:
    return on_saved_features(
        *(data, output),
        "attribute_labels: {weight: 1.0, regions: masked}",
        "detector.backend=builtin",
        "task.config={region_probability: 0.3, mask_pixels: true}",
        "data={files: {images: images/train2014}, boxes: {train: detections}, texts_per_image: 1}",
        "data.files.detections=lxmert/{split}_obj36.tsv",
        "data.boxes.selection={min_score: 0.0, min_regions: 4, max_regions: 4}",
        "data.resize={short_edge: [64], long_edge: 64}",
        "eval.boxes=[detections]",
        "encoder.config={masked_region_feature: false, x_layers: 1, initializer_range: 0.08}",
        "train={images_per_batch: 16, max_steps: 100, lr: 2.0e-3, detector_lr: 2.0e-3, keep_best: null}",
        *words,
    )


def share_found(config: RunConfig, change: Callable[[Batch], Batch]) -> tuple[float, VisionLanguageModel, Batch]:
    """Of the hidden regions of the validation scenes, in changed batches; with the model and the last batch."""
    config, model, tokenizer = load_model(Path(config.output))
    data = build_examples(config, model, tokenizer, "val", boxes="detections")
    collate = build_collate(config, model)
    right, count = 0, 0
    for first in range(0, len(data.groups), 25):
        batch = collate([data[Request(number, tuple(data.groups[number]))] for number in range(first, first + 25)])
        with torch.no_grad():
            is_right = model(change(batch)).task.details["attribute_labels"].is_right
        right += int(is_right.sum())
        count += len(is_right)
    return right / count, model, batch


def without_pixels(batch: Batch) -> Batch:
    return dataclasses.replace(
        batch, images=dataclasses.replace(batch.images, pixels=torch.zeros_like(batch.images.pixels))
    )


def test_colours_of_regions_hidden_in_the_pixels(quarters, tmp_path):
    config = from_pixels(quarters, tmp_path / "run")
    found, guessed = learned(config)["attribute_labels"]
    assert guessed < 0.4 and found > 0.52, (found, guessed)
    blind, model, batch = share_found(config, without_pixels)
    assert blind < 0.4, "what is found comes from the pixels"
    sum(loss.mean for loss in model.train()(batch).task.losses.values()).backward()
    first = next(model.detector.parameters())
    assert first.requires_grad and first.grad.abs().sum() > 0, "the detector learns from the hidden regions"
