"""A tiny encoder that is trained to describe what phrases name, on perfect features of drawn scenes, in seconds.

From the state of a phrase's last wordpiece all attributes of its object are read, also those that the phrase does not
say; so that wordpiece must attend to the region of the object.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from e2e_vl.analysis.collect import make_text_view
from e2e_vl.analysis.options import AttentionOptions
from e2e_vl.analysis.run import AttentionRequest, caption_examples
from e2e_vl.config import BoxSource, RunConfig, load_config
from e2e_vl.data.batching import Request
from e2e_vl.data.features import RegionFeatures, write_tsv
from e2e_vl.model import VisionLanguageModel
from e2e_vl.run.build import build_collate, build_model, read_training_texts
from e2e_vl.run.checkpoint import save_model
from e2e_vl.synthetic.config import SceneConfig
from e2e_vl.synthetic.generate import make_scenes
from e2e_vl.text import build_vocabulary, load_tokenizer

ROOT = Path(__file__).parents[2]
SCENES = {"train": 75, "val": 20}
WIDTH, SHAPES, STRENGTH = 64, 6, 4.0  # of a feature; of its 17 attributes the first are shapes; the value of each
CONFIG = """
seed: 1
detector:
  config: {root}/configs/detector/tiny.yaml
  backend: precomputed
  loss_weight: 0.0
  overrides: {{MODEL: {{RESNETS: {{RES2_OUT_CHANNELS: 8}}}}}}
encoder:
  name: visual_bert
  config: {{hidden_size: 48, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 96,
    hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0, initializer_range: 0.1}}
task: {{name: flickr30k}}
data:
  name: flickr30k
  root: {folder}/data
  config: {{image_name: "COCO_train2014_{{id:0>12}}.jpg"}}
  files: {{images: images/train2014, ids: "flickr30k/{{split}}.txt", sentences: flickr30k/Sentences,
    annotations: flickr30k/Annotations, features: features.tsv}}
  boxes: {{train: precomputed}}
  resize: {{short_edge: [96], long_edge: 96}}
  flip: 0.0
  workers: 0
eval: {{boxes: [precomputed], images_per_batch: 8}}
output: {folder}/run
"""


def draw_data(folder: Path) -> RunConfig:
    """Scenes with captions, gold parses, and perfect features of the annotated boxes.

    `features.tsv` has random confidences, by which its boxes are sorted when they are read; `plain.tsv` has none.
    """
    data = folder / "data"
    size = SceneConfig(min_side=96, max_side=96, min_objects=3, max_objects=5)
    make_scenes(data, scenes=SCENES, seed=0, formats=["refcoco+", "flickr30k"], config=size)
    annotations = data / "refcoco+" / "instances.json"
    write_tsv(data / "features.tsv", perfect_features(annotations), {}, layout="lxmert")
    write_tsv(data / "plain.tsv", perfect_features(annotations), {})
    (folder / "config.yaml").write_text(CONFIG.format(root=ROOT, folder=folder))
    return load_config(folder / "config.yaml")


def perfect_features(path: Path) -> Iterator[RegionFeatures]:
    """A row per annotated object, with a constant where it has an attribute or a shape; confidences are random."""
    content = json.loads(path.read_text())
    rng = np.random.default_rng(0)
    for image in content["images"]:
        objects = [one for one in content["annotations"] if one["image_id"] == image["id"]]
        features = np.zeros((len(objects), WIDTH), np.float32)
        for row, one in enumerate(objects):
            features[row, [one["category_id"] - 1, *(SHAPES + number for number in one["attribute_ids"])]] = STRENGTH
        boxes = np.array([one["bbox"] for one in objects], np.float32)
        boxes[:, 2:] += boxes[:, :2]
        found = {
            "scores": rng.random(len(objects), dtype=np.float32),
            "classes": np.array([one["category_id"] - 1 for one in objects]),
            "attributes": np.array([one["attribute_ids"][0] for one in objects]),
            "attribute_scores": np.ones(len(objects), np.float32),
        }
        yield RegionFeatures(str(image["id"]), (image["height"], image["width"]), boxes, features, **found)


def train_miniature(folder: Path, steps: int) -> tuple[RunConfig, VisionLanguageModel]:
    """Draw data, train and save a model into `folder / "run"`."""
    config = draw_data(folder)
    run = folder / "run"
    build_vocabulary(read_training_texts(config), run / "vocab.txt")
    tokenizer = load_tokenizer(run / "vocab.txt")
    torch.manual_seed(0)
    model = build_model(config, vocab_size=len(tokenizer), tokenizer=tokenizer)
    request = AttentionRequest(run, "train", BoxSource.PRECOMPUTED)
    examples = caption_examples(config, model, tokenizer, request, None)
    items = [examples[Request(group, tuple(texts))] for group, texts in enumerate(examples.groups)]
    collate = build_collate(config, model)
    batches = [lesson(model, collate(items[start : start + 15])) for start in range(0, len(items), 15)]
    head = nn.Linear(model.encoder.hidden_size, WIDTH)
    learned = [*model.encoder.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(learned, lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    model.encoder.train()
    for step in range(steps):
        texts, regions, owner, place, wanted = batches[step % len(batches)]
        found = head(model.encoder(texts, regions).text[owner, place])
        loss = F.binary_cross_entropy_with_logits(found, wanted, reduction="none").sum(dim=1).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        schedule.step()
    save_model(run / "model", config, model, tokenizer)
    return config, model.eval()


def lesson(model: VisionLanguageModel, batch):
    """Texts and regions of a batch, the last wordpiece of each phrase, and the mean of what its regions are."""
    with torch.no_grad():
        _, regions, _ = model.encode(batch)
    owner, place, wanted = [], [], []
    for text in range(len(batch)):
        view = make_text_view(batch, regions, text, batch.texts.input_ids.shape[1], AttentionOptions(), None)
        for (_, end), right in zip(view.caption.phrase_spans.tolist(), view.is_right, strict=True):
            if right.any():
                owner.append(text)
                place.append(end - 1)
                wanted.append(regions.features[text][right].mean(dim=0) / STRENGTH)
    return batch.texts, regions, torch.tensor(owner), torch.tensor(place), torch.stack(wanted)
