"""Encoders initialised from our runs, and weights without relative geometry."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from detector.config import DetectorConfig
from detector.structures import PrecomputedDetector
from e2e_vl.model import VisionLanguageModel
from e2e_vl.tasks.config import VQAConfig
from e2e_vl.tasks.vqa import VQATask
from e2e_vl.weights.loading import load_encoder
from e2e_vl.weights.lxmert import OfficialLxmert
from e2e_vl.weights.visual_bert import OfficialVisualBert
from e2e_vl.weights.vl_bert import OfficialVLBert
from tests.encoders.small import make_inputs, make_lxmert, make_visual_bert, make_vl_bert
from tests.regions import learn_geometry
from tests.weights.starts import rules, same


@pytest.mark.parametrize(
    ("name", "make", "field", "value"),
    [
        ("vl_bert", make_vl_bert, "geometry", "corners"),
        ("vl_bert", make_vl_bert, "visual_part_on_end", True),
        ("vl_bert", make_vl_bert, "whole_image_in_sequence", False),
        ("visual_bert", make_visual_bert, "region_position", "paper"),
        ("lxmert", make_lxmert, "num_attention_heads", 2),
    ],
)
def test_an_encoder_of_ours_starts_if_its_config_agrees_in_what_no_shape_shows(tmp_path, name, make, field, value):
    saved, loaded = make(), make()
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.add_(0.5)
    saved.save_pretrained(tmp_path)
    report = load_encoder(loaded, tmp_path, rules("refcoco", name))
    assert report.is_complete and report.layout == "this project" and same(loaded, saved)
    with pytest.raises(ValueError, match=rf"config\.json: {field} .*encoder\.config\.{field}"):
        load_encoder(make(**{field: value}), tmp_path, rules("refcoco", name))


ENCODERS = {
    "vl_bert": (make_vl_bert, OfficialVLBert(), {}),
    "visual_bert": (make_visual_bert, OfficialVisualBert(), {"hidden_layer": False}),
    "lxmert": (make_lxmert, OfficialLxmert(), {"head_width": 2}),
}


@pytest.mark.parametrize("is_official", [False, True])
@pytest.mark.parametrize("name", ENCODERS)
def test_weights_without_relative_geometry_start_as_they_were(tmp_path, name, is_official):
    make, adapter, options = ENCODERS[name]
    torch.manual_seed(1)
    plain, path = make(), tmp_path
    if is_official:
        path = tmp_path / f"published{adapter.suffix}"
        head = VQAConfig(answers=["yes", "no"], init_from_words=False, **options)
        task, detector = VQATask(plain.config.hidden_size, head), PrecomputedDetector(DetectorConfig())
        adapter.export(VisionLanguageModel(detector, plain, task), "vqa", path)
    else:
        plain.save_pretrained(tmp_path / "model" / "encoder")
    torch.manual_seed(2)
    paired = make(relative_geometry=True)
    report = load_encoder(paired, path, rules("vqa", name))
    assert report.zero == ["relative_geometry"]
    assert {key.split(".")[0] for key in report.missing} == {"relative_geometry"}
    before, after = plain(*make_inputs()), paired(*make_inputs())
    for part in ("text", "regions", "summary"):
        torch.testing.assert_close(getattr(before, part), getattr(after, part), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ENCODERS)
def test_weights_of_before_start_without_scores_of_proposals(tmp_path, name):
    make, _, _ = ENCODERS[name]
    plain = make()
    plain.save_pretrained(tmp_path / "model" / "encoder")
    scored = make(proposal_scores=True)
    report = load_encoder(scored, tmp_path, rules("vqa", name))
    assert report.zero == ["proposal_embedding"]
    assert torch.equal(plain(*make_inputs()).regions, scored(*make_inputs()).regions)


def test_a_part_of_relative_geometry_is_not_enough(tmp_path):
    saved, loaded = make_vl_bert(relative_geometry=True), make_vl_bert(relative_geometry=True)
    learn_geometry(saved)
    saved.save_pretrained(tmp_path)
    assert load_encoder(loaded, tmp_path, rules("vqa")).is_complete
    assert same(loaded.relative_geometry, saved.relative_geometry)
    path, lost = tmp_path / "model.safetensors", "relative_geometry.output.0.bias"
    save_file({key: value for key, value in load_file(path).items() if key != lost}, path)
    with pytest.raises(ValueError, match=rf"1 missing \({lost}\)"):
        load_encoder(make_vl_bert(relative_geometry=True), tmp_path, rules("vqa"))
