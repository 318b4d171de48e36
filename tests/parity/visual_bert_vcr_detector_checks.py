"""VCR from pixels against the official code: the network of R2C, VisualBERT and its head, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from detector.config import DetectorConfig
from detector.r2c import EXPANSION, DescribedBoxes, NetworkSizes, R2CNetwork
from detector.roi_pooler import to_rois
from detector.structures import ImageBatch, Regions
from e2e_vl.encoders.visual_bert import VisualBertEncoder
from e2e_vl.run.optim import build_optimizer
from e2e_vl.structures import Batch, TaskOutput, gather_regions
from e2e_vl.tasks.config import VCRConfig
from e2e_vl.tasks.vcr import CHOICES, VCRTargets, VCRTask
from tests.parity import visual_bert_common as common
from tests.parity import visual_bert_optimiser_checks as optimiser
from tests.parity.visual_bert_common import (
    assert_gradients_near,
    encoder_config,
    our_name,
    recorded_parts,
    recorded_texts,
    word_counts,
)
from tests.parity.vl_bert_common import RELATIVE, Golden, assert_near, optional

visual_golden = common.visual_golden
PART = "vcr_detector"


def network_config(golden: Golden) -> DetectorConfig:
    recorded = golden.meta["configs"]["detector"]
    [side, other] = recorded["roi_output"]
    assert side == other and recorded["spatial_scale"] == 1 / 16
    return DetectorConfig.from_flat(
        {
            "MODEL.RESNETS.NORM": "BN",
            "MODEL.BACKBONE.FREEZE_AT": 0,
            "MODEL.ROI_HEADS.NUM_CLASSES": recorded["classes"] - 1,
            "MODEL.ROI_BOX_HEAD.POOLER_TYPE": "ROIAlignV2" if recorded["aligned"] else "ROIAlign",
            "MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION": side,
            "MODEL.ROI_BOX_HEAD.POOLER_SAMPLING_RATIO": recorded["sampling_ratio"],
            "MODEL.R2C.FEATURE_DIM": recorded["final_dim"],
            "MODEL.R2C.MASK_CHANNELS": recorded["mask_channels"],
            "MODEL.R2C.CLASS_DIM": recorded["class_embedding"],
        }
    )


def network_sizes(golden: Golden) -> NetworkSizes:
    recorded = golden.meta["configs"]["detector"]
    sizes = NetworkSizes(recorded["stem"], tuple(recorded["blocks"]), tuple(recorded["planes"]))
    assert [EXPANSION * width for width in sizes.widths[2:]] == [recorded["c4"], recorded["c5"]]
    return sizes


class Seeing(nn.Module):
    """The parts of a run's model, by its names, on the recorded batch.

    Row 0 of the recorded boxes is the window of the image on its canvas; it is given like the other boxes.
    """

    phrase_head = None

    def __init__(self, golden: Golden) -> None:
        super().__init__()
        optional(golden, PART, "out.logits")
        self.arrays = golden[PART]
        self.detector = R2CNetwork(network_config(golden), network_sizes(golden))
        self.encoder = VisualBertEncoder(encoder_config(golden))
        config = VCRConfig(loss="softmax", region_loss_weight=0.0, mask_size=self.detector.map_size)
        self.task = VCRTask(self.encoder.hidden_size, config)
        weights = recorded_parts(golden, "vcr", PART)
        for part in ("detector", "encoder", "task"):
            getattr(self, part).load_state_dict(getattr(weights, part), strict=True)
        self.eval()
        self.images = self.arrays["in.images"].clone().requires_grad_()

    def double(self) -> Seeing:
        super().double()
        self.images = self.arrays["in.images"].double().requires_grad_()
        return self

    def rows(self, name: str) -> list[Tensor]:
        """What is recorded of the real boxes of each image."""
        real = self.arrays["in.box_mask"].bool()
        values = self.arrays[name]
        values = values.to(self.images.dtype) if values.is_floating_point() else values
        return [rows[kept] for rows, kept in zip(values, real, strict=True)]

    def batch(self) -> ImageBatch:
        number, _, height, width = self.images.shape
        sizes = torch.tensor([[height, width]]).expand(number, 2)
        return ImageBatch(self.images, sizes, sizes, [f"image {index}" for index in range(number)])

    def described(self) -> DescribedBoxes:
        """Boxes stay what they are in float64, too: pooling takes them in 32 bits."""
        masks, classes = torch.cat(self.rows("in.segms")), torch.cat(self.rows("in.objects"))
        return self.detector.describe(self.images, to_rois(self.rows("in.boxes")), masks, classes)

    def regions(self) -> Regions:
        classes = [rows - 1 for rows in self.rows("in.objects")]
        boxes, masks = self.rows("in.boxes"), self.rows("in.segms")
        return self.detector(self.batch(), boxes, roi_masks=masks, box_classes=classes)

    def run(self) -> TaskOutput:
        images, arrays = self.batch(), self.arrays
        names = ("in.input_ids", "in.token_type_ids", "in.input_mask")
        texts = recorded_texts({name: arrays[name].flatten(0, 1) for name in names})
        image_index = torch.arange(len(images)).repeat_interleave(CHOICES)[:, None]
        regions = gather_regions(self.regions(), images.sizes, image_index)
        counts = word_counts(arrays["in.alignment"].flatten(0, 1), regions, texts.attention_mask.shape[1])
        encoded = self.encoder.encode(texts, *self.encoder.embeddings.join(texts, regions, counts))
        is_correct = F.one_hot(arrays["in.label"], CHOICES).flatten().to(self.images.dtype)
        return self.task(Batch(images, None, texts, image_index, VCRTargets(is_correct)), regions, encoded)


@pytest.fixture(scope="module")
def seeing(visual_golden) -> Seeing:
    return Seeing(visual_golden)


def test_stages_of_the_network(visual_golden, seeing):
    recorded = visual_golden.part(PART, "mid.")
    with torch.no_grad():
        found = seeing.described()
        assert_near(seeing.detector.backbone(seeing.images), recorded["c4"], "c4")
        regions = seeing.regions()
    assert_near(found.pooled, recorded["roi_align"], "roi_align")
    assert_near(found.mean, recorded["obj_reps_raw"], "obj_reps_raw")
    real = seeing.arrays["in.box_mask"].bool()
    assert_near(torch.cat(regions.features), recorded["obj_reps"][real], "obj_reps")
    logits = torch.cat(regions.class_logits).roll(1, dims=1)  # recorded: the whole image first
    assert_near(logits, recorded["obj_logits"], "obj_logits")
    loss = F.cross_entropy(logits, torch.cat(seeing.rows("in.objects")))
    assert_near(loss[None], recorded["cnn_regularization_loss"], "cnn_regularization_loss")


def test_choices_from_pixels(visual_golden, seeing):
    values = visual_golden.meta["values"][PART]
    with torch.no_grad():
        output = seeing.run()
    assert_near(output.logits, seeing.arrays["out.logits"], "logits")
    assert_near(output.losses["choice"].mean, seeing.arrays["out.loss"], "loss")
    assert float(output.losses["choice"].mean) == pytest.approx(values["loss"], rel=RELATIVE)
    assert output.logits.argmax(dim=1).tolist() == values["argmax"]


def test_gradients_from_pixels(visual_golden):
    seeing = Seeing(visual_golden).double()
    seeing.run().losses["choice"].mean.backward()
    assert_gradients_near(visual_golden, PART, seeing, {"in.images": seeing.images})


def test_what_decays_with_the_network(visual_golden, seeing):
    if PART not in visual_golden.meta["optimizer_groups"]:
        pytest.skip(f"the set has no groups of {PART}; they are optional")
    recorded = visual_golden.meta["optimizer_groups"][PART]
    seeing.encoder.pooler.requires_grad_(False)
    names = {id(parameter): name for name, parameter in seeing.named_parameters()}
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for group in build_optimizer(seeing, optimiser.settings(visual_golden)).param_groups:
        found[group["weight_decay"] > 0] |= {names.pop(id(one)) for one in group["params"]}
    assert found[False] == {our_name(name) for name in recorded["no_decay"]}
    assert set(names.values()) == {our_name(name) for name in recorded["not_in_optimiser"]}
    outside = {name for name in found[True] if not name.startswith(optimiser.LAYERS)}
    assert outside == {our_name(name) for name in recorded["decay"]}
