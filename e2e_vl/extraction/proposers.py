"""Object detectors of transformers that propose boxes, with a score and a class or a phrase for each.

Boxes are xyxy in pixels of the image.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.ops import clip_boxes_to_image, nms, remove_small_boxes
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForObjectDetection,
    AutoModelForZeroShotObjectDetection,
    AutoProcessor,
    GroundingDinoProcessor,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_OBJECT_DETECTION_MAPPING,
    MODEL_FOR_ZERO_SHOT_OBJECT_DETECTION_MAPPING,
)

from detector.errors import MissingFileError, UserError, first_line
from detector.image_files import read_image
from e2e_vl.config import ProposalRule
from e2e_vl.data.user_images import to_image_file
from e2e_vl.registry import decode
from e2e_vl.samples import ImageBytes

_SMALLEST_SIDE = 0.01  # of a box, pixels; a smaller one has no area once its sides are rounded


@dataclasses.dataclass(frozen=True)
class Proposals:
    """The boxes that one pass proposes, best score first."""

    boxes: np.ndarray  # float64 [R, 4]
    scores: np.ndarray  # float32 [R]
    text_labels: tuple[str, ...]  # of R classes, or the phrases that the boxes fit best
    labels: np.ndarray  # int64 [R], number of the class, or of the phrase among those asked for


class Proposer:
    """A detector of transformers and its preprocessing, see `load_proposer`.

    `takes_text`: it looks for phrases ("zero-shot"); the others have classes.
    """

    def __init__(self, network: nn.Module, processor: Any, *, takes_text: bool) -> None:
        self.network = network.eval()
        self.processor = processor
        self.takes_text = takes_text

    def __call__(self, image: Any, text: str | Sequence[str] = (), **rule: Any) -> Proposals:
        """Propose boxes of an image in any form, see `to_image_file` in `e2e_vl/data/user_images.py`.

        Args:
            text: a phrase to look for, or several; only for a detector that takes text.
            rule: fields of `ProposalRule`, such as `max_boxes=10`.
        """
        file = to_image_file(image)
        content = file.content if isinstance(file, ImageBytes) else file
        phrases = [text] if isinstance(text, str) else list(text)
        if self.takes_text != bool(phrases):
            remedy = "looks for phrases; give a text" if self.takes_text else "has classes of its own; give no text"
            raise UserError(f"The detector {remedy}.")
        return self.propose(read_image(content, str(file)), decode(rule, ProposalRule, "proposer"), phrases)

    @torch.no_grad()
    def propose(self, image: Image.Image, rule: ProposalRule, phrases: Sequence[str] = ()) -> Proposals:
        """Propose boxes of an RGB image in one pass.

        Args:
            phrases: what to look for; only for a detector that takes text.
        """
        inputs = {"images": image, "return_tensors": "pt"}
        if self.takes_text:
            # a full stop ends a phrase of Grounding DINO; OWL-ViT reads the first 16 wordpieces of each
            inputs |= {"text": [[phrase.replace(".", " ") for phrase in phrases]], "truncation": True}
        encoded = self.processor(**inputs).to(self.network.device)
        limit = getattr(self.network.config, "max_text_len", None)
        if limit is not None and encoded["input_ids"].shape[1] > limit:
            raise UserError(
                f"The {len(phrases)} phrases are more than the {limit} wordpieces that the detector reads; give fewer."
            )
        output = self.network(**encoded)
        size = (image.height, image.width)
        if isinstance(self.processor, GroundingDinoProcessor):
            boxes, scores, labels = self._grounded(output, encoded["input_ids"][0], size)
        else:
            boxes, scores, labels = self._detected(output, size, phrases)
        boxes = clip_boxes_to_image(boxes.float().cpu(), size)
        scores = scores.float().cpu()
        rows = remove_small_boxes(boxes, _SMALLEST_SIDE)
        is_kept = scores[rows] >= rule.min_score
        if len(rows):
            is_kept[scores[rows].argmax()] = True  # an image without any box could not be learned from
        rows = rows[is_kept]
        rows = rows[nms(boxes[rows], scores[rows], rule.nms_threshold)][: rule.max_boxes]
        labels = labels.cpu()[rows]
        names = phrases if self.takes_text else self.network.config.id2label
        return Proposals(
            boxes[rows].double().numpy(),
            scores[rows].numpy(),
            tuple(names[label] for label in labels.tolist()),
            labels.numpy(),
        )

    def _detected(self, output: Any, size: tuple[int, int], phrases: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the boxes, scores and labels of a detector with classes, or of OWL-ViT and its like."""
        options = {"threshold": 0.0, "target_sizes": [size]}
        if self.takes_text:
            [result] = self.processor.post_process_grounded_object_detection(
                output, text_labels=[list(phrases)], **options
            )
        else:
            [result] = self.processor.post_process_object_detection(output, **options)
        return result["boxes"], result["scores"], result["labels"]

    def _grounded(self, output: Any, input_ids: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the boxes, scores and phrases of Grounding DINO.

        A box has a probability for each wordpiece. Its phrase is the one with the most probable wordpiece. (The
        library joins all words above a threshold, also those of several phrases, and none where all are below it.)
        """
        [result] = self.processor.post_process_grounded_object_detection(
            output, input_ids[None], threshold=-1.0, text_threshold=1.0, target_sizes=[size]
        )
        tokenizer = self.processor.tokenizer
        end = tokenizer.convert_tokens_to_ids(".")  # follows each phrase
        phrase_of_piece = (input_ids == end).cumsum(0)
        no_words = torch.tensor([tokenizer.cls_token_id, end, tokenizer.sep_token_id], device=input_ids.device)
        is_word = ~torch.isin(input_ids, no_words)
        logits = output.logits[0, :, : len(input_ids)].masked_fill(~is_word, -torch.inf)
        best = logits.max(dim=1)
        return result["boxes"], best.values.sigmoid(), phrase_of_piece[best.indices]


def load_proposer(source: str | Path) -> Proposer:
    """Load a detector of transformers: a folder, or a name on the Hugging Face hub.

    Raises:
        MissingFileError: there is no such model, or the hub cannot be reached.
        UserError: it is no object detector.
    """
    huggingface_hub.utils.logging.set_verbosity_error()  # it would print each of its retries
    try:
        config = AutoConfig.from_pretrained(source)
        takes_text = type(config) in MODEL_FOR_ZERO_SHOT_OBJECT_DETECTION_MAPPING
        if not takes_text and type(config) not in MODEL_FOR_OBJECT_DETECTION_MAPPING:
            raise UserError(
                f"{source} is a {config.model_type}, which is no object detector of transformers; give one, such as "
                "facebook/detr-resnet-50 or IDEA-Research/grounding-dino-tiny."
            )
        if takes_text:
            processor = AutoProcessor.from_pretrained(source)
            network = AutoModelForZeroShotObjectDetection.from_pretrained(source)
        else:
            processor = AutoImageProcessor.from_pretrained(source)
            network = AutoModelForObjectDetection.from_pretrained(source)
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise MissingFileError(
            f"{source} is neither a local folder of a model nor one that could be loaded from the hub "
            f"({first_line(error)}); check the name and the connection, or download it and give its folder."
        ) from error
    return Proposer(network, processor, takes_text=takes_text)
