"""Boxes in the answers of vision-language models, as their projects document them."""

from __future__ import annotations

import pytest

from e2e_vl.scoring.boxes_in_text import find_boxes

BOX = [12.0, 34.0, 56.0, 78.0]


@pytest.mark.parametrize(
    ("text", "boxes"),
    [
        ("<ref>the man</ref><box>(12,34),(56,78)</box>", [BOX]),
        ("<|box_start|>(12,34),(56,78)<|box_end|>", [BOX]),
        ("<|ref|>man<|/ref|><|det|>[[12, 34, 56, 78]]<|/det|>", [BOX]),
        ("the man [[012,034,056,078]]", [BOX]),
        ('```json\n[{"bbox_2d": [12, 34, 56, 78], "label": "man 2"}]\n```', [BOX]),
        ('{"bbox": [12.0, 34.0, 56.0, 78.0]}', [BOX]),
        ("{<12><34><56><78>}", [BOX]),
        ("[0.12, .34, 0.5, 1.]", [[0.12, 0.34, 0.5, 1.0]]),
        ("[[12,34,56,78],[1,2,3,4]]", [BOX, [1.0, 2.0, 3.0, 4.0]]),
        ("[12 34 56 78] and (5) men", [BOX]),
        ("<think>[1,2,3,4] is too small</think><answer>[12,34,56,78]</answer>", [BOX]),
        ("[[470,]]", []),
        ("[[0, 5329, 5310, 9, 99999]]", []),
        ("there is no such object", []),
        ("12, 34, 56, 78", []),
    ],
)
def test_boxes_are_four_numbers_in_brackets(text, boxes):
    assert find_boxes(text) == boxes
