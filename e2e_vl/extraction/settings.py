"""Selection of the boxes that become regions. Does not import torch, so commands check their options quickly."""

from __future__ import annotations

import dataclasses
from typing import Literal

from detector.config import SelectionRule

Rule = Literal["score", "maxconf", "maxnms", "given"]
DEFAULTS = {  # VL-BERT section 4.1; bottom-up attention; the features that LXMERT was trained on
    "score": SelectionRule(0.5, 10, 100),
    "maxconf": SelectionRule(0.2, 10, 100),
    "maxnms": SelectionRule(0.0, 36, 36),
}
SHOWN = SelectionRule(0.2, 10, 36)  # of "score", for pictures: fewer regions, with lower scores


@dataclasses.dataclass(frozen=True)
class ExtractionSettings:
    """How regions are selected, and which of their values are kept.

    rule
      score     detections (NMS within each class; several in one place are one region of the best class) by score
      maxconf   proposals by their best class probability after NMS within each class (bottom-up attention)
      maxnms    each proposal's best class and its refined box, NMS over all, loosened until there are enough (LXMERT)
      given     boxes from a file
    features_of
      proposal  features of the proposals; the boxes of "score" and "maxnms" are refined nonetheless, as in the original
      final     the box head's refined box of the best class is the region and gets features of its own
    """

    rule: Rule = "score"
    selection: SelectionRule | None = None  # None: the rule's `DEFAULTS`
    features_of: Literal["proposal", "final"] = "final"
    attributes: bool = False  # keep the most probable attribute of each region
    image_feature: bool = False  # keep the feature of the whole image
    nms_threshold: float = 0.3  # of "maxconf": the IoU above which boxes of one class are suppressed

    @property
    def numbers(self) -> SelectionRule:
        return self.selection or DEFAULTS[self.rule]
