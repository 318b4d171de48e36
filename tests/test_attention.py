"""Attention of an answer over regions, from maps whose steps see words, regions or both."""

from __future__ import annotations

import torch

from e2e_vl.structures import EncoderOutput, TextBatch
from e2e_vl.tasks.gqa import attention_to_regions

LENGTH, REGIONS = 3, 2


def texts(count: int, summary: torch.Tensor | None = None) -> TextBatch:
    ids = torch.ones(count, LENGTH, dtype=torch.int64)
    return TextBatch(ids, ids, ids.bool(), summary)


def step(rows: dict[tuple[int, int], list[float]], count: int = 1, heads: int = 2) -> torch.Tensor:
    """A map in which (text, place) looks at the regions as given; head 1 twice as much as head 0."""
    found = torch.zeros(count, heads, LENGTH + REGIONS + 1, LENGTH + REGIONS + 1)
    for (text, place), shares in rows.items():
        for head in range(heads):
            found[text, head, place, LENGTH : LENGTH + REGIONS] = torch.tensor(shares) * (head + 1)
    return found


def attended(steps: list[torch.Tensor], attention_mask: list[list[bool]], summary=None) -> list[list[float]]:
    states = torch.zeros(len(attention_mask), 1, 1)
    encoded = EncoderOutput(states, states, attentions=tuple(steps))
    return attention_to_regions(encoded, texts(len(attention_mask), summary), torch.tensor(attention_mask)).tolist()


def test_the_last_step_that_sees_regions_counts():
    steps = [step({(0, 0): [0.5, 0.5]}), step({(0, 0): [0.1, 0.3], (0, 1): [0.9, 0.0]}), step({(0, 1): [0.2, 0.7]})]
    torch.testing.assert_close(torch.tensor(attended(steps, [[True, True]])), torch.tensor([[0.25, 0.75]]))


def test_it_is_read_at_the_place_of_the_summary_and_at_real_regions():
    steps = [step({(0, 1): [0.2, 0.6], (1, 2): [0.5, 0.1]}, count=2)]
    found = attended(steps, [[True, True], [False, True]], torch.tensor([1, 2]))
    torch.testing.assert_close(torch.tensor(found), torch.tensor([[0.25, 0.75], [0.0, 1.0]]))


def test_a_text_without_regions_has_none():
    assert attended([step({(0, 0): [0.4, 0.4]})], [[False, False]]) == [[0.0, 0.0]]
