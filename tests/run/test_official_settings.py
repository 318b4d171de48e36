"""The shipped settings equal those of the official codes, and ablations differ in their switches only.

`tests/golden/config/official_settings.json` holds the values of the official files under our names: for each family
what its files share, and the rest of each file; and for each variant the settings that differ from its base.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from e2e_vl.cli.reproduce import Chain, Row, read_paper
from e2e_vl.config import RunConfig
from e2e_vl.config_files import differences, load_config, read_detector_config
from tests.run.runs import ROOT

GOLDEN = json.loads((ROOT / "tests" / "golden" / "config" / "official_settings.json").read_text("utf-8"))
OFFICIAL = {
    name: family["common"] | own for family in GOLDEN["families"].values() for name, own in family["files"].items()
}
VARIANTS = GOLDEN["variants"]


class AblationChain(Chain):
    """Trainings have the golden names of their outputs, and files their own."""

    def path_of(self, name: str) -> Path:
        if name in self.paper.files:
            return Path(Path(self.paper.files[name].path).name)
        kind, *_, last = name.split("_")
        if kind in ("coco", "task"):
            return Path(f"runs/pretraining_visual_bert_{name.removeprefix('task_')}")
        phase = name.split("_")[1] if kind in ("late", "bert", "some") else last
        return Path(f"runs/visual_bert_ablation_{self.name}_{phase}")


def read_ablations() -> dict[str, tuple[str, list[str], Row]]:
    """Name of a training -> its config, its settings, and the row of the paper's table that it belongs to."""
    paper, found = read_paper("visual_bert"), {}
    for table, task in (("3", "vqa_"), ("4", "vcr_"), ("5", "nlvr2_"), ("6", "flickr30k_"), ("7", ""), ("regions", "")):
        for name, row in paper.tables[table].items():
            chain = AblationChain(paper, task + name.removesuffix("_36"), row, Path("DATA"), Path(), [])
            for step in chain.steps if task == "" or name != "full" else ():
                kind, _, config, *words = chain.command(step)
                if kind == "train" and chain.path_of(step).name.startswith("visual_bert_ablation_"):
                    found[chain.path_of(step).name] = (config, words, row)
    return found


ABLATIONS = read_ablations()


def load(name: str) -> RunConfig:
    config, words, _ = ABLATIONS.get(name.replace("/", "_"), (f"configs/{name}.yaml", [], None))
    return load_config(ROOT / config, ["data.root=DATA", *words])


def header_of(name: str) -> str:
    lines = (ROOT / "configs" / f"{name}.yaml").read_text("utf-8").splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {prefix: list(values) if isinstance(values, tuple) else values}
    found = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}.{key}" if prefix else key)
    return found


@pytest.mark.parametrize("name", OFFICIAL)
def test_official_settings(name):
    found = flat(msgspec.to_builtins(load(name)))
    assert {key: found.get(key) for key in OFFICIAL[name]} == OFFICIAL[name]
    for words in GOLDEN["headers"].get(name, ()):
        assert words in header_of(name)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_differs_in_its_switches_only(name):
    base, own = load(VARIANTS[name]["base"]), load(name)
    changed = [line for line in differences(base, own) if not line.startswith("output:")]
    assert changed == [line for line in VARIANTS[name]["changed"] if not line.startswith("eval.report_pictures:")]
    header, (_, _, row) = VARIANTS[name]["header"], ABLATIONS.get(name.replace("/", "_"), (None, None, None))
    if row is None:
        assert header in header_of(name)
    else:
        published = {number.published for number in row.numbers.values()}
        assert {float(number) for number in re.findall(r"\d+\.\d+", header)} <= published
    assert own.output != base.output


def test_every_file_is_accounted_for():
    folders = ("pretraining", "refcoco", "vqa", "vcr", "nlvr2", "gqa", "flickr30k")
    files = {
        path.relative_to(ROOT / "configs").with_suffix("").as_posix()
        for folder in folders
        for path in (ROOT / "configs" / folder).rglob("*.yaml")
    }
    own = {"pretraining/paper", "pretraining/visual_bert_common", "flickr30k/pixels"}
    own |= {"pretraining/grounding_common", "pretraining/mdetr", "pretraining/odvg"}
    own |= {
        "refcoco/vl_bert_base_8gb",
        "refcoco/grefcoco_vl_bert_base",
        "refcoco/vl_bert_base_precomputed",
        "refcoco/vl_bert_base_fpn",
        "refcoco/vl_bert_base_fpn_masks",
        "refcoco/vl_bert_base_grounding_dino",
        "refcoco/vl_bert_base_parquet",
        *itertools.chain(*PIXELS.values()),
    }
    own |= {name for name in files if "/lxmert_" in name}
    known = set(OFFICIAL) | set(VARIANTS)
    rows = {name for name in known if name.startswith("visual_bert_ablation/")}
    assert files - own == known - rows - own and ABLATIONS.keys() == {name.replace("/", "_") for name in rows}


@pytest.mark.parametrize("name", [name for name in OFFICIAL if "vl_bert" in name])
def test_the_detector_of_vl_bert(name):
    detector = read_detector_config(load(name).detector)
    resnet, images = detector.resnet, detector.input
    assert (resnet.depth, resnet.res5_dilation, resnet.stride_in_1x1) == (101, 2, True)
    assert (resnet.freeze_at, resnet.norm, images.format) == (2, "FrozenBN", "BGR")
    assert (images.pixel_mean, images.pixel_std) == ((102.9801, 115.9465, 122.7717), (1.0, 1.0, 1.0))


def test_a_phase_starts_from_the_one_before():
    """One `data.root` serves a chain of trainings, and no start is given by hand."""
    for task in ("vqa", "nlvr2", "flickr30k", "vcr"):
        chain = [f"pretraining/visual_bert_coco_{task}", f"pretraining/visual_bert_{task}"]
        last = ("vcr/visual_bert_q2a", "vcr/visual_bert_qa2r") if task == "vcr" else (f"{task}/visual_bert",)
        for before, after in [chain, *((chain[1], name) for name in last)]:
            earlier, later = load(before), load(after)
            assert later.encoder.weights == f"{earlier.output}/best" and earlier.train.metric_for_best_model is not None
            expected = later.encoder.weights if task == "vcr" else None  # whose network of regions goes on too
            assert later.detector.weights == expected and later.detector.config == earlier.detector.config
            assert later.data.vocabulary == earlier.data.vocabulary


# Configs at full size that train the detector, too
PIXELS = {
    "vl_bert": [f"{task}/vl_bert_base_pixels" for task in ("vqa", "nlvr2", "gqa", "flickr30k")],
    "lxmert": ["refcoco/lxmert", "vcr/lxmert_q2a", "vcr/lxmert_qa2r", "flickr30k/lxmert_pixels"],
    "visual_bert": [
        "refcoco/visual_bert",
        *(f"{task}/visual_bert_pixels" for task in ("gqa", "vqa", "nlvr2", "flickr30k")),
    ],
}
# what each encoder's official code fine-tunes with: optimiser, decay of biases and LayerNorms, clipping of all
# gradients together and of each tensor
OPTIMISERS = {
    "vl_bert": ("adamw_official", True, 1.0, None),
    "lxmert": ("bert_adam", True, 5.0, None),
    "visual_bert": ("bert_adam", False, None, 1.0),
}


@pytest.mark.parametrize(("encoder", "name"), [(encoder, name) for encoder in PIXELS for name in PIXELS[encoder]])
def test_the_detector_is_trained_from_pixels(encoder, name):
    config, train = load(name), load(name).train
    assert (config.encoder.name, config.task.name) == (encoder, name.partition("/")[0])
    assert config.detector.backend == "builtin" and not config.detector.freeze
    assert {config.data.boxes.train, *config.eval.boxes} <= {"gt", "detections"} and config.data.files["images"]
    assert train.metric_for_best_model is None or train.metric_for_best_model.startswith(
        f"{config.data.eval_splits[0]}/accuracy_"
    )
    width = read_detector_config(config.detector).feature_dim
    assert width == (1024 if name == "nlvr2/visual_bert_pixels" else 2048)  # of the official encoders' features
    own = (train.optimizer, train.decay_norm_and_bias, train.max_grad_norm, train.max_grad_norm_per_tensor)
    assert own == OPTIMISERS[encoder]
    assert "No result is published, and this was not trained here." in header_of(name) and " ours" in header_of(name)
