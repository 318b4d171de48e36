"""The whole model: detector -> regions of each text -> encoder -> task. Read this file first.

    images --> detector --> Regions (per image) --> gather --> TextRegions (per text) --+
       ^          |                                                                     |
       |          +--> detection losses                                      texts --> encoder --> task --> losses,
       |                                                                                |                   predictions
       |                                                        intermediate states --> phrase head --> losses, phrases
       |                                       states and features of regions --> box refinement --> losses, moved boxes
       |                                             maps of detector, chosen regions --> segmentation --> losses, masks
       |
       +-- pre-training only: a pass of the teacher over the whole images labels the regions; then some regions are
           masked in the pixels, before the detector sees them, or only their features are replaced

One detector pass serves all texts about an image: `image_index` maps texts to images, the regions are
copied per text just before the encoder, and in the backward pass the gradients of all texts add up in that one pass.

Shape legend
    N  images in the batch
    M  texts in the batch
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from detector.structures import Detector, Regions
from e2e_vl.encoders.base import Encoder
from e2e_vl.region_masking import replace_features
from e2e_vl.structures import (
    Ability,
    Batch,
    EncoderOutput,
    MaskingBatch,
    ModelOutput,
    TextRegions,
    describe_proposals,
    gather_regions,
)
from e2e_vl.tasks.base import Task
from e2e_vl.tasks.box_refinement import BoxRefinementHead
from e2e_vl.tasks.phrase_head import PhraseHead
from e2e_vl.tasks.segmentation import Segmentation


class VisionLanguageModel(nn.Module):
    """A detector, an encoder and a task, trained together.

    Args:
        encoder: with `uses_whole_image` region 0 is the whole image; with `whole_image_is_region` tasks see it too.
        teacher: labels the masked regions and is not trained; None: the detector itself labels them.
        phrase_head: grounds the phrases of texts, in addition to the task.
        box_refinement: moves the regions onto the objects that texts name.
        segmentation: cuts out the regions that the task chooses, with the detector's mask head.
        freeze_detector: keep the initial weights and batch statistics of the detector.
    """

    def __init__(
        self,
        detector: Detector,
        encoder: Encoder,
        task: Task,
        *,
        teacher: Detector | None = None,
        phrase_head: PhraseHead | None = None,
        box_refinement: BoxRefinementHead | None = None,
        segmentation: Segmentation | None = None,
        freeze_detector: bool = False,
    ):
        super().__init__()
        self.detector = detector
        self.encoder = encoder
        self.task = task
        self.teacher = None if teacher is None else teacher.requires_grad_(False).eval()
        self.phrase_head = phrase_head
        self.box_refinement = box_refinement
        self.segmentation = segmentation
        self.freeze_detector = freeze_detector
        if freeze_detector:
            detector.requires_grad_(False)

    def recompute_activations(self) -> None:
        self.detector.recompute_activations()
        self.encoder.recompute_activations()

    def train(self, mode: bool = True) -> VisionLanguageModel:
        """Set the mode as `nn.Module` does; batch norms of a frozen detector, and the teacher, stay in evaluation."""
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        if self.freeze_detector:
            for module in self.detector.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self

    def forward(self, batch: Batch, *, output_attentions: bool = False) -> ModelOutput:
        """Run the model once over N images and the M texts about them.

        Returns the task's losses and logits, the regions per image (with detection losses if the batch has detection
        targets) and per text, the encoder's output (with attention maps if `output_attentions`), the output of the
        phrase head if the batch has phrases, the refined boxes if there is box refinement, and masks if there is
        segmentation.
        """
        if batch.image_index.shape[1] > 1:
            self.encoder.require(Ability.IMAGE_PAIRS, "A text about several images")
        batch = self.prepare_regions(batch)
        grounds_phrases = self.phrase_head is not None and batch.phrases is not None
        intermediate_layers = self.phrase_head.layers if grounds_phrases else ()
        regions, text_regions, encoded = self.encode(batch, output_attentions, intermediate_layers)
        task = self.task(batch, text_regions, encoded)
        phrases = self.phrase_head(batch, text_regions, encoded.intermediate) if grounds_phrases else None
        refinement = None if self.box_refinement is None else self.box_refinement(batch, text_regions, encoded)
        output = ModelOutput(
            task, regions, text_regions, encoded, batch, self.detector.class_names, phrases, refinement
        )
        if self.segmentation is not None:
            chosen_regions = None if self.training else self.task.chosen_regions(task, text_regions)
            whole_image = self.encoder.uses_whole_image
            output.segmentation = self.segmentation(self.detector, output, chosen_regions, whole_image=whole_image)
        return output

    def encode(
        self, batch: Batch, output_attentions: bool = False, intermediate_layers: Collection[int] = ()
    ) -> tuple[Regions, TextRegions, EncoderOutput]:
        """Run detector and encoder; returns the regions per image and per text, and the encoder's output."""
        whole_image = self.encoder.uses_whole_image
        masking = batch.masking or MaskingBatch()
        classes = {"box_classes": batch.region_labels.classes} if self.detector.reads_classes else {}
        regions = self.detector(
            batch.images,
            batch.boxes,
            batch.detection_targets,
            pixel_masks=masking.pixel_masks,
            roi_masks=batch.roi_masks,
            whole_image=whole_image,
            **classes,
        )
        regions = replace_features(regions, masking.masked_regions, whole_image=whole_image)
        text_regions = gather_regions(
            regions,
            batch.images.sizes,
            batch.image_index,
            whole_image=whole_image,
            masks=masking.masked_regions,
            limit=masking.region_limit,
        )
        if self.encoder.reads_proposals:
            text_regions.proposals = describe_proposals(batch, regions, text_regions, whole_image=whole_image)
        layers = {"intermediate_layers": intermediate_layers} if intermediate_layers else {}
        encoded = self.encoder(batch.texts, text_regions, output_attentions=output_attentions, **layers)
        if whole_image and not self.encoder.whole_image_is_region:
            text_regions = text_regions.without_whole_image()
        return regions, text_regions, encoded

    def prepare_regions(self, batch: Batch) -> Batch:
        """Return the batch with labelled, masked and truncated regions; unchanged for a task without region masking."""
        rule = self.task.region_masking
        is_masked = batch.masking is not None and batch.masking.masked_regions is not None  # as in recorded batches
        if rule is None or is_masked:
            return batch
        teacher = self.teacher or self.detector
        return rule.prepare(batch, self.detector, teacher, whole_image=self.encoder.whole_image_is_region)
