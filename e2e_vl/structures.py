"""The batch, and the outputs of the encoder and the task.

Shape legend of the whole package; the letters of `detector/structures.py` have the same meaning
    N   images in the batch
    M   texts in the batch; several texts may be about the same image
    I   images of one text, at most
    L   wordpieces of the longest text
    R   regions (candidate boxes) of one image; where padded: of the text or image with the most
    Z   positions of the longest packed sequence
    D   width of a region feature
    E   hidden size of the encoder
    F   width of a region vector
    X   width of a summary
    V   wordpieces of the vocabulary
    C   region classes, background included
    Y   possible answers
    U   questions with four choices each
    Q   boxes masked in one image
    S   side of a RoI map

Boxes are xyxy, float32, in pixels of the resized image. An `attention_mask` is True at real positions.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64, Num, Shaped
from torch import Tensor

from detector.structures import DetectionTargets, ImageBatch, Loss, Movable, Regions
from e2e_vl.phrases import PhraseBatch
from e2e_vl.targets import Ragged, Targets

PROPOSAL_NUMBERS = 4  # width of `TextRegions.proposals`


class Ability(enum.Enum):
    """Abilities of an encoder that tasks may need; the value completes "needs an encoder with ..."."""

    SUMMARY_OF_SINGLE = "a summary of a text and its regions"
    SUMMARY_OF_QUESTION = "a summary at the place of an answer"
    SUMMARY_OF_PAIR = "a summary of two texts and their regions"
    WORD_EMBEDDINGS = "word embeddings"
    MASKED_REGIONS = "a way to tell masked regions from others"
    MASKED_FEATURES = "a feature for masked regions whose pixels stay visible"
    NAMED_REGIONS = "words that carry the vector of the region they name"
    IMAGE_PAIRS = "a way to tell the images of one text apart"
    INTERMEDIATE_STATES = "states between its layers"


class AttentionBlock(enum.StrEnum):
    """A block of an attention map: queries to keys."""

    WORDS_TO_WORDS = "words to words"
    WORDS_TO_REGIONS = "words to regions"
    REGIONS_TO_WORDS = "regions to words"
    REGIONS_TO_REGIONS = "regions to regions"


@dataclasses.dataclass(frozen=True)
class AttentionGraph:
    """A stack of attention maps that belong together, such as all layers of one Transformer."""

    steps: tuple[int, ...]  # of each layer, the row in `EncoderOutput.attentions`; of a text's first image
    blocks: frozenset[AttentionBlock] = frozenset(AttentionBlock)  # those that are not zero


@dataclasses.dataclass
class TextBatch(Movable):
    """M wordpiece sequences, padded at the end."""

    on_host = frozenset({"lengths"})

    input_ids: Int64[Tensor, "M L"]
    token_type_ids: Int64[Tensor, "M L"]  # 0 or 1
    attention_mask: Bool[Tensor, "M L"]  # True at real wordpieces
    summary: Int64[Tensor, " M"] | None = None  # where the summary of each text is read; None: the pooled vector
    # row of the candidate box of the (first) image that a wordpiece names; -1 = none. Boxes of further images cannot be
    # named, which no data set of several images does.
    region_of_token: Int64[Tensor, "M L"] | None = None
    lengths: Int64[Tensor, " M"] = None  # real wordpieces, on the CPU; None: counted from the attention mask

    def __post_init__(self) -> None:
        if self.lengths is None:
            self.lengths = self.attention_mask.sum(dim=1).cpu()

    def __len__(self) -> int:
        return self.input_ids.shape[0]


@dataclasses.dataclass
class DetectedLabels(Movable):
    """What a detector predicts for the candidate boxes of N images, see `BoxPredictions`."""

    classes: list[Int64[Tensor, " _R"]] | None = None
    scores: list[Float[Tensor, " _R"]] | None = None
    attributes: list[Int64[Tensor, " _R"]] | None = None
    attribute_scores: list[Float[Tensor, " _R"]] | None = None


@dataclasses.dataclass
class RegionLabels(Movable):
    """Labels of the candidate boxes of N images: annotated, read from a file, or from a detector."""

    classes: list[Int64[Tensor, " _R"]] | None = None  # annotated class, 0 .. K-1
    class_probs: list[Float[Tensor, "_R C"]] | None = None  # distributions over region classes
    features: list[Float[Tensor, "_R D"]] | None = None  # from a detector that sees the whole image
    detected: DetectedLabels = dataclasses.field(default_factory=DetectedLabels)


@dataclasses.dataclass
class RegionMasks(Movable):
    """Which candidate boxes of N images are to be predicted, and which of them are masked."""

    is_labelled: list[Bool[Tensor, " _R"]]
    is_masked: list[Bool[Tensor, " _R"]]
    # the region whose feature it gets: a row among the candidate boxes of all N images, concatenated; -1 = its own
    replacement_index: list[Int64[Tensor, " _R"]] | None = None


@dataclasses.dataclass
class MaskingBatch(Movable):
    """What only region masking needs to know of a batch, and what it decides."""

    on_host = frozenset({"seeds", "region_limit", "pixel_masks"})

    seeds: Int64[Tensor, " M"] | None = None  # of the random choices that the model makes about a text; on the CPU
    boxes_to_mask: list[Float[Tensor, "_Q 4"]] | None = None  # mask exactly these; None: drawn at random
    masked_regions: RegionMasks | None = None  # candidate boxes that are masked and predicted
    pixel_masks: list[Float[Tensor, "_Q 4"]] | None = None  # boxes whose pixels are masked first; on the CPU
    # a text reads only the first candidate boxes of each image; on the CPU
    region_limit: Int64[Tensor, "M I"] | None = None


@dataclasses.dataclass
class Batch(Movable):
    """Images, texts, and the images that each text refers to."""

    on_host = frozenset({"image_index"})

    images: ImageBatch
    boxes: list[Float[Tensor, "_R 4"]] | None  # None: the detector proposes them
    texts: TextBatch
    image_index: Int64[Tensor, "M I"]  # index of the image(s) each text refers to; -1 = no image; on the CPU
    targets: Targets | None = None  # a class of the task's own; None: there are none
    detection_targets: DetectionTargets | None = None  # annotated objects of the N images
    region_labels: RegionLabels = dataclasses.field(default_factory=RegionLabels)
    roi_masks: list[Float[Tensor, "_R S S"]] | None = None  # instance masks of the candidate boxes
    masking: MaskingBatch | None = None  # None: no region is masked
    phrases: PhraseBatch | None = None  # None: not needed
    # how well the phrase of each candidate box matches the text, see `match_phrase`; 0 at padding. None: unknown
    phrase_matches: Float[Tensor, "M I R 2"] | None = None
    # M dicts of ids and ground truth, see `Preprocessor.record`; predictions begin with them
    records: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.records = self.records or [{} for _ in range(len(self))]

    def __len__(self) -> int:
        return len(self.texts)


@dataclasses.dataclass
class TextRegions(Movable):
    """Each text's regions, gathered from its images and padded at the end."""

    features: Float[Tensor, "M R D"]
    boxes: Float[Tensor, "M R 4"]  # 0 at padding
    image_sizes: Float[Tensor, "M R 2"]  # (height, width) of the resized image a region comes from; 1 at padding
    attention_mask: Bool[Tensor, "M R"]
    image_slot: Int64[Tensor, "M R"]  # which of the text's images a region comes from; 0 at padding
    image: Int64[Tensor, "M R"]  # row of that image in the batch; -1 at padding
    row: Int64[Tensor, "M R"]  # row of the region among its image's candidate boxes; -1 = whole image, or padding
    is_masked: Bool[Tensor, "M R"]  # see `RegionMasks`
    classes: Int64[Tensor, "M R"]  # detected, 0 .. K-1; -1 where the boxes were given, and elsewhere
    # what a proposer says of the region: 1, its score, and the two shares of `match_phrase`; all are 0 where it says
    # nothing. None: of no region.
    proposals: Float[Tensor, "M R 4"] = None

    def __post_init__(self) -> None:
        if self.proposals is None:
            self.proposals = self.boxes.new_zeros(*self.row.shape, PROPOSAL_NUMBERS)

    @functools.cached_property
    def lengths(self) -> list[int]:
        """The number of regions of each text. `gather_regions` sets it; otherwise a GPU waits here."""
        return self.attention_mask.sum(dim=1).tolist()

    @property
    def is_whole_image(self) -> Bool[Tensor, "M R"]:
        """Whether the region is a whole image, added for encoders with `uses_whole_image`."""
        return self.attention_mask & (self.row < 0)

    def without_whole_image(self) -> TextRegions:
        """Return a copy in which whole images count as padding; they keep their rows, so padding may be in front."""
        return dataclasses.replace(self, attention_mask=self.attention_mask & ~self.is_whole_image)

    def original_boxes(self, scales: Float[Tensor, "N 2"]) -> Float[Tensor, "M R 4"]:
        """Return the boxes in pixels of the original images, given their `ImageBatch.scales`; meaningless at padding.

        A flip is not undone.
        """
        return self.boxes / scales.to(self.boxes.device)[self.image.clamp(min=0)].repeat(1, 1, 2)

    def gather(self, values: list[Shaped[Tensor, "_R ..."]], fill: float) -> Shaped[Tensor, "M R ..."]:
        """Copy values of the candidate boxes of N images to the texts that read them.

        `fill` is the value at whole images and padding.
        """
        counts = torch.tensor([len(rows) for rows in values])
        starts = (counts.cumsum(0) - counts).to(self.row.device, non_blocking=True)
        joined = torch.cat([*values, values[0].new_full((1, *values[0].shape[1:]), fill)])
        rows = starts[self.image.clamp(min=0)] + self.row
        return joined[torch.where(self.row >= 0, rows, len(joined) - 1)]


@dataclasses.dataclass
class IntermediateStates:
    """Vectors between the layers of an encoder; zero at padding."""

    text: Float[Tensor, "M L E"]
    regions: Float[Tensor, "M R E"]


@dataclasses.dataclass
class EncoderOutput:
    """One vector per wordpiece, one per region, one for all."""

    text: Float[Tensor, "M L E"]
    regions: Float[Tensor, "M R E"]
    summary: Float[Tensor, "M X"] | None = None  # text and regions in one vector; None: the encoder has none here
    # a map (query, key) per layer, or per step of a layer that attends several times, in their order; None unless
    # `output_attentions`. Slots: L + R, words first, and one more where a sequence has an end. Blocks that a step does
    # not have are zero, such as regions for words that attend to words alone.
    attentions: tuple[Float[Tensor, "M heads slots slots"], ...] | None = None
    word_embeddings: Float[Tensor, "V E"] | None = None  # the input embeddings, which heads over words share
    # number of layers -> the states after them, for each of `intermediate_layers`
    intermediate: dict[int, IntermediateStates] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class TaskOutput:
    """The same in training and in evaluation."""

    losses: dict[str, Loss]
    logits: Float[Tensor, "*shape"]  # what the task predicts from; the task's file gives the shape
    details: dict[str, Any] = dataclasses.field(default_factory=dict)  # whatever else it predicts from, by name
    parts: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # logits of each part of a task that is a sum


@dataclasses.dataclass
class PhraseOutput:
    """The grounded phrases of M texts."""

    # [phrases, 2]: first wordpiece of each annotated or detected phrase and the last plus one; a list per text
    spans: Ragged
    log_attention: Float[Tensor, "phrases R"]  # log of the attention on each region of the text; -inf at padding
    is_correct: Bool[Tensor, "annotated R"]  # regions that the annotated phrases name
    losses: dict[str, Loss]


@dataclasses.dataclass
class RefinementOutput:
    """The regions of M texts, moved onto the objects that the texts name."""

    boxes: Float[Tensor, "M R 4"]  # whole images and padding are as in `TextRegions.boxes`
    losses: dict[str, Loss]


@dataclasses.dataclass
class SegmentationOutput(Movable):
    """The masks of the regions that a task chooses for M texts."""

    # side * side cells that cover the region's box, see `paste_mask`; meaningless where none is chosen. None: training
    probabilities: Float[Tensor, "M side side"] | None
    losses: dict[str, Loss]


@dataclasses.dataclass
class ModelOutput(Movable):
    """The output of one forward pass."""

    task: TaskOutput
    regions: Regions  # per image
    text_regions: TextRegions  # per text
    encoded: EncoderOutput
    batch: Batch  # with masked regions and their labels
    class_names: tuple[str, ...] | None = None  # of the detector's classes; None: unknown
    phrases: PhraseOutput | None = None  # None: not needed
    refinement: RefinementOutput | None = None  # None: boxes are not refined
    segmentation: SegmentationOutput | None = None  # None: there are no masks

    @property
    def refined_regions(self) -> TextRegions:
        """The regions of each text with the boxes that predictions name; without refinement, `text_regions`."""
        if self.refinement is None:
            return self.text_regions
        return dataclasses.replace(self.text_regions, boxes=self.refinement.boxes)

    def on_cpu(self) -> ModelOutput:
        """Return a copy with what predictions are made from on the CPU; pixels, features and hidden states stay.

        A GPU waits once, and not for every number that a prediction reads.
        """
        if self.text_regions.boxes.device.type == "cpu":
            return self
        heavy = {"features": [], "class_logits": [], "attribute_logits": None, "maps": None}
        images = self.batch.images
        moved = dataclasses.replace(
            self,
            regions=dataclasses.replace(self.regions, **heavy),
            text_regions=dataclasses.replace(self.text_regions, features=self.text_regions.features[..., :0]),
            encoded=None,
            batch=dataclasses.replace(
                self.batch, images=dataclasses.replace(images, pixels=images.pixels[..., :0, :0])
            ),
        ).cpu()
        batch = dataclasses.replace(moved.batch, images=dataclasses.replace(moved.batch.images, pixels=images.pixels))
        return dataclasses.replace(moved, encoded=self.encoded, batch=batch)

    @property
    def losses(self) -> dict[str, Loss]:
        """All losses by name, unweighted: those of `task_losses` and of the detector."""
        return {**self.task_losses, **self.regions.losses}

    @property
    def task_losses(self) -> dict[str, Loss]:
        """The losses of the task, of phrases, of box refinement and of segmentation by name, unweighted."""
        losses = dict(self.task.losses)
        if self.phrases is not None:
            losses |= self.phrases.losses
        if self.refinement is not None:
            losses |= self.refinement.losses
        if self.segmentation is not None:
            losses |= self.segmentation.losses
        return losses


def class_names_of(output: ModelOutput) -> list[list[str]]:
    """Return the name of the class detected in each region of each text, [M][R]; "": none was detected."""
    classes = output.text_regions.classes.tolist()
    if output.class_names is None:
        return [[""] * len(row) for row in classes]
    names = (*output.class_names, "")  # the last one, at -1, is for rows without a class
    return [[names[number] for number in row] for row in classes]


def at_least_float32(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Convert half precision to float32, in which losses are computed."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def gather_regions(
    regions: Regions,
    image_sizes: Num[Tensor, "N 2"],
    image_index: Int64[Tensor, "M I"],
    *,
    whole_image: bool = False,
    masks: RegionMasks | None = None,
    limit: Int64[Tensor, "M I"] | None = None,
) -> TextRegions:
    """Copy each text's regions out of its images; gradients of all texts add up in the shared regions.

    Args:
        image_sizes: (height, width) of the resized images.
        whole_image: row 0 of every image's regions is the whole image.
        limit: see `MaskingBatch.region_limit`.

    Returns:
        `TextRegions` with R = the largest number of regions of any text (at least 1, so that shapes stay valid).
    """
    first = int(whole_image)  # candidate boxes begin at this row
    device = regions.features[0].device
    counts = torch.tensor([len(boxes) for boxes in regions.boxes])
    all_features = torch.cat(regions.features)
    all_boxes = torch.cat(regions.boxes)

    # all indices are computed on the CPU, and moved together
    position = torch.arange(max(counts.tolist(), default=0) or 1)
    index = ((counts.cumsum(0) - counts)[:, None] + position).clamp(max=len(all_features))  # the last: zeros
    image = image_index.clamp(min=0)  # [M, I]
    is_real = (position < counts[:, None])[image] & (image_index >= 0)[..., None]  # [M, I, R]
    if limit is not None:
        is_real = is_real & (position < limit[..., None] + first)
    slot = torch.arange(image_index.shape[1])[None, :, None].expand_as(is_real)
    candidate = (position - first).expand_as(is_real)
    columns = (is_real, slot, index[image], candidate, image[..., None].expand_as(is_real))
    # padding moves to the end of each text, and what is padding in all texts is cut
    lengths = is_real.flatten(1).sum(dim=1).tolist()
    order = (~is_real).flatten(1).to(torch.uint8).argsort(dim=1, stable=True)
    order = order[:, : max(lengths, default=0) or 1]
    is_real, slot, rows, candidate, image_row = (column.flatten(1).gather(1, order) for column in columns)
    sizes_of_regions = torch.where(is_real[..., None], image_sizes.cpu().float()[image_row], 1.0)
    slot = slot.masked_fill(~is_real, 0)
    candidate = candidate.masked_fill(~is_real, -1)
    image_row = image_row.masked_fill(~is_real, -1)
    indices = torch.stack([is_real, slot, rows, candidate, image_row])
    is_real, slot, rows, candidate, image_row = indices.to(device, non_blocking=True)
    attention_mask = is_real.bool()

    result = TextRegions(
        features=F.pad(all_features, (0, 0, 0, 1))[rows] * attention_mask[..., None],
        boxes=F.pad(all_boxes, (0, 0, 0, 1))[rows] * attention_mask[..., None],
        image_sizes=sizes_of_regions.to(device, non_blocking=True),
        attention_mask=attention_mask,
        image_slot=slot,
        image=image_row,
        row=candidate,
        is_masked=torch.zeros_like(attention_mask),
        classes=torch.full_like(candidate, -1),
    )
    result.lengths = lengths
    if regions.classes is not None:
        result.classes = F.pad(torch.cat(regions.classes), (0, 1))[rows].masked_fill(result.row < 0, -1)
    if masks is not None:
        result.is_masked = result.gather(masks.is_masked, fill=False)
    return result


def describe_proposals(
    batch: Batch, regions: Regions, text_regions: TextRegions, *, whole_image: bool = False
) -> Float[Tensor, "M R 4"]:
    """Return `TextRegions.proposals`; the scores are those of the detector where it predicted the boxes.

    Args:
        regions: of the images, from which `text_regions` were gathered.
        whole_image: row 0 of every image's regions is the whole image.
    """
    is_candidate = text_regions.row >= 0
    result = text_regions.boxes.new_zeros(*is_candidate.shape, PROPOSAL_NUMBERS)
    scores = batch.region_labels.detected.scores
    if regions.scores is not None:
        scores = [image_scores[int(whole_image) :].detach() for image_scores in regions.scores]
    if scores is not None:
        result[..., 0] = is_candidate
        result[..., 1] = text_regions.gather(scores, fill=0.0)
    if batch.phrase_matches is not None:
        texts = torch.arange(len(batch), device=is_candidate.device)[:, None]
        matches = batch.phrase_matches[texts, text_regions.image_slot, text_regions.row.clamp(min=0)]
        result[..., 2:] = matches * is_candidate[..., None]
    return result


def take_along_dim(values: Tensor, index: Tensor, dim: int) -> Tensor:
    """Return `values.take_along_dim(index, dim)` for indices that are not negative; the other dimensions broadcast.

    torch's own wraps negative indices first, which takes several times as long as the rest.
    """
    shape = [max(sizes) for sizes in zip(values.shape, index.shape, strict=True)]
    shape[dim] = values.shape[dim]
    values = values.expand(shape)
    shape[dim] = index.shape[dim]
    return values.gather(dim, index.expand(shape))
