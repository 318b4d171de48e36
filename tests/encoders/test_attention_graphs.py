"""What an encoder says of its attention maps is what they hold."""

from __future__ import annotations

import pytest

from e2e_vl.encoders.base import Encoder, NoEncoder, NoEncoderConfig
from e2e_vl.structures import AttentionBlock
from tests.encoders.test_lxmert import make_model as make_lxmert
from tests.encoders.test_visual_bert import make_encoder as make_visual_bert
from tests.encoders.test_vl_bert import make_inputs
from tests.encoders.test_vl_bert import make_model as make_vl_bert

ENCODERS = {
    "one stack, with an end": (lambda: make_vl_bert(uses_whole_image=True), {"joint": 2}),
    "one stack": (make_visual_bert, {"joint": 2}),
    "late fusion": (lambda: make_visual_bert(bypass_transformer=True), {"language": 2, "joint": 1}),
    "three stacks": (make_lxmert, {"language": 4, "vision": 3, "cross": 2}),
    "three stacks, two images": (lambda: make_lxmert(max_images=2), {"language": 4, "vision": 3, "cross": 2}),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_the_blocks_of_each_graph_are_those_that_are_not_zero(name):
    make, layers = ENCODERS[name]
    encoder: Encoder = make()
    texts, regions = make_inputs()
    maps = encoder(texts, regions, output_attentions=True).attentions
    graphs = encoder.attention_graphs
    assert {name: len(graph.steps) for name, graph in graphs.items()} == layers
    length, count = texts.attention_mask.shape[1], regions.attention_mask.shape[1]
    words, places = slice(0, length), slice(length, length + count)
    blocks = {
        AttentionBlock.WORDS_TO_WORDS: (words, words),
        AttentionBlock.WORDS_TO_REGIONS: (words, places),
        AttentionBlock.REGIONS_TO_WORDS: (places, words),
        AttentionBlock.REGIONS_TO_REGIONS: (places, places),
    }
    used: dict[int, set[AttentionBlock]] = {}
    for graph in graphs.values():
        for step in graph.steps:
            for block in graph.blocks:
                queries, keys = blocks[block]
                assert maps[step][1, :, queries, keys].any(), f"step {step} has no {block}"
            assert not used.setdefault(step, set()) & graph.blocks, "a block of a map is in one graph only"
            used[step] |= graph.blocks
    for step, found in used.items():  # what no graph names is zero
        for block in set(blocks) - found:
            queries, keys = blocks[block]
            assert not maps[step][1, :, queries, keys].any(), f"step {step} also has {block}"
    if "two images" not in name:
        assert set(used) == set(range(len(maps)))


def test_an_encoder_without_maps_has_no_graphs():
    assert not NoEncoder(NoEncoderConfig(vocab_size=5, feature_dim=7)).attention_graphs
