"""Configs of the tasks (`task.config` of a run) and of the pre-training objectives."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from detector.config import Dropout, Fraction, NonNegativeFloat, PositiveInt
from detector.errors import UserError
from e2e_vl.registry import OBJECTIVES, TASKS, Config, check_name, decode

InitScheme = Literal["official", "normal"]
MaskAt = Literal["corners", "centres"]

# Tasks on regions and phrases


class ReferringConfig(Config, frozen=True):
    """RefCOCO. The defaults are those of the official VL-BERT code."""

    dropout: Dropout = 0.0  # dropout between the two Linears of the head
    # "binary": binary cross entropy per region (official). "softmax": minus the log of the total softmax share of the
    # positive regions; texts without positive regions are skipped.
    loss: Literal["binary", "softmax"] = "binary"
    # a region is positive if its IoU with the referred box is greater than this
    positive_iou: Annotated[float, Meta(ge=0, lt=1)] = 0.5
    # quirk: in that IoU, add one pixel to widths and heights: (x2 - x1 + 1) * (y2 - y1 + 1)
    plus_one: bool = True
    positive_weight: NonNegativeFloat = 1.0  # weight of positive regions in the binary loss
    # the box of the whole image is a candidate like any other. False: it is neither trained nor predicted, unless a
    # text has no other region and `allow_no_regions` is off.
    whole_image_can_win: bool = True
    # a text without regions counts as a wrong answer (`box` None) instead of an error, for detectors that may find
    # nothing
    allow_no_regions: bool = False
    # a learned score of "none of these" competes with the regions, for expressions that may refer to nothing (gRefCOCO)
    null_candidate: bool = False
    head_init: InitScheme = "official"  # initialisation of the head, see `e2e_vl.tasks.base.init_head`
    # how `metrics` compares boxes, see `e2e_vl.metrics.refcoco`
    iou_convention: Literal["mattnet", "vlbert", "strict", "same_annotation"] = "mattnet"
    # how `f1_precision` of gRefCOCO matches boxes: by generalised IoU >= 0.5 (official), or by `iou_convention`
    f1_overlap: Literal["generalized_iou", "iou"] = "generalized_iou"


class Flickr30KConfig(Config, frozen=True):
    """Flickr30K Entities. The defaults are those of the official VisualBERT code."""

    # the query of a phrase: the state of its last wordpiece (official), of its first, or the mean of all
    phrase_state: Literal["last", "first", "mean"] = "last"
    # the position of a phrase that occurs several times in its sentence: the "first" occurrence (official), or its
    # "own" annotated position
    occurrence: Literal["first", "own"] = "first"
    head_size: PositiveInt = 64  # width of queries and keys per head (official: the width of one head of the encoder)
    # 1: one head (official). More: the mean of the attention of several heads (paper).
    num_heads: PositiveInt = 1
    # divisor of the loss: the number of texts (official: "batchmean" over a batch of sentences), or the number of
    # phrases with a right region
    loss_per: Literal["text", "phrase"] = "text"
    # the box of the whole image is a candidate like any other. False: it is neither trained nor predicted, unless a
    # text has no other region.
    whole_image_can_win: bool = False
    head_init: InitScheme = "normal"  # initialisation of the head, see `e2e_vl.tasks.base.init_head`


class DetectionConfig(Config, frozen=True):
    """Detection. The threshold is for the score of a single image and pictures; the metrics are COCO's."""

    # minimum IoU of a detection with an object of its category
    positive_iou: Annotated[float, Meta(gt=0, le=1)] = 0.5


# Tasks on whole texts


class AnswerConfig(Config, frozen=True):
    """All tasks with an answer vocabulary. The defaults are those of the official VL-BERT code."""

    # the answer vocabulary; an answer's position is its class. May also be a file, see
    # `e2e_vl.data.answer_lists.read_answers`; None: `data.files.answers`, or built from the annotations of the
    # training split. The first of duplicate answers is used; `<unk>` is never a target, and is predicted only with
    # `unknown_can_win`.
    answers: list[str] | str | None = None
    # a vocabulary built from annotations keeps the answers that are the most frequent answer of at least this many
    # questions; 9 gives the usual 3,129 answers of VQA v2's train and val
    min_answer_count: PositiveInt = 9
    dropout: Dropout = 0.1  # dropout before the last Linear
    # "binary": binary cross entropy per answer with soft targets, summed over the answers (official). "softmax": cross
    # entropy with the best answer as target; texts without a known answer are skipped. "divergence": the KL divergence
    # of the softmax from the unnormalised soft targets, averaged over all texts (official VisualBERT code).
    loss: Literal["binary", "softmax", "divergence"] = "binary"
    # a question without a listed answer, such as one of another data set, has no loss. False: all answers are wrong
    # (official).
    skip_unlisted: bool = False
    # initialise each row of the last Linear with the mean embedding of the answer's wordpieces (official)
    init_from_words: bool = True
    # the head has a hidden layer with GELU and LayerNorm; False: dropout and one Linear (official VisualBERT code)
    hidden_layer: bool = True
    head_width: PositiveInt = 1  # width of that hidden layer, as a multiple of the summary's (LXMERT: 2)
    head_init: InitScheme = "official"  # initialisation of the head, see `e2e_vl.tasks.base.init_head`
    top_answers: PositiveInt = 5  # number of best answers in a prediction
    # quirk: `<unk>` may be predicted, as in the test file of the official VisualBERT code (but not in its validation)
    unknown_can_win: bool = False


class VQAConfig(AnswerConfig, frozen=True):
    """VQA v2. The defaults are those of the official VL-BERT code.

    With the loss "softmax" the target is the most frequent answer (paper, section 4.2.2).
    """

    # compute targets from normalised human answers; False: from raw strings (official)
    normalised_targets: bool = False


class GQAConfig(AnswerConfig, frozen=True):
    """The defaults are those of the official LXMERT code."""

    # as in `AnswerConfig`; "softmax_times_answers" is the loss "softmax" times the number of possible answers (official
    # LXMERT code with `--mceLoss`)
    loss: Literal["binary", "softmax", "divergence", "softmax_times_answers"] = "binary"
    # quirk: with "softmax_times_answers", an answer that is not in the vocabulary becomes class 0 (a bug of that
    # option); False: its question is skipped
    unlisted_is_first: bool = False
    min_answer_count: PositiveInt = 1  # all 1,842 answers of the balanced questions of train and val
    dropout: Dropout = 0.0
    init_from_words: bool = False
    head_width: PositiveInt = 2
    head_init: InitScheme = "normal"
    # compute the attention on the regions of the objects in a question and its answer; needs `data.config.grounding`,
    # which reads their boxes
    grounding: bool = False


class NLVR2Config(Config, frozen=True):
    """The defaults are those of the official VisualBERT code."""

    dropout: Dropout = 0.1  # dropout before the last Linear (LXMERT: 0)
    # the head has a hidden layer as wide as the summary, with GELU and LayerNorm (LXMERT)
    hidden_layer: bool = False
    # "softmax": cross entropy over the two classes (official VisualBERT and LXMERT code). "sigmoid": binary cross
    # entropy of one score (LXMERT's paper).
    loss: Literal["softmax", "sigmoid"] = "softmax"
    head_init: InitScheme = "normal"  # initialisation of the head, see `e2e_vl.tasks.base.init_head`


NEUTRAL_NAMES = (
    "Casey",
    "Riley",
    "Jessie",
    "Jackie",
    "Avery",
    "Jaime",
    "Peyton",
    "Kerry",
    "Jody",
    "Kendall",
    "Frankie",
    "Pat",
    "Quinn",
)


class VCRConfig(Config, frozen=True):
    """The defaults are those of the official VL-BERT code."""

    people_names: Annotated[tuple[str, ...], Meta(min_length=1)] = NEUTRAL_NAMES  # names for people, used in turn
    # "box": people get names in the order of their boxes. "mention": in the order in which sentences mention them (R2C,
    # official VisualBERT code).
    name_order: Literal["box", "mention"] = "box"
    # quirk: with "mention", people mentioned only in a choice get names from the first one again, so that two people
    # may share a name (a bug in R2C's code, and in the official VisualBERT code)
    names_restart_in_choices: bool = False
    # with "box", in training: start at a random name (the official code continues from question to question); False:
    # always start at the first name
    rotate_names: bool = True
    join_word: str | None = "and"  # between several objects; None leaves it out (R2C)
    # words that refer to an object get its region's vector; False: all words get the vector of the whole image
    ground_words: bool = True
    # where: "pieces", at all wordpieces of an object's name
    # quirk: "word_number", at the position equal to the name's word number before wordpiece tokenization, see
    # `rows_by_word_number` (official VisualBERT code)
    grounding_position: Literal["pieces", "word_number"] = "pieces"
    # question and choice together are truncated to this number of wordpieces, not counting [CLS] and [SEP]
    max_pieces: Annotated[int, Meta(ge=2)] = 64
    # "longer" removes the last pieces of the longer text, see `truncate_answers` and `truncate_rationales`, but not of
    # rationales without a label (official); "fronts" removes the first pieces of both the choice and the text before
    # it, see `truncate_fronts`
    truncation: Literal["longer", "fronts"] = "longer"
    # quirk: with "fronts", only the choice is truncated (a bug in the official VisualBERT code, which takes the length
    # of a pair for the length of the text before the choice)
    truncate_choices_only: bool = False
    mask_size: PositiveInt | None = 14  # size of the instance masks and of the detector's RoI maps; None = no masks
    # a mask cell belongs to the object if its upper left corner does or, as in R2C's and VisualBERT's code, its centre
    mask_at: MaskAt = "corners"
    blank_question: bool = False  # remove the question (control experiment with choices only)
    dropout: Dropout = 0.1  # dropout on the summary, before the Linear that scores a choice
    # "sigmoid": binary cross entropy per choice, averaged over all choices (official). "softmax": cross entropy over
    # the four choices (paper, section 4.2.1).
    loss: Literal["sigmoid", "softmax"] = "sigmoid"
    region_loss_weight: NonNegativeFloat = 1.0  # weight of the region classification; 0 turns it off
    num_classes: PositiveInt = 81  # C, region classes, including the whole image (class 0)
    region_dropout: Dropout = 0.0  # dropout between the two Linears of that classification
    initializer_range: NonNegativeFloat = 0.02  # standard deviation of their initialisation
    head_init: InitScheme = "official"  # initialisation of the head, see `e2e_vl.tasks.base.init_head`


# Pre-training objectives


class ObjectiveConfig(Config, frozen=True):
    """Base of the objectives' configs. A weight of 0 turns an objective off."""

    name: ClassVar[str] = "<name>"  # its key in `objectives`
    weight: NonNegativeFloat = 0.0
    # share of the schedule before which its weight in training is 0 (LXMERT's paper: 0.5)
    start_fraction: Fraction = 0.0

    @classmethod
    def key(cls, field: str) -> str:
        """Return the dotted key of a setting."""
        return f"task.config.objectives.{cls.name}.{field}"


class MaskedWordsConfig(ObjectiveConfig, frozen=True):
    """The defaults follow the official code."""

    name: ClassVar[str] = "masked_words"
    weight: NonNegativeFloat = 1.0
    probability: Fraction = 0.15  # probability that a word is chosen
    always_mask: bool = False  # replace all chosen words by [MASK] (paper), not only 80 % (official code)
    # mask whole words (VL-BERT); False: mask each wordpiece independently (VisualBERT, LXMERT)
    whole_words: bool = True
    # "words": append a random human answer to a question, new in each epoch, and mask it too (VisualBERT)
    # quirk: "letters", where each letter of the answer is a word (a bug in VisualBERT's code)
    answer: Literal["left_out", "words", "letters"] = "left_out"


class MaskedTextConfig(MaskedWordsConfig, frozen=True):
    """The defaults follow the official code."""

    name: ClassVar[str] = "masked_text"
    # minimum number of words in a corpus text; following lines are appended to reach it
    min_words: PositiveInt = 64
    max_length: Annotated[int, Meta(ge=3)] = 64  # maximum number of wordpieces
    # corpus texts are `[CLS] text [SEP]` (the paper starts with [CLS]); False: without special tokens (official code)
    special_tokens: bool = False


class MaskedRegionsConfig(ObjectiveConfig, frozen=True):
    """The defaults follow the official code."""

    name: ClassVar[str] = "masked_regions"
    weight: NonNegativeFloat = 1.0
    classes: PositiveInt = 1601  # C, with the background; 1601 for Visual Genome
    # the target. "distribution": the whole class distribution (official code). "class": its best class (paper).
    labels: Literal["distribution", "class"] = "distribution"


class RelationshipConfig(ObjectiveConfig, frozen=True):
    """Is the text about the image? Wrong pairs are made as `text_format` says."""

    name: ClassVar[str] = "relationship"
    # probability of a caption of another image; 0.5 in the official code of all models
    probability: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    # "single": each caption alone. "pair": each caption is followed by a second one, either of the same image or of
    # another. "labelled": texts are unchanged, and the data have labels.
    text_format: Literal["single", "pair", "labelled"] = "single"


class ObjectLabelsConfig(ObjectiveConfig, frozen=True):
    """The defaults follow the official code, with the weight 1 / 0.15 and the name Obj."""

    name: ClassVar[str] = "object_labels"
    classes: PositiveInt = 1600  # K, without a background; 1600 for Visual Genome's objects
    # regions in the loss. "all": masked or not (official code). "masked": only masked ones (paper).
    regions: Literal["all", "masked"] = "all"
    confidence: bool = True  # weight the loss of each region by the detector's confidence in its label


class AttributeLabelsConfig(ObjectLabelsConfig, frozen=True):
    """The defaults follow the official code, with the weight 1 / 0.15 and the name Attr."""

    name: ClassVar[str] = "attribute_labels"
    classes: PositiveInt = 400  # A, without "no attribute"; 400 for Visual Genome's attributes


class RegionFeaturesConfig(ObjectiveConfig, frozen=True):
    """The defaults follow the official code, with the weight 1 / 0.15 and the name Feat."""

    name: ClassVar[str] = "region_features"
    # averaged over the D dimensions. "smooth_l1": with beta 1 (official code). "l2": squared differences (paper).
    loss: Literal["smooth_l1", "l2"] = "smooth_l1"
    # divisor of the sum over the masked regions. "all": the number of all regions (official code). "masked": the number
    # of masked regions.
    average: Literal["all", "masked"] = "all"


class ImageQAConfig(ObjectiveConfig, frozen=True):
    """The defaults follow the official code, with the weight 1."""

    name: ClassVar[str] = "image_qa"
    # the answer vocabulary, or its file, such as LXMERT's all_ans.json, see `e2e_vl.data.answer_lists.read_answers`;
    # an answer's position is its class
    answers: list[str] | str | None = None
    answer_sources: list[str] | None = None  # use only the file's answers of these data sets
    # the target if several answers are in the vocabulary: "drawn" samples one in each epoch with probability
    # proportional to its score (official code), and "best" is the first with the highest score
    label: Literal["drawn", "best"] = "drawn"
    head_width: PositiveInt = 2  # width of the head's hidden layer, as a multiple of the summary's


class ChoiceTextsConfig(Config, frozen=True):
    """Preprocessing of questions with several choices, of which one is used."""

    task: str  # the task that encodes and truncates the texts, a key of TASKS in e2e_vl/registry.py
    config: Any = {}  # config of that task
    # "random": a random choice in each epoch
    # quirk: "in_turn", for text i always choice i modulo the number of choices (a bug in VisualBERT's code)
    drawn: Literal["random", "in_turn"] = "random"

    def __post_init__(self) -> None:
        check_name(self.task, TASKS, "task")
        msgspec.structs.force_setattr(self, "config", decode(self.config, TASKS[self.task].config_class, "config"))


class PretrainingConfig(Config, frozen=True):
    """Masking and objectives; the defaults follow the official code."""

    # name of an objective, see `OBJECTIVES` in `e2e_vl/registry.py` -> its config, or only its weight; a weight of 0
    # turns it off. Objectives that are not listed have their default config.
    objectives: dict[str, Any] = {}
    region_probability: Fraction = 0.15  # probability that a region is chosen for prediction
    # probability that a chosen region is masked; 1.0 in the paper
    mask_probability: Fraction = 0.9
    # probability that a chosen region gets the feature of another region instead (LXMERT's official code:
    # mask_probability 0.8, replace_probability 0.1)
    replace_probability: Fraction = 0.0
    # source of the region labels: "frozen" = a copy of the initial detector; "current" = the detector in training;
    # "file" = class distributions in the data
    teacher: Literal["frozen", "current", "file"] = "frozen"
    # mask regions in the image, before the detector. False: replace only the region's feature by a learned vector; the
    # region is still visible in overlapping regions and the whole image.
    mask_pixels: bool = True
    # colour of masked pixels. "mean": zero in the network's input, which is the mean colour (official code). "black":
    # zero in the image, before the mean is subtracted (paper, section 3.3).
    masked_pixels: Literal["mean", "black"] = "mean"
    # position of the background among the region classes, with a detector as teacher. "last": after the detector's
    # classes, as in Detectron2. "first": as in the training files of the official code, and so in the region
    # classifier of its checkpoints. Class distributions from a file are not reordered.
    background: Literal["last", "first"] = "last"
    # maximum number of detected boxes; None = all detections
    max_detected_regions: PositiveInt | None = 100
    # maximum number of wordpieces and regions of a text together; None = no truncation
    max_length: Annotated[int, Meta(ge=3)] | None = 64
    # how pairs of texts longer than data.max_text_length are truncated, see `TextTokenizer.pair`
    # quirk: "fronts_too_much", which is "fronts" with the sign error of VisualBERT's code
    pair_truncation: Literal["ends", "fronts", "fronts_too_much"] = "ends"
    # which part of the masked-language-modelling head is initialised from a BERT in task.weights: the whole "head"
    # quirk: only its output "bias" (official LXMERT code, whose pre-training from scratch keeps BERT's bias)
    word_start: Literal["head", "bias"] = "head"
    # for data sets of questions with several choices; None for other data sets
    choices: ChoiceTextsConfig | None = None
    # size of the instance masks for the detector (R2C's network: 14), and where their cells are sampled, as in
    # `VCRConfig`; None: no masks. With `choices`, both are set in that task's config.
    mask_size: PositiveInt | None = None
    mask_at: MaskAt = "corners"

    def __post_init__(self) -> None:
        if self.mask_probability + self.replace_probability > 1 + 1e-9:
            raise UserError("mask_probability and replace_probability together must not be above 1")
        for name in self.objectives:
            check_name(name, OBJECTIVES, "objective")
        objectives = {}
        for name, entry in OBJECTIVES.items():
            values = self.objectives.get(name, {})
            if isinstance(values, int | float):
                values = {"weight": values}
            objectives[name] = decode(values, entry.config_class, f"objectives.{name}")
        msgspec.structs.force_setattr(self, "objectives", objectives)

    @property
    def has_background_last(self) -> bool:
        """Whether the background is the last region class; in official files it is the first."""
        return self.teacher != "file" and self.background == "last"
