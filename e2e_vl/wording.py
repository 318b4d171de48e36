"""From facts to wordpieces: what a task does with a sample before the model sees it."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from e2e_vl.examples import ImageExample, TextExample
from e2e_vl.layout import LaidText, TextWriter
from e2e_vl.phrases import phrases_of
from e2e_vl.samples import Sample, SampleText
from e2e_vl.targets import Targets

ONLY_PHRASES = "only_phrases"  # key of the record of a text that has phrases and no target of the task
Draw = Callable[[int], np.random.Generator]  # text index -> its random generator in this epoch


@dataclasses.dataclass(frozen=True)
class Wording(abc.ABC):
    """Puts the texts of a sample into wordpieces, with their targets and records. It is sent to data workers."""

    writer: TextWriter
    # kinds of truth that the task learns from. Where data sets are joined, texts with phrases and with another truth
    # have no target, see `no_target`. (): the task cannot take such texts. (object,): it learns from any text.
    learns_from: ClassVar[tuple[type, ...]] = ()

    def __call__(self, sample: Sample, images: Sequence[ImageExample], draw: Draw) -> Iterable[TextExample]:
        """All texts of the sample, in order; the loaded images say where boxes are now, and which are candidates."""
        for text in sample.texts:
            for example in self.word(text, sample, images, draw):
                if self.lacks_target(text):
                    example.targets = dataclasses.replace(self.no_target(), known=False)
                    example.record = example.record | {ONLY_PHRASES: True}
                if self.writer.marks_phrases and example.phrases is None:
                    other = example.other_words
                    said = text if other is None else dataclasses.replace(text, words=other, phrases=None)
                    example.phrases = phrases_of(said, example, images, self.writer)
                yield example

    def lacks_target(self, text: SampleText) -> bool:
        """Phrases are asked for, and the text has nothing else to learn from."""
        could = bool(self.learns_from) and self.writer.marks_phrases and text.may_lack_target
        return could and not isinstance(text.truth, self.learns_from)

    def no_target(self) -> Targets:
        """Values that mean nothing, of the class, shapes and dtypes that the targets of other texts have."""
        raise NotImplementedError(f"{type(self).__name__} has targets for every text.")

    @abc.abstractmethod
    def word(
        self, text: SampleText, sample: Sample, images: Sequence[ImageExample], draw: Draw
    ) -> Iterable[TextExample]:
        """One text of the sample: usually one example, several where it has several choices."""

    def record(self, text: SampleText, images: Sequence[ImageExample], laid: LaidText | None = None) -> dict[str, Any]:
        """What goes into the prediction beside the answer; sizes are (height, width) of the stored (first) image."""
        record = {"text_index": text.index, **text.facts}
        if text.looks_at:
            image = images[text.looks_at[0]]
            size = list(image.placement.original_size)
            record |= {"file_name": image.name, "image_size": size, "flipped": image.placement.flipped}
        if laid is not None and laid.num_cut:
            record["cut_wordpieces"] = laid.num_cut
        return record
