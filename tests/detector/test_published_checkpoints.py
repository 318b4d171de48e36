"""Checkpoints in every published layout, written here from a tiny detector: loaded, they give its numbers."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from detector.checkpoint import load_checkpoint, load_detector, save_pretrained, save_weights
from detector.config import DetectorConfig
from detector.faster_rcnn import FasterRCNN
from detector.images import make_image_batch
from detector.weight_files import WeightsFile, read_weights
from detector.weight_names import CELL_ANCHORS, match_ends, to_detector_names

SIZES, RATIOS, CLASSES, ATTRIBUTES = 2, 3, 4, 3
ANCHORS = SIZES * RATIOS
TREE = {
    "MODEL": {
        "RESNETS": {
            "DEPTH": 50,
            "STEM_OUT_CHANNELS": 8,
            "RES2_OUT_CHANNELS": 8,
            "WIDTH_PER_GROUP": 4,
            "STEM_POOL": "caffe_max",
            "RES5_DILATION": 2,
        },
        "ANCHOR_GENERATOR": {"SIZES": [[32, 64]], "ASPECT_RATIOS": [[0.5, 1.0, 2.0]]},
        "RPN": {"CONV_DIMS": [12], "PRE_NMS_TOPK_TEST": 50, "POST_NMS_TOPK_TEST": 10},
        "ROI_HEADS": {"NUM_CLASSES": CLASSES, "SCORE_THRESH_TEST": 0.0},
        "ROI_BOX_HEAD": {
            "POOLER_TYPE": "ROIPool",
            "POOLER_RESOLUTION": 4,
            "ATTRIBUTES": {"NUM_CLASSES": ATTRIBUTES, "EMBEDDING_DIM": 5, "HIDDEN_DIM": 6},
        },
    }
}
WITHOUT_ATTRIBUTES = copy.deepcopy(TREE)
del WITHOUT_ATTRIBUTES["MODEL"]["ROI_BOX_HEAD"]["ATTRIBUTES"]
RPN = "proposal_generator.rpn_head"
PREDICTOR = "roi_heads.box_predictor"


def make(tree: dict, seed: int) -> FasterRCNN:
    """A detector whose every number is random, norms too."""
    torch.manual_seed(seed)
    model = FasterRCNN(DetectorConfig.from_yaml(tree)).eval()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if "norm" in name or "bias" in name:
                value.copy_(torch.rand_like(value) + 0.5 if "running_var" in name else 0.2 * torch.randn_like(value))
            elif "box_predictor" in name or RPN in name:
                value.copy_(0.1 * torch.randn_like(value))
    return model


@pytest.fixture(scope="module")
def original() -> FasterRCNN:
    return make(TREE, 1)


@pytest.fixture(scope="module")
def plain() -> FasterRCNN:
    return make(WITHOUT_ATTRIBUTES, 2)


@torch.no_grad()
def outputs(model: FasterRCNN) -> dict[str, Tensor]:
    """Everything the detector says about an image: of given boxes, and of its own."""
    pixels = np.random.default_rng(0).integers(0, 256, (80, 112, 3), dtype=np.uint8)
    settings = model.config.input
    batch = make_image_batch([pixels], [(80, 112)], ["image"], settings.pixel_mean, settings.pixel_std)
    boxes = torch.tensor([[3.0, 5, 60, 70], [40, 10, 110, 50]])
    given, found = model(batch, [boxes]), model(batch)
    results = {"features": given.features[0], "logits": given.class_logits[0], "boxes": found.boxes[0]}
    results |= {"scores": found.scores[0], "classes": found.classes[0]}
    if given.attribute_logits is not None:
        results["attributes"] = given.attribute_logits[0]
    return results


def assert_same_outputs(one: FasterRCNN, other: FasterRCNN) -> None:
    expected, actual = outputs(one), outputs(other)
    assert len(expected["boxes"]) > 5
    assert expected.keys() == actual.keys()
    for name in expected:
        torch.testing.assert_close(
            actual[name], expected[name], rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def arrays(tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in tensors.items()}


def write_pickle(path: Path, content: object) -> Path:
    path.write_bytes(pickle.dumps(content, protocol=2))
    return path


def is_trunk(name: str) -> bool:
    return name.startswith(("backbone.", "roi_heads.res5."))


def without_prefix(name: str) -> str:
    return name.removeprefix("backbone.").removeprefix("roi_heads.")


def torchvision_name(name: str) -> str:
    parts = without_prefix(name).split(".")
    if parts[0] == "stem":
        parts = parts[1:]
    else:
        parts[0] = f"layer{int(parts[0][3:]) - 1}"
    at = -3 if parts[-2] == "norm" else -2
    if parts[at] == "shortcut":
        parts[at:] = ["downsample", "1" if at == -3 else "0", parts[-1]]
    elif at == -3:
        parts[at:] = [parts[at].replace("conv", "bn"), parts[-1]]
    return ".".join(parts)


def caffe2_name(name: str, norms: dict[str, str]) -> str:
    """Inverse of the model zoo's names; `norms` spells the norm's parameters."""
    layers = {
        f"{RPN}.conv": "conv_rpn",
        f"{RPN}.objectness_logits": "rpn_cls_logits",
        f"{RPN}.anchor_deltas": "rpn_bbox_pred",
        f"{PREDICTOR}.cls_score": "cls_score",
        f"{PREDICTOR}.bbox_pred": "bbox_pred",
        "backbone.stem.conv1": "conv1",
    }
    layer, _, parameter = name.rpartition(".")
    conv = layer.removesuffix(".norm")
    if conv in layers:
        blob = layers[conv]
    else:
        stage, block, branch = without_prefix(conv).split(".")
        blob = f"{stage}_{block}_branch" + {"shortcut": "1", "conv1": "2a", "conv2": "2b", "conv3": "2c"}[branch]
    if layer != conv:
        return f"{'res_conv1' if blob == 'conv1' else blob}_bn_{norms[parameter]}"
    return f"{blob}_{parameter[0]}"


NEW_NORMS = {"weight": "gamma", "bias": "beta", "running_mean": "running_mean", "running_var": "running_var"}
OLD_NORMS = {"weight": "s", "bias": "b", "running_mean": "rm", "running_var": "riv"}


def caffe2_blobs(model: FasterRCNN, norms: dict[str, str]) -> dict[str, np.ndarray]:
    blobs = {}
    for name, value in model.state_dict().items():
        if "cls_score" in name:
            value = torch.cat((value[-1:], value[:-1]))
        elif "bbox_pred" in name:
            value = torch.cat((torch.full_like(value[:4], 99.0), value))
        blobs[caffe2_name(name, norms)] = value
    return arrays(blobs)


def caffe_attention_state(model: FasterRCNN) -> dict[str, Tensor]:
    """The detector in the conventions of bottom-up attention's Caffe code, row by row."""
    state = dict(model.state_dict())
    background = torch.randn(ANCHORS, *state[f"{RPN}.objectness_logits.weight"].shape[1:])
    for parameter in ("weight", "bias"):
        objectness, deltas = (state[f"{RPN}.{name}.{parameter}"] for name in ("objectness_logits", "anchor_deltas"))
        zero = background if parameter == "weight" else torch.randn(ANCHORS)
        new_objectness, new_deltas = torch.empty(2 * ANCHORS, *objectness.shape[1:]), torch.empty_like(deltas)
        for s in range(SIZES):
            for r in range(RATIOS):
                ours, caffe = s * RATIOS + r, r * SIZES + s
                new_objectness[caffe] = zero[caffe]
                new_objectness[ANCHORS + caffe] = zero[caffe] + objectness[ours]
                new_deltas[4 * caffe : 4 * caffe + 4] = deltas[4 * ours : 4 * ours + 4]
        state[f"{RPN}.objectness_logits.{parameter}"] = new_objectness
        state[f"{RPN}.anchor_deltas.{parameter}"] = new_deltas
        boxes = state[f"{PREDICTOR}.bbox_pred.{parameter}"].clone()
        for row in range(len(boxes)):
            boxes[row] /= (10, 10, 5, 5)[row % 4]
        state[f"{PREDICTOR}.bbox_pred.{parameter}"] = torch.cat((torch.full_like(boxes[:4], 99.0), boxes))
        renamed = {"cls_score": "cls_score", "cls_embedding": "cls_embed", "attr_score": "attr_linear2"}
        for old, new in renamed.items():
            value = state.pop(f"{PREDICTOR}.{old}.{parameter}", None)
            if value is not None:
                state[f"{PREDICTOR}.{new}.{parameter}"] = torch.cat((value[-1:], value[:-1]))
        state[f"{PREDICTOR}.attr_linear1.{parameter}"] = state.pop(f"{PREDICTOR}.fc_attr.{parameter}")
    return state


def test_detectron2_pickle_and_its_own_anchors(tmp_path: Path, original: FasterRCNN):
    """Also the layout of py-bottom-up-attention, which has our attribute head's names and an old anchor buffer."""
    content = arrays(original.state_dict())
    content[f"{CELL_ANCHORS}0"] = original.proposal_generator.anchor_generator.cell_anchors.numpy()
    model = make(TREE, 3)
    report = load_checkpoint(model, write_pickle(tmp_path / "a.pkl", {"model": content, "__author__": "someone"}))
    assert report.is_complete and report.layout == "Detectron2"
    assert_same_outputs(original, model)

    content[f"{CELL_ANCHORS}0"] = 2 * content[f"{CELL_ANCHORS}0"]
    with pytest.raises(ValueError, match=r"a\.pkl: its .*cell_anchors.* contradicts MODEL.ANCHOR_GENERATOR"):
        load_checkpoint(model, write_pickle(tmp_path / "a.pkl", {"model": content}))


@pytest.mark.parametrize("heuristics", [False, True])
def test_saved_as_detectron2_reads_it(tmp_path: Path, plain: FasterRCNN, heuristics: bool):
    save_weights(plain.state_dict(), tmp_path / "a.pth")
    content = torch.load(tmp_path / "a.pth", weights_only=True)
    assert set(content) == {"model"} and set(content["model"]) == set(plain.state_dict())
    torch.save(
        {**content, "iteration": 3, "optimizer": {"state": {}}, "matching_heuristics": heuristics}, tmp_path / "b.pth"
    )
    for name in ("a.pth", "b.pth"):
        model = make(WITHOUT_ATTRIBUTES, 3)
        assert load_checkpoint(model, tmp_path / name).is_complete
        assert_same_outputs(plain, model)


@pytest.mark.parametrize("norms", [NEW_NORMS, OLD_NORMS])
@pytest.mark.parametrize("wrap", ["bare", "blobs", "model"])
def test_caffe2_blobs(tmp_path: Path, plain: FasterRCNN, norms: dict, wrap: str):
    blobs: dict = caffe2_blobs(plain, norms)
    blobs["conv1_b"] = np.zeros(8, np.float32)
    blobs["fc1000_w"] = np.zeros((10, 64), np.float32)
    content = {"model": {"model": blobs, "__author__": "Caffe2", "matching_heuristics": True}, "bare": blobs}
    content["blobs"] = {"blobs": {**blobs, "conv1_w_momentum": blobs["conv1_w"]}, "cfg": "text"}
    model = make(WITHOUT_ATTRIBUTES, 3)
    report = load_checkpoint(model, write_pickle(tmp_path / "a.pkl", content[wrap]))
    assert report.layout == "Caffe2"
    assert sorted(report.unexpected) == ["fc1000.weight", "stem.conv1.bias"]
    assert not report.missing and not report.mismatched
    assert_same_outputs(plain, model)


def test_folded_norms_of_caffe2(tmp_path: Path):
    """Detectron saved scale and bias alone. What statistics the model had before does not matter."""
    source = make(WITHOUT_ATTRIBUTES, 2)
    for name, value in source.state_dict().items():
        if "running" in name:
            value.fill_(0.0 if name.endswith("mean") else 1 - 1e-5)
    blobs = {name: v for name, v in caffe2_blobs(source, OLD_NORMS).items() if not name.endswith(("_rm", "_riv"))}
    model = make(WITHOUT_ATTRIBUTES, 3)
    assert load_checkpoint(model, write_pickle(tmp_path / "a.pkl", blobs)).is_complete
    assert_same_outputs(source, model)


@pytest.mark.parametrize("name", ["resnet.pth", "resnet101-pt-vgbua-0000.model", "data_parallel.pth"])
def test_torchvision_names_fill_the_backbone(tmp_path: Path, plain: FasterRCNN, name: str):
    state = {torchvision_name(key): value for key, value in plain.state_dict().items() if is_trunk(key)}
    assert {"conv1.weight", "bn1.running_mean", "layer4.0.downsample.1.bias", "layer3.5.bn3.weight"} <= set(state)
    state |= {"bn1.num_batches_tracked": torch.tensor(3), "fc.weight": torch.zeros(10, 64), "fc.bias": torch.zeros(10)}
    if name == "data_parallel.pth":
        state = {f"module.{key}": value for key, value in state.items()}
    torch.save(state, tmp_path / name)
    model = make(WITHOUT_ATTRIBUTES, 3)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"10 missing \(proposal_generator.*expect no_attributes or backbone"):
        load_checkpoint(model, tmp_path / name)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())

    report = load_checkpoint(model, tmp_path / name, expect="backbone")
    assert report.layout == "torchvision"
    assert sorted(report.unexpected) == ["fc.bias", "fc.weight"]
    after = model.state_dict()
    assert all(torch.equal(after[key], (plain.state_dict() if is_trunk(key) else before)[key]) for key in after)
    assert sorted(report.missing) == sorted(key for key in after if not is_trunk(key))


def test_names_of_torchvision_itself():
    """Real torchvision modules: the whole of a ResNet-50 finds its place in the shipped C4 config."""
    torchvision = pytest.importorskip("torchvision")
    with torch.device("meta"):
        state = torchvision.models.resnet50().state_dict()
        wanted = {k: v.shape for k, v in torchvision_targets()}
    renamed = to_detector_names(WeightsFile(Path("r50.pth"), state, None, False), wanted, DetectorConfig())
    shapes = {k: v.shape for k, v in renamed.tensors.items() if not k.endswith("num_batches_tracked")}
    assert {k: v for k, v in shapes.items() if is_trunk(k)} == {k: v for k, v in wanted.items() if is_trunk(k)}
    assert {k for k in shapes if not is_trunk(k)} == {"fc.weight", "fc.bias"}


def torchvision_targets() -> list[tuple[str, Tensor]]:
    return list(FasterRCNN(DetectorConfig()).state_dict().items())


def test_partial_names(tmp_path: Path, plain: FasterRCNN):
    """What Detectron2's converter of torchvision models writes."""
    content = {without_prefix(name): value.numpy() for name, value in plain.state_dict().items() if is_trunk(name)}
    content["stem.fc.weight"] = np.zeros((10, 64), np.float32)
    content = {"model": content, "__author__": "torchvision", "matching_heuristics": True}
    model = make(WITHOUT_ATTRIBUTES, 3)
    report = load_checkpoint(model, write_pickle(tmp_path / "a.pkl", content), expect="backbone")
    assert report.layout == "Detectron2 without prefixes" and report.unexpected == ["stem.fc.weight"]
    after, wanted = model.state_dict(), plain.state_dict()
    assert all(torch.equal(after[name], wanted[name]) for name in after if is_trunk(name))


def test_the_longest_end_wins_and_two_places_are_an_error():
    tensors = {name: torch.zeros(1) for name in ("conv1.weight", "res2.conv1.weight", "other")}
    model_names = ["body.conv1.weight", "body.res2.conv1.weight", "body.my_other"]
    assert set(match_ends(tensors, model_names, "x")) == {*model_names[:2], "other"}
    with pytest.raises(ValueError, match=r"x: conv1\.weight could be body\.conv1\.weight or head\.conv1\.weight"):
        match_ends(tensors, [*model_names, "head.conv1.weight"], "x")


@pytest.mark.parametrize("box_weights", [[10.0, 10.0, 5.0, 5.0], [1.0, 1.0, 1.0, 1.0]])
def test_caffe_bottom_up_attention(tmp_path: Path, original: FasterRCNN, box_weights: list[float]):
    state = caffe_attention_state(original)
    cells = original.proposal_generator.anchor_generator.cell_anchors
    order = [s * RATIOS + r for r in range(RATIOS) for s in range(SIZES)]
    state[f"{CELL_ANCHORS}0"] = cells[order] - torch.tensor([0, 0, 1, 1])
    torch.save({"model": state}, tmp_path / "a.pth")
    tree = copy.deepcopy(TREE)
    tree["MODEL"]["ROI_BOX_HEAD"]["BBOX_REG_WEIGHTS"] = box_weights
    model = make(tree, 3)
    report = load_checkpoint(model, tmp_path / "a.pth")
    assert report.is_complete and report.layout == "bottom-up attention, Caffe conventions"
    assert_same_outputs(original, model)

    state[f"{CELL_ANCHORS}0"] = cells - torch.tensor([0, 0, 1, 1])  # size-major already
    torch.save(state, tmp_path / "a.pth")
    with pytest.raises(ValueError, match=r"contradicts MODEL\.ANCHOR"):
        load_checkpoint(model, tmp_path / "a.pth")
    tree["MODEL"]["ANCHOR_GENERATOR"]["SIZES"] = [[32, 64, 128]]
    with pytest.raises(ValueError, match=r"a\.pth: it has 6 anchors per cell.* 3 sizes x 3 ratios"):
        load_checkpoint(make(tree, 3), tmp_path / "a.pth")


def test_attributes_may_be_absent_if_asked(tmp_path: Path, original: FasterRCNN):
    with_head, without = tmp_path / "with.safetensors", tmp_path / "without.pth"
    save_weights(original.state_dict(), with_head)
    head = ("cls_embedding", "fc_attr", "attr_score")
    save_weights({k: v for k, v in original.state_dict().items() if k.split(".")[2] not in head}, without)
    small, large = make(WITHOUT_ATTRIBUTES, 3), make(TREE, 3)
    with pytest.raises(ValueError, match="5 unexpected"):
        load_checkpoint(small, with_head)
    assert len(load_checkpoint(small, with_head, expect="no_attributes").unexpected) == 5
    with pytest.raises(ValueError, match="5 missing"):
        load_checkpoint(large, without)
    assert len(load_checkpoint(large, without, expect="no_attributes").missing) == 5
    expected, found = outputs(small), outputs(large)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_another_number_of_classes(tmp_path: Path, plain: FasterRCNN):
    """A stated mismatch; the backbone alone loads, and the file's heads are listed as unused."""
    save_weights(plain.state_dict(), tmp_path / "a.pth")
    tree = copy.deepcopy(WITHOUT_ATTRIBUTES)
    tree["MODEL"]["ROI_HEADS"]["NUM_CLASSES"] = 9
    model = make(tree, 3)
    with pytest.raises(
        ValueError, match=r"4 mismatched \(roi_heads\.box_predictor\.cls_score\.weight \[5, 64\] -> \[10, 64\]"
    ):
        load_checkpoint(model, tmp_path / "a.pth")
    report = load_checkpoint(model, tmp_path / "a.pth", expect="backbone")
    assert len(report.unexpected) == len(report.missing) == 10
    assert "unexpected: 10\n  proposal_generator.rpn_head.conv.weight\n" in str(report)
    with pytest.raises(ValueError, match="not 'everything'"):
        load_checkpoint(model, tmp_path / "a.pth", expect="everything")


def test_an_incomplete_backbone_is_never_accepted(tmp_path: Path, plain: FasterRCNN):
    state = plain.state_dict()
    del state["backbone.res3.0.conv1.weight"]
    save_weights(state, tmp_path / "a.pth")
    with pytest.raises(ValueError, match=r"1 missing \(backbone\.res3\.0\.conv1\.weight\)"):
        load_checkpoint(make(WITHOUT_ATTRIBUTES, 3), tmp_path / "a.pth", expect="backbone")


def test_folders(tmp_path: Path, plain: FasterRCNN):
    save_pretrained(plain, tmp_path / "run" / "model" / "detector")
    for folder in ("run", "run/model", "run/model/detector"):
        model = make(WITHOUT_ATTRIBUTES, 3)
        assert load_checkpoint(model, tmp_path / folder).is_complete
    assert_same_outputs(plain, model)
    assert_same_outputs(plain, load_detector(tmp_path / "run" / "model" / "detector"))
    with pytest.raises(FileNotFoundError, match="holds no detector's weights"):
        load_checkpoint(model, tmp_path)


def test_unknown_names_and_contents(tmp_path: Path, plain: FasterRCNN):
    torch.save({"encoder.weight": torch.zeros(1)}, tmp_path / "a.pth")
    with pytest.raises(ValueError, match=r"a\.pth: its names are of no known layout \(encoder\.weight"):
        load_checkpoint(plain, tmp_path / "a.pth")
    with pytest.raises(ValueError, match=r"b\.pkl: expected a state dict of tensors.* 'w' is no tensor"):
        read_weights(write_pickle(tmp_path / "b.pkl", {"w": "text"}))
    with pytest.raises(ValueError, match=r"c\.pkl: expected weights by name, found list"):
        read_weights(write_pickle(tmp_path / "c.pkl", [1]))
    with pytest.raises(ValueError, match=r"d\.bin: weights are written as"):
        save_weights({}, tmp_path / "d.bin")


def test_golden_weights_survive_every_form(tmp_path: Path, golden_root: Path):
    """A state dict that the real Detectron2 saved: through .pth, .pkl and Caffe2's names and back, bit for bit."""
    folder = golden_root / "detectron2"
    config = DetectorConfig.from_yaml(folder / "config.yaml")
    model = FasterRCNN(config)
    load_checkpoint(model, folder / "state_dict.safetensors")
    state = copy.deepcopy(model.state_dict())
    save_weights(state, tmp_path / "a.pth")
    write_pickle(tmp_path / "b.pkl", {"model": arrays(state), "__author__": "Detectron2 Model Zoo"})
    names = ["a.pth", "b.pkl"]
    if len(config.rpn.conv_dims) == 1:  # Caffe2 had a single convolution
        write_pickle(tmp_path / "c.pkl", caffe2_blobs(model, NEW_NORMS))
        names.append("c.pkl")
    for name in names:
        again = FasterRCNN(config)
        assert load_checkpoint(again, tmp_path / name).is_complete
        assert all(torch.equal(value, state[key]) for key, value in again.state_dict().items())


def test_shipped_caffe_anchors():
    """Caffe's rounded anchors are the ideal ones around (8, 8) within 7 %, in the same order."""
    folder = Path(__file__).parents[2] / "configs" / "detector"
    caffe = DetectorConfig.from_yaml(folder / "bottom_up_attention_caffe.yaml")
    port = DetectorConfig.from_yaml(folder / "bottom_up_attention.yaml")
    cells = torch.tensor(caffe.anchors.cell_anchors)
    assert torch.equal(cells[:, :2] + cells[:, 2:], torch.full((12, 2), 16.0))
    sides = cells[:, 2:] - cells[:, :2]
    ideal = [(s / r**0.5, s * r**0.5) for s in port.anchors.sizes[0] for r in port.anchors.aspect_ratios[0]]
    torch.testing.assert_close(sides, torch.tensor(ideal), rtol=0.07, atol=0)
    same = dataclasses.replace(caffe, anchors=port.anchors, rpn=port.rpn, roi_heads=port.roi_heads)
    assert same == port


@pytest.mark.parametrize("name", ["bottom_up_attention", "bottom_up_attention_caffe"])
def test_shipped_configs_have_the_shapes_of_the_published_files(name: str):
    """Shapes as reported of the published files (py-bottom-up-attention's with an attribute head)."""
    config = DetectorConfig.from_yaml(Path(__file__).parents[2] / "configs" / "detector" / f"{name}.yaml")
    with torch.device("meta"):
        shapes = {key: list(value.shape) for key, value in FasterRCNN(config).state_dict().items()}
    expected = {
        f"{RPN}.conv": [512, 1024, 3, 3],
        f"{RPN}.objectness_logits": [12, 512, 1, 1],
        f"{RPN}.anchor_deltas": [48, 512, 1, 1],
        f"{PREDICTOR}.cls_score": [1601, 2048],
        f"{PREDICTOR}.bbox_pred": [6400, 2048],
        f"{PREDICTOR}.cls_embedding": [1601, 256],
        f"{PREDICTOR}.fc_attr": [512, 2304],
        f"{PREDICTOR}.attr_score": [401, 512],
    }
    assert {key: shapes[f"{key}.weight"] for key in expected} == expected
    assert "backbone.res4.22.conv3.norm.running_var" in shapes and "backbone.res4.23.conv1.weight" not in shapes


def test_a_torch_archive_called_pkl(tmp_path: Path, plain: FasterRCNN):
    torch.save({"model": plain.state_dict()}, tmp_path / "a.pkl")
    assert load_checkpoint(make(WITHOUT_ATTRIBUTES, 3), tmp_path / "a.pkl").is_complete
