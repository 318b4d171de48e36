"""Three texts about two images with random encoder states, and preprocessors, for tests of objectives."""

from __future__ import annotations

import dataclasses

import torch
from transformers import PreTrainedTokenizerBase

from detector.structures import ImageBatch, Regions
from e2e_vl.structures import Batch, EncoderOutput, MaskingBatch, RegionMasks, TextBatch, TextRegions, gather_regions
from e2e_vl.tasks.config import PretrainingConfig
from e2e_vl.tasks.objectives.base import MLMHead, Objective, ObjectiveOutput, Sizes
from e2e_vl.tasks.pretraining import PretrainingPreprocessor, PretrainingTask, build_objectives
from e2e_vl.text import TextTokenizer

HIDDEN, VOCABULARY, CLASSES = 6, 9, 4
SIZES = Sizes(HIDDEN, VOCABULARY, feature_dim=3, num_classes=CLASSES - 1)
LENGTH = 4
COUNTS = (3, 2)  # regions of the two images, the whole image included


@dataclasses.dataclass
class Inputs:
    """The inputs of an objective, except its targets."""

    batch: Batch
    regions: TextRegions
    encoded: EncoderOutput
    word_head: MLMHead

    def run(self, objective: Objective, targets) -> ObjectiveOutput:
        return objective(targets, self.batch, self.regions, self.encoded, self.word_head)


def make_inputs(image_index: list[list[int]] | None = None) -> Inputs:
    """By default text 0 has image 0, text 1 has image 1 and text 2 has none."""
    generator = torch.Generator().manual_seed(0)
    image_index = torch.tensor(image_index or [[0], [1], [-1]])
    regions = Regions(
        [torch.rand(count, 4, generator=generator) for count in COUNTS],
        [torch.rand(count, 3, generator=generator) for count in COUNTS],
        [torch.zeros(count, CLASSES) for count in COUNTS],
    )
    sizes = torch.tensor([[10, 10], [10, 10]])
    gathered = gather_regions(regions, sizes, image_index, whole_image=True)
    ids = torch.ones(3, LENGTH, dtype=torch.int64)
    batch = Batch(
        images=ImageBatch(torch.zeros(2, 3, 10, 10), sizes, sizes, ["a", "b"]),
        boxes=[rows[1:] for rows in regions.boxes],
        texts=TextBatch(ids, ids, ids.bool()),
        image_index=image_index,
        masking=MaskingBatch(
            masked_regions=RegionMasks(
                [torch.tensor([True, False]), torch.tensor([True])], [torch.zeros(n, dtype=torch.bool) for n in (2, 1)]
            )
        ),
    )
    encoded = EncoderOutput(
        text=torch.randn(3, LENGTH, HIDDEN, generator=generator).requires_grad_(),
        regions=torch.randn(*gathered.attention_mask.shape, HIDDEN, generator=generator).requires_grad_(),
        summary=torch.randn(3, HIDDEN, generator=generator).requires_grad_(),
        word_embeddings=torch.randn(VOCABULARY, HIDDEN, generator=generator).requires_grad_(),
    )
    torch.manual_seed(1)
    return Inputs(batch, gathered, encoded, MLMHead(HIDDEN, VOCABULARY))


ONLY_WORDS = {"masked_text": 0.0, "masked_regions": 0.0, "relationship": 0.0}


def make_task(tokenizer: PreTrainedTokenizerBase, **objectives) -> PretrainingTask:
    """A task with masked words, and with the given objectives (name -> weight or config)."""
    sizes = Sizes(hidden_size=4, vocab_size=len(tokenizer))
    return PretrainingTask(sizes, PretrainingConfig(), build_objectives(ONLY_WORDS | objectives, sizes))


def make_preprocessor(
    tokenizer: PreTrainedTokenizerBase, *, is_blank: bool = False, max_length: int | None = None, **objectives
) -> PretrainingPreprocessor:
    """The preprocessor of `make_task`."""
    text_tokenizer = TextTokenizer(tokenizer, is_blank=is_blank, max_length=max_length)
    return make_task(tokenizer, **objectives).preprocessor(text_tokenizer)
