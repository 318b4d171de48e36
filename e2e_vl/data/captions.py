"""Captions for pre-training: masked words, a caption that may be another image's, and text without images.

Targets of a text
    mlm_labels   int64 [L]: the wordpiece at pieces of masked words, -1 elsewhere
    is_match     int64: 1 = its own caption, 0 = that of another image, -1 = no image
    region_seed  int64: from which the choice of masked regions is to be drawn
Targets of the candidate boxes of an image: those of its source, such as `class_probs` float32 [R, C].
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from detector.images import ResizeRule
from e2e_vl.config import DataSettings
from e2e_vl.data.caption_settings import (
    BOX_SOURCES,
    CaptionConfig,
    box_reader,
    caption_source,
    corpus_files,
    data_path,
    index_folder,
    make_masking,
)
from e2e_vl.data.caption_sources import BoxReader, CandidateBoxes, CaptionSource, require_names
from e2e_vl.data.captions_asked import asked_example
from e2e_vl.data.coco import CocoInstances, object_labels, read_instances
from e2e_vl.data.corpus import TextCorpus, TextLines
from e2e_vl.data.examples import Example, ImageExample, Objects, Request, TextExample, random_generator
from e2e_vl.data.files import read_options
from e2e_vl.data.image_source import MEAN_COLOUR
from e2e_vl.data.images import EncodedImage, ImageSizeError, Placement, read_image
from e2e_vl.data.masking import NO_LABEL, word_pieces

logger = logging.getLogger(__name__)

_BROKEN_IN_A_ROW = 20  # after so many unreadable images one after the other, the data are wrong as a whole
_HINT = "(Training can go on without it: data.config.skip_broken=true takes the next image and logs it.)"


class CaptionDataset(Dataset):
    """Captions of one split, grouped by image.

    A text is `[CLS] caption [SEP]`, all of segment 0. Mirroring changes no word (official VL-BERT code). All texts of
    one request share one image, so also its mirroring and size.

    Args:
        source: images and captions.
        tokenizer: wordpiece tokenizer.
        resize: size of the network input; of several rules one is drawn at random per request (multi-scale training).
        config: see there.
        boxes: reads candidate boxes of an image by its name; None = those of the source, or none: the detector
            proposes them.
        corpus: adds a text of the corpus, drawn at random, beside each caption.
        instances: annotated objects, without crowds, as targets of the detection losses.
        flip_probability: chance to mirror the image; for training.
        seed: all randomness depends on (seed, epoch, text) only.
        channel_order: "BGR" or "RGB".
        blank_text: drop all words: the control that sees no text.
        blank_image: every pixel is the mean colour, and precomputed features are zero: the control that sees no image.
        max_text_length: longest sequence in wordpieces, [CLS] and [SEP] included; longer captions lose their last
            pieces and the record tells how many in `cut_wordpieces`. None = no limit.
        skip_broken: see `CaptionConfig`; the caller decides whether this is training.

    Attributes:
        groups: text indices of each image.
        broken: images that were replaced by others in this process.

    Raises:
        ValueError: settings that contradict each other.
    """

    # keys of `data.files`
    known_files = ("images", "captions", "shards", "instances", "corpus", "detections", "features")

    def __init__(
        self,
        source: CaptionSource,
        tokenizer: PreTrainedTokenizerBase,
        resize: ResizeRule | Sequence[ResizeRule],
        config: CaptionConfig | None = None,
        *,
        boxes: BoxReader | None = None,
        corpus: TextCorpus | None = None,
        instances: CocoInstances | None = None,
        flip_probability: float = 0.0,
        seed: int = 0,
        channel_order: str = "BGR",
        blank_text: bool = False,
        blank_image: bool = False,
        max_text_length: int | None = None,
        skip_broken: bool = False,
    ) -> None:
        self.config = config or CaptionConfig()
        if not 0 <= flip_probability <= 1:
            raise ValueError(f"flip_probability is {flip_probability}, expected a number from 0 to 1")
        if max_text_length is not None and max_text_length < 2:
            raise ValueError(f"max_text_length is {max_text_length}, but [CLS] and [SEP] alone need 2")
        if self.config.relationship and len(source.groups) < 2:
            raise ValueError(f"{source.path}: captions of other images need at least two images")
        self.source = source
        self.groups = source.groups
        self.tokenizer = tokenizer
        self.masking = make_masking(tokenizer, self.config)
        self.resize_rules = [resize] if isinstance(resize, ResizeRule) else list(resize)
        if not self.resize_rules:
            raise ValueError("CaptionDataset needs at least one resize rule")
        self.box_reader = boxes
        self.corpus = corpus
        self.instances = instances
        self.flip_probability = flip_probability
        self.seed = seed
        self.channel_order = channel_order
        self.blank_text = blank_text
        self.blank_image = blank_image
        self.max_text_length = max_text_length
        self.skip_broken = skip_broken
        self.broken: set[int] = set()

    @classmethod
    def from_settings(
        cls,
        settings: DataSettings,
        tokenizer: PreTrainedTokenizerBase,
        split: str,
        *,
        boxes: str,
        training: bool,
        seed: int,
        channel_order: str,
        with_objects: bool,
    ) -> CaptionDataset:
        """Build from a run's settings; `caption_settings.py` lists `data.files` and what `data.config` takes.

        In evaluation the last of the short edges is used, nothing is mirrored, and there is no corpus.
        """
        config = read_options(CaptionConfig, settings.config, "data.config")
        if boxes not in BOX_SOURCES:
            raise ValueError(
                f"{settings.name} cannot have boxes from '{boxes}'; choose one of {', '.join(BOX_SOURCES)}."
            )
        if boxes == "precomputed" and training and settings.flip > 0:
            raise ValueError("precomputed features are those of images as they are, not mirrored; set data.flip to 0")
        if with_objects and "instances" not in settings.files:
            raise ValueError(
                f"the detection losses need annotated objects, but {settings.name} has no data.files.instances; set it "
                "or detector.loss_weight=0."
            )
        source = caption_source(settings, config, split, boxes)
        instances = None
        if "instances" in settings.files and (with_objects or boxes == "gt"):
            instances = read_instances(data_path(settings, "instances", split), drop_empty_boxes=True)
        reader = box_reader(settings, config, split, boxes, instances)
        if reader is not None and config.source == "coco":
            require_names(reader, (source.name(group) for group in range(len(source.groups))))
        corpus = None
        if "corpus" in settings.files and config.use_corpus and training:
            files = corpus_files(settings, split)
            masking, cache = make_masking(tokenizer, config), index_folder(settings, config)
            options = {
                "min_words": config.corpus_words,
                "max_length": config.corpus_length,
                "special_tokens": config.corpus_special_tokens,
            }
            corpus = TextCorpus(files, tokenizer, masking, cache, **options)
        sizes = settings.resize.short_edge if training else settings.resize.short_edge[-1:]
        return cls(
            source,
            tokenizer,
            [ResizeRule(size, settings.resize.long_edge, settings.resize.rounding) for size in sizes],
            config,
            boxes=reader,
            corpus=corpus,
            instances=instances if with_objects else None,
            flip_probability=settings.flip if training else 0.0,
            seed=seed,
            channel_order=channel_order,
            blank_text=settings.blank_text,
            blank_image=settings.blank_image,
            max_text_length=settings.max_text_length,
            skip_broken=config.skip_broken and training,
        )

    @classmethod
    def texts_of(cls, settings: DataSettings, split: str) -> Iterator[str]:
        """All captions of a split and all lines of the corpus, to build a vocabulary from."""
        config = read_options(CaptionConfig, settings.config, "data.config")
        source = caption_source(settings, config, split, "online")
        yield from (source.caption(text) for text in range(source.groups.num_texts))
        if "corpus" in settings.files and config.use_corpus:
            for file in corpus_files(settings, split):
                yield from TextLines(file, index_folder(settings, config), "corpus")

    example_of = staticmethod(asked_example)

    def check_classes(self, num_classes: int) -> None:
        """Raises ValueError if a detector with `num_classes` foreground classes cannot learn the annotated objects."""
        if self.instances is not None and self.instances.num_classes > num_classes:
            raise ValueError(
                f"{self.instances.path} has {self.instances.num_classes} categories, but the detector has "
                f"{num_classes} classes; set MODEL.ROI_HEADS.NUM_CLASSES in its config."
            )

    def __len__(self) -> int:
        """Number of captions."""
        return self.groups.num_texts

    def __getitem__(self, request: Request) -> Example:
        """Load the request's image once, with all its texts, each followed by its text of the corpus.

        Raises:
            FileNotFoundError: an image or a file of boxes is missing.
            ValueError: an image that cannot be read or has another size than its boxes' file says, boxes that lie
                outside it, or a damaged record.
        """
        generator = random_generator(self.seed, request.epoch, request.texts[0])
        flip = bool(generator.random() < self.flip_probability)
        resize = self.resize_rules[int(generator.integers(len(self.resize_rules)))]
        group, texts = self.groups.of_text(request.texts[0]), request.texts
        for _ in range(_BROKEN_IN_A_ROW):
            try:
                image, placement = self._image(group, flip, resize)
                break
            except _BrokenImageError as error:
                if not self.skip_broken:
                    raise error.with_hint() from error.__cause__
                group, texts = self._next(group, len(texts), error)
        else:
            raise ValueError(
                f"{self.source.path}: {_BROKEN_IN_A_ROW} images in a row cannot be read, the last is "
                f"{self.source.name(group)}; check where the data are"
            )
        examples = []
        for text in texts:
            own, other = random_generator(self.seed, request.epoch, text).spawn(2)
            examples.append(self._text(text, group, image.name, placement, own))
            if self.corpus is not None:
                examples.append(self._corpus_text(other))
        return Example([image], examples)

    def _next(self, group: int, num_texts: int, error: _BrokenImageError) -> tuple[int, tuple[int, ...]]:
        """The next image with captions, and its first ones, in place of an image that cannot be read."""
        self.broken.add(group)
        broken = group
        while True:
            group = (group + 1) % len(self.groups)
            if len(self.groups[group]):
                break
        logger.warning(
            "%s Image %s takes its place (%d unreadable images so far in this process).",
            *(error.__cause__, self.source.name(group), len(self.broken)),
        )
        if group == broken:
            raise error.__cause__
        return group, tuple(self.groups[group][:num_texts])

    def _image(self, group: int, flip: bool, resize: ResizeRule) -> tuple[ImageExample, Placement]:
        found = self.source.boxes(group) if self.box_reader is None else self.box_reader(self.source.name(group))
        if found is not None and found.features is not None:
            return self._precomputed(group, found, resize)
        size = (found.image_size if found is not None else None) or self.source.image_size(group)
        name = f"image {self.source.name(group)}"  # outside of the try: an unreadable record is no unreadable image
        try:
            file = self.source.image(group)
            pixels, placement = read_image(file, size, resize, flip=flip, channel_order=self.channel_order, name=name)
        except ImageSizeError:
            raise
        except (ValueError, OSError) as error:
            raise _BrokenImageError from error
        if self.blank_image:
            pixels = np.broadcast_to(np.array(MEAN_COLOUR[self.channel_order], dtype=np.uint8), pixels.shape)
        example = ImageExample(
            pixels=pixels,
            original_size=placement.original_size,
            name=file.name if isinstance(file, EncodedImage) else str(file),
            boxes=None if found is None else placement.move_and_clamp_boxes(found.boxes, found.origin),
            objects=None if self.instances is None else self._objects(group, placement),
            region_targets={} if found is None else found.targets,
        )
        return example, placement

    def _precomputed(self, group: int, found: CandidateBoxes, resize: ResizeRule) -> tuple[ImageExample, Placement]:
        """Boxes and features from the file; of the image only the sizes."""
        size, stated = found.image_size, self.source.image_size(group)
        if stated is not None and stated != size:
            raise ValueError(
                f"{found.origin}: the image was {size[1]} x {size[0]} pixels, but {self.source.path} says {stated[1]} "
                f"x {stated[0]}; use features of the same images"
            )
        placement = Placement(size, resize.target_size(*size))
        features, whole = found.features, found.image_feature
        if self.blank_image:
            features, whole = np.zeros_like(features), None if whole is None else np.zeros_like(whole)
        example = ImageExample(
            pixels=np.broadcast_to(np.uint8(0), (*placement.size, 3)),  # a shape without memory
            original_size=size,
            name=found.origin,
            boxes=placement.move_and_clamp_boxes(found.boxes, found.origin),
            features=features,
            image_feature=whole,
            region_targets=found.targets,
        )
        return example, placement

    def _objects(self, group: int, placement: Placement) -> Objects:
        rows = self.instances.by_image.get(int(self.source.name(group)))
        if rows is None:
            raise ValueError(f"{self.instances.path}: image {self.source.name(group)} is not listed")
        rows = [row for row in rows if not row.is_crowd]
        boxes = np.array([row.box for row in rows], dtype=np.float64).reshape(-1, 4)
        return Objects(placement.move_objects(boxes), *object_labels(rows, len(self.instances.attribute_names)))

    def _text(
        self, text: int, group: int, file_name: str, placement: Placement, generator: np.random.Generator
    ) -> TextExample:
        shown = text
        if generator.random() < self.config.relationship:
            while shown in self.groups[group]:
                shown = int(generator.integers(self.groups.num_texts))
        caption = "" if self.blank_text else self.source.caption(shown)
        ids, labels = self.masking(word_pieces(caption, self.tokenizer), generator)
        num_cut = 0 if self.max_text_length is None else max(len(ids) + 2 - self.max_text_length, 0)
        ids, labels = ids[: len(ids) - num_cut], labels[: len(ids) - num_cut]
        ids = np.array([self.tokenizer.cls_token_id, *ids, self.tokenizer.sep_token_id], dtype=np.int64)
        record: dict[str, Any] = {
            "text_index": text,
            "image_id": self.source.name(group),
            "sent": caption,
            "file_name": file_name,
            "image_size": list(placement.original_size),
            "flipped": placement.flipped,
            "is_match": shown == text,
        }
        if num_cut:
            record["cut_wordpieces"] = num_cut
        return TextExample(
            input_ids=ids,
            segment_ids=np.zeros_like(ids),
            looks_at=(0,),
            targets={
                "mlm_labels": np.array([NO_LABEL, *labels, NO_LABEL], dtype=np.int64),
                "is_match": np.array(int(shown == text)),
                "region_seed": generator.integers(2**62),
            },
            record=record,
        )

    def _corpus_text(self, generator: np.random.Generator) -> TextExample:
        example = self.corpus.example(int(generator.integers(len(self.corpus))), generator)
        example.targets |= {"is_match": np.array(-1), "region_seed": np.array(0)}
        return example


class _BrokenImageError(Exception):
    """An image that is missing or cannot be read; the cause says which."""

    def with_hint(self) -> Exception:
        """What is raised where nothing may be skipped."""
        kinds = [kind for kind in (FileNotFoundError, OSError) if isinstance(self.__cause__, kind)]
        return (kinds or [ValueError])[0](f"{self.__cause__} {_HINT}")
