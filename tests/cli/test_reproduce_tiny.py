"""Every chain of every paper runs end to end, on drawn data in the official formats, with models of one narrow layer.

A new paper needs its published files in `LINKS` (data), `DETECTORS` or `BERTS` (weights), and nothing else.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.torch import save_file
from transformers import BertConfig, BertForPreTraining

from e2e_vl.cli.main import main
from e2e_vl.cli.reproduce import PAPERS, Chain, read_paper
from e2e_vl.config import RunConfig, load_config
from e2e_vl.run.build import build_detector, read_training_texts
from e2e_vl.run.train import train
from e2e_vl.synthetic import lxmert
from e2e_vl.synthetic.conceptual import FEATURE_DIM
from e2e_vl.synthetic.generate import make_scenes
from e2e_vl.text import build_vocabulary, load_tokenizer
from tests.conftest import ROOT
from tests.weights.starts import options, replaced

SCENES = {"train": 4, "val": 2, "test": 2, "testA": 2, "testB": 2}
LINKS = {  # path in DATA -> file or folder of the drawn data
    "conceptual-captions": "conceptual",
    "en_corpus/wiki.doc": "corpus/corpus.doc",
    "en_corpus/bc1g.doc": "corpus/corpus.doc",
    **{
        f"vqa/v2_OpenEnded_mscoco_{name}_questions.json": f"vqa/v2_OpenEnded_mscoco_{split}_questions.json"
        for name, split in (("train2014", "train"), ("val2014", "val"), ("test2015", "test"))
    },
    **{
        f"vqa/v2_mscoco_{name}_annotations.json": f"vqa/v2_mscoco_{split}_annotations.json"
        for name, split in (("train2014", "train"), ("val2014", "val"))
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
}
BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
DETECTORS = {  # path of published weights in DATA -> a run with that detector
    "pretrained/resnet101-pt-vgbua-0000.model": "configs/refcoco/vl_bert_base.yaml"
}
BERTS = ("bert-base-uncased", "bert-large-uncased")
RESNETS = {"DEPTH": 18, "STEM_OUT_CHANNELS": 8, "WIDTH_PER_GROUP": 8}

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """The folder DATA: drawn scenes under the names of the published files, and a tiny BERT and its vocabulary."""
    folder = tmp_path_factory.mktemp("papers") / "DATA"
    make_scenes(folder, scenes=SCENES)
    for name, drawn in LINKS.items():
        (folder / name).parent.mkdir(exist_ok=True)
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
    vocabulary = [read_training_texts(tiny(name, folder)) for name in ("pretraining", "vqa", "refcoco", "vcr")]
    build_vocabulary([text for texts in vocabulary for text in texts], folder / "bert" / "vocab.txt")
    size = len(load_tokenizer(folder / "bert"))
    BertForPreTraining(BertConfig(vocab_size=size, **BERT)).save_pretrained(folder / "bert")
    for name, run in DETECTORS.items():
        config = shrunk(load_config(ROOT / run, ["data.root=unused"]), folder)
        (folder / name).mkdir(parents=True)
        save_file(build_detector(config).state_dict(), folder / name / "model.safetensors")
    return folder


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
    width = (lxmert.FEATURE_DIM if config.encoder.name == "lxmert" else FEATURE_DIM) // 8
    model = config.detector.overrides.get("MODEL", {}) | {"RESNETS": RESNETS | {"RES2_OUT_CHANNELS": width}}
    return replaced(
        config,
        detector={"overrides": config.detector.overrides | {"MODEL": model}},
        encoder={"config": encoder | sizes, **starts["encoder"]},
        task={"config": task, **starts["task"]},
        data={"vocabulary": bert, "resize": {"short_edge": [48], "long_edge": 64}, "canvas": None, "workers": 0},
        train={"images_per_batch": 2, "accumulate": 1, "max_steps": 1, "epochs": 1.0, "warmup_steps": 0,
               "mixed_precision": "no", "trackers": []},
        eval={"every_epochs": 0, "images_per_batch": 4, "report_pictures": 0},
    )  # fmt: skip


class TinyChain(Chain):
    """The output of a step that ran alike for another row is that one's."""

    done: dict[Path, Path]

    def place(self, name: str) -> Path:
        place = super().place(name)
        return self.done.get(place, place)


@pytest.mark.parametrize("name", sorted(path.stem for path in PAPERS.glob("*.yaml")))
def test_every_chain_of_a_paper_runs(name, data, tmp_path, monkeypatch, capsys):
    """Steps that are alike at this size, such as BASE and LARGE, run once."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("e2e_vl.run.report.write_report", lambda *words, **more: None)
    monkeypatch.setattr("detector.io._sync", lambda path: None)
    paper, ran = read_paper(name), {}
    TinyChain.done = {}
    for rows in paper.tables.values():
        for row, content in rows.items():
            chain = TinyChain(paper, row, content, data, tmp_path, [])
            for step in chain.steps:
                place, words = chain.place(step), chain.command(step)
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
                    assert main(words) == 0, capsys.readouterr().err
            assert chain.missing() == []
    assert len(ran) > 1
