"""Options of region extraction. Does not import torch, so that commands can check their options quickly."""

from __future__ import annotations

import dataclasses
from typing import Literal

from detector.config import SelectionRule

Rule = Literal["score", "maxconf", "maxnms", "given"]
DEFAULT_SELECTIONS = {  # VL-BERT section 4.1; bottom-up attention; the features that LXMERT was trained on
    "score": SelectionRule(0.5, 10, 100),
    "maxconf": SelectionRule(0.2, 10, 100),
    "maxnms": SelectionRule(0.0, 36, 36),
}
DISPLAY_SELECTION = SelectionRule(0.2, 10, 36)  # with the rule "score", for display: fewer regions, at lower scores


@dataclasses.dataclass(frozen=True)
class ExtractionSettings:
    """How regions are selected, and what is stored for each.

    rule
      score     detections by score, after NMS within each class and merging of classes at the same place (VL-BERT)
      maxconf   proposals by their best class probability after NMS within each class (bottom-up attention)
      maxnms    the refined box of each proposal's best class, after NMS over all classes, whose threshold is raised
                until enough boxes remain (LXMERT)
      given     boxes from a file
    features_of
      proposal  features are pooled from the proposals, although "score" and "maxnms" return refined boxes, as in the
                original code
      final     features are pooled from the refined box of the best class
    """

    rule: Rule = "score"
    selection: SelectionRule | None = None  # None: the rule's `DEFAULT_SELECTIONS`
    features_of: Literal["proposal", "final"] = "final"
    attributes: bool = False  # store the most probable attribute of each region
    image_feature: bool = False  # store the feature of the whole image
    nms_threshold: float = 0.3  # IoU threshold of NMS with the rule "maxconf"

    @property
    def selection_rule(self) -> SelectionRule:
        """`selection`, or the default of the rule."""
        return self.selection or DEFAULT_SELECTIONS[self.rule]
