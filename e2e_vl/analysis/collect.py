"""All measures over the captions of a split, computed on any number of processes and in constant memory.

Shape legend: see `e2e_vl/structures.py`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from tqdm.auto import tqdm

from e2e_vl.analysis.captions import CAPTION_KEY, CaptionAnnotations
from e2e_vl.analysis.measures import (
    HeadSums,
    Measurement,
    baseline_hits,
    entity_grounding,
    region_grouping,
    region_naming,
    word_dependency,
)
from e2e_vl.analysis.options import AnalysisConfig, WordPiece
from e2e_vl.data.batching import BatchLoader
from e2e_vl.metrics.flickr30k import correct_candidates
from e2e_vl.model import VisionLanguageModel
from e2e_vl.structures import AttentionBlock, AttentionGraph, Batch, TextRegions

# Queries and targets of the measures: wordpieces of phrases, and pairs of related words.


@dataclasses.dataclass(frozen=True)
class PhraseQueries:
    """The wordpieces whose attention is measured for the phrases of a caption."""

    spans: Int64[np.ndarray, "phrases 2"]  # first wordpiece and last plus one; the whole phrase if it has no query
    has_query: Bool[np.ndarray, " phrases"]  # False: the phrase has no head word and is skipped
    piece: WordPiece  # which wordpiece of a span is the query


def choose_queries(caption: CaptionAnnotations, options: AnalysisConfig) -> PhraseQueries:
    """Choose the query wordpieces according to `options.entity_piece`.

    "head" is the (first) head word in the parse, read at `options.word_piece`. A phrase has no head word if its caption
    has no parse, or if all its words belong to nested phrases.
    """
    has_query = np.ones(len(caption.phrases), dtype=bool)
    if options.entity_piece != "head":
        return PhraseQueries(caption.phrase_spans, has_query, options.entity_piece)
    spans = caption.phrase_spans.copy()
    head_words = [row for row, is_head in enumerate(caption.is_head) if is_head]
    for phrase in range(len(caption.phrases)):
        heads = [row for row in head_words if caption.phrase_of[row] == phrase]
        has_query[phrase] = caption.is_parsed and len(heads) > 0
        if has_query[phrase]:
            spans[phrase] = caption.word_spans[heads[0]]
    return PhraseQueries(spans, has_query, options.word_piece)


Pair = tuple[int, int, str]  # query word, target word or its phrase, and the relation


def share_wordpiece(spans: Int64[np.ndarray, "words 2"], first: int, second: int) -> bool:
    """Return whether two words share a wordpiece."""
    common_begin = max(spans[first, 0], spans[second, 0])
    common_end = min(spans[first, 1], spans[second, 1])
    return bool(common_begin < common_end)


def list_word_pairs(caption: CaptionAnnotations, options: AnalysisConfig) -> list[Pair]:
    """List both directions of every relation: query word w2, target word w1."""
    pairs = []
    for relation in caption.relations:
        label_to = label_from = relation.label
        if options.directions == "separate":
            label_to = f"{relation.label}, to its governor"
            label_from = f"{relation.label}, from its governor"
        pairs.append((relation.dependent, relation.governor, label_to))
        pairs.append((relation.governor, relation.dependent, label_from))
    return pairs


def list_grounded_pairs(caption: CaptionAnnotations, counted: Sequence[bool], options: AnalysisConfig) -> list[Pair]:
    """List the pairs whose target word w1 is in a counted phrase: query word w2, phrase of w1."""
    pairs = []
    for source, target, label in list_word_pairs(caption, options):
        phrase = caption.phrase_of[target]
        is_counted = phrase >= 0 and counted[phrase]
        if is_counted and (options.phrase_word == "any" or caption.is_head[target]):
            pairs.append((source, phrase, label))
    return pairs


# Names of the measures, and the attention block that each needs.
ENTITIES = "entity grounding"
RELATIONS = "syntactic grounding"
NAMING = "region naming"
GROUPING = "region grouping"
DEPENDENCIES = "word dependency"
REQUIRED_BLOCK = {
    ENTITIES: AttentionBlock.WORDS_TO_REGIONS,
    RELATIONS: AttentionBlock.WORDS_TO_REGIONS,
    NAMING: AttentionBlock.REGIONS_TO_WORDS,
    GROUPING: AttentionBlock.REGIONS_TO_REGIONS,
    DEPENDENCIES: AttentionBlock.WORDS_TO_WORDS,
}
ALL = ""  # label of the sums over all relations
ROUNDING = 1e-6  # tolerance of IoUs
# baselines besides "chance"
CONFIDENCE = "highest confidence"
LARGEST = "largest region"


@dataclasses.dataclass(frozen=True)
class MeasureKey:
    """A measure of a graph, for one relation or all."""

    graph: str
    measure: str
    label: str = ALL


@dataclasses.dataclass
class TextAttention:
    """Attention maps and regions of one text, on the CPU. Boxes are xyxy in pixels of the original image."""

    index: int
    caption: CaptionAnnotations
    file_name: str
    region_boxes: np.ndarray  # float64 [R, 4]
    allowed: np.ndarray  # bool [R]
    is_correct: np.ndarray  # bool [phrases, R]
    length: int  # L, slots before the regions
    maps: dict[str, np.ndarray]  # graph -> float16 [layers, heads, slots, slots]
    image_size: tuple[int, int] | None = None  # (height, width) of the original image


@dataclasses.dataclass
class AttentionStatistics:
    """The sums of all measures, counts of texts and phrases, and the texts to draw."""

    sums: dict[MeasureKey, HeadSums] = dataclasses.field(default_factory=dict)
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    texts: list[TextAttention] = dataclasses.field(default_factory=list)

    def add(self, key: MeasureKey, measurement: Measurement, *, per_sentence: bool) -> None:
        """Add the examples of one text, if it has any."""
        if not len(measurement):
            return
        layers, heads, _ = measurement.hits.shape
        zero = HeadSums.zero(layers, heads, list(measurement.baselines))
        self.sums.setdefault(key, zero).add(measurement, per_sentence=per_sentence)

    def merge(self, other: AttentionStatistics) -> None:
        """Add the results of another process."""
        for key, sums in other.sums.items():
            zero = HeadSums.zero(*sums.hits.shape, list(sums.baselines))
            self.sums.setdefault(key, zero).merge(sums)
        self.counts.update(other.counts)
        self.texts += other.texts

    def most_common_relations(self, graph: str, measure: str, options: AnalysisConfig) -> list[str]:
        """Return the most common relations of a measure, by descending number of examples."""
        counts = {}
        for key, sums in self.sums.items():
            is_relation = key.graph == graph and key.measure == measure and key.label != ALL
            if is_relation and sums.examples >= options.min_count:
                counts[key.label] = sums.examples
        return sorted(counts, key=lambda label: (-counts[label], label))[: options.max_relations]


@dataclasses.dataclass
class MeasureInputs:
    """The regions of one text, and which of them are correct for each phrase."""

    caption: CaptionAnnotations
    length: int  # L
    boxes: np.ndarray  # float64 [R, 4], xyxy in pixels of the original image
    allowed: Bool[Tensor, " R"]
    is_correct: Bool[Tensor, "phrases R"]
    baseline_scores: dict[str, Float[Tensor, " R"]]  # baseline -> score of each region

    @property
    def regions(self) -> slice:
        """The slots of the regions."""
        return slice(self.length, self.length + len(self.allowed))

    def baselines(self, is_correct: Bool[Tensor, "examples R"]) -> dict[str, Float[Tensor, " examples"]]:
        """Return whether the region chosen by each baseline is correct."""
        return {name: baseline_hits(score, self.allowed, is_correct) for name, score in self.baseline_scores.items()}


def collect_attention(
    model: VisionLanguageModel,
    loader: BatchLoader,
    options: AnalysisConfig,
    accelerator: Accelerator,
    *,
    sorted_boxes: bool = False,
    keep_texts: Collection[int] = (),
) -> AttentionStatistics:
    """Compute all measures on a split; every process returns the totals.

    Args:
        loader: the batches of this process.
        sorted_boxes: candidate boxes without scores are sorted by descending confidence.
        keep_texts: indices of the texts whose attention is kept for pictures.
    """
    model.eval()
    statistics = AttentionStatistics()  # of this process
    total = AttentionStatistics()
    hidden = not accelerator.is_local_main_process
    bar = tqdm(loader, desc="attention", unit="batch", leave=False, delay=1, disable=hidden)
    with torch.no_grad(), bar:  # always float32: rounding to lower precision would create ties
        for batch in bar:
            add_batch(statistics, model, batch.to(accelerator.device), options, sorted_boxes, keep_texts)
    for other in gather_object([statistics]):
        total.merge(other)
    total.texts.sort(key=lambda text: text.index)
    return total


def add_batch(
    statistics: AttentionStatistics,
    model: VisionLanguageModel,
    batch: Batch,
    options: AnalysisConfig,
    sorted_boxes: bool,
    keep_texts: Collection[int],
) -> None:
    """Run the model on a batch and add the measures of its texts."""
    regions, text_regions, encoded = model.encode(batch, output_attentions=True)
    scores = regions.scores
    if scores is not None and model.encoder.uses_whole_image:
        scores = [image_scores[1:] for image_scores in scores]
    elif scores is None:
        scores = batch.region_labels.detected.scores
    if scores is None and sorted_boxes and batch.boxes is not None:
        scores = [-torch.arange(len(boxes), device=boxes.device, dtype=torch.float32) for boxes in batch.boxes]
    confidences = [None] * len(batch.records)  # of the regions of each text
    if scores is not None:
        confidences = text_regions.gather(scores, fill=-torch.inf)
    for text, record in enumerate(batch.records):
        inputs = make_inputs(batch, text_regions, text, options, confidences[text])
        maps = {}
        for name, graph in model.encoder.attention_graphs.items():
            maps[name] = torch.stack([encoded.attentions[step][text] for step in graph.steps]).float()
            add_text(statistics, name, graph, maps[name], inputs, options)
        count_text(statistics.counts, inputs, options)
        if record["text_index"] in keep_texts:
            statistics.texts.append(
                TextAttention(
                    index=record["text_index"],
                    caption=inputs.caption,
                    file_name=record["file_name"],
                    image_size=tuple(record["image_size"]),
                    region_boxes=inputs.boxes,
                    allowed=inputs.allowed.cpu().numpy(),
                    is_correct=inputs.is_correct.cpu().numpy(),
                    length=inputs.length,
                    maps={name: values.half().cpu().numpy() for name, values in maps.items()},
                )
            )


def make_inputs(
    batch: Batch, regions: TextRegions, text: int, options: AnalysisConfig, confidence: Float[Tensor, " R"] | None
) -> MeasureInputs:
    """Prepare the inputs of the measures for one text."""
    caption: CaptionAnnotations = batch.records[text][CAPTION_KEY]
    allowed = regions.attention_mask[text] & (regions.image_slot[text] == 0)
    if options.whole_image == "excluded":
        allowed = allowed & (regions.row[text] >= 0)
    scales = batch.images.scales.cpu()[regions.image[text].cpu().clamp(min=0)].double()
    boxes = (regions.boxes[text].cpu().double() / torch.cat([scales, scales], dim=1)).numpy()
    correct = [find_correct_regions(boxes, phrase_boxes, options) for phrase_boxes in caption.boxes]
    is_correct = torch.tensor(np.array(correct, dtype=bool).reshape(-1, len(boxes)), device=allowed.device) & allowed
    areas = torch.from_numpy(boxes[:, 2:] - boxes[:, :2]).prod(dim=1)
    baseline_scores = {LARGEST: areas.float().to(allowed.device)}
    if confidence is not None:
        baseline_scores = {CONFIDENCE: confidence.float(), **baseline_scores}
    length = batch.texts.input_ids.shape[1]
    return MeasureInputs(caption, length, boxes, allowed, is_correct, baseline_scores)


def find_correct_regions(regions: np.ndarray, boxes: np.ndarray, options: AnalysisConfig) -> np.ndarray:
    """Mark the regions (bool [R]) with enough overlap with the boxes of a phrase, see `options.gold_boxes`."""
    if not len(boxes):
        return np.zeros(len(regions), dtype=bool)
    if options.gold_boxes == "union":
        boxes = np.concatenate([boxes[:, :2].min(axis=0), boxes[:, 2:].max(axis=0)])[None]
    # the boxes have been scaled to the resized image and back; rounding must not decide an IoU at the threshold
    return correct_candidates(regions, boxes, options.min_iou - ROUNDING)


def add_text(
    statistics: AttentionStatistics,
    graph_name: str,
    graph: AttentionGraph,
    maps: Float[Tensor, "layers heads slots slots"],
    inputs: MeasureInputs,
    options: AnalysisConfig,
) -> None:
    """Add the measures of one graph on one text."""
    per_sentence = options.mean_over == "sentences"
    caption = inputs.caption
    device = maps.device
    queries = choose_queries(caption, options)
    counted = counted_phrases(inputs, options)

    def put(measure: str, measurement: Measurement, label: str = ALL) -> None:
        statistics.add(MeasureKey(graph_name, measure, label), measurement, per_sentence=per_sentence)

    def measure_grounding(spans: Tensor, correct: Tensor, piece: WordPiece) -> Measurement:
        return entity_grounding(maps, spans, inputs.regions, inputs.allowed, correct, inputs.baselines(correct), piece)

    spans = torch.from_numpy(caption.phrase_spans).to(device)
    if REQUIRED_BLOCK[ENTITIES] in graph.blocks:
        asked = counted & torch.from_numpy(queries.has_query).to(device)
        spans_asked = torch.from_numpy(queries.spans).to(device)[asked]
        put(ENTITIES, measure_grounding(spans_asked, inputs.is_correct[asked], queries.piece))
    if REQUIRED_BLOCK[NAMING] in graph.blocks:
        is_word = torch.from_numpy(caption.is_word).to(device)
        padded = torch.zeros(inputs.length, dtype=torch.bool, device=device)
        padded[: len(is_word)] = is_word
        put(NAMING, region_naming(maps, inputs.regions, inputs.is_correct, spans, padded))
    if REQUIRED_BLOCK[GROUPING] in graph.blocks:
        put(GROUPING, region_grouping(maps, inputs.regions, inputs.allowed, inputs.is_correct))
    if not caption.is_parsed:
        return
    words = torch.from_numpy(caption.word_spans).to(device)

    def put_pairs(measure: str, measurement: Measurement, labels: Sequence[str]) -> None:
        put(measure, measurement)
        for label in dict.fromkeys(labels):
            has_label = torch.tensor([pair_label == label for pair_label in labels], device=device)
            put(measure, measurement.select(has_label), label)

    if REQUIRED_BLOCK[RELATIONS] in graph.blocks:
        pairs = list_grounded_pairs(caption, counted.tolist(), options)
        source, phrase, labels = split_pairs(pairs, device)
        put_pairs(RELATIONS, measure_grounding(words[source], inputs.is_correct[phrase], options.word_piece), labels)
    if REQUIRED_BLOCK[DEPENDENCIES] in graph.blocks:
        # words that share a wordpiece cannot be told apart
        pairs = []
        for pair in list_word_pairs(caption, options):
            source_word, target_word, _ = pair
            if not share_wordpiece(caption.word_spans, source_word, target_word):
                pairs.append(pair)
        source, target, labels = split_pairs(pairs, device)
        put_pairs(DEPENDENCIES, word_dependency(maps, words, target, source, options.word_piece), labels)


def split_pairs(
    pairs: Sequence[Pair], device: torch.device
) -> tuple[Int64[Tensor, " pairs"], Int64[Tensor, " pairs"], list[str]]:
    """Return the first words, the second words (or phrases) and the labels of the pairs."""
    first = torch.tensor([word for word, _, _ in pairs], dtype=torch.int64, device=device)
    second = torch.tensor([target for _, target, _ in pairs], dtype=torch.int64, device=device)
    return first, second, [label for _, _, label in pairs]


def counted_phrases(inputs: MeasureInputs, options: AnalysisConfig) -> Bool[Tensor, " phrases"]:
    """Mark the phrases that are measured, see `options.without_box` and `options.without_region`."""
    has_box = inputs.allowed.new_tensor([len(boxes) > 0 for boxes in inputs.caption.boxes])
    has_region = inputs.is_correct.any(dim=1)
    counted = has_box if options.without_box == "skip" else torch.ones_like(has_box)
    if options.without_region == "skip":
        counted = counted & (has_region | ~has_box)
    return counted


def count_text(counts: Counter[str], inputs: MeasureInputs, options: AnalysisConfig) -> None:
    """Update the counts with one text."""
    caption = inputs.caption
    without_box = 0
    without_region = 0  # although they have a box
    for boxes, has_region in zip(caption.boxes, inputs.is_correct.any(dim=1).tolist(), strict=True):
        if len(boxes) == 0:
            without_box += 1
        elif not has_region:
            without_region += 1
    inseparable = 0
    for relation in caption.relations:
        inseparable += share_wordpiece(caption.word_spans, relation.governor, relation.dependent)
    counts.update(
        {
            "captions": 1,
            "captions without a parse": int(not caption.is_parsed),
            "phrases": len(caption.phrases) + caption.truncated_phrases,
            "truncated phrases": caption.truncated_phrases,
            "truncated words": caption.truncated_words,
            "relations skipped in word dependency: the words share a wordpiece": inseparable,
            "phrases without a box": without_box,
            "phrases with a box but no correct region": without_region,
            "candidate regions": int(inputs.allowed.sum()),
        }
    )
    if options.entity_piece == "head":
        missing = int((~choose_queries(caption, options).has_query).sum())
        counts["phrases skipped in entity grounding: no head word"] += missing


def choose_texts(groups: Sequence[Sequence[int]], number: int, seed: int) -> list[int]:
    """Choose one random text of each of `number` random images."""
    rng = np.random.default_rng(seed)
    shuffled = [groups[int(row)] for row in rng.permutation(len(groups))]
    texts = []
    for group in [group for group in shuffled if len(group)][:number]:
        texts.append(int(group[int(rng.integers(len(group)))]))
    return sorted(texts)
