"""Each objective of pre-training is learned on synthetic data: what is found on held-out scenes beats guessing by far.

Guessing is the share of the most frequent truth, or of features their mean. What was learned by heart does not help:
the scenes are others than in training. `test_pretraining.py` has the test of masked words.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from e2e_vl.config import RunConfig, SyntheticDataConfig
from e2e_vl.data.batching import Request, collate
from e2e_vl.run.build import build_examples
from e2e_vl.run.checkpoint import load_model
from e2e_vl.run.train import train
from e2e_vl.structures import ModelOutput
from e2e_vl.synthetic.config import ImitatedDetectorConfig, SceneConfig
from e2e_vl.synthetic.generate import make_scenes
from tests.run.runs import tiny
from tests.weights.starts import replaced

LOOKS = {"min_side": 64, "max_side": 64, "small": (16, 20), "big": (24, 28), "textures": ("plain",)}
LOOKS |= {"shapes": ("circle", "square", "triangle", "star"), "colours": ("red", "blue", "yellow", "green")}
NO_ERRORS = ImitatedDetectorConfig(missed=0, wrong_category=0, false_alarms=0)
# Comes first: every objective is switched off, and those that a run learns are switched on behind it.
OFF = (
    "task.config.objectives={masked_words: {weight: 0}, masked_text: {weight: 0}, masked_regions: {weight: 0}, "
    "relationship: {weight: 0}, object_labels: {weight: 0}, attribute_labels: {weight: 0}, region_features: "
    "{weight: 0}, image_qa: {weight: 0}}"
)
TRAIN = (
    "train={optimizer: adamw, betas: [0.9, 0.98], schedule: cosine, max_grad_norm: 1.0, epochs: 1000, "
    "save_every_epochs: 1000, metric_for_best_model: null, log_every: 50, lr: 1.0e-3}"
)
NARROW = (
    "hidden_size: 64, num_attention_heads: 4, intermediate_size: 128, hidden_dropout_prob: 0.0, "
    "attention_probs_dropout_prob: 0.0"
)

pytestmark = [pytest.mark.usefixtures("on_cpu"), pytest.mark.timeout(600)]  # a machine may be busy


def drawn(folder: Path, things: int, train: int, val: int, **more: object) -> Path:
    """Scenes of so many things each."""
    config = SceneConfig(min_objects=things, max_objects=things, **LOOKS)
    make_scenes(folder, scenes={"train": train, "val": val}, config=config, **more)
    return folder


@pytest.fixture(scope="module")
def one_thing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With what is said and asked about them."""
    folder = tmp_path_factory.mktemp("one_thing") / "data"
    return drawn(folder, 1, 300, 100, detections=NO_ERRORS, formats=["conceptual", "lxmert"])


@pytest.fixture(scope="module")
def two_things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With several regions of either."""
    return drawn(tmp_path_factory.mktemp("two_things") / "data", 2, 200, 60, formats=["lxmert"])


def learned(config: RunConfig) -> dict[str, tuple[float, float]]:
    """Of each objective the share that is found, and by guessing; of features the explained variance, and 0."""
    config = replaced(config, data={"synthetic": SyntheticDataConfig()})  # the data are there
    train(config)
    config, model, tokenizer = load_model(Path(config.output))
    [boxes] = config.eval.boxes
    data = build_examples(config, model, tokenizer, "val", boxes=boxes)
    batch = collate([data[Request(*group)] for group in enumerate(map(tuple, data.groups))])
    with torch.no_grad():
        output = model(batch)
    found = {}
    for name in model.task.objectives:
        truth, is_correct = TRUTHS[name](output), output.task.details[name].is_correct
        assert len(truth) == len(is_correct) > 80, name
        if name == "region_features":
            error, spread = output.task.parts[name] - truth, truth - truth.mean(dim=0)
            found[name] = 1 - float(error.square().sum() / spread.square().sum()), 0.0
        else:
            found[name] = float(is_correct.float().mean()), Counter(truth.tolist()).most_common(1)[0][1] / len(truth)
    print(found)  # shown when a test fails
    return found


def answers_of(output: ModelOutput) -> Tensor:
    answers = output.batch.targets.parts["image_qa"].answer
    return answers[answers >= 0]


def of_regions(field: str) -> Callable[[ModelOutput], Tensor]:
    """What is known of the regions that are predicted; of class distributions the best class."""

    def labels(output: ModelOutput) -> Tensor:
        regions = output.text_regions
        is_predicted = regions.gather(output.batch.masking.masked_regions.is_labelled, fill=False)
        found = regions.gather(operator.attrgetter(field)(output.batch.region_labels), fill=0)[is_predicted]
        return found.argmax(dim=1) if field == "class_probs" else found

    return labels


TRUTHS = {
    "masked_regions": of_regions("class_probs"),
    "image_qa": answers_of,
    "object_labels": of_regions("detected.classes"),
    "attribute_labels": of_regions("detected.attributes"),
    "region_features": of_regions("features"),
}


def on_saved_features(data: Path, output: Path, objectives: str, *words: str) -> RunConfig:
    """LXMERT on the files of its official code, without an image. Of what is predicted nothing is seen."""
    return tiny(
        *("lxmert_files", data, output),
        *(OFF, f"task.config.objectives={{{objectives}}}"),
        "task.config={mask_probability: 1.0, replace_probability: 0.0}",
        f"encoder.config={{{NARROW}, x_layers: 2, initializer_range: 0.2}}",
        "eval={boxes: [precomputed], every_epochs: 0, images_per_batch: 50}",
        TRAIN,
        "train.warmup_ratio=0.1",
        *words,
    )


def test_objects_attributes_and_features_of_masked_regions(two_things, tmp_path):
    """LXMERT's three objectives of regions together; other regions of the same thing are seen."""
    masked = "{weight: 1.0, regions: masked}"
    found = learned(
        on_saved_features(
            *(two_things, tmp_path / "run"),
            f"object_labels: {masked}, attribute_labels: {masked}, "
            "region_features: {weight: 40.0, average: masked}",  # a mean over 64 numbers, most of them noise
            "task.config.region_probability=0.3",
            "data.config.sources=[mscoco]",
            "data.boxes.max_precomputed=12",
            "encoder.config={x_layers: 1, initializer_range: 0.08}",
            "train={images_per_batch: 24, max_steps: 110, lr: 2.0e-3}",
        )
    )
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


def test_masked_regions_from_pixels(one_thing, tmp_path):
    """VL-BERT on the files of its official code: what is masked in the image is said in the caption."""
    config = tiny(
        *("pretraining", one_thing, tmp_path / "run"),
        "data.config={source: json_lines, use_corpus: false}",
        "data.files={captions: 'conceptual/{split}.json', detections: 'conceptual/{split}_frcnn.json', "
        "features: 'conceptual/{split}_frcnn.json'}",
        "data={texts_per_image: 1, resize: {short_edge: [64], long_edge: 64}, boxes: {train: detections}}",
        *(OFF, TRAIN, "task.config.objectives={masked_regions: {weight: 1.0}}"),
        "task.config={teacher: file, region_probability: 1.0, mask_probability: 1.0}",
        f"encoder.config={{{NARROW}, region_dropout_prob: 0.0, norm_first: false, visual_scale_text_init: 0.5, "
        "visual_scale_object_init: 0.5, image_feature_on_words: false, embedding_init_std: 0.08, "
        "initializer_range: 0.08}",
        "train={images_per_batch: 12, max_steps: 90, lr: 2.0e-3, detector_lr: 2.0e-4, warmup_steps: 10}",
        "eval={boxes: [detections], every_epochs: 0, images_per_batch: 50, report_pictures: 0}",
    )
    found = learned(config)
    assert found["masked_regions"][1] < 0.4 and found["masked_regions"][0] > 0.7, found
