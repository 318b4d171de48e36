"""Exported programs give what the model gives."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from detector.images import normalise_images
from e2e_vl.api.model import convert_boxes
from e2e_vl.cli.export import main
from e2e_vl.samples import Question


def test_exported_detector_and_encoder(demo_model, tmp_path, capsys):
    assert main(["--run", "demo", "--output", str(tmp_path), "--boxes", "7", "--words", "20"]) == 0
    assert capsys.readouterr().out.count("written: ") == 2
    scene = demo_model.examples[0]
    given = convert_boxes(demo_model.regions(scene.image, min_regions=5, max_regions=5).boxes)
    _, output = demo_model.ask_with_output(Question(scene.image, scene.texts[0], given))
    texts, regions, [boxes] = (
        output.batch.texts,
        output.text_regions,
        output.regions.boxes,
    )
    detect, encode = (torch.export.load(tmp_path / f"{name}.pt2").module() for name in ("detector", "encoder"))

    pixels = normalise_images(output.batch.images, demo_model.network.detector.config.input).pixels
    features, logits = detect(pixels, torch.cat([boxes, boxes[:2]]))
    torch.testing.assert_close(features[:6], output.regions.features[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(logits[:6], output.regions.class_logits[0], rtol=0, atol=1e-5)

    length = texts.input_ids.shape[1]
    words = [F.pad(one, (0, 20 - length)) for one in (texts.input_ids, texts.token_type_ids, texts.attention_mask)]
    padded = [F.pad(one, (0, 0, 0, 2)) for one in (regions.features, regions.boxes)]
    found = encode(*words, *padded, torch.arange(8)[None] < 6)
    for one, own in zip(found, (output.encoded.text, output.encoded.regions), strict=True):
        torch.testing.assert_close(one[:, : own.shape[1]], own, rtol=0, atol=1e-5)
        assert not one[:, own.shape[1] :].any()


def test_what_cannot_be_exported_is_one_sentence(tmp_path, capsys):
    assert main(["--run", str(tmp_path), "--output", str(tmp_path)]) == 2
    assert "contains no trained model" in capsys.readouterr().err
