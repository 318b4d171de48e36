"""Writer of a text corpus about the drawn world: descriptions of things that no image shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from e2e_vl.synthetic.format_writer import FormatWriter
from e2e_vl.synthetic.language import RELATIONS, Description, ReferringExpression, to_words
from e2e_vl.synthetic.scene_records import SceneRecord
from e2e_vl.synthetic.scenes import SceneConfig

LINES_PER_SCENE = 4
_OPERATORS = ("biggest", "smallest", "bigger", "smaller", *RELATIONS)
_FRAMES = ("there is {}", "look at {}", "i see {}", "{}", "{} is here", "this is {}")
_SENTENCES_PER_LINE = (1, 9)


class CorpusWriter(FormatWriter[None]):
    """Writes ``corpus.doc``, UTF-8: one paragraph per line, and a blank line now and then as between two documents."""

    def write(self, folder: Path, scenes: Sequence[SceneRecord[None]]) -> None:
        rng = self.recipe.generator("corpus")
        write_corpus(folder / "corpus.doc", self.recipe.scene, rng, lines=LINES_PER_SCENE * len(scenes))


def write_corpus(path: Path, config: SceneConfig, rng: np.random.Generator, *, lines: int) -> None:
    """Write a corpus of ``lines`` paragraphs about the shapes, colours and textures of ``config``."""
    paragraphs = draw_lines(config, rng)
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for _ in range(lines):
            file.write(next(paragraphs) + ("\n\n" if rng.random() < 0.1 else "\n"))


def draw_lines(config: SceneConfig, rng: np.random.Generator) -> Iterator[str]:
    """Endless paragraphs of a few sentences each."""
    while True:
        yield " ".join(_sentence(config, rng) for _ in range(rng.integers(*_SENTENCES_PER_LINE)))


def _sentence(config: SceneConfig, rng: np.random.Generator) -> str:
    operator = _OPERATORS[rng.integers(len(_OPERATORS))] if rng.random() < 0.55 else None
    needs_anchor = operator in RELATIONS or (operator in ("bigger", "smaller") and rng.random() < 0.7)
    anchored = _description(config, rng), operator, _description(config, rng) if needs_anchor else None
    sentence = _FRAMES[rng.integers(len(_FRAMES))].format(to_words(ReferringExpression(*anchored), rng))
    return sentence[0].upper() + sentence[1:] + "."


def _description(config: SceneConfig, rng: np.random.Generator) -> Description:
    chances = {"size": 0.3, "texture": 0.3, "colour": 0.6, "shape": 0.8}
    said = {slot: str(rng.choice(config.values[slot])) for slot, chance in chances.items() if rng.random() < chance}
    return Description(**said)
