"""The detectors, encoders, tasks, objectives and data sets by name, each with the class of its settings.

A new one is one file, a Struct of its settings and one entry in a dict below; see CONTRIBUTING.md.
Nothing is imported before it is used, so settings are checked without torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import pkgutil
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from detector.errors import UserError


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A group of settings; `msgspec.structs.replace` makes changed copies."""


Decoded = TypeVar("Decoded", bound=Config)


@dataclasses.dataclass(frozen=True)
class Entry:
    """The two classes behind a name; those given as "module:Class" are imported when they are used."""

    config: str | type[Config]
    implementation: str | type[Any]

    @property
    def config_class(self) -> type[Config]:
        return _resolved(self.config)

    @property
    def cls(self) -> type[Any]:
        return _resolved(self.implementation)


def _resolved(named: str | type[Any]) -> type[Any]:
    return pkgutil.resolve_name(named) if isinstance(named, str) else named


DETECTORS = {  # their settings are Detectron2 YAML files
    "builtin": Entry("detector.config:DetectorConfig", "detector.faster_rcnn:FasterRCNN"),
    "detectron2": Entry("detector.config:DetectorConfig", "detector.detectron2_backend:Detectron2Detector"),
    "r2c": Entry("detector.config:DetectorConfig", "detector.r2c:R2CNetwork"),
    "precomputed": Entry("detector.config:DetectorConfig", "detector.structures:PrecomputedDetector"),
}
ENCODERS = {
    "vl_bert": Entry("e2e_vl.encoders.config:VLBertEncoderConfig", "e2e_vl.encoders.vl_bert:VLBertModel"),
    "visual_bert": Entry(
        "e2e_vl.encoders.config:VisualBertEncoderConfig", "e2e_vl.encoders.visual_bert:VisualBertEncoder"
    ),
    "lxmert": Entry("e2e_vl.encoders.config:LxmertEncoderConfig", "e2e_vl.encoders.lxmert:LxmertEncoder"),
    "none": Entry("e2e_vl.encoders.config:NoEncoderConfig", "e2e_vl.encoders.base:NoEncoder"),
}
TASKS = {
    "refcoco": Entry("e2e_vl.tasks.config:ReferringConfig", "e2e_vl.tasks.refcoco:ReferringTask"),
    "detection": Entry("e2e_vl.tasks.config:DetectionConfig", "e2e_vl.tasks.detection:DetectionTask"),
    "pretraining": Entry("e2e_vl.tasks.config:PretrainingConfig", "e2e_vl.tasks.pretraining:PretrainingTask"),
    "vqa": Entry("e2e_vl.tasks.config:VQAConfig", "e2e_vl.tasks.vqa:VQATask"),
    "vcr": Entry("e2e_vl.tasks.config:VCRConfig", "e2e_vl.tasks.vcr:VCRTask"),
    "gqa": Entry("e2e_vl.tasks.config:GQAConfig", "e2e_vl.tasks.gqa:GQATask"),
    "nlvr2": Entry("e2e_vl.tasks.config:NLVR2Config", "e2e_vl.tasks.nlvr2:NLVR2Task"),
    "flickr30k": Entry("e2e_vl.tasks.config:Flickr30KConfig", "e2e_vl.tasks.flickr30k:Flickr30KTask"),
}
_OBJECTIVES = "e2e_vl.tasks.objectives"
OBJECTIVES = {  # of pre-training; texts are changed in this order
    "masked_words": Entry("e2e_vl.tasks.config:MaskedWordsConfig", f"{_OBJECTIVES}.words:MaskedWords"),
    "masked_text": Entry("e2e_vl.tasks.config:MaskedTextConfig", f"{_OBJECTIVES}.words:MaskedText"),
    "masked_regions": Entry("e2e_vl.tasks.config:MaskedRegionsConfig", f"{_OBJECTIVES}.regions:MaskedRegions"),
    "relationship": Entry("e2e_vl.tasks.config:RelationshipConfig", f"{_OBJECTIVES}.texts:Relationship"),
    "object_labels": Entry("e2e_vl.tasks.config:ObjectLabelsConfig", f"{_OBJECTIVES}.regions:ObjectLabels"),
    "attribute_labels": Entry("e2e_vl.tasks.config:AttributeLabelsConfig", f"{_OBJECTIVES}.regions:AttributeLabels"),
    "region_features": Entry(
        "e2e_vl.tasks.config:RegionFeaturesConfig", f"{_OBJECTIVES}.regions:RegionFeatureRegression"
    ),
    "image_qa": Entry("e2e_vl.tasks.config:ImageQAConfig", f"{_OBJECTIVES}.texts:ImageQA"),
}
DATASETS = {
    "refcoco": Entry("e2e_vl.data.config:NoDatasetConfig", "e2e_vl.data.refcoco:RefCOCODataset"),
    "coco_detection": Entry("e2e_vl.data.config:NoDatasetConfig", "e2e_vl.data.coco:CocoDetectionDataset"),
    "captions": Entry("e2e_vl.data.config:CaptionDatasetConfig", "e2e_vl.data.captions:CaptionDataset"),
    "vqa": Entry("e2e_vl.data.config:VQADatasetConfig", "e2e_vl.data.vqa:VQADataset"),
    "vcr": Entry("e2e_vl.data.config:VCRDatasetConfig", "e2e_vl.data.vcr:VCRDataset"),
    "gqa": Entry("e2e_vl.data.config:GQADatasetConfig", "e2e_vl.data.gqa:GQADataset"),
    "nlvr2": Entry("e2e_vl.data.config:NLVR2DatasetConfig", "e2e_vl.data.nlvr2:NLVR2Dataset"),
    "flickr30k": Entry("e2e_vl.data.config:Flickr30KDatasetConfig", "e2e_vl.data.flickr30k:Flickr30KDataset"),
    "image_sentences": Entry(
        "e2e_vl.data.config:ImageSentenceDatasetConfig", "e2e_vl.data.lxmert:ImageSentenceDataset"
    ),
    "scored_questions": Entry("e2e_vl.data.config:ImageSetsConfig", "e2e_vl.data.lxmert:ScoredQuestionDataset"),
    "listed_pairs": Entry("e2e_vl.data.config:ListedPairDatasetConfig", "e2e_vl.data.lxmert:ListedPairDataset"),
    "visual_genome": Entry(
        "e2e_vl.data.config:VisualGenomeDatasetConfig", "e2e_vl.data.visual_genome:VisualGenomeDataset"
    ),
    "mdetr": Entry("e2e_vl.data.config:MDETRDatasetConfig", "e2e_vl.data.mdetr:MDETRDataset"),
    "odvg": Entry("e2e_vl.data.config:GroundedTextsConfig", "e2e_vl.data.odvg:ODVGDataset"),
    "refcoco_parquet": Entry("e2e_vl.data.config:NoDatasetConfig", "e2e_vl.data.refcoco_parquet:ParquetRefCOCODataset"),
    "joined": Entry("e2e_vl.data.config:JoinedDatasetConfig", "e2e_vl.data.concat:JoinedDataset"),
}


# From names and mappings in YAML to Structs


def check_name(name: str, choices: Iterable[str], where: str) -> None:
    """Raise a UserError with the nearest choice unless the name is one of the choices."""
    choices = tuple(choices)
    if name not in choices:
        similar = difflib.get_close_matches(str(name), choices, n=1)
        similar += [choice for choice in choices if choice.startswith(name)]
        hint = f"; did you mean '{similar[0]}'?" if similar else "."
        raise UserError(f"{where} '{name}' is unknown; there is {', '.join(choices) or 'nothing'}{hint}")


def decode(values: Any, kind: type[Decoded], key: str) -> Decoded:
    """Convert settings to a Struct if they are not one yet.

    `key` names their field in error messages. Raises UserError: an unknown key, or a value of the wrong type or out of
    range.
    """
    try:
        return msgspec.convert(values, kind, strict=True)
    except msgspec.ValidationError as error:
        raise UserError(f"{error} - at `$.{key}`") from error


def decode_config(section: Config, registry: Mapping[str, Entry], name: str) -> None:
    """Decode the field `config` of a section as the settings of `name`; called in the section's `__post_init__`."""
    check_name(name, registry, "name")
    config = decode(section.config, registry[name].config_class, "config")
    msgspec.structs.force_setattr(section, "config", config)
