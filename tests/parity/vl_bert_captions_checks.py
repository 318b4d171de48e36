"""Captioned images as the official code prepares them: size, mirroring, order and corners of boxes, class labels."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file

from detector.config import InputConfig
from detector.images import ResizeRule, mask_rectangles, normalise_images
from e2e_vl.config import BoxSource, DataConfig
from e2e_vl.data.base import DataFiles, DataNeeds
from e2e_vl.data.batching import EncodedDataset, Request, collate
from e2e_vl.data.captions import CaptionDataset, VLBertCaptions
from e2e_vl.data.config import CaptionDatasetConfig
from e2e_vl.data.image_loader import ImageLoader, ImageRules
from e2e_vl.encoders.vl_bert import VLBertModel
from e2e_vl.tasks.objectives.words import WordMasking
from e2e_vl.tasks.pretraining import PretrainingPreprocessor
from e2e_vl.text import TextTokenizer, load_tokenizer


@pytest.fixture(scope="module")
def facts(golden_root) -> dict:
    return json.loads((golden_root / "vl_bert" / "data.json").read_text(encoding="utf-8"))["cc"]


@pytest.fixture(scope="module")
def arrays(golden_root) -> dict[str, np.ndarray]:
    return load_file(golden_root / "vl_bert" / "data.safetensors")


@pytest.fixture(scope="module")
def source(facts, arrays, tmp_path_factory) -> VLBertCaptions:
    """The recorded image with its boxes, written in the official layout."""
    root = tmp_path_factory.mktemp("captions")
    for folder in ("val_image", "val_frcnn"):
        (root / folder).mkdir()
    stream = io.BytesIO()
    Image.fromarray(arrays["cc.image_uint8"]).save(stream, "PNG")
    (root / "val_image" / "00000000.jpg").write_bytes(stream.getvalue())
    height, width = arrays["cc.image_uint8"].shape[:2]
    frcnn = {"image_w": width, "image_h": height, "num_boxes": len(arrays["cc.boxes"])}
    for key, name in (("boxes", "cc.boxes"), ("classes", "cc.class_scores")):
        frcnn[key] = base64.encodebytes(arrays[name].astype(np.float32).tobytes()).decode()
    (root / "val_frcnn" / "00000000.json").write_text(json.dumps(frcnn))
    line = {"image": "val_image.zip@/00000000.jpg", "frcnn": "val_frcnn.zip@/00000000.json"}
    (root / "val_frcnn.json").write_text(json.dumps({**line, "caption": facts["caption_words"]}) + "\n")
    (root / "vocab.txt").write_text(_vocabulary(facts), encoding="utf-8")
    return VLBertCaptions(root / "val_frcnn.json", root / "index", with_boxes=True)


def _vocabulary(facts: dict) -> str:
    """The recorded words at their recorded ids."""
    special = {0: "[PAD]", 100: "[UNK]", 101: "[CLS]", 102: "[SEP]", 103: "[MASK]"}  # of every set, as in BERT
    words = [f"[unused{number}]" for number in range(max(*special, *facts["caption_ids"]) + 1)]
    for number, word in [*zip(facts["caption_ids"], facts["caption_words"], strict=True), *special.items()]:
        words[number] = word
    return "".join(f"{word}\n" for word in words)


def test_captions_sizes_of_resized_images(golden_root):
    cases = json.loads((golden_root / "vl_bert" / "data.json").read_text(encoding="utf-8"))["resize"]
    assert cases
    for case in cases:
        (width, height), rule = case["size"], ResizeRule(*case["scales"], "truncate")
        assert list(rule.target_size(height, width)[::-1]) == case["out"], case


def test_captions_image_boxes_classes_and_words_are_those_of_the_official_code(facts, arrays, source):
    short, long = facts["scales"]
    files = {"detections": source.lines.path.name}
    settings = DataConfig(name="captions", root=str(source.lines.path.parent), files=files)
    options = CaptionDatasetConfig(source="json_lines")
    captions = CaptionDataset(DataFiles(settings, tuple(files)), options, "val", DataNeeds(BoxSource.DETECTIONS))
    text_tokenizer = TextTokenizer(load_tokenizer(source.lines.path.parent / "vocab.txt"), VLBertModel.layout)
    preprocessor = PretrainingPreprocessor(text_tokenizer, {"masked_words": WordMasking(text_tokenizer)})
    for number, case in enumerate(facts["cases"]):
        rules = ImageRules((ResizeRule(short, long, "truncate"),), flip_probability=float(case["flip"]))
        dataset = EncodedDataset(captions, ImageLoader(rules, BoxSource.DETECTIONS), preprocessor)
        example = dataset[Request(0, (0,))]
        batch = collate([example])

        boxes = arrays[f"cc.{number}.boxes"][1:]  # without the whole image
        np.testing.assert_allclose(batch.boxes[0][: len(boxes)].numpy(), boxes, rtol=1e-5, atol=1e-4)

        probabilities = batch.region_labels.class_probs[0].numpy()
        labels = arrays[f"cc.{number}.mvrc_labels"][1:]
        labelled = labels.sum(axis=1) > 0
        np.testing.assert_array_equal(probabilities[: len(labels)][labelled], labels[labelled])

        masked = arrays[f"cc.{number}.mvrc_ops_before_truncation"][1:].astype(bool)
        height, width = batch.images.sizes[0].tolist()
        hidden = torch.zeros(height, width, dtype=torch.bool)
        for x1, y1, x2, y2 in mask_rectangles(batch.boxes[0][masked], (height, width), "truncate").int().tolist():
            hidden[y1:y2, x1:x2] = True
        colours = InputConfig(pixel_mean=tuple(facts["pixel_means"]), pixel_std=(1.0, 1.0, 1.0))
        pixels = normalise_images(batch.images, colours).pixels[0].masked_fill(hidden, 0.0).numpy()
        np.testing.assert_allclose(pixels, arrays[f"cc.{number}.image"], atol=1e-3)

        info = [width, height, *batch.images.scales[0].tolist(), 0]  # the last is the number of the sample
        np.testing.assert_allclose(arrays[f"cc.{number}.im_info"], info, rtol=1e-6)

        kept = case["kept_text"]
        expected = arrays[f"cc.{number}.mlm_labels"], arrays[f"cc.{number}.text"]
        original = np.where(expected[0] >= 0, expected[0], expected[1])
        [text] = example.texts
        words = text.targets.parts["masked_words"].labels, text.encoding.input_ids
        ours = np.where(words[0] >= 0, words[0], words[1])
        np.testing.assert_array_equal([*ours[: kept - 1], ours[-1]], original)
