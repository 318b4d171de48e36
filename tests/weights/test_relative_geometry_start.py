"""Relative geometry may be switched on in a run that starts from weights without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from detector.config import DetectorConfig
from detector.structures import PrecomputedDetector
from e2e_vl.encoders.base import Encoder
from e2e_vl.model import VisionLanguageModel
from e2e_vl.run.build import ADAPTERS, Start
from e2e_vl.run.trackers import origin_text
from e2e_vl.tasks.config import VQAConfig
from e2e_vl.tasks.vqa import VQATask
from e2e_vl.weights.lxmert import OfficialLxmert
from e2e_vl.weights.start import StartRules, load_encoder
from e2e_vl.weights.visual_bert import OfficialVisualBert
from e2e_vl.weights.vl_bert import OfficialVLBert
from tests.encoders.small import make_inputs, make_lxmert, make_visual_bert, make_vl_bert
from tests.regions import learn_geometry

ENCODERS = {
    "vl_bert": (make_vl_bert, OfficialVLBert, {}),
    "visual_bert": (make_visual_bert, OfficialVisualBert, {"hidden_layer": False}),
    "lxmert": (make_lxmert, OfficialLxmert, {"head_width": 2}),
}


def own_run(encoder: Encoder, name: str, folder: Path) -> Path:
    encoder.save_pretrained(folder / "model" / "encoder")
    return folder


def published(encoder: Encoder, name: str, folder: Path) -> Path:
    head = VQAConfig(answers=["yes", "no"], initialise_from_words=False, **ENCODERS[name][2])
    model = VisionLanguageModel(
        PrecomputedDetector(DetectorConfig()), encoder, VQATask(encoder.config.hidden_size, head)
    )
    adapter = ENCODERS[name][1]()
    path = folder / f"published{adapter.suffix}"
    adapter.export(model, "vqa", path)
    return path


def rules(name: str) -> StartRules:
    return StartRules("vqa", ADAPTERS[name])


@pytest.mark.parametrize("save", [own_run, published])
@pytest.mark.parametrize("name", ENCODERS)
def test_weights_without_it_start_as_they_were(tmp_path, name, save: Callable[..., Path]):
    make = ENCODERS[name][0]
    torch.manual_seed(1)
    plain = make()
    path = save(plain, name, tmp_path)
    torch.manual_seed(2)
    paired = make(relative_geometry=True)
    report = load_encoder(paired, path, rules(name))
    assert report.zero == ["relative_geometry"]
    assert {key.split(".")[0] for key in report.missing} == {"relative_geometry"}
    assert "starts at zero: relative_geometry" in report.summary()
    line = origin_text(paired, [Start("encoder", str(path), report)])
    assert line.endswith("starts at zero: relative_geometry; random: nothing")
    inputs = make_inputs()
    before, after = plain(*inputs), paired(*inputs)
    for one, other in ((before.text, after.text), (before.regions, after.regions), (before.summary, after.summary)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ENCODERS)
def test_a_part_of_it_is_not_enough(tmp_path, name):
    make = ENCODERS[name][0]
    saved = make(relative_geometry=True)
    learn_geometry(saved)
    path = own_run(saved, name, tmp_path) / "model" / "encoder" / "model.safetensors"
    loaded = make(relative_geometry=True)
    assert load_encoder(loaded, tmp_path, rules(name)).is_complete
    assert torch.equal(loaded.relative_geometry.output[0].weight, saved.relative_geometry.output[0].weight)
    tensors = load_file(path)
    lost = "relative_geometry.output.0.bias"
    save_file({key: value for key, value in tensors.items() if key != lost}, path)
    with pytest.raises(ValueError, match=rf"does not fit the model's config: .* 1 missing \({lost}\)"):
        load_encoder(make(relative_geometry=True), tmp_path, rules(name))
