"""From a run's settings to captions, boxes and a corpus for pre-training.

Files (`data.files`, relative to `data.root`; {split} is the split)
    source coco      captions (JSON), images (folder)
    source shards    shards (folder, or a pattern such as cc3m/*.tar)
    source vl_bert   captions (JSON lines); these name images and detected boxes
    any              corpus: text files joined by "+"; in training, each caption comes with a text from it (1:1)
    boxes gt         instances (COCO)
    boxes detections detections: MAttNet's JSON, or a file of region features; vl_bert: lines with `frcnn`
    boxes precomputed features: a file of region features; vl_bert: lines with `frcnn`
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from detector.selection import SelectionRule
from e2e_vl.config import DataSettings
from e2e_vl.data.caption_sources import (
    AnnotatedBoxes,
    BoxReader,
    CaptionSource,
    CocoCaptions,
    DetectedBoxes,
    StoredBoxes,
)
from e2e_vl.data.coco import CocoInstances
from e2e_vl.data.conceptual import VLBertCaptions
from e2e_vl.data.detections import DetectionsFile
from e2e_vl.data.features.stores import open_features
from e2e_vl.data.masking import WordMasking
from e2e_vl.data.shards import ShardCaptions

BOX_SOURCES = ("gt", "detections", "online", "precomputed")


@dataclasses.dataclass(frozen=True)
class CaptionConfig:
    """Options in `data.config`; the defaults are the official code's.

    Attributes:
        source: where captions come from: "coco", "shards" (img2dataset) or "vl_bert" (the official layout).
        word_probability: chance of a word to be masked.
        always_mask: every chosen word becomes [MASK] (paper), not 80 % of them (official code).
        relationship: chance that a text is the caption of another image; the official option uses 0.5.
        use_corpus: False leaves `data.files.corpus` out.
        corpus_words: words that a text of the corpus has at least.
        corpus_length: wordpieces that it has at most.
        corpus_special_tokens: texts of the corpus are `[CLS] text [SEP]` (paper) instead of words alone (official
            code).
        skip_broken: in training, take the next image in place of one that is missing or cannot be read, and log it.
            Web data hold a few of those. Otherwise, and always in evaluation, it is an error; so is an image of another
            size than its annotations say.
        cache: folder for the indices of large files; None = `index` in `data.root`.

    Raises:
        ValueError: an unknown source, or a number that makes no sense.
    """

    source: str = "coco"
    word_probability: float = 0.15
    always_mask: bool = False
    relationship: float = 0.0
    use_corpus: bool = True
    corpus_words: int = 64
    corpus_length: int = 64
    corpus_special_tokens: bool = False
    skip_broken: bool = False
    cache: str | None = None

    def __post_init__(self) -> None:
        if self.source not in ("coco", "shards", "vl_bert"):
            raise ValueError(f"data.config.source is '{self.source}'; it must be one of coco, shards, vl_bert.")
        for name in ("word_probability", "relationship"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"data.config.{name} is {getattr(self, name)}; it must be from 0 to 1.")


def make_masking(tokenizer: PreTrainedTokenizerBase, config: CaptionConfig) -> WordMasking:
    """The rule for words that the options describe."""
    return WordMasking(tokenizer.mask_token_id, len(tokenizer), config.word_probability, config.always_mask)


def caption_source(settings: DataSettings, config: CaptionConfig, split: str, boxes: str) -> CaptionSource:
    """Captions of a split, with the boxes that lie beside them if `boxes` asks for those."""
    if config.source == "coco":
        return CocoCaptions(data_path(settings, "captions", split), data_path(settings, "images", split))
    if config.source == "shards":
        return ShardCaptions(data_path(settings, "shards", split), index_folder(settings, config))
    name = {"detections": "detections", "precomputed": "features"}.get(boxes, "captions")
    return VLBertCaptions(
        data_path(settings, name, split),
        index_folder(settings, config),
        with_boxes=boxes == "detections",
        with_features=boxes == "precomputed",
    )


def box_reader(
    settings: DataSettings, config: CaptionConfig, split: str, boxes: str, instances: CocoInstances | None
) -> BoxReader | None:
    """Reader of a file of boxes; None: the source has the boxes, or the detector finds them.

    Raises:
        ValueError: boxes that do not go with the source, or a file that is not set.
    """
    if boxes == "online" or (config.source == "vl_bert" and boxes != "gt"):
        return None
    if boxes == "gt":
        if config.source != "coco" or instances is None:
            raise ValueError("annotated boxes (gt) need source coco and data.files.instances.")
        return AnnotatedBoxes(instances)
    rule = settings.boxes.selection
    selection = SelectionRule(rule.min_score, rule.min_regions, rule.max_regions)
    path = data_path(settings, "features" if boxes == "precomputed" else "detections", split)
    if path.suffix == ".json":
        if boxes == "precomputed" or config.source != "coco":
            raise ValueError(f"{path}: boxes in MAttNet's format have no features and go with COCO's images only")
        return DetectedBoxes(DetectionsFile(path), selection)
    return StoredBoxes(open_features(path), selection, with_features=boxes == "precomputed")


def data_path(settings: DataSettings, name: str, split: str) -> Path:
    """Path of one of `data.files`."""
    if name not in settings.files:
        raise ValueError(f"data.files.{name} is not set; it names the {name} of {settings.name}.")
    return Path(settings.root).expanduser() / settings.files[name].replace("{split}", split)


def corpus_files(settings: DataSettings, split: str) -> list[Path]:
    """The text files, joined by "+" in the settings (as the official code does)."""
    names = settings.files["corpus"].replace("{split}", split).split("+")
    return [Path(settings.root).expanduser() / name for name in names]


def index_folder(settings: DataSettings, config: CaptionConfig) -> Path:
    """Where indices of large files are kept."""
    return (Path(settings.root) / "index" if config.cache is None else Path(config.cache)).expanduser()
