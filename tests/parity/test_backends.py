"""Built-in detector and Detectron2 side by side: one YAML, one checkpoint, the same inputs, everything compared.

Runs only where Detectron2 is installed. Evaluation is compared in float32, gradients and training steps in float64: in
float32, ReLUs near zero flip between two correct kernels, which moves gradients by 1e-3 and more. Detectron2 keeps
boxes, objectness and losses in float32 all the same; the outputs of its box predictor are rounded, see `in_float64`.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from torch import Tensor

from detector.checkpoint import load_weights, read_tensors
from detector.config import DetectorConfig
from detector.faster_rcnn import FasterRCNN, TwoStageDetector
from detector.structures import DetectionTargets, ImageBatch, Regions

TOLERANCE = 1e-4  # of the largest value of a tensor
CONTINUED = 1e-6  # of the change of the weights in two steps
STEPS = 1e-7  # of the change of the weights in 100 steps; measured: 1e-15
EXACT = 1e-6  # relative, of losses and gradients in float64 (gradients: L2 distance)

SMALL = {
    "MODEL": {
        "BACKBONE": {"FREEZE_AT": 1},
        "RESNETS": {"WIDTH_PER_GROUP": 8, "RES2_OUT_CHANNELS": 16, "STEM_OUT_CHANNELS": 8},
        "ANCHOR_GENERATOR": {"SIZES": [[24, 48, 96]]},
        "RPN": {"BATCH_SIZE_PER_IMAGE": 4096, "PRE_NMS_TOPK_TRAIN": 100, "POST_NMS_TOPK_TRAIN": 40},
        "ROI_HEADS": {"NUM_CLASSES": 5, "BATCH_SIZE_PER_IMAGE": 512, "SCORE_THRESH_TEST": 0.1},
    },
    "TEST": {"DETECTIONS_PER_IMAGE": 30},
}
VARIANTS = {  # what is unlike the golden set
    "stock": {},
    "vl_bert": {
        "RESNETS": {"RES5_DILATION": 2},
        "ROI_BOX_HEAD": {"POOLER_TYPE": "ROIAlign", "POOLER_SAMPLING_RATIO": 1},
    },
    "bottom_up_attention": {
        "RESNETS": {"RES5_DILATION": 2, "STEM_POOL": "caffe_max"},
        "ROI_HEADS": {"FEATURES_OF": "proposal"},
        "ROI_BOX_HEAD": {
            "POOLER_TYPE": "ROIPool",
            "ATTRIBUTES": {"NUM_CLASSES": 6, "EMBEDDING_DIM": 8, "HIDDEN_DIM": 12},
        },
    },
    "torchvision_style": {
        "RESNETS": {"STRIDE_IN_1X1": False, "NORM": "BN"},
        "RPN": {"BBOX_REG_LOSS_TYPE": "giou", "CONV_DIMS": [16, -1], "BOUNDARY_THRESH": 8, "LOSS_WEIGHT": 0.5},
        "ROI_BOX_HEAD": {"CLS_AGNOSTIC_BBOX_REG": True, "SMOOTH_L1_BETA": 0.5},
        "BACKBONE": {"FREEZE_AT": 2},
    },
    "sampled": {  # fewer anchors and RoIs than there are candidates: both backends must draw the same ones
        "RPN": {"BATCH_SIZE_PER_IMAGE": 32},
        "ROI_HEADS": {"BATCH_SIZE_PER_IMAGE": 12},
    },
    "given_cell_anchors": {  # not centred, as Caffe's
        "ANCHOR_GENERATOR": {
            "ASPECT_RATIOS": [[1.0]],
            "CELL_ANCHORS": [[-4.0, -2.0, 20.0, 22.0], [-16.0, -20.0, 32.0, 30.0], [-40.0, -40.0, 56.0, 60.0]],
        }
    },
    "shallow": {"RESNETS": {"DEPTH": 18, "NORM": "BN"}, "BACKBONE": {"FREEZE_AT": 0}},
    "stem_without_pool": {"RESNETS": {"STEM_POOL": "none"}, "BACKBONE": {"FREEZE_AT": 5}},
}
LEVELS = ["p2", "p3", "p4", "p5", "p6"]
STAGES = ["res2", "res3", "res4", "res5"]
FPN = {
    "BACKBONE": {"NAME": "build_resnet_fpn_backbone"},
    "RESNETS": {"OUT_FEATURES": STAGES},
    "FPN": {"IN_FEATURES": STAGES, "OUT_CHANNELS": 16},
    "ANCHOR_GENERATOR": {"SIZES": [[12], [24], [48], [96], [150]]},
    "RPN": {"IN_FEATURES": LEVELS, "BATCH_SIZE_PER_IMAGE": 12000, "PRE_NMS_TOPK_TRAIN": 50, "PRE_NMS_TOPK_TEST": 50},
    "ROI_HEADS": {"NAME": "StandardROIHeads", "IN_FEATURES": LEVELS[:4]},
    "ROI_BOX_HEAD": {"NAME": "FastRCNNConvFCHead", "NUM_FC": 2, "FC_DIM": 24, "POOLER_RESOLUTION": 7},
}
FPN_VARIANTS = {  # on top of FPN
    "fpn": {},
    "fpn_convolutions": {
        "FPN": {"OUT_CHANNELS": 32, "NORM": "GN", "FUSE_TYPE": "avg"},
        "RPN": {"CONV_DIMS": [-1, 24]},
        "ROI_BOX_HEAD": {
            "NUM_CONV": 2,
            "CONV_DIM": 32,
            "NUM_FC": 1,
            "NORM": "GN",
            "POOLER_TYPE": "ROIAlign",
            "POOLER_SAMPLING_RATIO": 2,
            "CLS_AGNOSTIC_BBOX_REG": True,
            "REGION_FEATURE": "mean",
        },
    },
    "fpn_shallow": {
        "BACKBONE": {"FREEZE_AT": 0},
        "RESNETS": {"DEPTH": 18, "NORM": "BN"},
        "FPN": {"NORM": "BN"},
        "ROI_BOX_HEAD": {
            "REGION_FEATURE": "fc6",
            "ATTRIBUTES": {"NUM_CLASSES": 6, "EMBEDDING_DIM": 8, "HIDDEN_DIM": 12},
        },
    },
    "fpn_resnext": {
        "BACKBONE": {"FREEZE_AT": 2},
        "RESNETS": {"NUM_GROUPS": 4, "WIDTH_PER_GROUP": 2, "STRIDE_IN_1X1": False, "STEM_POOL": "caffe_max"},
        "FPN": {"IN_FEATURES": STAGES[1:], "NORM": "FrozenBN"},
        "ANCHOR_GENERATOR": {
            "SIZES": [[48]],
            "ASPECT_RATIOS": [[1.0]],
            "CELL_ANCHORS": [[-s, -s, s + 3, s] for s in (12, 24, 48, 64)],
        },
        "RPN": {"IN_FEATURES": LEVELS[1:], "BATCH_SIZE_PER_IMAGE": 32},
        "ROI_HEADS": {"IN_FEATURES": LEVELS[1:3], "BATCH_SIZE_PER_IMAGE": 12, "FEATURES_OF": "proposal"},
        "ROI_BOX_HEAD": {"POOLER_TYPE": "ROIPool", "REGION_FEATURE": "fc7"},
    },
    "fpn_without_fully_connected_layers": {"ROI_BOX_HEAD": {"NUM_FC": 0, "NUM_CONV": 1, "CONV_DIM": 8}},
    "dilated_res5_with_box_head": {
        "BACKBONE": {"NAME": "build_resnet_backbone"},
        "RESNETS": {"OUT_FEATURES": ["res5"], "RES5_DILATION": 2},
        "ANCHOR_GENERATOR": {"SIZES": [[24, 48, 96]]},
        "RPN": {"IN_FEATURES": ["res5"]},
        "ROI_HEADS": {"IN_FEATURES": ["res5"]},
    },
}


@dataclasses.dataclass
class Pair:
    ours: TwoStageDetector
    theirs: TwoStageDetector

    def train(self, mode: bool = True) -> Pair:
        self.ours.train(mode)
        self.theirs.train(mode)
        return self

    def run(self, *args, **options) -> tuple[Regions, Regions]:
        results = []
        for model in (self.ours, self.theirs):
            torch.manual_seed(0)
            results.append(model(*args, **options))
        return results[0], results[1]


def in_float64(model: TwoStageDetector) -> TwoStageDetector:
    """A copy in float64, for training.

    The box predictor's outputs are rounded to float32 in both backends. The built-in one does so by itself; Detectron2
    keeps them, and the difference of 1e-8 grows in some directions to 1e-4 in a hundred steps of plain L1 losses.
    """
    model = copy.deepcopy(model).double().train()
    pooler = getattr(model.roi_heads, "pooler", getattr(model.roi_heads, "box_pooler", None))
    if pooler is not None:  # Detectron2's RoIPool does not convert its float32 boxes itself
        for level in pooler.level_poolers:
            level.register_forward_pre_hook(lambda module, inputs: (inputs[0], inputs[1].to(inputs[0])))
        pooler.register_forward_hook(lambda module, inputs, output: output.to(inputs[0][0]))
    predictor = model.roi_heads.box_predictor
    predictor.register_forward_hook(lambda module, inputs, outputs: tuple(part.float() for part in outputs))
    return model


def make_tree(variant: str) -> dict:
    tree = copy.deepcopy(SMALL)
    layers = [VARIANTS[variant]] if variant in VARIANTS else [FPN, FPN_VARIANTS[variant]]
    for layer in layers:
        for group, values in layer.items():
            tree["MODEL"].setdefault(group, {}).update(values)
    return tree


def make_lively(model: TwoStageDetector) -> None:
    """Random statistics, and weights that make features, scores and deltas of ordinary size, as training does."""
    torch.manual_seed(1)
    for name, value in model.state_dict().items():
        if name.endswith("norm.weight"):
            value.uniform_(0.5, 1.0)
        elif name.endswith(("running_mean", "norm.bias")):
            value.normal_(std=0.1)
        elif name.endswith("running_var"):
            value.uniform_(0.5, 1.5)
        elif name.endswith(("cls_score.weight", "attr_score.weight", "cls_embedding.weight")):
            value.normal_(std=0.2)
        elif name.endswith(("objectness_logits.weight", "anchor_deltas.weight", "bbox_pred.weight")):
            value.normal_(std=0.03)


@pytest.fixture(scope="module", params=[*VARIANTS, *FPN_VARIANTS])
def pair(request: pytest.FixtureRequest, backends: ModuleType, tmp_path_factory) -> Pair:
    """Both backends from one YAML file and one checkpoint file."""
    adapter = backends.detector_class("detectron2")
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "config.yaml").write_text(yaml.safe_dump(make_tree(request.param)), encoding="utf-8")
    models = [cls(DetectorConfig.from_yaml(folder / "config.yaml")) for cls in (FasterRCNN, adapter)]
    make_lively(models[0])
    torch.save(models[0].state_dict(), folder / "model.pth")
    for model in models:
        load_weights(model, read_tensors(folder / "model.pth"), folder / "model.pth")
    return Pair(*models).train(False)


@pytest.fixture(scope="module")
def images() -> ImageBatch:
    generator = torch.Generator().manual_seed(2)
    sizes = torch.tensor([[128, 160], [112, 150]])
    pixels = torch.randn(2, 3, 128, 160, generator=generator)
    pixels[1, :, 112:] = 0
    pixels[1, :, :, 150:] = 0
    return ImageBatch(pixels, sizes, sizes * 2, ["first", "second"])


@pytest.fixture(scope="module")
def images_64(images: ImageBatch) -> ImageBatch:
    return dataclasses.replace(images, pixels=images.pixels.double())


@pytest.fixture(scope="module")
def boxes() -> list[Tensor]:
    return [
        torch.tensor([[5.0, 6.0, 70.5, 90.0], [20.0, 30.0, 150.0, 120.0], [80.0, 10.0, 110.0, 44.0]]),
        torch.tensor([[0.0, 0.0, 149.0, 111.0]]),
    ]


@pytest.fixture(scope="module")
def targets(boxes: list[Tensor]) -> DetectionTargets:
    classes = [torch.tensor([0, 4, 2]), torch.tensor([3])]
    attributes = [torch.tensor([[1, -1], [-1, -1], [5, 0]]), torch.tensor([[2, 3]])]
    return DetectionTargets(boxes, classes, attributes)


def assert_near(ours: Tensor, theirs: Tensor, tolerance: float = TOLERANCE) -> None:
    assert ours.shape == theirs.shape
    if ours.numel():
        worst, largest = (ours - theirs).abs().max().item(), theirs.abs().max().item()
        assert worst <= tolerance * largest, f"differs by {worst:.3g}; the largest value is {largest:.3g}"


def same_rows(ours: Tensor, theirs: Tensor) -> Tensor:
    """For each row of ours the nearest one of theirs, each used once: scores that nearly tie may swap places."""
    nearest = torch.cdist(ours, theirs).argmin(dim=1)
    assert len(ours) == len(theirs) == len(nearest.unique())
    return nearest


def assert_same_regions(ours: Regions, theirs: Regions) -> None:
    assert ours.losses.keys() == theirs.losses.keys()
    for name in ("boxes", "features", "class_logits", "scores", "classes", "attribute_logits"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        assert (mine is None) == (other is None), name
        if mine is not None:
            assert [len(rows) for rows in mine] == [len(rows) for rows in other], name
            assert_near(torch.cat(mine).detach().float(), torch.cat(other).detach().float())
    for name, loss in ours.losses.items():
        assert loss.count == theirs.losses[name].count, name
        assert loss.mean.item() == pytest.approx(theirs.losses[name].mean.item(), rel=TOLERANCE), name


def test_the_same_parameters(pair: Pair):
    assert pair.ours.state_dict().keys() == pair.theirs.state_dict().keys()
    for name, parameter in pair.ours.named_parameters():
        assert parameter.requires_grad == pair.theirs.get_parameter(name).requires_grad, name
    assert pair.ours.feature_dim == pair.theirs.feature_dim
    assert pair.ours.num_classes == pair.theirs.num_classes


@torch.no_grad()
def test_the_same_features_and_proposals(pair: Pair, images: ImageBatch, backends: ModuleType):
    pair.train(False)
    sizes = [tuple(size) for size in images.sizes.tolist()]
    found = []
    for model in (pair.ours, pair.theirs):
        features = model.features(images)
        output = model.run_rpn(features)
        found.append((features, backends.rpn_arrays(output), model.propose(output, sizes)))
    (maps_1, rpn_1, proposals_1), (maps_2, rpn_2, proposals_2) = found
    assert list(maps_1) == list(maps_2)
    for name, level in maps_1.items():
        assert_near(level, maps_2[name])
    assert torch.equal(rpn_1.anchors, rpn_2.anchors)
    assert_near(rpn_1.objectness, rpn_2.objectness)
    assert_near(rpn_1.deltas, rpn_2.deltas)
    for ours, theirs in zip(proposals_1, proposals_2, strict=True):
        assert len(ours) > 5
        assert_near(ours, theirs[same_rows(ours, theirs)])


@torch.no_grad()
@pytest.mark.parametrize("whole_image", [False, True])
def test_the_same_given_boxes_with_pixel_masks(pair: Pair, images, boxes, whole_image: bool):
    pair.train(False)
    plain = pair.run(images, boxes, whole_image=whole_image)
    masked = pair.run(images, boxes, pixel_masks=[rows[:1] for rows in boxes], whole_image=whole_image)
    for ours, theirs in (plain, masked):
        assert_same_regions(ours, theirs)
    assert not torch.allclose(plain[0].features[0], masked[0].features[0], rtol=1e-3)


@torch.no_grad()
def test_the_same_roi_masks(pair: Pair, images, boxes):
    pair.train(False)
    side = pair.ours.map_size
    assert side == pair.theirs.map_size
    generator = torch.Generator().manual_seed(3)
    masks = [torch.rand(len(rows), side, side, generator=generator) for rows in boxes]
    assert_same_regions(*pair.run(images, boxes, roi_masks=masks, whole_image=True))
    for model in (pair.ours, pair.theirs):
        with pytest.raises(ValueError, match="RoI masks have shape"):
            model(images, boxes, roi_masks=[mask[:, 1:, 1:] for mask in masks])


@torch.no_grad()
def test_the_same_detections(pair: Pair, images):
    pair.train(False)
    ours, theirs = pair.run(images)
    assert min(len(rows) for rows in ours.boxes) > 3
    keys = [
        [torch.cat((boxes, 100 * scores[:, None], 100.0 * classes[:, None]), dim=1) for boxes, scores, classes in rows]
        for rows in (zip(regions.boxes, regions.scores, regions.classes, strict=True) for regions in (ours, theirs))
    ]
    orders = [same_rows(mine, other) for mine, other in zip(*keys, strict=True)]
    for field in dataclasses.fields(theirs):
        if isinstance(values := getattr(theirs, field.name), list):
            setattr(theirs, field.name, [rows[order] for rows, order in zip(values, orders, strict=True)])
    assert_same_regions(ours, theirs)
    assert torch.equal(torch.cat(ours.classes), torch.cat(theirs.classes))


@pytest.mark.parametrize("with_boxes", [False, True])
def test_the_same_losses_and_gradients(pair: Pair, images_64, boxes, targets, with_boxes: bool):
    pair = Pair(in_float64(pair.ours), in_float64(pair.theirs))
    ours, theirs = pair.run(images_64, boxes if with_boxes else None, targets)
    assert ours.losses.keys() == theirs.losses.keys()
    assert len(ours.losses) >= 4
    for name, loss in ours.losses.items():
        assert loss.count == theirs.losses[name].count, name
        assert loss.mean.item() == pytest.approx(theirs.losses[name].mean.item(), rel=EXACT), name
    for mine, other in zip(ours.boxes, theirs.boxes, strict=True):  # the RoIs that were drawn, in their order
        assert torch.equal(mine, other)
    assert_near(torch.cat(ours.features).detach(), torch.cat(theirs.features).detach(), EXACT)

    for regions in (ours, theirs):
        total = sum(loss.mean for loss in regions.losses.values())
        (total + torch.cat(regions.features).square().mean()).backward()
    compared = 0
    for name, parameter in pair.ours.named_parameters():
        theirs_gradient = pair.theirs.get_parameter(name).grad
        assert (parameter.grad is None) == (theirs_gradient is None), name
        if parameter.grad is not None:
            assert (parameter.grad - theirs_gradient).norm() <= EXACT * theirs_gradient.norm(), name
            compared += bool(theirs_gradient.any())
    assert compared >= 10


def test_a_batch_without_objects(pair: Pair, images):
    pair = Pair(copy.deepcopy(pair.ours), copy.deepcopy(pair.theirs)).train()
    empty = DetectionTargets(
        [torch.zeros(0, 4)] * 2, [torch.zeros(0, dtype=torch.int64)] * 2, [torch.zeros(0, 2, dtype=torch.int64)] * 2
    )
    ours, theirs = pair.run(images, None, empty)
    assert ours.losses.keys() == theirs.losses.keys()
    for name, loss in ours.losses.items():
        assert loss.mean.item() == pytest.approx(theirs.losses[name].mean.item(), rel=TOLERANCE, abs=1e-7), name


def test_training_continues_in_the_other_backend(pair: Pair, images_64, targets, tmp_path: Path):
    """Two steps in one backend, or one step in each with a checkpoint between them, give the same weights."""
    start = {name: parameter.detach().double() for name, parameter in pair.ours.named_parameters()}

    def step(model: TwoStageDetector) -> None:
        torch.manual_seed(0)
        losses = model(images_64, None, targets).losses
        model.zero_grad(set_to_none=True)
        sum(loss.mean for loss in losses.values()).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 1e-3 * parameter.grad

    ends = []
    for first, second in ((pair.ours, pair.ours), (pair.ours, pair.theirs), (pair.theirs, pair.ours)):
        first, second = in_float64(first), in_float64(second)
        step(first)
        torch.save({"model": first.state_dict()}, tmp_path / "model.pth")
        load_weights(second, read_tensors(tmp_path / "model.pth"), tmp_path / "model.pth")
        step(second)
        ends.append({name: second.get_parameter(name).detach() for name in start})
    changes = [torch.cat([(end[name] - value).flatten() for name, value in start.items()]) for end in ends]
    assert changes[0].norm() > 1e-4
    for other in changes[1:]:
        assert (other - changes[0]).norm() <= CONTINUED * changes[0].norm()


@pytest.mark.timeout(1200)
def test_a_hundred_training_steps(pair: Pair, images_64, targets, request: pytest.FixtureRequest):
    """From the same weights, each backend for itself."""
    if request.node.callspec.params["pair"] not in ("stock", "fpn"):
        pytest.skip("one detector of each kind is enough for the long run")
    models = [in_float64(pair.ours), in_float64(pair.theirs)]
    start = {name: parameter.detach().clone() for name, parameter in models[0].named_parameters()}
    for model in models:
        torch.manual_seed(0)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3, momentum=0.9)
        for _ in range(100):
            losses = model(images_64, None, targets).losses
            optimizer.zero_grad()
            sum(loss.mean for loss in losses.values()).backward()
            optimizer.step()
    ours, theirs = (
        torch.cat([(model.get_parameter(name).detach() - value).flatten() for name, value in start.items()])
        for model in models
    )
    assert ours.norm() > 1e-2
    assert (ours - theirs).norm() <= STEPS * theirs.norm()
