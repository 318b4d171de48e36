"""Boxes in the answers of vision-language models, as numbers without a unit.

A box is four numbers in brackets: `[1, 2, 3, 4]`, `(1,2),(3,4)`, `<1><2><3><4>`, also nested and in JSON.
"""

from __future__ import annotations

import re

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)"
_SEPARATOR = r"(?:\s*[,;]\s*|\s+|\s*[)>]\s*,?\s*[(<]\s*)"
_NUMBERS_IN_BRACKETS = re.compile(rf"[\[(<{{]\s*({_NUMBER}(?:{_SEPARATOR}{_NUMBER})*)\s*,?\s*[\])>}}]")
_NUMBER_ALONE = re.compile(_NUMBER)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def find_boxes(text: str) -> list[list[float]]:
    """Return the boxes in an answer, in their order; empty: it has none that can be read.

    Reasoning before `</think>` does not count, nor does what is outside of `<answer>` where the answer has it. Brackets
    with more or fewer than four numbers are no box.
    """
    text = text.rpartition("</think>")[2]
    marked_answers = _ANSWER.findall(text)
    if marked_answers:
        text = marked_answers[-1]
    boxes = []
    for match in _NUMBERS_IN_BRACKETS.finditer(text):
        numbers = [float(number) for number in _NUMBER_ALONE.findall(match[1])]
        if len(numbers) == 4:
            boxes.append(numbers)
    return boxes
