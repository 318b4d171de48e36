"""The options of the data sets: `data.config` of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from detector.config import Fraction, PositiveInt
from detector.errors import UserError
from detector.zoo import CLASS_LISTS
from e2e_vl.registry import DATASETS, Config, decode_config

# a file name with the image id (a string) as a placeholder: "{id}.jpg", or "{id:0>12}.jpg" with leading zeros
ImageName = Annotated[str, Meta(pattern=r"\{id(:[^{}d]*)?\}")]


class NoDatasetConfig(Config, frozen=True):
    """`data.config` of a data set without options."""


class ImageNamesConfig(Config, frozen=True):
    """Image file names."""

    image_name: ImageName = "{id}.jpg"

    def file(self, folder: Path, image_id: str, **values: str) -> Path:
        """Return the file of an image; `values` fill in the other placeholders."""
        return folder / self.image_name.format(id=image_id, **values)


class VQADatasetConfig(ImageNamesConfig, frozen=True):
    """VQA v2; {images} in a file name is the COCO image set, such as train2014."""

    image_name: ImageName = "COCO_{images}_{id:0>12}.jpg"
    # questions with fewer than ten human answers repeat them in turn until there are ten, as MMF does, so that a single
    # answer counts fully. False: answers as in the file (official); a single one is then never right.
    repeat_answers: bool = False


class GQADatasetConfig(ImageNamesConfig, frozen=True):
    """GQA."""

    # in evaluation, read the boxes of the objects in a question and its answer from `data.files.scene_graphs`
    grounding: bool = False


class NLVR2DatasetConfig(Config, frozen=True):
    """NLVR2."""

    suffix: str = ".png"  # of the image files; many files in the release are actually JPEG
    use_folders: bool = True  # training images are in subfolders named by `directory`; False: all in one folder


class Flickr30KDatasetConfig(ImageNamesConfig, frozen=True):
    """Flickr30K Entities."""

    # "as_written": coordinates as in the files, which count pixels from 1 (BAN, VisualBERT). "zero_based": 1 is
    # subtracted, as in the data set's official parser.
    coordinates: Literal["as_written", "zero_based"] = "as_written"


# The 80 classes of COCO as VCR spells them, in COCO's order. Their numbers are 1 to 80; 0 is the whole image.
CLASS_NAMES = tuple(name.replace(" ", "") for name in (CLASS_LISTS / "coco.txt").read_text("utf-8").splitlines())


class VCRDatasetConfig(Config, frozen=True):
    """VCR. The defaults are those of the official VL-BERT code."""

    # "answer" (Q->A) or "rationale" (QA->R). For pre-training, "both" uses each question twice, for its answer and for
    # its rationale.
    # quirk: "in_turn" (VisualBERT's code, by mistake) uses it once, alternating between four questions for their
    # answers and four for their rationales
    question: Literal["answer", "rationale", "both", "in_turn"] = "answer"
    # "right": rationales are predicted for the right answer. "each": for each of the four answers, as the leaderboard
    # requires; a question then has four text indices, and no labels for training.
    condition_on: Literal["right", "each"] = "right"
    # which objects are candidate boxes. "all": all in the image, in file order, so that questions can share a detector
    # pass. "mentioned": those mentioned in the question and the choices (for rationales, also in the answers), in the
    # order of first mention. "r2c": R2C's selection, in file order, see `find_relevant_objects`.
    # quirk: "r2c_all_texts", the selection for the question with all its answers and rationales together (official
    # VisualBERT code)
    objects: Literal["all", "mentioned", "r2c", "r2c_all_texts"] = "all"
    class_names: tuple[str, ...] = CLASS_NAMES  # in the order of the detector's classes
    # object names in the question and the choices are phrases to ground in the objects' boxes, which a run with
    # `phrases.weight` trains
    names_are_phrases: bool = False

    def __post_init__(self) -> None:
        if self.condition_on == "each" and self.question != "rationale":
            raise UserError(
                "condition_on=each applies to rationales; set data.config.question=rationale, or use such a run"
            )


class CaptionDatasetConfig(Config, frozen=True):
    """Captions."""

    # format: COCO, img2dataset's shards, or VL-BERT's official code ("json_lines")
    source: Literal["coco", "shards", "json_lines"] = "coco"
    use_corpus: bool = True  # False ignores `data.files.corpus`
    use_images: bool = True  # False returns captions without their images, for the text-only control
    cache: str | None = None  # folder for index files; None = `index` in `data.root`
    min_object_score: Fraction = 0.7  # only objects of `data.files.metadata` with a higher score (official VisualBERT)


class VisualGenomeDatasetConfig(Config, frozen=True):
    """Visual Genome."""

    texts: Literal["regions", "questions"] = "regions"
    # "without": only images that are not in COCO (LXMERT's vgnococo); "only": only images that are
    coco: Literal["all", "without", "only"] = "all"
    use_folders: bool = True  # images are in VG_100K and VG_100K_2; False: all in one folder, as released with GQA


# Grounding pre-training


class GroundedTextsConfig(Config, frozen=True):
    """Texts whose phrases are grounded in boxes, in ODVG's format."""

    # the truth of a text. "captions": its phrases, each with its boxes; "expressions": the boxes that the whole text
    # refers to
    texts: Literal["captions", "expressions"] = "captions"


class MDETRDatasetConfig(GroundedTextsConfig, frozen=True):
    """MDETR's files."""

    # `data_source` of an image -> value of {source} in `data.files.images`, such as {coco: coco/train2014, vg: gqa};
    # default: the `data_source` itself
    image_folders: dict[str, str] = {}


# The files of the official LXMERT code


class ImageSetsConfig(ImageNamesConfig, frozen=True):
    """Files with several image sets."""

    # split -> value of {images} in `data.files`, such as {mscoco_train: train2014}; default: the name of the split
    image_sets: dict[str, str] = {}
    # skip texts about images that the file of features (or detections) lacks, as the official LXMERT code does, and
    # log their number; False: a missing image is an error
    skip_missing_images: bool = False
    # split -> number of rows: keep only texts about images in the first rows of that file, and log how many are
    # skipped (minival of the official LXMERT code: 5000)
    first_rows: dict[str, PositiveInt] = {}

    def values(self, split: str) -> dict[str, str]:
        """Return the placeholder values of a split."""
        return {"split": split, "images": self.image_sets.get(split, split)}


class ImageSentenceDatasetConfig(ImageSetsConfig, frozen=True):
    """Sentences about images, from several sources."""

    sources: list[str] | None = None  # keep only sentences from these sources; None: all


class ListedPairDatasetConfig(ImageSetsConfig, frozen=True):
    """NLVR2 in LXMERT's files."""

    image_name: ImageName = "{id}.png"


# Several data sets joined into one


class JoinedMemberConfig(Config, frozen=True):
    """One of the joined data sets; the fields are the same as in `data`."""

    name: str
    # split of the run -> split of this data set, which is used in these splits only
    splits: Annotated[dict[str, str], Meta(min_length=1)]
    files: dict[str, str] = {}
    config: Any = {}
    # parts with the same value have the same images under the same ids; None: no other part has these images
    images: str | None = None
    # text file below `data.root` with one image id per line: keep only these images, or skip them
    only_images: str | None = None
    without_images: str | None = None

    def __post_init__(self) -> None:
        decode_config(self, DATASETS, self.name)


class JoinedDatasetConfig(Config, frozen=True):
    """Several data sets whose samples are joined into one."""

    datasets: dict[str, JoinedMemberConfig] = {}  # the names are used in messages
    # splits of the run whose images are left out of training, such as the test splits of all parts. Images are the same
    # if their parts have the same `images`, or by their ids in COCO, Visual Genome or Flickr (e2e_vl/data/overlap.py);
    # an image of Visual Genome that is also in COCO is not recognised
    held_out_splits: list[str] = []
