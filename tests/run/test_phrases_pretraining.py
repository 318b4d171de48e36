"""Phrases in pre-training, for every encoder, on captions without phrases, Flickr30K and Visual Genome joined."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from e2e_vl.config import RunConfig, load_config
from e2e_vl.data.batching import Request
from e2e_vl.data.concat import JoinedDataset, JoinedPart
from e2e_vl.run.build import build_run
from tests.weights.starts import replaced

ROOT = Path(__file__).parents[2]
SIZES = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
LAYERS = {
    "vl_bert": {
        "num_hidden_layers": 2,
        "geometry_dim": 16,
        "with_pooler": True,
        "masked_region_embedding": True,
        # the official start of 0 lets no gradient through
        "visual_scale_text_init": 1.0,
        "visual_scale_object_init": 1.0,
    },
    "visual_bert": {"num_hidden_layers": 2, "train_pooler": True},
    "lxmert": {"l_layers": 1, "r_layers": 1, "x_layers": 1, "masked_region_feature": True},
}
NO_HIDDEN_REGIONS = {"visual_bert"}  # it cannot tell hidden regions from others
DETECTIONS = "detections/refcoco+_unc/res101_coco_minus_refer_notime_dets.json"
GENOME = {
    "images": "visual_genome",
    "image_data": "visual_genome/image_data_{split}.json",
    "regions": "visual_genome/region_descriptions_{split}.json",
    "region_graphs": "visual_genome/region_graphs_{split}.json",
}
FLICKR = {
    "images": "images/train2014",
    "ids": "flickr30k/{split}.txt",
    "sentences": "flickr30k/Sentences",
    "annotations": "flickr30k/Annotations",
}
CAPTIONS = {"images": "images/train2014", "captions": "captions/captions_{split}.json"}
PARTS = {
    "captions": {"name": "captions", "files": CAPTIONS},
    "flickr": {"name": "flickr30k", "files": FLICKR, "config": {"image_name": "COCO_train2014_{id:0>12}.jpg"}},
    "genome": {"name": "visual_genome", "files": GENOME},
}


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> RunConfig:
    """Settings of some scenes, which are drawn once, in the files of three data sets."""
    words = [
        f"detector.config={ROOT / 'configs' / 'detector' / 'tiny.yaml'}",
        f"data.root={tmp_path_factory.mktemp('joined') / 'data'}",
        f"output={tmp_path_factory.mktemp('joined') / 'run'}",
        "data.synthetic={scenes: {train: 3}, formats: [captions, flickr30k, visual_genome, detections]}",
    ]
    config = load_config(ROOT / "configs" / "tiny" / "visual_genome.yaml", words)
    parts = {name: part | {"splits": {"train": "train"}, "images": "drawn"} for name, part in PARTS.items()}
    return replaced(config, data={"name": "joined", "files": {"detections": DETECTIONS}, "config": {"parts": parts}})


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", list(LAYERS))
def test_phrases_alone_train_the_backbone_of_each_encoder(config, name):
    objectives = {"masked_text": 0.0, "relationship": 1.0, "masked_regions": {"classes": 7}}
    if name in NO_HIDDEN_REGIONS:
        objectives["masked_regions"] = 0.0
    task = {"config": {"objectives": objectives}}
    settings = replaced(config, encoder={"name": name, "config": SIZES | LAYERS[name]}, task=task)
    run = build_run(dataclasses.replace(settings, output=str(Path(config.output) / name)))
    groups = run.train_data.groups
    first = [member.dataset.groups[0][0] + start for member, start in _starts(run.train_data.dataset)]
    chosen = [number for number, texts in enumerate(groups) if texts[0] in first]
    batch = run.collate([run.train_data[Request(number, tuple(groups[number][:2]))] for number in chosen])
    counts = batch.phrases.spans.counts.tolist()
    assert counts[0] == 0 and len(chosen) == 3 and sum(counts) > 0
    model = run.model.train()
    output = model(batch)
    learned = {"phrases", "phrase_tags", "masked_words", "relationship"}
    assert learned | ({"masked_regions"} if objectives["masked_regions"] else set()) == set(output.losses)
    assert all(torch.isfinite(loss.total) for loss in output.losses.values())
    assert output.losses["phrases"].count > 0
    output.losses["phrases"].mean.backward()
    backbone = [value for key, value in model.detector.named_parameters() if "backbone" in key and value.requires_grad]
    assert backbone and any(value.grad is not None and value.grad.abs().sum() > 0 for value in backbone)
    assert any(value.grad is not None and value.grad.abs().sum() > 0 for value in model.encoder.parameters())


def _starts(joined: JoinedDataset) -> list[tuple[JoinedPart, int]]:
    """Each part with the number of its first text."""
    return list(zip(joined.members, joined.starts[:-1], strict=True))
