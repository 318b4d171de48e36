"""The options of the data sets: `data.config` of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from detector.errors import UserError
from e2e_vl.parts import DATASETS, PositiveInt, Probability, Settings, set_part_config

# a file name that holds the image's id, which is a text: "{id}.jpg", or "{id:0>12}.jpg" with leading zeros
ImageName = Annotated[str, Meta(pattern=r"\{id(:[^{}d]*)?\}")]


class NoOptions(Settings, frozen=True):
    """`data.config` of a data set that takes nothing there."""


class ImageNames(Settings, frozen=True):
    """How image files are named."""

    image_name: ImageName = "{id}.jpg"

    def file(self, folder: Path, image_id: str, **values: str) -> Path:
        """The file of an image; `values` are those of further placeholders."""
        return folder / self.image_name.format(id=image_id, **values)


class VQAOptions(ImageNames, frozen=True):
    """VQA v2; {images} in a file name is the COCO image set, such as train2014."""

    image_name: ImageName = "COCO_{images}_{id:0>12}.jpg"


class GQAOptions(ImageNames, frozen=True):
    """GQA."""

    # in evaluation, read the boxes of the objects that a question and its answer name from `data.files.scene_graphs`
    grounding: bool = False


class NLVR2Options(Settings, frozen=True):
    """NLVR2."""

    suffix: str = ".png"  # of the image files; in the release many of them are JPEG files inside
    use_directories: bool = True  # training images lie in folders by their `directory`; False: all in one folder


class Flickr30KOptions(ImageNames, frozen=True):
    """Flickr30K Entities."""

    # "as_written": the files count pixels from 1, and boxes are taken as they are (BAN, VisualBERT). "zero_based": one
    # less, as the data set's own parser gives them.
    coordinates: Literal["as_written", "zero_based"] = "as_written"


# The 80 classes of COCO as VCR spells them, in COCO's order. Their numbers are 1 to 80; 0 is the whole image.
# fmt: off
CLASS_NAMES = (
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "trafficlight",
    "firehydrant", "stopsign", "parkingmeter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow", "elephant",
    "bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee", "skis", "snowboard",
    "sportsball", "kite", "baseballbat", "baseballglove", "skateboard", "surfboard", "tennisracket", "bottle",
    "wineglass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple", "sandwich", "orange", "broccoli",
    "carrot", "hotdog", "pizza", "donut", "cake", "chair", "couch", "pottedplant", "bed", "diningtable", "toilet",
    "tv", "laptop", "mouse", "remote", "keyboard", "cellphone", "microwave", "oven", "toaster", "sink",
    "refrigerator", "book", "clock", "vase", "scissors", "teddybear", "hairdrier", "toothbrush",
)
# fmt: on


class VCROptions(Settings, frozen=True):
    """VCR. The official VL-BERT code has the same defaults.

    Attributes:
        question: "answer" (Q->A) or "rationale" (QA->R). For pre-training: "both" gives each question twice, for its
            answer and for its rationale; "in_turn" (VisualBERT's code, by mistake) once, four questions for their
            answers, the next four for their rationales, and so on.
        condition_on: "right": rationales are given the right answer. "each": given each of the four answers, as the
            leaderboard file wants it; a question is then four text indices, and there is nothing to learn.
        objects: which boxes there are. "all" of the image, in file order: its questions can share a detector pass.
            "mentioned": what question and choices name (for rationales what the answers name too), in the order of
            first mention. "r2c": what R2C chooses of them, see `relevant_objects`, in file order. "r2c_all_texts": the
            same for the question with all its answers and rationales together (official VisualBERT code).
        class_names: the classes of objects, in the order of the detector's classes.
        names_are_phrases: the names of objects in question and choices are phrases for the objects' boxes, which a run
            with `phrases.weight` learns.
    """

    question: Literal["answer", "rationale", "both", "in_turn"] = "answer"
    condition_on: Literal["right", "each"] = "right"
    objects: Literal["all", "mentioned", "r2c", "r2c_all_texts"] = "all"
    class_names: tuple[str, ...] = CLASS_NAMES
    names_are_phrases: bool = False

    def __post_init__(self) -> None:
        if self.condition_on == "each" and self.question != "rationale":
            raise UserError(
                "condition_on=each is about rationales; set data.config.question=rationale, or use a run trained so"
            )


class CaptionOptions(Settings, frozen=True):
    """Captions.

    Attributes:
        source: where captions come from: "coco", "shards" (img2dataset) or "json_lines" (VL-BERT's official code).
        use_corpus: False leaves `data.files.corpus` out.
        use_images: False gives captions without their images: the control that learns from words alone.
        cache: folder for the indices of large files; None = `index` in `data.root`.
        min_object_score: of `data.files.metadata` only objects with a higher score are kept (official VisualBERT: 0.7).
    """

    source: Literal["coco", "shards", "json_lines"] = "coco"
    use_corpus: bool = True
    use_images: bool = True
    cache: str | None = None
    min_object_score: Probability = 0.7


class GenomeOptions(Settings, frozen=True):
    """Visual Genome."""

    texts: Literal["regions", "questions"] = "regions"
    # "without": only images that COCO does not have (LXMERT's vgnococo); "only": only images that it has
    coco: Literal["all", "without", "only"] = "all"
    use_folders: bool = True  # images lie in VG_100K and VG_100K_2; False: all in one folder, as GQA releases them


# The files of the official LXMERT code.


class ImageSets(ImageNames, frozen=True):
    """Files with several sets of images."""

    # split -> value of {images} in `data.files`, such as {mscoco_train: train2014}; by default the name of the split
    image_sets: dict[str, str] = {}
    # leave out texts about images that the file of features (or detections) lacks, as the official LXMERT code does,
    # and log their number; False: such an image is an error
    leave_out_unseen: bool = False
    # split -> number of rows: keep only texts about images in the first rows of that file, and log the number of the
    # others (minival of the official LXMERT code: 5000)
    first_rows: dict[str, PositiveInt] = {}

    def values(self, split: str) -> dict[str, str]:
        """Placeholder values of a split."""
        return {"split": split, "images": self.image_sets.get(split, split)}


class SentenceOptions(ImageSets, frozen=True):
    """Sentences of several sources about images."""

    sources: list[str] | None = None  # only sentences of these sources; None: of all


class ListedPairOptions(ImageSets, frozen=True):
    """NLVR2 in LXMERT's files."""

    image_name: ImageName = "{id}.png"


# Several data sets as one.


class PartSettings(Settings, frozen=True):
    """One of the joined data sets; the fields mean what they mean in `data`."""

    name: str
    # split of the run -> split of this data set; it takes no part in other splits of the run
    splits: Annotated[dict[str, str], Meta(min_length=1)]
    files: dict[str, str] = {}
    config: Any = {}
    # parts with the same value here have the same images under the same ids; None: no other part has these images
    images: str | None = None
    # text file below `data.root` with an image id per line: all other images are left out, or these
    only_images: str | None = None
    without_images: str | None = None

    def __post_init__(self) -> None:
        set_part_config(self, DATASETS, self.name)


class JoinedOptions(Settings, frozen=True):
    """Several data sets."""

    parts: dict[str, PartSettings] = {}  # under any name, which is for messages
