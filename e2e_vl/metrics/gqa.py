"""GQA: the scores of the official evaluation script, pinned by golden data.

Answers are compared as they are: case and spaces count. Only balanced questions are scored; unbalanced ones matter
where a balanced question entails them (`consistency`).

A record holds the keys of the official files: "questionId", "prediction", "question", "answer" (None or no key where it
is unknown), "isBalanced", "types" {"structural", "semantic", "detailed"}, "group" (`groups.global`), "entailed" (ids)
and "steps" (of reasoning in its program), and where the choices of the question are known the booleans "is_valid" and
"is_plausible" (see `belongs`), and where attention over regions is known "grounding" (see `grounding`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from detector.errors import UserError
from e2e_vl.metrics.submission_files import write_list

OPEN = "query"  # the structural type of open questions; all others are binary
COMMON = ("color", "material", "shape")  # choices of questions such as "What do both have in common?"
_KINDS = {"accuracyPerStructuralType": "structural", "accuracyPerSemanticType": "semantic"}

Record = Mapping[str, Any]


def belongs(answer: str, choices: Iterable[str], types: Mapping[str, str]) -> bool:
    """Whether an answer is among the valid (or plausible) choices of a question of these types."""
    return answer in (COMMON if "Common" in types["detailed"] else choices)


def gqa_scores(records: Iterable[Record], *, with_consistency: bool = True) -> dict[str, Any]:
    """What the official script reports, in per cent.

    Args:
        records: the questions of a split with their predictions, see the module.
        with_consistency: needs the predictions for all entailed questions.

    Returns:
        "accuracy", "binary", "open" and, where the choices are known, "validity" and "plausibility"; "grounding" where
        it is known; "consistency"; the lower the better "distribution" (chi-square / 100); and
        "accuracyPerStructuralType", "accuracyPerSemanticType", "accuracyPerLength" (words) and "accuracyPerSteps", each
        {type: {"accuracy", "count"}}. A score of no question is 0, as in the script.

    Raises:
        ValueError: there is no balanced question with an answer, or a question that another one entails has no
            prediction.
    """
    records = [record for record in records if record.get("answer") is not None]
    scored = [record for record in records if record["isBalanced"]]
    if not scored:
        raise UserError("there is no balanced question with an answer to score; predict a split that has some")
    lists: dict[str, list[bool]] = {"accuracy": [], "binary": [], "open": []}
    tables: dict[str, dict[str, list[bool]]] = {
        name: defaultdict(list) for name in (*_KINDS, "accuracyPerLength", "accuracyPerSteps")
    }
    for record in scored:
        hit = is_hit(record)
        lists["accuracy"].append(hit)
        lists["open" if record["types"]["structural"] == OPEN else "binary"].append(hit)
        for table, kind in _KINDS.items():
            tables[table][record["types"][kind]].append(hit)
        tables["accuracyPerLength"][str(len(record["question"].split()))].append(hit)
        tables["accuracyPerSteps"][str(record["steps"])].append(hit)
    for name, key in (("validity", "is_valid"), ("plausibility", "is_plausible")):
        if all(key in record for record in scored):
            lists[name] = [record[key] for record in scored]
    scores: dict[str, Any] = {name: 100 * _mean(values) for name, values in lists.items()}
    if all("grounding" in record for record in scored):
        scores["grounding"] = 100 * _mean([record["grounding"] for record in scored])
    if with_consistency:
        shares = consistency_shares(records)
        scores["consistency"] = 100 * _mean(shares)
    scores["distribution"] = distribution(scored) / 100
    for name, table in tables.items():
        scores[name] = {
            key: {"accuracy": 100 * _mean(values), "count": len(values)} for key, values in sorted(table.items())
        }
    return scores


def is_hit(record: Record) -> bool:
    """The predicted answer is the annotated one, letter by letter."""
    return record["prediction"] == record["answer"]


def entailed_ids(record: Record) -> list[str]:
    """The other questions whose answers follow from this one and its answer."""
    return [other for other in record.get("entailed") or () if other != record["questionId"]]


def consistency_shares(records: Sequence[Record]) -> list[float]:
    """Of each balanced question with a right answer that entails others: the share of those with a right answer.

    Raises:
        ValueError: one of those has no prediction.
    """
    hits = {record["questionId"]: is_hit(record) for record in records}
    shares = []
    for record in records:
        if not record["isBalanced"] or not is_hit(record):
            continue
        others = entailed_ids(record)
        missing = next((other for other in others if other not in hits), None)
        if missing is not None:
            raise UserError(
                f"question {record['questionId']} entails question {missing}, which has no prediction; predict all "
                "questions, not only the balanced ones, or leave consistency out"
            )
        if others:
            shares.append(sum(hits[other] for other in others) / len(others))
    return shares


def distribution(records: Iterable[Record]) -> float:
    """How far predicted answers are distributed from annotated ones: the chi-square of each group, weighted by its
    size.

    Groups are questions about the same kind of thing ("group"); questions without one do not count, nor do predictions
    that are no annotated answer of the group. 0 where there is no group.
    """
    gold: dict[str, Counter[str]] = defaultdict(Counter)
    predicted: dict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
        if record.get("group") is not None:
            gold[record["group"]][record["answer"]] += 1
            predicted[record["group"]][record["prediction"]] += 1
    total = weighted = 0.0
    for group, counts in gold.items():
        size = counts.total()
        chi_square = sum((predicted[group][answer] - count) ** 2 / count for answer, count in counts.items())
        weighted += chi_square * size
        total += size
    return weighted / total if total else 0.0


def gqa_metrics(records: Iterable[Record]) -> dict[str, float]:
    """The same scores as fractions, 0 to 1, of records that hold prediction and truth.

    Records without "types", such as those of LXMERT's files of balanced questions, have an accuracy alone.

    Returns:
        "count", and if there are balanced questions with answers "accuracy", "accuracy/binary" and "accuracy/open"
        where there are such questions, "accuracy_by_structure/<type>", "accuracy_by_meaning/<type>",
        "accuracy_by_words/<n>", "accuracy_by_steps/<n>", "distribution" (0 is best, it has no upper end), and where
        they are known "validity", "plausibility", "grounding" and "consistency", which is left out where entailed
        questions were not predicted.
    """
    records = list(records)
    metrics = {"count": float(len(records))}
    answered = [record for record in records if record.get("answer") is not None]
    if answered and not any("types" in record for record in answered):
        return metrics | {"accuracy": _mean([is_hit(record) for record in answered])}
    if not any(record["isBalanced"] for record in answered):
        return metrics
    known = {record["questionId"] for record in records}
    entailing = [entailed_ids(record) for record in records if record["isBalanced"]]
    is_complete = any(entailing) and all(other in known for others in entailing for other in others)
    scores = gqa_scores(records, with_consistency=is_complete)
    metrics["accuracy"] = scores["accuracy"] / 100
    is_open = {record["types"]["structural"] == OPEN for record in records if record["isBalanced"]}
    for kind, name in ((False, "binary"), (True, "open")):
        if kind in is_open:
            metrics[f"accuracy/{name}"] = scores[name] / 100
    names = ("structure", "meaning", "words", "steps")
    official = (*_KINDS, "accuracyPerLength", "accuracyPerSteps")
    for name, table in zip(names, official, strict=True):
        metrics |= {f"accuracy_by_{name}/{key}": row["accuracy"] / 100 for key, row in scores[table].items()}
    known_only = ("validity", "plausibility", "grounding", "consistency")
    metrics |= {name: scores[name] / 100 for name in known_only if name in scores}
    return metrics | {"distribution": scores["distribution"]}


def grounding(annotated: Sequence[Sequence[float]], attended: Iterable[tuple[Sequence[float], float]]) -> float:
    """How much attention lies on the objects that a question and its answer name; of one question.

    Each annotated box adds the attention of every region times the share of the region that lies in the box, so that
    attention on several annotated boxes counts several times. (The official script never adds the whole image, although
    it means to for questions about the scene: it looks for the word among the keys of a program's steps.)

    Args:
        annotated: boxes xyxy of those objects, from 0 to 1 of the image's sides (`annotations` of the question).
        attended: boxes xyxy of the same kind, such as regions or the cells of a map, with their attention.
    """
    total = 0.0
    for box, attention in attended:
        x1, y1, x2, y2 = box
        area = (x2 - x1) * (y2 - y1)
        for other in annotated:
            width = max(min(x2, other[2]) - max(x1, other[0]), 0)
            height = max(min(y2, other[3]) - max(y1, other[1]), 0)
            total += attention * width * height / area
    return total


def write_submission(path: str | Path, records: Iterable[Record]) -> None:
    """Write predictions as the evaluation server wants them: a JSON list of {"questionId": str, "prediction": str}.

    Raises:
        ValueError: a question twice.
    """
    counts = Counter()
    rows = []
    for record in records:
        counts[record["questionId"]] += 1
        rows.append({"questionId": record["questionId"], "prediction": record["prediction"]})
    double = next((name for name, count in counts.items() if count > 1), None)
    if double is not None:
        raise UserError(f"the predictions have question {double} twice; one record each is expected")
    write_list(path, rows)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
