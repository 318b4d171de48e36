"""Both backends against arrays recorded from stock Detectron2: every stage, in the order of the forward pass.

Configs, sizes and options are read from the set, so that another set (`--golden-root`) is tested by the same file.
Floats agree to 1e-4 of the largest value of a tensor, discrete results exactly. Gradients are compared by their
relative L2 distance: single ReLU sign flips between two correct float32 kernels move them by about 1e-3. Trained batch
norms multiply all this by ten: the statistics of the batch pass every rounding error on to all pixels.
The Detectron2 backend is skipped where Detectron2 is not installed.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from detector.boxes import decode_deltas, encode_deltas, rescale_detections
from detector.checkpoint import load_weights
from detector.config import DetectorConfig
from detector.faster_rcnn import TwoStageDetector
from detector.images import make_image_batch, resize_image
from detector.roi_heads import to_rois
from detector.structures import DetectionTargets, ImageBatch

TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-2
BATCH_NORMS = ("BN", "SyncBN")


@dataclasses.dataclass
class GoldenSet:
    config: dict[str, Any]
    meta: dict[str, Any]
    weights: dict[str, Tensor]
    tensors: dict[str, Tensor]  # of all other files
    detector_class: type[TwoStageDetector]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @property
    def noise(self) -> float:
        """Factor of the tolerances in training mode."""
        config = DetectorConfig.from_yaml(self.config).resnet
        return 10.0 if config.norm in BATCH_NORMS and config.freeze_at < 5 else 1.0

    @property
    def num_images(self) -> int:
        return len(self.meta["image_sizes_hw"])

    def of_images(self, pattern: str) -> list[Tensor]:
        """The tensors of all images; `pattern` has {} where the image number goes."""
        return [self[pattern.format(f"image{number}")] for number in range(self.num_images)]

    def description(self, name: str) -> str:
        return next(notes[name]["description"] for notes in self.meta["tensors"].values() if name in notes)

    def images(self, names: str = "input.{}.bgr_u8") -> ImageBatch:
        arrays = [image.numpy() for image in self.of_images(names)]
        config = DetectorConfig.from_yaml(self.config).input
        return make_image_batch(
            arrays,
            [array.shape[:2] for array in arrays],
            [f"image{number}" for number in range(self.num_images)],
            config.pixel_mean,
            config.pixel_std,
        )

    def detector(self, **keys: Any) -> TwoStageDetector:
        """A detector with the set's weights, in evaluation mode; `keys` (MODEL__X__Y=value) change the config."""
        tree = json.loads(json.dumps(self.config))
        for key, value in keys.items():
            node = tree
            *parents, leaf = key.split("__")
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = value
        model = self.detector_class(self.detector_class.config_class.from_yaml(tree))
        load_weights(model, self.weights, "state_dict.safetensors")
        return model.eval()


@pytest.fixture(scope="module", params=["builtin", "detectron2"])
def golden(golden_root: Path, backends: ModuleType, request: pytest.FixtureRequest) -> GoldenSet:
    detector_class = backends.detector_class(request.param)
    folder = golden_root / "detectron2"
    names = ("eval", "train", "mask", "resize", "extras")
    return GoldenSet(
        config=yaml.safe_load((folder / "config.yaml").read_text()),
        meta=json.loads((folder / "meta.json").read_text()),
        weights=load_file(folder / "state_dict.safetensors"),
        tensors={key: value for name in names for key, value in load_file(folder / f"{name}.safetensors").items()},
        detector_class=detector_class,
    )


@pytest.fixture(scope="module")
def model(golden: GoldenSet) -> TwoStageDetector:
    return golden.detector()


@pytest.fixture(scope="module")
def images(golden: GoldenSet) -> ImageBatch:
    return golden.images()


@pytest.fixture(scope="module")
def sizes(images: ImageBatch) -> list[tuple[int, int]]:
    return [tuple(size) for size in images.sizes.tolist()]


@pytest.fixture(scope="module")
def features(model: TwoStageDetector, images: ImageBatch) -> Any:
    with torch.no_grad():
        return model.features(images)


@pytest.fixture(scope="module")
def rpn_output(model: TwoStageDetector, features: Any) -> Any:
    with torch.no_grad():
        return model.run_rpn(features)


@pytest.fixture(scope="module")
def given(golden: GoldenSet) -> list[Tensor]:
    return golden.of_images("given.{}.boxes")


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    assert actual.shape == expected.shape
    if not expected.numel():
        return
    largest = expected.double().abs().max().item()
    worst = (actual.double() - expected.double()).abs().max().item()
    assert worst <= tolerance * largest, f"differs by {worst:.3g}; the largest value is {largest:.3g}"


def test_state_dict_loads_strictly(golden: GoldenSet):
    model = golden.detector_class(golden.detector_class.config_class.from_yaml(golden.config))
    model.load_state_dict(golden.weights, strict=True)
    assert set(model.state_dict()) == set(golden.weights)


def test_config_is_the_effective_one(golden: GoldenSet):
    config = DetectorConfig.from_yaml(golden.config)
    flat = config.to_flat()
    for section, values in golden.meta["config_effective"].items():
        items = values.items() if isinstance(values, dict) else [(None, values)]
        for name, value in items:
            key = (section if "." in section else f"MODEL.{section}") + (f".{name}" if name else "")
            if key in flat:
                assert flat[key] == value, key


def test_preprocessing(golden: GoldenSet, images: ImageBatch):
    assert torch.equal(images.sizes, golden["pre.image_sizes"])
    assert_near(images.pixels, golden["pre.batch"], 1e-6)


def test_backbone(golden: GoldenSet, model: TwoStageDetector, images: ImageBatch, backends: ModuleType):
    with torch.no_grad():
        stages = backends.stages(model, images.pixels)
    for name in ("stem", "res2", "res3", "res4"):
        assert_near(stages[name], golden[f"backbone.{name}"])


def test_anchors(golden: GoldenSet, model: TwoStageDetector, rpn_output: Any, backends: ModuleType):
    assert torch.equal(backends.cell_anchors(model), golden["rpn.cell_anchors"])
    assert torch.equal(backends.rpn_arrays(rpn_output).anchors, golden["rpn.anchors"])


def test_rpn_head(golden: GoldenSet, model: TwoStageDetector, features: Any, rpn_output: Any, backends: ModuleType):
    rpn_output = backends.rpn_arrays(rpn_output)
    with torch.no_grad():
        objectness, deltas = backends.head_maps(model, features)
    assert_near(objectness, golden["rpn.head.objectness_map"])
    assert_near(deltas, golden["rpn.head.delta_map"])
    assert_near(rpn_output.objectness, golden["rpn.objectness_logits"])
    assert_near(rpn_output.deltas, golden["rpn.anchor_deltas"])
    decoded = decode_deltas(rpn_output.deltas, rpn_output.anchors, model.config.rpn.box_weights)
    assert_near(decoded, golden["rpn.decoded_boxes"])


def test_proposals(
    golden: GoldenSet, model: TwoStageDetector, rpn_output: Any, sizes: list[tuple[int, int]], backends: ModuleType
):
    boxes, objectness = backends.proposals(model, rpn_output, sizes)
    for number in range(golden.num_images):
        prefix = f"rpn.image{number}."
        assert_near(boxes[number], golden[f"{prefix}proposal_boxes"])
        assert_near(objectness[number], golden[f"{prefix}proposal_logits"])
    if backends.is_builtin(model):  # Detectron2 does not say which anchor a proposal came from
        found = model.proposal_generator.propose(rpn_output, sizes)
        for number, index in enumerate(found.anchor_index):
            assert torch.equal(index, golden[f"rpn.image{number}.proposal_anchor_index"])


def test_given_boxes(
    golden: GoldenSet,
    model: TwoStageDetector,
    images: ImageBatch,
    features: Any,
    given: list[Tensor],
    backends: ModuleType,
):
    with torch.no_grad():
        rows = golden["given.roi_align.rows"]
        pooled, maps = backends.roi_maps(model, features, to_rois(given))
        assert_near(pooled[rows], golden["given.roi_align.output"])
        assert_near(maps[rows], golden["given.res5.output"])
        regions = model(images, given)
        _, deltas = model.roi_heads.box_predictor(torch.cat(regions.features))
    assert_near(torch.cat(regions.features), golden["given.pooled_features"])
    assert_near(torch.cat(regions.class_logits), golden["given.class_logits"])
    assert_near(deltas, golden["given.box_deltas"])
    assert regions.scores is None
    assert regions.losses == {}


def test_box_head_on_proposals(golden: GoldenSet, model: TwoStageDetector, features: Any):
    proposals = golden.of_images("rpn.{}.proposal_boxes")
    with torch.no_grad():
        pooled = model.describe(features, to_rois(proposals))
        logits, deltas = model.roi_heads.box_predictor(pooled)
    decoded = decode_deltas(deltas, torch.cat(proposals), model.config.roi_heads.box_weights)
    assert_near(pooled, torch.cat(golden.of_images("roi.{}.pooled_features")))
    assert_near(logits, torch.cat(golden.of_images("roi.{}.class_logits")))
    assert_near(deltas, torch.cat(golden.of_images("roi.{}.box_deltas")))
    assert_near(logits.softmax(dim=1), torch.cat(golden.of_images("roi.{}.class_probs")))
    assert_near(decoded, torch.cat(golden.of_images("roi.{}.decoded_boxes")))


def test_detections(golden: GoldenSet, model: TwoStageDetector, images: ImageBatch):
    with torch.no_grad():
        regions = model(images)
        again = model(images, regions.boxes)
    for number in range(golden.num_images):
        prefix = f"det.image{number}."
        assert_near(regions.boxes[number], golden[f"{prefix}boxes"])
        assert_near(regions.scores[number], golden[f"{prefix}scores"])
        assert torch.equal(regions.classes[number], golden[f"{prefix}classes"])
        assert_near(regions.features[number], again.features[number], 1e-5)  # of the final boxes, not of the proposals


def test_detections_at_another_size(golden: GoldenSet, sizes: list[tuple[int, int]]):
    for number, size in enumerate(sizes):
        prefix = f"det.image{number}."
        boxes, kept = rescale_detections(golden[f"{prefix}boxes"], size, golden[f"{prefix}post.output_size"].tolist())
        assert_near(boxes, golden[f"{prefix}post.boxes"], 1e-6)
        assert torch.equal(golden[f"{prefix}scores"][kept], golden[f"{prefix}post.scores"])
        assert torch.equal(golden[f"{prefix}classes"][kept], golden[f"{prefix}post.classes"])


def test_features_of_proposals(golden: GoldenSet, images: ImageBatch, sizes: list[tuple[int, int]]):
    model = golden.detector(MODEL__ROI_HEADS__FEATURES_OF="proposal")
    with torch.no_grad():
        regions = model(images)
        features = model.features(images)
        detections, _ = model.detect(features, model.propose(model.run_rpn(features), sizes), sizes)
    for number in range(golden.num_images):
        prefix = f"det.image{number}."
        assert torch.equal(detections.proposal_index[number], golden[f"{prefix}proposal_index"])
        assert_near(regions.boxes[number], golden[f"{prefix}boxes"])
        assert_near(regions.features[number], golden[f"{prefix}proposal_features"])


def test_images_run_alone(golden: GoldenSet, given: list[Tensor], backends: ModuleType):
    model = golden.detector(MODEL__ROI_HEADS__FEATURES_OF="proposal")
    batch = golden.images()
    for number, (height, width) in enumerate(batch.sizes.tolist()):
        rows = slice(number, number + 1)
        alone = ImageBatch(
            batch.pixels[rows, :, :height, :width], batch.sizes[rows], batch.original_sizes[rows], batch.names[rows]
        )
        with torch.no_grad():
            described, detected = model(alone, given[rows]), model(alone)
            assert_near(backends.res4(model.features(alone)), golden[f"single.image{number}.res4"])
        prefix = f"single.image{number}."
        assert_near(described.features[0], golden[f"{prefix}given_pooled_features"])
        assert_near(detected.boxes[0], golden[f"{prefix}det.boxes"])
        assert_near(detected.scores[0], golden[f"{prefix}det.scores"])
        assert torch.equal(detected.classes[0], golden[f"{prefix}det.classes"])
        assert_near(detected.features[0], golden[f"{prefix}det.proposal_features"])


def targets_of(golden: GoldenSet) -> DetectionTargets:
    return DetectionTargets(golden.of_images("train.{}.gt_boxes"), golden.of_images("train.{}.gt_classes"))


def test_training_targets(golden: GoldenSet, images: ImageBatch, sizes: list[tuple[int, int]], backends: ModuleType):
    model = golden.detector().train()
    targets = targets_of(golden)
    with torch.no_grad():
        output = model.run_rpn(model.features(images))
    labels, matched = backends.label_anchors(model, output, targets, sizes)
    assert torch.equal(labels, torch.stack(golden.of_images("train.{}.rpn_labels")))
    positive = labels == 1
    assert torch.equal(matched[positive], torch.stack(golden.of_images("train.{}.rpn_matched_gt"))[positive])

    boxes, objectness = backends.proposals(model, output, sizes)
    for number in range(golden.num_images):
        assert_near(boxes[number], golden[f"train.image{number}.proposal_boxes"], TOLERANCE * golden.noise)
        assert_near(objectness[number], golden[f"train.image{number}.proposal_logits"], TOLERANCE * golden.noise)

    sampled = backends.sampled_arrays(model.sample(boxes, targets, sizes), targets)
    for number in range(golden.num_images):
        prefix = f"train.image{number}."
        expected = golden[f"{prefix}roi_boxes"]
        distances = torch.cdist(expected, sampled.boxes[number])  # sampling shuffles the RoIs
        order = distances.argmin(dim=1)
        assert len(sampled.boxes[number]) == len(expected)
        assert_near(sampled.boxes[number][order], expected, TOLERANCE * golden.noise)
        assert_near(sampled.boxes[number], expected[distances.argmin(dim=0)], TOLERANCE * golden.noise)
        assert torch.equal(sampled.classes[number][order], golden[f"{prefix}roi_classes"])
        foreground = golden[f"{prefix}roi_classes"] < model.num_classes
        objects = targets.boxes[number][golden[f"{prefix}roi_matched_gt"]]
        assert torch.equal(sampled.matched_boxes[number][order][foreground], objects[foreground])


@pytest.mark.parametrize("with_boxes", [False, True])
def test_training_losses_and_gradients(golden: GoldenSet, images: ImageBatch, given: list[Tensor], with_boxes: bool):
    if with_boxes and golden.noise > 1:
        pytest.skip("given boxes take part in the batch statistics of res5, so that the losses are others")
    model = golden.detector().train()
    regions = model(images, given if with_boxes else None, targets_of(golden))
    losses = {name: loss.mean for name, loss in regions.losses.items()}
    assert set(losses) == {"loss_rpn_cls", "loss_rpn_loc", "loss_cls", "loss_box_reg"}
    for name, value in losses.items():
        assert value.item() == pytest.approx(golden[f"train.loss.{name}"].item(), rel=TOLERANCE), name
    total = sum(losses.values())
    assert total.item() == pytest.approx(golden["train.loss.total"].item(), rel=TOLERANCE)

    total.backward()
    parameters = dict(model.named_parameters())
    names = [key.removeprefix("grad.") for key in golden.tensors if key.startswith("grad.")]
    assert names
    for name in names:
        expected = golden[f"grad.{name}"]
        distance = (parameters[name].grad - expected).norm()
        assert distance <= GRADIENT_TOLERANCE * golden.noise * expected.norm(), name
    if with_boxes:
        assert_near(torch.cat(regions.features).detach(), golden["given.pooled_features"])


@pytest.mark.parametrize("variant", ["norm", "raw", "none"])
def test_pixel_masks(golden: GoldenSet, model: TwoStageDetector, images: ImageBatch, given: list[Tensor], variant: str):
    batch, masks = images, None
    if variant == "norm":
        rows = golden.of_images("mask.{}.box_rows")
        masks = [boxes[index] for boxes, index in zip(given, rows, strict=True)]
    elif variant == "raw":
        batch = golden.images("mask.raw.{}.bgr_u8")
    with torch.no_grad():
        regions = model(batch, given, pixel_masks=masks)
    assert_near(torch.cat(regions.features), golden[f"mask.{variant}.pooled_features"])
    if variant != "none":
        assert_near(torch.cat(regions.class_logits), golden[f"mask.{variant}.class_logits"])


def test_feature_of_a_resized_image(golden: GoldenSet, model: TwoStageDetector):
    cases = sorted({key.split(".")[1] for key in golden.tensors if key.startswith("resize.")})
    assert cases
    for case in cases:
        source = golden[f"resize.{case}.input_bgr_u8"].numpy()
        height, width = golden[f"resize.{case}.output_bgr_u8"].shape[:2]
        settings = model.config.input
        batch = make_image_batch(
            [resize_image(source, (height, width))], [source.shape[:2]], [case], settings.pixel_mean, settings.pixel_std
        )
        with torch.no_grad():
            regions = model(batch, [torch.tensor([[0.0, 0.0, width, height]])])
        assert_near(regions.features[0], golden[f"resize.{case}.full_image_feature"])


def test_box_coder(golden: GoldenSet):
    for name in ("w1", "wroi"):
        stated = re.search(r"weights \(([^)]*)\)", golden.description(f"coder.{name}.decoded"))
        values = tuple(float(value) for value in stated[1].split(","))
        decoded = decode_deltas(golden["coder.deltas"], golden["coder.boxes"], values)
        encoded = encode_deltas(golden["coder.boxes"], golden["coder.targets"], values)
        assert_near(decoded, golden[f"coder.{name}.decoded"], 1e-6)
        assert_near(encoded, golden[f"coder.{name}.encoded"], 1e-6)


def test_poolers(golden: GoldenSet, images: ImageBatch, given: list[Tensor], backends: ModuleType):
    names = sorted({key.removesuffix(".rows") for key in golden.tensors if re.match(r"pooler\..*\.rows", key)})
    assert names
    for name in names:
        note = golden.description(f"{name}.output")
        kind, ratio, side = re.search(r"type (\w+), sampling_ratio (\d+), (\d+)x", note).groups()
        model = golden.detector(
            MODEL__ROI_BOX_HEAD__POOLER_TYPE=kind,
            MODEL__ROI_BOX_HEAD__POOLER_SAMPLING_RATIO=int(ratio),
            MODEL__ROI_BOX_HEAD__POOLER_RESOLUTION=int(side),
        )
        with torch.no_grad():
            maps, _ = backends.roi_maps(model, model.features(images), to_rois(given))
            regions = model(images, given)
        assert_near(maps[golden[f"{name}.rows"]], golden[f"{name}.output"])
        assert_near(torch.cat(regions.features), golden[f"{name}.pooled_features"])


def test_bottom_up_attention_features(golden: GoldenSet, images: ImageBatch, given: list[Tensor], backends: ModuleType):
    stride_in_1x1 = re.search(r"STRIDE_IN_1X1=(\w+)", golden.description("butd.res4"))[1] == "True"
    model = golden.detector(
        MODEL__RESNETS__STEM_POOL="caffe_max",
        MODEL__RESNETS__STRIDE_IN_1X1=stride_in_1x1,
        MODEL__RESNETS__RES5_DILATION=2,
        MODEL__ROI_BOX_HEAD__POOLER_TYPE="ROIPool",
        MODEL__ROI_BOX_HEAD__POOLER_RESOLUTION=golden["butd.roipool.output"].shape[-1],
    )
    with torch.no_grad():
        features = model.features(images)
        pooled, maps = backends.roi_maps(model, features, to_rois(given))
        regions = model(images, given)
    assert_near(backends.res4(features), golden["butd.res4"])
    assert_near(pooled[golden["butd.roipool.rows"]], golden["butd.roipool.output"])
    assert list(maps.shape) == golden["butd.res5.output_shape"].tolist()
    assert_near(torch.cat(regions.features), golden["butd.given_pooled_features"])


def test_bottom_up_attention_attributes(golden: GoldenSet, images: ImageBatch, given: list[Tensor]):
    prefix = "butd.attr.param."
    parameters = {key.removeprefix(prefix): golden[key] for key in golden.tensors if key.startswith(prefix)}
    attributes = {
        "NUM_CLASSES": len(parameters["attr_score.weight"]) - 1,
        "EMBEDDING_DIM": parameters["cls_embedding.weight"].shape[1],
        "HIDDEN_DIM": len(parameters["fc_attr.weight"]),
    }
    tree = yaml.safe_load(yaml.safe_dump(golden.config))
    tree["MODEL"].setdefault("ROI_BOX_HEAD", {})["ATTRIBUTES"] = attributes
    model = golden.detector_class(golden.detector_class.config_class.from_yaml(tree)).eval()
    extra = {f"roi_heads.box_predictor.{name}": value for name, value in parameters.items()}
    model.load_state_dict(golden.weights | extra, strict=True)

    features, class_logits = golden["given.pooled_features"], golden["given.class_logits"]
    assert torch.equal(class_logits.argmax(dim=1), golden["butd.attr.class_argmax"])
    with torch.no_grad():
        logits = model.roi_heads.box_predictor.attributes(features, class_logits.argmax(dim=1))
        regions = model(images, given)
    assert_near(logits, golden["butd.attr.logits"])
    joined = torch.cat(regions.attribute_logits)  # "no attribute" is dropped before the softmax
    assert_near(joined, golden["butd.attr.logits"][:, :-1])
    best = joined.softmax(dim=1).max(dim=1)
    assert_near(best.values, golden["butd.attr.prob"])
    assert torch.equal(best.indices, golden["butd.attr.label"])
