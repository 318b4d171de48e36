"""The settings of the tasks, `task.config` of a run, and of the objectives of pre-training."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from detector.errors import UserError
from e2e_vl.parts import (
    OBJECTIVES,
    TASKS,
    Dropout,
    NonNegativeFloat,
    PositiveInt,
    Probability,
    Settings,
    check_name,
    decode,
)

NewLayers = Literal["official", "normal"]
MaskAt = Literal["corners", "centres"]

# Tasks on regions and phrases.


class ReferringConfig(Settings, frozen=True):
    """RefCOCO. The official VL-BERT code has the same defaults."""

    dropout: Dropout = 0.0  # dropout between the two Linears of the head
    # "binary": a binary cross entropy per region (official). "softmax": a cross entropy over the regions of a text,
    # whose truth is all positive regions together; texts without one are left out.
    loss: Literal["binary", "softmax"] = "binary"
    # a region is positive if its IoU with the referred box is *above* this
    positive_iou: Annotated[float, Meta(ge=0, lt=1)] = 0.5
    plus_one: bool = True  # that IoU counts inclusive pixels, (x2 - x1 + 1) * (y2 - y1 + 1)
    positive_weight: NonNegativeFloat = 1.0  # factor on the binary loss of positive regions
    # the box of the whole image is a candidate like every other. False: it is neither trained nor predicted, unless a
    # text has no other region and that is no miss.
    whole_image_can_win: bool = True
    # a text without any region counts as a wrong answer (`box` None) instead of an error; for a detector that may find
    # nothing
    no_region_is_miss: bool = False
    new_layers: NewLayers = "official"  # start of the head, see `e2e_vl.tasks.base.init_head`
    # how `metrics` compares boxes, see `e2e_vl.metrics.refcoco`
    iou_convention: Literal["mattnet", "vlbert", "strict", "same_annotation"] = "mattnet"


class Flickr30KConfig(Settings, frozen=True):
    """Flickr30K Entities. The official VisualBERT code has the same defaults."""

    # which state of a phrase asks: of its last wordpiece (official), of its first, or the mean of all
    phrase_state: Literal["last", "first", "mean"] = "last"
    # a phrase whose words occur several times in its sentence is read at the "first" occurrence (official), or at its
    # "own" place in the data
    occurrence: Literal["first", "own"] = "first"
    head_size: PositiveInt = 64  # width of queries and keys per head (official: the width of one head of the encoder)
    # 1: one head (official). More: the mean of the attention of several heads (paper).
    num_heads: PositiveInt = 1
    # what the loss is divided by: the number of texts (official: "batchmean" of a batch of sentences), or the number of
    # phrases that have a right region
    loss_per: Literal["text", "phrase"] = "text"
    # the box of the whole image is a candidate like every other. False: it is neither trained nor predicted, unless a
    # text has no other region.
    whole_image_can_win: bool = False
    new_layers: NewLayers = "normal"  # start of the head's Linears, see `e2e_vl.tasks.base.init_head`


class DetectionConfig(Settings, frozen=True):
    """Detection: what `correct` counts in one image; the metrics need no setting."""

    # detections below this score are left aside
    shown_score: Annotated[float, Meta(gt=0, le=1)] = 0.5
    # a detection finds an object of its category if their IoU is at least this
    positive_iou: Annotated[float, Meta(gt=0, le=1)] = 0.5


# Tasks on whole texts.


class AnswerConfig(Settings, frozen=True):
    """Settings of all tasks with a list of answers; the official VL-BERT code has the same defaults."""

    # the possible answers; the position in the list is the class. In settings also a file, see
    # `e2e_vl.data.answer_lists.read_answers`; None: `data.files.answers`, or built from the annotations of the
    # training split. Of an answer that is listed twice the first counts; `<unk>` is never a target, and predicted only
    # with `unknown_can_win`.
    answers: list[str] | str | None = None
    # a list built from annotations holds the answers that are the most frequent one to at least this number of
    # questions; 9 gives the usual 3,129 answers of VQA v2's train and val
    min_answer_count: PositiveInt = 9
    dropout: Dropout = 0.1  # dropout before the last Linear
    # "binary": a binary cross entropy per answer with soft targets, summed over the answers (official). "softmax": a
    # cross entropy with the best answer as truth; texts without a known answer are left out. "divergence": the
    # divergence (Kullback-Leibler) of the softmax from the soft targets as they are, which need not sum to 1; the mean
    # over all texts (official VisualBERT code).
    loss: Literal["binary", "softmax", "divergence"] = "binary"
    # each row of the last Linear starts as the mean word embedding of its answer's wordpieces (official)
    initialise_from_words: bool = True
    # the head has a hidden layer with GELU and LayerNorm; False: dropout and one Linear (official VisualBERT code)
    hidden_layer: bool = True
    head_width: PositiveInt = 1  # width of that hidden layer, in widths of the summary (LXMERT: 2)
    new_layers: NewLayers = "official"  # start of the head's Linears, see `e2e_vl.tasks.base.init_head`
    top_answers: PositiveInt = 5  # how many of the best answers a prediction lists
    # `<unk>` may be predicted, as in the test file of the official VisualBERT code (its validation leaves it out)
    unknown_can_win: bool = False


class VQAConfig(AnswerConfig, frozen=True):
    """The official VL-BERT code has the same defaults. With the loss "softmax" the most frequent answer is the truth
    (paper, section 4.2.2)."""

    # count normalised human answers for the targets; False counts raw strings (official)
    normalised_targets: bool = False


class GQAConfig(AnswerConfig, frozen=True):
    """The official LXMERT code has the same defaults."""

    # as in `AnswerConfig`; "softmax_times_answers" is the loss "softmax" times the number of possible answers (official
    # LXMERT code with `--mceLoss`)
    loss: Literal["binary", "softmax", "divergence", "softmax_times_answers"] = "binary"
    # with "softmax_times_answers", an answer that is not in the list counts as the first answer of the list (a mistake
    # of that option); False: its question is left out
    unlisted_is_first: bool = False
    min_answer_count: PositiveInt = 1  # all 1,842 answers of the balanced questions of train and val
    dropout: Dropout = 0.0
    initialise_from_words: bool = False
    head_width: PositiveInt = 2
    new_layers: NewLayers = "normal"
    # score how much of the attention over regions lies on the objects that a question and its answer name; needs
    # `data.config.grounding`, which reads where they are
    grounding: bool = False


class NLVR2Config(Settings, frozen=True):
    """The official VisualBERT code has the same defaults."""

    dropout: Dropout = 0.1  # dropout before the last Linear (LXMERT: 0)
    # the head has a hidden layer as wide as the summary, with GELU and LayerNorm (LXMERT)
    hidden_layer: bool = False
    # "softmax": a cross entropy over the two classes (both official codes). "sigmoid": a binary cross entropy of one
    # score (LXMERT's paper).
    loss: Literal["softmax", "sigmoid"] = "softmax"
    new_layers: NewLayers = "normal"  # start of the head's Linears, see `e2e_vl.tasks.base.init_head`


NEUTRAL_NAMES = (
    *("Casey", "Riley", "Jessie", "Jackie", "Avery", "Jaime", "Peyton", "Kerry"),
    *("Jody", "Kendall", "Frankie", "Pat", "Quinn"),
)


class VCRConfig(Settings, frozen=True):
    """The official VL-BERT code has the same defaults."""

    people_names: Annotated[tuple[str, ...], Meta(min_length=1)] = NEUTRAL_NAMES  # what people are called, in turn
    # "box": people take turns in the order of their boxes. "mention": in the order in which sentences name them
    # (R2C, official VisualBERT code).
    names_by: Literal["box", "mention"] = "box"
    # with "mention": the names of people whom only a choice names begin with the first one again, so that two people
    # may share a name (a mistake of R2C's code, which the official VisualBERT code has too)
    names_restart_in_choices: bool = False
    # with "box", in training: the first name is random (the official code goes on from question to question); otherwise
    # it is always the first of the list
    turn_names: bool = True
    join_word: str | None = "and"  # between several objects; None leaves it out (R2C)
    # words that name an object carry its region's vector; False: every word carries the vector of the whole image
    ground_words: bool = True
    # where: "pieces", at all wordpieces of an object's name; "word_number", at the position that is the number of the
    # name among the words before they were split, see `rows_by_word_number` (official VisualBERT code)
    ground_at: Literal["pieces", "word_number"] = "pieces"
    # question and choice are cut to this number of wordpieces together, [CLS] and [SEP] not counted
    max_pieces: Annotated[int, Meta(ge=2)] = 64
    # how: "longer" removes the last pieces of the longer text, see `truncate_answers` and `truncate_rationales`;
    # "fronts" removes the first pieces of both, of the choice and of what precedes it, see `truncate_fronts`
    cut: Literal["longer", "fronts"] = "longer"
    # with "fronts": the choice alone is cut (a mistake of the official VisualBERT code, which takes the length of a
    # pair for the length of what precedes the choice)
    cut_choices_only: bool = False
    mask_size: PositiveInt | None = 14  # side of the instance masks and of the detector's RoI maps; None = no masks
    # a mask's cell belongs to the object if its upper left corner does or, as in R2C and VisualBERT's code, its centre
    mask_at: MaskAt = "corners"
    blank_question: bool = False  # control that reads the choices only
    dropout: Dropout = 0.1  # on the summary, before the Linear that scores a choice
    # "sigmoid": a binary cross entropy per choice, mean over all choices (official). "softmax": a cross entropy over
    # the four choices (paper, section 4.2.1).
    loss: Literal["sigmoid", "softmax"] = "sigmoid"
    region_loss_weight: NonNegativeFloat = 1.0  # weight of the classification of regions; 0 leaves it out
    num_classes: PositiveInt = 81  # C, classes of regions, the whole image (class 0) included
    region_dropout: Dropout = 0.0  # dropout between the two Linears of that classification
    initializer_range: NonNegativeFloat = 0.02  # standard deviation of their start values
    new_layers: NewLayers = "official"  # start of the Linear that scores a choice, see `e2e_vl.tasks.base.init_head`


# Objectives of pre-training.


class ObjectiveConfig(Settings, frozen=True):
    """Every objective has a weight; 0 leaves it out."""

    name: ClassVar[str] = "<name>"  # in settings, for error messages
    weight: NonNegativeFloat = 0.0

    @classmethod
    def key(cls, field: str) -> str:
        """The dotted key of a setting."""
        return f"task.config.objectives.{cls.name}.{field}"


class MaskedWordsConfig(ObjectiveConfig, frozen=True):
    """The defaults follow the official code."""

    name: ClassVar[str] = "masked_words"
    weight: NonNegativeFloat = 1.0
    probability: Probability = 0.15  # chance of a word to be masked
    always_mask: bool = False  # every chosen word becomes [MASK] (paper), not 80 % of them (official code)
    # all wordpieces of a word or none (VL-BERT); False: each on its own (VisualBERT, LXMERT)
    whole_words: bool = True
    # one of the human answers to a question, drawn anew in each epoch, follows it and is masked with it (VisualBERT).
    # "letters": each letter of it is a word, a mistake of VisualBERT's code.
    answer: Literal["left_out", "words", "letters"] = "left_out"


class MaskedTextConfig(MaskedWordsConfig, frozen=True):
    """The defaults follow the official code."""

    name: ClassVar[str] = "masked_text"
    # words that a text of the corpus has at least; following lines are added until it has
    min_words: PositiveInt = 64
    max_length: Annotated[int, Meta(ge=3)] = 64  # wordpieces that it has at most
    # texts of the corpus are `[CLS] text [SEP]` (the paper starts with [CLS]) instead of words alone (official code)
    special_tokens: bool = False


class MaskedRegionsConfig(ObjectiveConfig, frozen=True):
    """The defaults follow the official code."""

    name: ClassVar[str] = "masked_regions"
    weight: NonNegativeFloat = 1.0
    classes: PositiveInt = 1601  # C; 1601 for Visual Genome's
    # "distribution": the whole class distribution (official code). "class": its best class (paper).
    labels: Literal["distribution", "class"] = "distribution"


class RelationshipConfig(ObjectiveConfig, frozen=True):
    """Does a text belong to its image? In some texts the caption of another image takes the place of their own."""

    name: ClassVar[str] = "relationship"
    # chance that a text is the caption of another image; the official codes use 0.5
    probability: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    # "single": each caption by itself. "pair": each caption is followed by a second one, which is judged; otherwise it
    # is another caption of the same image. "labelled": texts stay as they are, and the data say which are true.
    texts: Literal["single", "pair", "labelled"] = "single"


class ObjectLabelsConfig(ObjectiveConfig, frozen=True):
    """The defaults follow the official code, whose weight is 1 / 0.15; its name for this loss is Obj."""

    name: ClassVar[str] = "object_labels"
    classes: PositiveInt = 1600  # K, without a background; 1600 for Visual Genome's objects
    # "all": every region, masked or not (official code). "masked": those that are to be predicted (paper).
    regions: Literal["all", "masked"] = "all"
    confidence: bool = True  # the loss of a region counts as much as the detector was sure of its label


class AttributeLabelsConfig(ObjectLabelsConfig, frozen=True):
    """The defaults follow the official code, whose weight is 1 / 0.15; its name for this loss is Attr."""

    name: ClassVar[str] = "attribute_labels"
    classes: PositiveInt = 400  # A, without "no attribute"; 400 for Visual Genome's attributes


class RegionFeaturesConfig(ObjectiveConfig, frozen=True):
    """The defaults follow the official code, whose weight is 1 / 0.15; its name for this loss is Feat."""

    name: ClassVar[str] = "region_features"
    # mean over the D numbers of a feature. "smooth_l1": with beta 1 (official code). "l2": squared differences (paper).
    loss: Literal["smooth_l1", "l2"] = "smooth_l1"
    # what the sum over the masked regions is divided by. "all": the number of all regions (official code). "masked":
    # the number of masked ones.
    average: Literal["all", "masked"] = "all"


class ImageQAConfig(ObjectiveConfig, frozen=True):
    """The official code has the weight 1."""

    name: ClassVar[str] = "image_qa"
    # the possible answers, or a file of them such as LXMERT's all_ans.json, see
    # `e2e_vl.data.answer_lists.read_answers`; the position in the list is the class
    answers: list[str] | str | None = None
    answer_sources: list[str] | None = None  # of that file, only answers of these data sets
    # of several answers in the list, "drawn" takes one with a probability in proportion to its score, in each epoch
    # anew (official code), and "best" the one with the highest score, of equal ones the first
    label: Literal["drawn", "best"] = "drawn"
    head_width: PositiveInt = 2  # width of the head's hidden layer, in widths of the summary


class ChoiceTextsConfig(Settings, frozen=True):
    """Which task turns questions with choices into texts, and which of the choices is read."""

    task: str  # a key of TASKS in e2e_vl/parts.py; its rule truncates the texts
    config: Any = {}  # settings of that task
    # "random": one of the choices, drawn anew in each epoch. "in_turn": of text i the choice i modulo their number, in
    # every epoch (VisualBERT's code, by mistake)
    drawn: Literal["random", "in_turn"] = "random"

    def __post_init__(self) -> None:
        check_name(self.task, TASKS, "task")
        msgspec.structs.force_setattr(self, "config", decode(self.config, TASKS[self.task].config_class, "config"))


class PretrainingConfig(Settings, frozen=True):
    """What is masked and predicted; the defaults follow the official code."""

    # name of an objective, see `OBJECTIVES` in `e2e_vl/parts.py` -> its settings, or only its weight; a weight of 0
    # leaves it out. Objectives that are not named have their default settings, and are added when settings are read.
    objectives: dict[str, Any] = {}
    region_probability: Probability = 0.15  # chance of a region to be predicted
    # chance of a region that is to be predicted to be masked; the paper always masks it (1.0)
    mask_probability: Probability = 0.9
    # chance of a region that is to be predicted to get the feature of another region instead (LXMERT's official code:
    # mask_probability 0.8, replace_probability 0.1)
    replace_probability: Probability = 0.0
    # what labels the regions: "frozen" = a copy of the detector as it was when training began; "current" = the
    # detector in training; "file" = class distributions of the data
    teacher: Literal["frozen", "current", "file"] = "frozen"
    # mask a region in the image, before the detector. False: a learned vector replaces its feature alone, although
    # neighbours and the whole image still show it.
    mask_pixels: bool = True
    # what masked pixels become. "mean": zero in the network's input, which is the mean colour (official code). "black":
    # zero in the image, before the mean is subtracted (paper, section 3.3).
    masked_pixels: Literal["mean", "black"] = "mean"
    # place of the background among the region classes, with a detector as teacher. "last": after the detector's
    # classes, as in Detectron2. "first": as in the files that the official code learns from, and so in the region
    # classifier of its checkpoints. Class distributions from a file stay as they are in it.
    background: Literal["last", "first"] = "last"
    # most boxes when the detector finds them itself; None = all its detections
    max_detected_regions: PositiveInt | None = 100
    # wordpieces and regions of a text together; None = no cut
    max_length: Annotated[int, Meta(ge=3)] | None = 64
    # how pairs of texts longer than data.max_text_length are truncated, see `TextTokenizer.pair`; "fronts_too_much" is
    # VisualBERT's code, and "fronts" the same without its wrong sign
    cut_pairs: Literal["ends", "fronts", "fronts_too_much"] = "ends"
    # what of the masked-language-modelling head starts from a BERT in task.weights: the whole "head", or its output
    # "bias" alone (official LXMERT code, whose pre-training from scratch leaves BERT's bias there)
    word_start: Literal["head", "bias"] = "head"
    # for data whose texts are questions with several choices; None: other data
    choices: ChoiceTextsConfig | None = None
    # side of the instance masks that the detector reads (R2C's network: 14), and where their cells are sampled, as in
    # VCR's task; None: it reads none. With `choices` both are settings of that task.
    mask_size: PositiveInt | None = None
    mask_at: MaskAt = "corners"

    def __post_init__(self) -> None:
        if self.mask_probability + self.replace_probability > 1 + 1e-9:
            raise UserError("mask_probability and replace_probability together must not be above 1")
        for name in self.objectives:
            check_name(name, OBJECTIVES, "objective")
        given = {
            name: {"weight": values} if isinstance(values, int | float) else values
            for name, values in self.objectives.items()
        }
        objectives = {
            name: decode(given.get(name, {}), part.config_class, f"objectives.{name}")
            for name, part in OBJECTIVES.items()
        }
        msgspec.structs.force_setattr(self, "objectives", objectives)

    @property
    def has_background_last(self) -> bool:
        """The background is the last region class; official files have it first."""
        return self.teacher != "file" and self.background == "last"
