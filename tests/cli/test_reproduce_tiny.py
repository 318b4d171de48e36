"""Every chain of every paper runs end to end, on synthetic data in official formats, with models of one narrow layer.

A new paper needs its published files in `LINKS` (data), `DETECTORS` or `BERTS` (weights), and nothing else.
"""

from __future__ import annotations

import base64
import json
import pickle
import re
from pathlib import Path

import h5py
import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import BertConfig, BertForPreTraining, SwinConfig, SwinForImageClassification, ViTImageProcessor

from e2e_vl.cli.main import main
from e2e_vl.cli.reproduce import PAPERS, Chain, read_paper
from e2e_vl.config import BoxSource, RunConfig
from e2e_vl.config_files import load_config
from e2e_vl.data.features import RegionFeatures, write_tsv
from e2e_vl.data.refcoco import read_refs
from e2e_vl.run.build import build_detector, open_split, read_training_texts
from e2e_vl.run.train import train
from e2e_vl.synthetic import lxmert
from e2e_vl.synthetic.conceptual import FEATURE_DIM
from e2e_vl.synthetic.generate import make_scenes
from e2e_vl.text import build_vocabulary, load_tokenizer
from tests.conftest import ROOT
from tests.weights.starts import options, replaced

SCENES = {"train": 4, "val": 4, "test": 4, "testA": 2, "testB": 2, "pretrain": 2, "detector": 2}
VAL = ("val2014", "valminusminival2014", "minival2014")
LINKS = {  # path in DATA -> file or folder of the synthetic data
    "conceptual-captions": "conceptual",
    "en_corpus/wiki.doc": "corpus/corpus.doc",
    "en_corpus/bc1g.doc": "corpus/corpus.doc",
    **{
        f"vqa/v2_OpenEnded_mscoco_{name}_questions.json": f"vqa/v2_OpenEnded_mscoco_{split}_questions.json"
        for name, split in (("train2014", "train"), ("val2014", "val"), ("minival2014", "val"), ("test2015", "test"))
    },
    **{
        f"vqa/v2_mscoco_{name}_annotations.json": f"vqa/v2_mscoco_{split}_annotations.json"
        for name, split in (("train2014", "train"), ("val2014", "val"), ("minival2014", "val"))
    },
    **{
        f"lxmert/{name}.json": f"lxmert/{split}.json"
        for name, split in (("mscoco_train", "train"), ("mscoco_nominival", "val"), ("mscoco_minival", "val"))
    },
    **{
        f"{task}/{name}.json": f"lxmert/{split}_{questions}.json"
        for task, questions, names in (
            ("vqa", "vqa", {"train": "train", "nominival": "val", "minival": "val", "test": "test"}),
            ("gqa", "vqa", {"train": "test", "valid": "train", "testdev": "val", "submit": "test"}),
            ("nlvr2", "nlvr2", {"train": "train", "valid": "val", "test": "test"}),
        )
        for name, split in names.items()
    },
    **{f"{task}/trainval_label2ans.json": "lxmert/trainval_label2ans.json" for task in ("vqa", "gqa")},
    **{
        f"{folder}/{name}_obj36.tsv": f"lxmert/{split}_obj36.tsv"
        for folder, names in (
            ("mscoco_imgfeat", {"train2014": "train", "val2014": "val", "test2015": "test"}),
            ("vg_gqa_imgfeat", {"vg_gqa": "test", "gqa_testdev": "val"}),
            ("nlvr2_imgfeat", {"train": "train", "valid": "val", "test": "test"}),
        )
        for name, split in names.items()
    },
    **{
        f"coco/annotations/captions_{name}.json": f"captions/captions_{split}.json"
        for name, split in zip(("train2014", *VAL), ("train", "val", "val", "val"), strict=True)
    },
    "coco/annotations/image_info_test2015.json": "captions/captions_test.json",
    "coco/train2014": "images/train2014",
    "coco/val2014": "images/train2014",
    "flickr30k/Flickr30kEntities/Sentences": "flickr30k/Sentences",
    "flickr30k/Flickr30kEntities/Annotations": "flickr30k/Annotations",
    "flickr30k/flickr30k_images": "images/train2014",
    "coco/annotations/instances_train2014.json": "refcoco+/instances.json",  # of all splits
    "coco/annotations/instances_val2014.json": "detection/instances_val.json",
    "refcoco": "refcoco+",
    "refcocog/instances.json": "refcoco+/instances.json",
    "refcocog/refs(umd).p": "refcoco+/refs(unc).p",
    "mdetr_annotations": "mdetr",
    "gqa/images": "mdetr/vg",
}
BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
DETECTORS = {  # path of published weights in DATA -> a run with that detector
    "pretrained/resnet101-pt-vgbua-0000.model": "configs/refcoco/vl_bert_base.yaml",
    "pretrained/resnet50-19c8e357.pth": "configs/pretraining/visual_bert_coco_vcr.yaml",
}
BERTS = ("bert-base-uncased", "bert-large-uncased")
RESNETS = {"DEPTH": 18, "STEM_OUT_CHANNELS": 8}
SWIN = {"embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2], "window_size": 4}
ON_SWIN = {  # Detectron2's keys of a narrow detector on it, with the classes of the scenes
    "FPN": {"OUT_CHANNELS": 8},
    "RPN": {"POST_NMS_TOPK_TRAIN": 24, "POST_NMS_TOPK_TEST": 12},
    "ROI_HEADS": {"NUM_CLASSES": 6, "BATCH_SIZE_PER_IMAGE": 12},
    "ROI_BOX_HEAD": {"FC_DIM": 16},
}

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """The folder DATA: synthetic scenes under the names of the published files, and a tiny BERT and its vocabulary."""
    folder = tmp_path_factory.mktemp("papers") / "DATA"
    make_scenes(folder, scenes=SCENES)
    folder.with_name("DATA_detector").symlink_to(folder)
    for name, drawn in LINKS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(folder / drawn)
    others = (folder / "lxmert" / "test.json").read_text().replace('"vqa"', '"visual7w"')
    (folder / "lxmert" / "vgnococo.json").write_text(others)
    (folder / "vqa" / "answers_vqa.txt").write_text("<unk>\nyes\nno\nred\n")
    regions = folder / "vgbua_res101_precomputed"
    for name in ("trainval2014", "test2015"):
        own = regions / f"{name}_resnet101_faster_rcnn_genome"
        own.mkdir(parents=True)
        for image in range(1, sum(SCENES.values()) + 1):
            arrays = {"boxes": [[0, 0, 20, 30], [9, 5, 40, 50]], "features": np.eye(2, FEATURE_DIM)}
            coded = {key: base64.b64encode(np.array(one, "<f4")).decode() for key, one in arrays.items()}
            text = json.dumps({"image_w": 60, "image_h": 60, "num_boxes": 2, **coded})
            (own / f"{image}.json").write_text(text)
    write_visual_bert_features(folder)
    vocabulary = [read_training_texts(tiny(name, folder)) for name in ("pretraining", "vqa", "refcoco", "vcr")]
    build_vocabulary([text for texts in vocabulary for text in texts], folder / "bert" / "vocab.txt")
    SwinForImageClassification(SwinConfig(**SWIN)).save_pretrained(folder / "swin")
    ViTImageProcessor().save_pretrained(folder / "swin")
    size = len(load_tokenizer(folder / "bert"))
    BertForPreTraining(BertConfig(vocab_size=size, **BERT)).save_pretrained(folder / "bert")
    for name, run in DETECTORS.items():
        config = shrunk(load_config(ROOT / run, ["data.root=unused", "detector.weights=null"]), folder)
        (folder / name).mkdir(parents=True)
        save_file(build_detector(config).state_dict(), folder / name / "model.safetensors")
    return folder


def write_visual_bert_features(folder: Path) -> None:
    """Features of two regions, detections and lists of images as they are published for VisualBERT."""
    first = 1
    for split, name in (("train", "train2014"), ("val", "val2014"), ("test", "test2015")):
        images = {str(image): (128, 128) for image in range(first, first + SCENES[split])}
        first += SCENES[split]
        boxes = np.array([[0, 0, 20, 30], [9, 5, 40, 50]], np.float32)
        coco = {image: f"COCO_{name}_{int(image):012}" for image in images}
        for image in images:
            file = folder / "detectron_fix_100" / "fc6" / "vqa" / name / f"{coco[image]}.npy"
            file.parent.mkdir(parents=True, exist_ok=True)
            np.save(file, np.ones((2, 2048), np.float32))
        large = (np.ones((2, 1024), np.float32), boxes, np.ones(2, np.float32))
        part = {"val": "dev", "test": "test1"}.get(split, split)
        drawn = (folder / "nlvr2" / "data" / f"{split}.json").read_text().replace(f'"{split}-', f'"{part}-')
        (folder / "nlvr2" / "data" / f"{part}.json").write_text(drawn)
        pairs = {json.loads(line)["identifier"].rpartition("-")[0] for line in drawn.splitlines()}
        photos = [f"{pair}-img{number}.png.npz" for pair in sorted(pairs) for number in (0, 1)]
        torch.save(dict.fromkeys(photos, large), folder / f"features_{part}_150.th")
        torch.save({f"{one}.jpg.npz": large for one in coco.values()}, folder / f"features_coco_{split}_150.th")
        small = np.ones((2, FEATURE_DIM), np.float32)
        regions = [RegionFeatures(image, size, boxes, small) for image, size in images.items()]
        (folder / "features" / "bottom_up").mkdir(parents=True, exist_ok=True)
        write_tsv(folder / "features" / "bottom_up" / f"{name}.tsv", regions, {})
        (folder / "flickr30k" / "ban").mkdir(exist_ok=True)
        with h5py.File(folder / "flickr30k" / "ban" / f"{split}.hdf5", "w") as file:
            file["image_features"] = np.tile(small, (len(images), 1))
            file["image_bb"] = np.tile(boxes, (len(images), 1))
            file["spatial_features"] = np.tile(np.concatenate([boxes, boxes[:, :2]], axis=1) / 128, (len(images), 1))
            file["pos_boxes"] = [[2 * row, 2 * row + 2] for row in range(len(images))]
        rows = {image: row for row, image in enumerate(images)}
        (folder / "flickr30k" / "ban" / f"{split}_imgid2idx.pkl").write_bytes(pickle.dumps(rows))
        (folder / f"karpathy_{split}.txt").write_text("\n".join(images))
        found = {"boxes": [[0, 0, 20, 30, 0.9]], "segms": [[[[0, 0], [20, 0], [20, 30]]]], "names": ["person"]}
        (folder / "detections" / "vcr").mkdir(exist_ok=True)
        for image in images:  # whose files have one folder's name here
            file = folder / "detections" / "vcr" / f"COCO_train2014_{int(image):012}.json"
            file.write_text(json.dumps({**found, "width": 128, "height": 128}))


def tiny(name: str, folder: Path) -> RunConfig:
    return load_config(ROOT / "configs" / "tiny" / f"{name}.yaml", [f"data.root={folder}", "output=unused"])


def shrunk(config: RunConfig, data: Path) -> RunConfig:
    """The settings with a narrow model and one short step; one of `BERTS` is the tiny one."""
    bert, encoder, task = str(data / "bert"), options(config.encoder.config), options(config.task.config)
    sizes = {
        key: value for key, value in (BERT | {"l_layers": 1, "r_layers": 1, "x_layers": 1}).items() if key in encoder
    }
    starts = {
        part: {key: bert for key in ("weights", "fallback_weights") if getattr(getattr(config, part), key) in BERTS}
        for part in ("encoder", "task")
    }
    if "masked_regions" in task.get("objectives", {}):
        task["objectives"]["masked_regions"]["classes"] = 7  # of drawn detections
    if "min_answer_count" in task:
        task["min_answer_count"] = 1
    width = (lxmert.FEATURE_DIM if config.encoder.name == "lxmert" else FEATURE_DIM) // 8
    resnets = RESNETS | {"RES2_OUT_CHANNELS": width, "WIDTH_PER_GROUP": width // 4}
    model = config.detector.overrides.get("MODEL", {}) | {"RESNETS": resnets}
    if "swin" in config.detector.config:
        model = config.detector.overrides.get("MODEL", {}) | ON_SWIN
        model["TRANSFORMERS_BACKBONE"] = {"NAME": str(data / "swin")}
    if config.detector.backend == "r2c":
        model["R2C"] = model.get("R2C", {}) | {"MASK_CHANNELS": 8, "CANVAS": [48, 64]}
    return replaced(
        config,
        detector={"overrides": config.detector.overrides | {"MODEL": model}},
        encoder={"config": encoder | sizes, **starts["encoder"]},
        task={"config": task, **starts["task"]},
        data={"vocabulary": bert, "resize": {"short_edge": [48], "long_edge": 64}, "canvas": None, "workers": 0,
              "synthetic": {}},
        phrases={"layer": min(config.phrases.layer, 1)},
        train={"images_per_batch": 2, "gradient_accumulation_steps": 1, "max_steps": 1, "epochs": 1.0,
               "warmup_steps": 0, "mixed_precision": "no", "trackers": []},
        eval={"every_epochs": 0.01 if config.train.metric_for_best_model else 0, "images_per_batch": 4,
              "report_pictures": 0},
    )  # fmt: skip


class TinyChain(Chain):
    """The output of a step that ran alike for another row is that one's."""

    done: dict[Path, Path]

    def path_of(self, name: str) -> Path:
        path = super().path_of(name)
        return self.done.get(path, path)


@pytest.mark.parametrize("name", sorted(path.stem for path in PAPERS.glob("*.yaml")))
def test_every_chain_of_a_paper_runs(name, data, tmp_path, monkeypatch, capsys):
    """Steps that are alike at this size, such as BASE and LARGE, run once."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("e2e_vl.run.report.write_report", lambda *words, **more: None)
    monkeypatch.setattr("detector.io.flush_to_disk", lambda path: None)
    paper, ran = read_paper(name), {}
    TinyChain.done = {}
    for rows in paper.tables.values():
        for row, content in rows.items():
            chain = TinyChain(paper, row, content, data, tmp_path, [])
            for step in chain.steps:
                place, words = chain.path_of(step), chain.command(step)
                config = shrunk(load_config(words[2], words[3:]), data) if words[0] == "train" else None
                does = json.dumps(words if config is None else options(msgspec.structs.replace(config, output="")))
                alike = re.sub(rf"{re.escape(str(tmp_path))}/\w+", "STEP", does)
                TinyChain.done[place] = ran.get(alike, place)
                if alike in ran:
                    continue
                ran[alike] = place
                if config is not None:
                    train(config)
                else:
                    capsys.readouterr()
                    assert main(words) == 0, capsys.readouterr().err
                    place.with_name(f"{place.name}.log").write_text(capsys.readouterr().out)
            assert chain.missing() == []
            for number in content.numbers.values():
                if number.metric and "grounding" not in number.metric:  # no head of a tiny encoder is active
                    assert 0 <= chain.measured(number) <= 100
    assert len(ran) > 1


@pytest.mark.parametrize(
    ("name", "splits"), [("detector", {"train", "pretrain", "detector"}), ("three_sets", {"train"})]
)
def test_grounding_is_trained_on_no_photo_of_a_validation_or_test_split(name, splits, data, monkeypatch):
    """The detector's file of instances has the photos of all splits."""
    monkeypatch.chdir(ROOT)
    config = shrunk(load_config(f"configs/grounding/{name}.yaml", [f"data.root={data}"]), data)
    dataset = open_split(config, "train", BoxSource.ONLINE, training=True)
    trained_files = {dataset.sample(group[:1]).images[0].file.name for group in dataset.groups}
    refs = read_refs(data / "refcoco+" / "refs(unc).p")
    image_ids = {ref.image_id for ref in refs if ref.split in splits}
    assert trained_files == {f"COCO_train2014_{image_id:012}.jpg" for image_id in image_ids}
