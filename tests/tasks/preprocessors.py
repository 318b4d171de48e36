"""Samples, loaded images and tokenizers for tests of preprocessors; no data set is read."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from e2e_vl.data.batching import random_generator
from e2e_vl.preprocessing import EncodedText, Preprocessor
from e2e_vl.samples import Sample, SampleImage, SampleText
from e2e_vl.text import build_vocabulary, load_tokenizer
from e2e_vl.transforms import ImageTransform, LoadedImage


def make_tokenizer(folder: Path, *sentences: str) -> PreTrainedTokenizerBase:
    """A tokenizer with the words of the sentences."""
    build_vocabulary(sentences, folder / "vocab.txt")
    return load_tokenizer(folder / "vocab.txt")


def photo(*, flipped: bool = False, scale: int = 1, **fields) -> LoadedImage:
    """A loaded photo of 100 x 60 stored pixels."""
    image_transform = ImageTransform((60, 100), (60 * scale, 100 * scale), flipped)
    return LoadedImage(np.zeros((60 * scale, 100 * scale, 3), dtype=np.uint8), image_transform, "photo.jpg", **fields)


def sample_of(*texts: SampleText | str, image: SampleImage | None = None, **fields) -> Sample:
    """A sample of texts about one photo; strings are texts without metadata."""
    shown = image or SampleImage("7", Path("photo.jpg"))
    made = (SampleText(n, text, {}) if isinstance(text, str) else text for n, text in enumerate(texts))
    return Sample((shown,), tuple(made), **fields)


def preprocess(
    preprocessor: Preprocessor, sample: Sample, image: LoadedImage | None = None, *, seed: int = 0, epoch: int = 0
) -> list[EncodedText]:
    """The texts of a sample as wordpieces."""
    draw = functools.partial(random_generator, seed, epoch)
    return list(preprocessor(sample, [image or photo()], draw))


def tokens(text: EncodedText, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The wordpieces of a text."""
    return tokenizer.convert_ids_to_tokens(text.encoding.input_ids.tolist())


def decoded(text: EncodedText, tokenizer: PreTrainedTokenizerBase) -> str:
    """The wordpieces of a text in one line."""
    return " ".join(tokens(text, tokenizer))
