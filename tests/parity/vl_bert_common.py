"""What the comparisons with the official VL-BERT code share: the recorded set, and models with its weights.

Configs are read from the set's meta.json and sizes from its arrays, so that another set (`--golden-root`) is tested by
the same files.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from detector.config import DetectorConfig
from detector.faster_rcnn import FasterRCNN
from detector.structures import ImageBatch
from e2e_vl.encoders.vl_bert import PretrainedVLBertConfig, VLBertModel
from e2e_vl.model import VisionLanguageModel
from e2e_vl.structures import TextBatch
from e2e_vl.tasks.config import ReferringConfig
from e2e_vl.tasks.refcoco import ReferringTask
from e2e_vl.text import Template, TextEncoding, fill_template
from tests.parity.tolerances import NETWORK

RELATIVE = NETWORK  # of the largest value
RELATIVE_CNN_FLOAT32 = 0.1  # single ReLU signs decide gradients of the CNN in float32; those in float64 tell
KEY_BIAS = "attention.self.key.bias"  # its gradient is zero up to rounding
STAGES = ("backbone.stem", "backbone.res2", "backbone.res3", "backbone.res4", "roi_heads.res5")  # official 1 .. 5
BLOCKS_TO_DEPTH = {(3, 4, 6, 3): 50, (3, 4, 23, 3): 101, (3, 8, 36, 3): 152}
BERT_FIELDS = (
    "hidden_size",
    "visual_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "max_position_embeddings",
    "type_vocab_size",
    "vocab_size",
    "initializer_range",
    "visual_scale_text_init",
    "visual_scale_object_init",
    "with_pooler",
)


class Golden:
    """The recorded set: `meta`, and the arrays of a file by name.

    Args:
        optional: names of array files that a set need not have; a check that reads one that is absent is skipped.
    """

    def __init__(self, folder: Path, optional: Collection[str] = ()) -> None:
        self.folder = folder
        self.optional = optional
        self.meta = json.loads((folder / "meta.json").read_text())
        self.files: dict[str, dict[str, Tensor]] = {}

    def __getitem__(self, name: str) -> dict[str, Tensor]:
        if name not in self.files:
            if name in self.optional:
                self.require(f"{name}.safetensors")
            self.files[name] = load_file(self.folder / f"{name}.safetensors")
        return self.files[name]

    def part(self, name: str, prefix: str) -> dict[str, Tensor]:
        """Arrays whose name starts with the prefix, without it."""
        return {key.removeprefix(prefix): value for key, value in self[name].items() if key.startswith(prefix)}

    def require(self, *files: str) -> None:
        """Skip the check unless the set has these optional files or folders."""
        for file in files:
            if not (self.folder / file).exists():
                pytest.skip(f"the set has no {file}; it is optional")


def optional(golden: Golden, file: str, name: str) -> Tensor:
    """A recorded array that a set need not have."""
    golden.require(f"{file}.safetensors")
    if name not in golden[file]:
        pytest.skip(f"the set has no {name} in {file}; it is optional")
    return golden[file][name]


@pytest.fixture(scope="session")
def golden(golden_root: Path) -> Golden:
    return Golden(golden_root / "vl_bert")


def assert_near(ours: Tensor, recorded: Tensor, name: str, relative: float = RELATIVE) -> None:
    assert ours.shape == recorded.shape, f"{name}: shape {tuple(ours.shape)}, recorded {tuple(recorded.shape)}"
    scale = recorded.double().abs().max()  # may be 0: then ours must be 0 too
    difference = (ours.detach().double() - recorded.double()).abs().max()
    assert difference <= relative * scale, f"{name}: differs by {difference:.3g}, largest value {scale:.3g}"


def encoder_config(golden: Golden, name: str, **fields: Any) -> PretrainedVLBertConfig:
    """The encoder of a recorded model; `fields` are those that no recorded config has."""
    recorded, visual = golden.meta["configs"][name], golden.meta["configs"]["visual"]
    recorded = recorded.get("VLBERT", recorded)
    return PretrainedVLBertConfig(
        **{field: recorded[field] for field in BERT_FIELDS},
        visual_layer_norm=recorded["visual_ln"],
        feature_dim=visual["feature_dim"],
        geometry_dim=visual["coordinate_dim"],
        **fields,
    )


def leading_frozen_stages(frozen: list[int]) -> int:
    """FREEZE_AT for IMAGE_FROZEN_BACKBONE_STAGES: how many stages from the stem on are frozen."""
    return next(count for count in range(len(STAGES) + 1) if count + 1 not in frozen)


def detector_config(golden: Golden, name: str = "refcoco", dilated: bool | None = None) -> DetectorConfig:
    """The detector of a recorded model; `dilated` overrides the recorded dilation of res5."""
    visual, network = golden.meta["configs"]["visual"], golden.meta["configs"][name]
    dilated = visual["c5_dilated"] if dilated is None else dilated
    return DetectorConfig.from_flat(
        {
            "MODEL.RESNETS.DEPTH": BLOCKS_TO_DEPTH[tuple(visual["blocks"])],
            "MODEL.RESNETS.STEM_OUT_CHANNELS": visual["stem_width"],
            "MODEL.RESNETS.WIDTH_PER_GROUP": visual["stage_planes"][0],
            "MODEL.RESNETS.RES2_OUT_CHANNELS": visual["feature_dim"] // 8,
            "MODEL.RESNETS.STRIDE_IN_1X1": visual["stride_in_1x1"],
            "MODEL.RESNETS.RES5_DILATION": 2 if dilated else 1,
            "MODEL.RESNETS.NORM": "FrozenBN" if network["IMAGE_FROZEN_BN"] else "BN",
            "MODEL.BACKBONE.FREEZE_AT": leading_frozen_stages(network["IMAGE_FROZEN_BACKBONE_STAGES"]),
            "MODEL.ROI_BOX_HEAD.POOLER_TYPE": "ROIAlign",
            "MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION": visual["roi_output"][0],
            "MODEL.ROI_BOX_HEAD.POOLER_SAMPLING_RATIO": visual["sampling_ratio"],
        }
    )


def without_pooler(encoder: VLBertModel, official: dict[str, Tensor]) -> dict[str, Tensor]:
    """The trunk's weights hold a pooler; drop it if the encoder has none."""
    return {key: value for key, value in official.items() if encoder.pooler or not key.startswith("vlbert.pooler.")}


def referring_config(golden: Golden) -> ReferringConfig:
    """The official RefCOCO loss is unweighted: its code never reads CLASSIFIER_SIGMOID_LOSS_POSITIVE_WEIGHT."""
    return ReferringConfig(dropout=golden.meta["configs"]["refcoco"]["CLASSIFIER_DROPOUT"], positive_weight=1.0)


def make_model(golden: Golden, keys: ModuleType, *, dilated: bool | None = None) -> VisionLanguageModel:
    """The official RefCOCO model: trunk and head."""
    model = VisionLanguageModel(
        FasterRCNN(detector_config(golden, dilated=dilated)),
        VLBertModel(encoder_config(golden, "refcoco")),
        ReferringTask(encoder_config(golden, "refcoco").hidden_size, referring_config(golden)),
    )
    state = keys.split_state(without_pooler(model.encoder, {**golden["trunk"], **golden.part("refcoco", "state.")}))
    missing, unexpected = model.detector.load_state_dict(state["detector"], strict=False)
    assert not unexpected
    assert all(key.startswith(("proposal_generator.", "roi_heads.box_predictor.")) for key in missing)
    model.encoder.load_state_dict(state["encoder"], strict=True)
    model.task.load_state_dict(state["task"], strict=True)
    for number in golden.meta["configs"]["refcoco"]["IMAGE_FROZEN_BACKBONE_STAGES"]:  # FREEZE_AT knows no gaps
        model.detector.get_submodule(STAGES[number - 1]).requires_grad_(False)
    return model.eval()


def image_batch(pixels: Tensor, im_info: Tensor) -> ImageBatch:
    sizes = im_info[:, [1, 0]]
    ratios = im_info[:, [3, 2]]
    names = [f"image {index}" for index in range(len(pixels))]
    return ImageBatch(pixels=pixels, sizes=sizes.long(), original_sizes=sizes / ratios, names=names)


def padded(rows: tuple[Tensor, ...], mask: Tensor) -> Tensor:
    """Rows of each image -> [N, R, ...], zero where the mask is False."""
    result = rows[0].new_zeros(*mask.shape, *rows[0].shape[1:])
    result[mask] = torch.cat(rows)
    return result


def recorded_texts(arrays: dict[str, Tensor]) -> TextBatch:
    return TextBatch(arrays["text_input_ids"], arrays["text_token_type_ids"], arrays["text_mask"])


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """The special wordpieces of recorded texts, under the names that a tokenizer has for them."""

    cls_token_id: int
    sep_token_id: int
    mask_token_id: int | None = None

    @classmethod
    def of(cls, texts: TextBatch, *, with_mask: bool = False) -> SpecialTokens:
        """Read from the first text: `[CLS] ... [SEP]`, or `[CLS] ... [MASK] [SEP]`."""
        ids = texts.input_ids[0][texts.attention_mask[0]].tolist()
        return cls(ids[0], ids[-1], ids[-2] if with_mask else None)

    def fill_template(self, template: Template, *texts: Sequence[int]) -> TextEncoding:
        """The pieces of texts in a form of VL-BERT's layout."""
        return fill_template(template, texts, self)


def assert_laid_out(encoding: Sequence[TextEncoding], texts: TextBatch) -> None:
    """Wordpieces and segments of texts as this project lays them out are the recorded ones."""
    assert len(encoding) == len(texts)
    for row, text in enumerate(encoding):
        real = texts.attention_mask[row]
        assert text.input_ids.tolist() == texts.input_ids[row][real].tolist(), f"text {row}"
        assert text.token_type_ids.tolist() == texts.token_type_ids[row][real].tolist(), f"text {row}"


def is_cnn(name: str) -> bool:
    return "backbone" in name or "roi_head" in name


def cnn_float32_tolerance(golden: Golden, part: str) -> float:
    """How far the CNN's gradients of the recorded float32 run may be from ours in float64.

    The set says how far its own float32 and float64 runs are apart in some of them; ten times the worst is allowed.
    """
    checks = golden.meta.get("fp64_check", {}).get(part, {})
    apart = [one["max_abs_diff"] / one["max_abs_value"] for name, one in checks.items() if is_cnn(name)]
    return max([RELATIVE_CNN_FLOAT32, *(10 * ratio for ratio in apart)])


def assert_gradients_near(
    golden: Golden, part: str, gradients: dict[str, Tensor], our_key: Callable[[str], str]
) -> None:
    """Compare gradients of a float64 run, by our names, with all that is recorded of a model's.

    Those recorded in float64 (the CNN's) and float32 ones of everything behind the CNN must agree to `RELATIVE`.
    """
    of_cnn = cnn_float32_tolerance(golden, part)
    in_float64, in_float32 = golden.part(part, "grad64."), golden.part(part, "grad.")
    assert in_float32
    for key, recorded in in_float64.items():
        if not key.endswith(KEY_BIAS):
            assert_near(gradients[our_key(key)], recorded, f"grad64.{key}")
    for key, recorded in in_float32.items():
        if not key.endswith(KEY_BIAS):
            assert_near(gradients[our_key(key)], recorded, f"grad.{key}", of_cnn if is_cnn(key) else RELATIVE)
    norms = golden.meta["grad_norms"][part]
    assert set(gradients) == {our_key(key) for key in norms}
    zero = 1e-3 * max(norms.values())  # a bias before a softmax has a gradient of rounding errors only
    for key, norm in norms.items():
        if not key.endswith(KEY_BIAS):
            ours = float(gradients[our_key(key)].norm())
            tolerance = of_cnn if is_cnn(key) else RELATIVE
            assert ours == pytest.approx(norm, rel=tolerance, abs=RELATIVE * zero), key
