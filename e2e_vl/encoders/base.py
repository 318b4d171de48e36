"""What every vision-and-language encoder offers the model, the tasks and the checkpoints."""

from __future__ import annotations

from transformers import PreTrainedModel

from e2e_vl.structures import EncoderOutput, TextBatch, TextRegions


class Encoder(PreTrainedModel):
    """texts + regions -> one vector per wordpiece and one per region.

    A subclass sets `config_class`; its config has the fields `hidden_size` and `uses_whole_image`. Saving and loading
    (`save_pretrained`, `from_pretrained`) come from transformers.
    """

    @property
    def hidden_size(self) -> int:
        """H, the width of every output vector."""
        return self.config.hidden_size

    @property
    def uses_whole_image(self) -> bool:
        """True if the encoder expects the whole image as region 0 of each image."""
        return self.config.uses_whole_image

    @property
    def whole_image_is_region(self) -> bool:
        """True if region 0 is a region like the others for tasks too. False: it only feeds other elements."""
        return self.uses_whole_image

    def recompute_activations(self) -> None:
        """Keep fewer activations for the backward pass and compute them again, if the encoder is made for it."""
        if self.supports_gradient_checkpointing:
            # transformers' newer name, and the older one, of which newer versions warn
            names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
            getattr(self, next(name for name in names if hasattr(self, name)))({"use_reentrant": False})

    def forward(self, texts: TextBatch, regions: TextRegions, output_attentions: bool = False) -> EncoderOutput:
        """Encode M texts together with the regions they look at.

        Args:
            texts: M wordpiece sequences, padded to L.
            regions: their regions, padded to R.
            output_attentions: also return the attention maps.

        Returns:
            `EncoderOutput` with text [M, L, H] and regions [M, R, H], zero at padding.
        """
        raise NotImplementedError
