"""Settings about data: `data.` of a run, see `e2e_vl/config.py`."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field
from typing import Any

from omegaconf import MISSING

from detector.errors import UserError
from detector.selection_rule import SelectionRule
from e2e_vl.box_sources import BoxSource
from e2e_vl.converter import check_choice, check_numbers


@dataclass(frozen=True)
class SyntheticSettings:
    """Draw a data set in the official formats before the run, if it is not there yet."""

    scenes: dict[str, int] = field(default_factory=dict)  # split -> number of scenes; empty = no synthetic data
    seed: int = 0
    # folders beside `images` that are written, such as captions (see e2e_vl/synthetic/generate.py); None = all
    formats: list[str] | None = None
    config: dict[str, Any] = field(default_factory=dict)  # fields of the scene and language settings


class SelectionSettings(SelectionRule):
    """The rule of `data.boxes.selection`."""

    where = "data.boxes.selection"


@dataclass(frozen=True)
class BoxSettings:
    """Where the boxes of training images come from, and which boxes of a detector are kept."""

    train: str = "gt"  # a value of BoxSource, see e2e_vl/box_sources.py
    selection: SelectionRule = field(default_factory=SelectionSettings)  # of boxes that come from a file
    max_precomputed: int | None = None  # of precomputed regions, only the first of each image, by falling score

    def __post_init__(self) -> None:
        check_numbers(self, "data.boxes.", positive=["max_precomputed"])
        check_choice("data.boxes.train", self.train, BoxSource)

    @property
    def unread_by_own_boxes(self) -> str | None:
        """A sentence where a selection is set, which boxes 'online' do not read; else None."""
        if astuple(self.selection) == astuple(SelectionSettings()):
            return None
        return (
            "data.boxes.selection chooses among boxes of files, so it does not change boxes 'online': these are the "
            "detector's final detections, which MODEL.ROI_HEADS.SCORE_THRESH_TEST and TEST.DETECTIONS_PER_IMAGE of its "
            "config limit"
        )


@dataclass(frozen=True)
class ResizeSettings:
    short_edge: list[int] = field(default_factory=lambda: [600])  # pixels; training draws one, testing takes the last
    long_edge: int = 1000
    rounding: str = "truncate"  # truncate (VL-BERT) | detectron2 | torchvision

    def __post_init__(self) -> None:
        check_choice("data.resize.rounding", self.rounding, ("truncate", "detectron2", "torchvision"))
        check_numbers(self, "data.resize.", positive=["long_edge"])
        if not self.short_edge or min(self.short_edge) < 1:
            raise UserError(f"data.resize.short_edge is {self.short_edge}; give positive sizes.")


@dataclass(frozen=True)
class DataSettings:
    name: str = MISSING  # the reader, a key of DATASETS in e2e_vl/engine/build.py
    config: dict[str, Any] = field(default_factory=dict)  # the reader's own options, see its file
    root: str = MISSING  # folder of the data set
    files: dict[str, str] = field(default_factory=dict)  # the reader's files, relative to root
    vocabulary: str | None = None  # vocab.txt, saved tokenizer or hub name; None = built from the training texts
    train_split: str = "train"
    eval_splits: list[str] = field(default_factory=lambda: ["val"])
    boxes: BoxSettings = field(default_factory=BoxSettings)
    # None = INPUT.MIN_SIZE_TRAIN .. MAX_SIZE_TEST of the detector's YAML file, which have no effect otherwise
    resize: ResizeSettings | None = field(default_factory=ResizeSettings)
    # [short, long] edge of the canvas that each image is padded to at least, pixels; None = a batch is as large as its
    # largest image
    canvas: list[int] | None = None
    flip: float = 0.5  # probability of mirroring a training image
    # precomputed features: mirror boxes and words although the features stay as they are (official VL-BERT code); False
    # forbids `flip` with them
    mirror_precomputed: bool = False
    # the whole image's feature is the mean of its regions' where a features file has none (official VL-BERT code)
    mean_image_feature: bool = False
    # missing or unreadable images: training takes the next one and logs it; tools/evaluate.py leaves them out and
    # counts them, as the evaluations of a training run always do
    skip_broken: bool = False
    check_images: int | None = 100  # images of each split that are looked for before a run; 0 = none, None = all
    keep_empty_images: bool = True  # detection: also train on images without objects
    texts_per_image: int | None = 1  # texts of one image in one batch; None = all of them
    blank_text: bool = False  # text-blind control: every text is empty
    blank_image: bool = False  # image-blind control: every pixel is the mean colour
    max_text_length: int | None = None  # wordpieces, [CLS] and [SEP] included; None = no cut
    workers: int = 2
    synthetic: SyntheticSettings = field(default_factory=SyntheticSettings)

    def __post_init__(self) -> None:
        counts = ("texts_per_image", "max_text_length")
        check_numbers(self, "data.", positive=counts, not_negative=["workers", "check_images"])
        if not 0 <= self.flip <= 1:
            raise UserError(f"data.flip is {self.flip}; it must be a probability, from 0 to 1.")
        if self.canvas is not None and (len(self.canvas) != 2 or not 0 < self.canvas[0] <= self.canvas[1]):
            raise UserError(f"data.canvas is {self.canvas}; give its short and its long edge, such as [600, 1200].")
