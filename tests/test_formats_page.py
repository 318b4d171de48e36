"""docs/reference/formats.md: its records are what the readers decode and what the writers write."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import e2e_vl.data
from detector.io import read_json
from e2e_vl.analysis.probe_report import ProbeResults, ProbeRow
from e2e_vl.api.results import Answer, ExampleScene, ImageRegions
from e2e_vl.cli import ask, check_data, extract, import_features, score
from e2e_vl.data import (
    answer_lists,
    captions,
    coco,
    coco_masks,
    features,
    gqa,
    image_loader,
    lxmert,
    mdetr,
    nlvr2,
    odvg,
    overlap,
    refcoco,
    refcoco_parquet,
    user_inputs,
    vcr,
    visual_genome,
    vqa,
)
from e2e_vl.data.annotation_tools import coco as tool_coco
from e2e_vl.data.annotation_tools import labelme, records
from e2e_vl.data.batching import Unreadable
from e2e_vl.io import Record
from e2e_vl.metrics import flickr30k as flickr30k_metrics
from e2e_vl.metrics import gqa as gqa_metrics
from e2e_vl.metrics import refcoco as refcoco_metrics
from e2e_vl.metrics import vqa as vqa_metrics
from e2e_vl.predictions import PhrasesOnly, Prediction
from e2e_vl.scoring.measures import Measure
from e2e_vl.tasks.detection import DetectionPrediction
from e2e_vl.tasks.nlvr2 import NLVR2Prediction
from e2e_vl.tasks.objectives.base import PretrainingPrediction
from e2e_vl.tasks.vcr import VCRPrediction
from tests.analysis.test_results import results as analysis_results
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "reference" / "formats.md").read_text("utf-8")
ENTRY = re.compile(r"^### `([^`\n]+)`\n(?:(?!^### ).)*?```json\n(.*?)^```", re.MULTILINE | re.DOTALL)
RECORDS = {name: json.loads(block) for name, block in ENTRY.findall(PAGE)}


class MDETRFile(msgspec.Struct):
    """A file whose two lists are read one after the other."""

    images: list[mdetr._CaptionedImage]
    annotations: list[mdetr._BoxWithWords]


READ = {  # name of a file to read -> the types that decode it; several of them read different keys
    "instances.json": [coco.InstancesFile, coco_masks._MaskFile, tool_coco._CocoFile],
    "refs.json": [list[refcoco.Ref]],
    "expressions.json": [list[records.Row]],
    "v2_OpenEnded_mscoco_val2014_questions.json": [dict[str, str | list[vqa._Question]]],
    "v2_mscoco_val2014_annotations.json": [dict[str, list[vqa._Annotation]]],
    "train_balanced_questions.json": [dict[str, gqa._FileQuestion]],
    "train_choices.json": [dict[str, gqa.Choices]],
    "train_sceneGraphs.json": [dict[str, gqa.SceneGraph]],
    "dev.json": [nlvr2.PairStatement],
    "val.jsonl": [vcr.VCRQuestion],
    "scene@0.json": [vcr.ImageMetadata],
    "captions_train2014.json": [captions._CaptionsFile],
    "train_frcnn.json": [captions._CaptionLineWithBoxes],
    "00000000.json": [captions.RegionFile],
    "image_data.json": [list[visual_genome.GenomeImage], list[overlap._GenomeImage]],
    "region_descriptions.json": [list[visual_genome._RegionsOfImage]],
    "question_answers.json": [list[visual_genome._QuestionsOfImage]],
    "region_graphs.json": [list[visual_genome._GraphsOfImage]],
    "final_mixed_train.json": [MDETRFile],
    "train_vg.jsonl": [odvg._Line],
    "val-00000-of-00001.parquet": [refcoco_parquet._RowOfImage],
    "test-00000-of-00001.parquet": [refcoco_parquet._RowOfObject],
    "train-00000-of-00001.parquet": [refcoco_parquet._RowOfRef],
    "lxmert/mscoco_train.json": [list[lxmert._SentencesRow]],
    "vqa/train.json": [list[lxmert.ScoredQuestion]],
    "nlvr2/valid.json": [list[lxmert.ListedPair]],
    "all_ans.json": [list[answer_lists._SourcedAnswer]],
    "res101_coco_minus_refer_notime_dets.json": [list[image_loader._Detection]],
    "detections.json": [list[image_loader._Detection], list[user_inputs._LabelledDetection]],
    "labelme.json": [labelme._LabelMe],
    "questions.json": [list[ask.QuestionEntry]],
    "boxes.json": [user_inputs._BoxesFile],
    "images.json": [user_inputs._ImagesFile, overlap._ImagesFile, import_features._SizedImagesFile],
    "given_boxes.json": [list[user_inputs._GivenDetection]],
    "features.tsv.json": [features._Sidecar],
}
PREDICTIONS = {
    kind.__name__: kind
    for kind in (
        refcoco_metrics.ReferringPrediction,
        vqa_metrics.VQAPrediction,
        gqa_metrics.GQAPrediction,
        NLVR2Prediction,
        VCRPrediction,
        flickr30k_metrics.Flickr30KPrediction,
        DetectionPrediction,
        PretrainingPrediction,
        PhrasesOnly,
    )
}
SUBMISSIONS = {
    "refcoco.json": ("ReferringPrediction", refcoco_metrics.write_submission),
    "vqa.json": ("VQAPrediction", vqa_metrics.write_submission),
    "gqa.json": ("GQAPrediction", gqa_metrics.write_submission),
    "flickr30k.json": ("Flickr30KPrediction", flickr30k_metrics.write_submission),
}
OTHERS = {
    "log.jsonl",
    "metrics.json",
    "step.json",
    "best.json",
    "checksums.json",
    "unreadable_val_gt.json",
    "answer.json",
    'answer.save("answer.json")',
    'regions.save("regions.json")',
    "phrase.json",
    "check.json",
    "numbers.json",
    "probe.json",
    "attention.json",
}


def keys_that_are_lost(record: Any, decoded: Any, where: str = "") -> Iterator[str]:
    """The keys of a record, with their paths, that a decoder does not know."""
    if isinstance(record, dict):
        for key, value in record.items():
            if isinstance(decoded, dict) and key in decoded:
                yield from keys_that_are_lost(value, decoded[key], f"{where}.{key}")
            else:
                yield f"{where}.{key}"
    elif isinstance(record, list) and isinstance(decoded, list | tuple):
        for value, decoded_value in zip(record, decoded, strict=True):
            yield from keys_that_are_lost(value, decoded_value, where)


def test_every_entry_is_tested() -> None:
    assert RECORDS.keys() == {*READ, *PREDICTIONS, *SUBMISSIONS, *OTHERS}


@pytest.mark.parametrize("name", READ)
def test_a_file_to_read_has_the_keys_that_are_read(name: str) -> None:
    lost_keys = []
    for kind in READ[name]:
        decoded = msgspec.to_builtins(msgspec.convert(RECORDS[name], kind))
        lost_keys.append(set(keys_that_are_lost(RECORDS[name], decoded)))
    assert not set.intersection(*lost_keys), "no decoder knows these keys"


@pytest.mark.parametrize("name", PREDICTIONS)
def test_a_prediction_has_the_fields_of_its_class(name: str) -> None:
    prediction = msgspec.convert(RECORDS[name], PREDICTIONS[name])
    assert json.loads(msgspec.json.encode(prediction)) == RECORDS[name], "a key is unknown, or has its default"


@pytest.mark.parametrize("name", SUBMISSIONS)
def test_a_submission_is_what_its_prediction_becomes(name: str, tmp_path: Path) -> None:
    prediction, write = SUBMISSIONS[name]
    write(tmp_path / name, [msgspec.convert(RECORDS[prediction], PREDICTIONS[prediction])])
    assert read_json(tmp_path / name) == RECORDS[name]


def all_subclasses(kind: type) -> Iterator[type]:
    for child in kind.__subclasses__():
        yield child
        yield from all_subclasses(child)


def structs_in(kind: Any) -> Iterator[type]:
    """The Structs that a type contains, itself included."""
    if isinstance(kind, msgspec.inspect.StructType):
        yield kind.cls
    for child in children_of(kind):
        yield from structs_in(child)


def children_of(kind: Any) -> Iterable[Any]:
    if isinstance(kind, msgspec.inspect.StructType):
        return [field.type for field in kind.fields]
    names = ("item_type", "key_type", "value_type", "types", "item_types")
    children = [getattr(kind, name) for name in names if hasattr(kind, name)]
    return [child for value in children for child in (value if isinstance(value, tuple) else (value,))]


def test_no_file_that_is_read_is_missing() -> None:
    """Every Struct of a file is in a type of this module; those with `array_like` are rows of tables in memory."""
    for module in pkgutil.walk_packages(e2e_vl.data.__path__, "e2e_vl.data."):
        importlib.import_module(module.name)
    documented = {Record}
    for kinds in READ.values():
        for kind in msgspec.inspect.multi_type_info(kinds):
            documented.update(structs_in(kind))
    bases = {base for kind in documented for base in kind.__mro__}
    of_files = {kind for kind in all_subclasses(Record) if kind.__module__.startswith("e2e_vl.")}
    in_memory = {kind for kind in of_files if kind.__struct_config__.array_like}
    small = {vqa._Header, user_inputs._SavedRegion}  # described with the file that has them
    others = {kind for kind in of_files if kind.__module__.endswith("yolo")}  # YAML
    assert not of_files - documented - bases - in_memory - small - others
    assert {kind for kind in all_subclasses(Prediction) if kind.__module__.startswith("e2e_vl.")} == set(
        PREDICTIONS.values()
    )


def test_files_of_a_run(trained_run) -> None:
    lines = [json.loads(line) for line in (trained_run.path / "log.jsonl").read_text("utf-8").splitlines()]
    train = next(line for line in lines if line["kind"] == "train")
    assert RECORDS["log.jsonl"].keys() <= train.keys()
    metrics = read_json(trained_run.path / "metrics.json")
    assert {"val/accuracy_gt_boxes", "val/count_gt_boxes", "steps"} <= RECORDS["metrics.json"].keys() & metrics.keys()
    checkpoint = next((trained_run.path / "checkpoints").iterdir())
    step = read_json(checkpoint / "step.json")
    assert RECORDS["step.json"].keys() <= step.keys()
    assert RECORDS["best.json"].keys() <= step["best"].keys()
    assert RECORDS["checksums.json"].keys() <= read_json(checkpoint / "checksums.json").keys()


def test_results_of_the_api(demo_model) -> None:
    scene: ExampleScene = demo_model.examples[2]
    answer: Answer = demo_model.ask(scene.image, scene.texts[1])
    expected = RECORDS['answer.save("answer.json")']
    assert answer.to_dict().keys() == expected.keys()
    assert answer.to_dict()["phrases"][0].keys() == expected["phrases"][0].keys()
    regions: ImageRegions = demo_model.regions(scene.image)
    expected = RECORDS['regions.save("regions.json")']
    assert regions.to_dict().keys() == expected.keys()
    assert regions.to_dict()["regions"][0].keys() == expected["regions"][0].keys()


def test_results_of_commands(demo_model, tmp_path: Path) -> None:
    scene = demo_model.examples[2]
    ask.save_answer(tmp_path, demo_model.ask(scene.image, scene.texts[1]))
    assert RECORDS["answer.json"].keys() <= read_json(tmp_path / "answer.json").keys()
    extract.write_phrase(tmp_path, demo_model, scene.image, scene.texts[1])
    assert RECORDS["phrase.json"].keys() == read_json(tmp_path / "phrase.json").keys()
    [unreadable] = RECORDS["unreadable_val_gt.json"]
    [split] = RECORDS["check.json"]["splits"]
    [row] = RECORDS["probe.json"]["probes"]
    for record, kind in (
        (unreadable, Unreadable),
        (split, check_data.SplitReport),
        (RECORDS["probe.json"], ProbeResults),
        (row, ProbeRow),
    ):
        assert list(record) == [field.name for field in dataclasses.fields(kind)], kind


def test_the_other_results_have_the_keys_that_are_written() -> None:
    facts = {"data": "refcoco+", "split": "val", "predictions": "predictions.json"}
    report = score.Report(facts=facts, measures=[Measure("accuracy at 0.5", 0.71, (0.69, 0.73), 10758)])
    assert RECORDS["numbers.json"].keys() == report.as_json().keys()
    [measure] = RECORDS["numbers.json"]["measures"].values()
    assert measure.keys() == report.as_json()["measures"]["accuracy at 0.5"].keys()
    attention = analysis_results().as_json()
    record = RECORDS["attention.json"]
    assert record.keys() == attention.keys() and record["options"].keys() <= attention["options"].keys()
