"""The encoder against the official LXMERT code: every layer and sub-layer, attention maps, gradients, a vision mask."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import Tensor
from transformers import LxmertConfig, LxmertModel

from e2e_vl.encoders.lxmert import LxmertEncoder, PretrainedLxmertConfig
from e2e_vl.structures import EncoderOutput, TextRegions
from tests.parity import lxmert_common as common
from tests.parity.lxmert_common import (
    assert_gradients_near,
    assert_near,
    gradients_of,
    make_encoder,
    our_weights,
    regions_of,
    texts_of,
)

golden = common.golden


def run(encoder: LxmertEncoder, arrays: dict[str, Tensor]) -> tuple[EncoderOutput, dict[str, Tensor]]:
    """The output with its maps, and the states of every step under their recorded names."""
    steps: dict[str, Tensor] = {}
    hooks = []

    def keep(module: torch.nn.Module, *names: str) -> None:
        def store(_, __, found) -> None:
            found = (found,) if isinstance(found, Tensor) else found
            steps.update({name: one for name, one in zip(names, found, strict=False) if name})

        hooks.append(module.register_forward_hook(store))

    parts = encoder.encoder
    keep(encoder.embeddings, "embeddings")
    keep(parts.visn_fc, "visual_embeddings")
    for kind, layers in (("l", parts.layer), ("r", parts.r_layers)):
        for number, layer in enumerate(layers):
            keep(layer, f"{kind}.{number}")
    for number, layer in enumerate(parts.x_layers):
        keep(layer, f"x.{number}.lang", f"x.{number}.visn")
        keep(layer.lang_self_att, f"x.{number}.self.lang")
        keep(layer.visn_self_att, f"x.{number}.self.visn")
        cross = iter(("lang", "visn"))  # the shared module runs once for each direction
        layer.visual_attention.register_forward_hook(
            lambda _, __, found, cross=cross, number=number: steps.update({f"x.{number}.cross.{next(cross)}": found[0]})
        )
    output = encoder(texts_of(arrays), regions_of(arrays["visual_feats"], arrays["boxes"]), output_attentions=True)
    for hook in hooks:
        hook.remove()
    return output, steps


def is_language(name: str) -> bool:
    return name == "embeddings" or name.startswith("l.") or name.endswith("lang")


def test_states_of_every_step(golden):
    encoder, arrays = make_encoder(golden), golden.part("encoder", "in.")
    with torch.no_grad():
        output, steps = run(encoder, arrays)
    recorded, real = golden.part("encoder", "out."), arrays["attention_mask"].bool()
    assert set(steps) == set(recorded) - {"language", "vision", "pooled", "scalar"}
    for name, ours in steps.items():
        kept = real if is_language(name) else slice(None)
        assert_near(ours[kept], recorded[name][kept], name)
    assert_near(output.text[real], recorded["language"][real], "language")
    assert not output.text[~real].any()
    assert_near(output.regions, recorded["vision"], "vision")
    assert_near(output.summary, recorded["pooled"], "pooled")


def test_attention_maps(golden):
    encoder, arrays = make_encoder(golden), golden.part("encoder", "in.")
    with torch.no_grad():
        output, _ = run(encoder, arrays)
    recorded, real = golden.part("encoder", "att."), arrays["attention_mask"].bool()
    length, maps, config = real.shape[1], iter(output.attentions), encoder.config
    words, regions = slice(length), slice(length, None)
    queries = real[:, None, :, None]  # rows of real words

    def check(found: Tensor, blocks: dict[str, tuple[slice, slice]]) -> None:
        rest = found.clone()
        for name, (rows, columns) in blocks.items():
            theirs = recorded.pop(name)
            is_text = rows == words
            assert_near(found[:, :, rows, columns], theirs * queries if is_text else theirs, name)
            rest[:, :, rows, columns] = 0
        assert not rest.any(), "blocks that the step does not have"

    for number in range(config.l_layers):
        check(next(maps), {f"l.{number}": (words, words)})
    for number in range(config.r_layers):
        check(next(maps), {f"r.{number}": (regions, regions)})
    for number in range(config.x_layers):
        name = f"x.{number}"
        check(next(maps), {f"{name}.lang_to_visn": (words, regions), f"{name}.visn_to_lang": (regions, words)})
        check(next(maps), {f"{name}.lang": (words, words), f"{name}.visn": (regions, regions)})
    assert next(maps, None) is None
    assert not recorded


def test_gradients_of_the_encoder(golden):
    encoder = make_encoder(golden).double()
    arrays = {
        name: value.double() if value.is_floating_point() else value
        for name, value in golden.part("encoder", "in.").items()
    }
    inputs = {name: arrays[name].requires_grad_() for name in ("visual_feats", "boxes")}
    output = encoder(texts_of(arrays), regions_of(features=inputs["visual_feats"], boxes=inputs["boxes"]))
    states = {"language": output.text, "vision": output.regions, "pooled": output.summary}
    scalar = sum((arrays[f"probe_{name}"] * value).sum() for name, value in states.items())
    assert_near(scalar, golden["encoder"]["out.scalar"], "scalar")
    assert float(scalar.detach()) == pytest.approx(golden.meta["values"]["encoder"]["scalar"], rel=1e-5)
    scalar.backward()
    gradients = gradients_of(encoder) | {f"in.{name}": value.grad for name, value in inputs.items()}
    assert_gradients_near(golden, "encoder", gradients)
    for table in ("word", "position", "token_type"):  # padding rows
        assert not gradients[f"embeddings.{table}_embeddings.weight"][0].any()


def masked_inputs(golden) -> tuple[dict[str, Tensor], TextRegions]:
    if "masked.in.visual_mask" not in golden["encoder"]:
        pytest.skip("the set has no case with a vision mask; it is optional")
    arrays, masked = golden.part("encoder", "in."), golden.part("encoder", "masked.in.")
    return {**arrays, **masked}, regions_of(arrays["visual_feats"], arrays["boxes"], masked["visual_mask"])


def test_masked_regions_and_segments(golden):
    arrays, regions = masked_inputs(golden)
    with torch.no_grad():
        output = make_encoder(golden)(texts_of(arrays), regions)
    recorded, real = golden.part("encoder", "masked.out."), arrays["attention_mask"].bool()
    assert_near(output.text[real], recorded["language"][real], "masked language")
    assert_near(output.regions[regions.attention_mask], recorded["vision"][regions.attention_mask], "masked vision")
    assert not output.regions[~regions.attention_mask].any()
    assert_near(output.summary, recorded["pooled"], "masked pooled")


def test_two_slots_with_one_image_each_begin_with_the_summary_of_that_image(golden):
    arrays, regions = masked_inputs(golden)
    with torch.no_grad():
        output = make_encoder(golden, max_images=2)(texts_of(arrays), regions)
    summary = golden.part("encoder", "masked.out.")["pooled"]
    assert_near(output.summary[:, : summary.shape[1]], summary, "masked pooled")


def test_transformers_computes_the_same(golden):
    config, arrays = golden.meta["configs"]["encoder"], golden.part("encoder", "in.")
    fields = {name: value for name, value in config.items() if name != "layer_norm_eps"}
    theirs = LxmertModel(LxmertConfig(**fields)).eval()
    encoder = make_encoder(golden)
    theirs.load_state_dict(encoder.state_dict(), strict=True)  # the names are the same
    masks = {"attention_mask": arrays["attention_mask"], "token_type_ids": arrays["token_type_ids"]}
    with torch.no_grad():
        found = theirs(arrays["input_ids"], arrays["visual_feats"], arrays["boxes"], **masks)
        output = encoder(texts_of(arrays), regions_of(arrays["visual_feats"], arrays["boxes"]))
    real = arrays["attention_mask"].bool()
    assert_near(output.text[real], found.language_output[real], "language")
    assert_near(output.regions, found.vision_output, "vision")
    assert_near(output.summary, found.pooled_output, "pooled")


def official_keys(golden) -> dict:
    golden.require("official_state_keys.json")
    return json.loads((golden.folder / "official_state_keys.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", ["pretrain", "vqa", "gqa", "nlvr2"])
@pytest.mark.parametrize("module", ["", "module."])
def test_official_names_and_shapes_at_full_size(golden, kind, module):
    """The default config is the official one; the names of several GPUs are accepted too."""
    shapes = official_keys(golden)[kind]
    place = "" if kind == "pretrain" else "lxrt_encoder.model."
    names = {place + module + name.removeprefix(place) if name.startswith(place) else name: name for name in shapes}
    official = {name: torch.empty(shapes[old], device="meta") for name, old in names.items()}
    decoder = [name for name in official if name.endswith("predictions.decoder.weight")]
    assert len(decoder) == (kind == "pretrain")
    for name in decoder:  # a tensor without values cannot be compared with its alias
        del official[name]
    encoder_state, head = our_weights(official)
    with torch.device("meta"):
        ours = LxmertEncoder(PretrainedLxmertConfig()).state_dict()
    assert {name: value.shape for name, value in encoder_state.items()} == {
        name: value.shape for name, value in ours.items()
    }
    assert len(encoder_state) + len(head) + len(decoder) == len(shapes)


def test_regions_beyond_those_that_are_attended_to_change_nothing(golden):
    arrays, regions = masked_inputs(golden)
    encoder = make_encoder(golden)
    other = dataclasses.replace(regions, features=torch.where(regions.attention_mask[..., None], regions.features, 7.0))
    with torch.no_grad():
        one, two = encoder(texts_of(arrays), regions), encoder(texts_of(arrays), other)
    torch.testing.assert_close(one.summary, two.summary)
