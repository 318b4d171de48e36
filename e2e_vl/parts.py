"""The detectors, encoders, tasks, objectives and data sets by name, each with the class of its settings.

A new part is one file, a Struct of settings and one entry in a dict below; see CONTRIBUTING.md.
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


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A group of settings; `msgspec.structs.replace` makes changed copies."""


Decoded = TypeVar("Decoded", bound=Settings)


@dataclasses.dataclass(frozen=True)
class Part:
    """The two classes of a part; those given as "module:Class" are imported when they are used."""

    settings: str | type[Settings]
    implementation: str | type[Any]

    @property
    def config_class(self) -> type[Settings]:
        return _resolved(self.settings)

    @property
    def cls(self) -> type[Any]:
        return _resolved(self.implementation)


def _resolved(named: str | type[Any]) -> type[Any]:
    return pkgutil.resolve_name(named) if isinstance(named, str) else named


DETECTORS = {  # their settings are Detectron2 YAML files
    "builtin": Part("detector.config:DetectorConfig", "detector.faster_rcnn:FasterRCNN"),
    "detectron2": Part("detector.config:DetectorConfig", "detector.detectron2_backend:Detectron2Detector"),
    "r2c": Part("detector.config:DetectorConfig", "detector.r2c:R2CNetwork"),
    "precomputed": Part("detector.config:DetectorConfig", "detector.structures:PrecomputedDetector"),
}
ENCODERS = {
    "vl_bert": Part("e2e_vl.encoders.config:VLBertSettings", "e2e_vl.encoders.vl_bert:VLBertModel"),
    "visual_bert": Part("e2e_vl.encoders.config:VisualBertSettings", "e2e_vl.encoders.visual_bert:VisualBertEncoder"),
    "lxmert": Part("e2e_vl.encoders.config:LxmertSettings", "e2e_vl.encoders.lxmert:LxmertEncoder"),
    "none": Part("e2e_vl.encoders.config:NoEncoderSettings", "e2e_vl.encoders.base:NoEncoder"),
}
TASKS = {
    "refcoco": Part("e2e_vl.tasks.config:ReferringConfig", "e2e_vl.tasks.refcoco:ReferringTask"),
    "detection": Part("e2e_vl.tasks.config:DetectionConfig", "e2e_vl.tasks.detection:DetectionTask"),
    "pretraining": Part("e2e_vl.tasks.config:PretrainingConfig", "e2e_vl.tasks.pretraining:PretrainingTask"),
    "vqa": Part("e2e_vl.tasks.config:VQAConfig", "e2e_vl.tasks.vqa:VQATask"),
    "vcr": Part("e2e_vl.tasks.config:VCRConfig", "e2e_vl.tasks.vcr:VCRTask"),
    "gqa": Part("e2e_vl.tasks.config:GQAConfig", "e2e_vl.tasks.gqa:GQATask"),
    "nlvr2": Part("e2e_vl.tasks.config:NLVR2Config", "e2e_vl.tasks.nlvr2:NLVR2Task"),
    "flickr30k": Part("e2e_vl.tasks.config:Flickr30KConfig", "e2e_vl.tasks.flickr30k:Flickr30KTask"),
}
_OBJECTIVES = "e2e_vl.tasks.objectives"
OBJECTIVES = {  # of pre-training; texts are changed in this order
    "masked_words": Part("e2e_vl.tasks.config:MaskedWordsConfig", f"{_OBJECTIVES}.words:MaskedWords"),
    "masked_text": Part("e2e_vl.tasks.config:MaskedTextConfig", f"{_OBJECTIVES}.words:MaskedText"),
    "masked_regions": Part("e2e_vl.tasks.config:MaskedRegionsConfig", f"{_OBJECTIVES}.regions:MaskedRegions"),
    "relationship": Part("e2e_vl.tasks.config:RelationshipConfig", f"{_OBJECTIVES}.texts:Relationship"),
    "object_labels": Part("e2e_vl.tasks.config:ObjectLabelsConfig", f"{_OBJECTIVES}.regions:ObjectLabels"),
    "attribute_labels": Part("e2e_vl.tasks.config:AttributeLabelsConfig", f"{_OBJECTIVES}.regions:AttributeLabels"),
    "region_features": Part(
        "e2e_vl.tasks.config:RegionFeaturesConfig", f"{_OBJECTIVES}.regions:RegionFeatureRegression"
    ),
    "image_qa": Part("e2e_vl.tasks.config:ImageQAConfig", f"{_OBJECTIVES}.texts:ImageQA"),
}
DATASETS = {
    "refcoco": Part("e2e_vl.data.config:NoOptions", "e2e_vl.data.refcoco:RefCOCODataset"),
    "coco_detection": Part("e2e_vl.data.config:NoOptions", "e2e_vl.data.coco:CocoDetectionDataset"),
    "captions": Part("e2e_vl.data.config:CaptionOptions", "e2e_vl.data.captions:CaptionDataset"),
    "vqa": Part("e2e_vl.data.config:VQAOptions", "e2e_vl.data.vqa:VQADataset"),
    "vcr": Part("e2e_vl.data.config:VCROptions", "e2e_vl.data.vcr:VCRDataset"),
    "gqa": Part("e2e_vl.data.config:GQAOptions", "e2e_vl.data.gqa:GQADataset"),
    "nlvr2": Part("e2e_vl.data.config:NLVR2Options", "e2e_vl.data.nlvr2:NLVR2Dataset"),
    "flickr30k": Part("e2e_vl.data.config:Flickr30KOptions", "e2e_vl.data.flickr30k:Flickr30KDataset"),
    "image_sentences": Part("e2e_vl.data.config:SentenceOptions", "e2e_vl.data.lxmert:ImageSentenceDataset"),
    "scored_questions": Part("e2e_vl.data.config:ImageSets", "e2e_vl.data.lxmert:ScoredQuestionDataset"),
    "listed_pairs": Part("e2e_vl.data.config:ListedPairOptions", "e2e_vl.data.lxmert:ListedPairDataset"),
    "visual_genome": Part("e2e_vl.data.config:GenomeOptions", "e2e_vl.data.visual_genome:VisualGenomeDataset"),
    "joined": Part("e2e_vl.data.config:JoinedOptions", "e2e_vl.data.concat:JoinedDataset"),
}


# From names and mappings in YAML to the Structs of parts


def check_name(name: str, choices: Iterable[str], where: str) -> None:
    """Raise a UserError with the nearest choice unless the name is one of the choices."""
    choices = tuple(choices)
    if name not in choices:
        near = difflib.get_close_matches(str(name), choices, n=1) or [one for one in choices if one.startswith(name)]
        hint = f"; did you mean '{near[0]}'?" if near else "."
        raise UserError(f"{where} '{name}' is unknown; there is {', '.join(choices) or 'nothing'}{hint}")


def decode(values: Any, kind: type[Decoded], key: str) -> Decoded:
    """Convert settings to a Struct if they are not one yet; `key` names their field in error messages. Raises
    UserError: an unknown key, or a value of the wrong type or out of range.
    """
    try:
        return msgspec.convert(values, kind, strict=True)
    except msgspec.ValidationError as error:
        raise UserError(f"{error} - at `$.{key}`") from error


def set_part_config(section: Settings, parts: Mapping[str, Part], name: str) -> None:
    """In the `__post_init__` of a section with a field `config`: decode it as the settings of the named part."""
    check_name(name, parts, "name")
    config = decode(section.config, parts[name].config_class, "config")
    msgspec.structs.force_setattr(section, "config", config)
