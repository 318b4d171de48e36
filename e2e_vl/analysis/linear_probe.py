"""Linear probes: how well a logistic regression reads a label off features, on other images than it learned from.

Shape legend: rows are annotated objects of all images, joined; `classes` are the values of one label.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from e2e_vl.samples import AnnotatedObjects
from e2e_vl.synthetic.config import COLOURS, SIZES, TEXTURES

CLASS = "class"  # the label of the categories
# values of a label -> its name: attributes of synthetic scenes
KNOWN_LABELS = {frozenset(COLOURS): "colour", frozenset(TEXTURES): "texture", frozenset(SIZES): "size"}
MAX_ATTRIBUTES = 8  # attributes that are labels of their own, where an object may have several
MIN_SHARE = 0.5  # of the objects that have a value in a slot, for the slot to be a label
DECAY = 1e-3  # weight of the squared norm of the weights, relative to the mean cross entropy
STEPS = 100  # of L-BFGS, at most


@dataclasses.dataclass(frozen=True)
class Label:
    """A label of annotated objects."""

    name: str
    classes: tuple[str, ...]
    values: Int64[np.ndarray, " rows"]  # -1: unknown


@dataclasses.dataclass(frozen=True)
class ProbeAccuracy:
    """How often a probe is right about objects of images that it did not learn from."""

    accuracy: float
    chance: float  # accuracy of always saying the most frequent value of the images that it learned from
    trained_on: int  # objects
    judged: int  # objects


def read_labels(objects: Sequence[AnnotatedObjects]) -> dict[str, Label]:
    """Return the labels that annotated objects have, by name: their class, and their attributes.

    Attributes of which every object has one of each kind, such as a colour and a size, make one label of each kind.
    Otherwise each of the most frequent ones is a label with the values "yes" and "no".
    A label with a single value is left out, since there is nothing to tell apart.
    """
    labels = [_class_label(objects), *_attribute_labels(objects)]
    return {label.name: label for label in labels if label is not None and len(np.unique(label.values)) > 1}


def _class_label(objects: Sequence[AnnotatedObjects]) -> Label | None:
    names: list[str | None] = []
    for image_objects in objects:
        if image_objects.names is not None:
            names += image_objects.names
        elif image_objects.classes is not None:
            names += [str(number) for number in image_objects.classes]
        else:
            names += [None] * len(image_objects)
    classes = sorted({name for name in names if name is not None})
    number_of = {name: number for number, name in enumerate(classes)}
    values = [number_of.get(name, -1) for name in names]
    return Label(CLASS, tuple(classes), np.array(values, dtype=np.int64)) if classes else None


def _attribute_labels(objects: Sequence[AnnotatedObjects]) -> list[Label]:
    arrays = [image_objects.attributes for image_objects in objects]
    if any(array is None for array in arrays):
        return []
    slots = max((array.shape[1] for array in arrays), default=0)
    attributes = np.full((sum(map(len, arrays)), slots), -1, dtype=np.int64)
    first = 0
    for array in arrays:
        attributes[first : first + len(array), : array.shape[1]] = array
        first += len(array)
    names = next((image_objects.attribute_names for image_objects in objects), None)
    count = int(attributes.max(initial=-1)) + 1
    if names is None:
        names = [f"attribute {number}" for number in range(count)]
    values_of_slots = [set(column[column >= 0].tolist()) for column in attributes.T]
    is_disjoint = sum(map(len, values_of_slots)) == len(set().union(*values_of_slots))
    is_filled = bool(len(attributes)) and bool(((attributes >= 0).mean(axis=0) >= MIN_SHARE).all())
    if slots and is_disjoint and is_filled:
        return [_slot_label(column, names) for column in attributes.T]
    labels = []
    frequent = Counter(attributes[attributes >= 0].tolist()).most_common(MAX_ATTRIBUTES)
    for number, _ in frequent:
        has_attribute = (attributes == number).any(axis=1)
        labels.append(Label(names[number], ("no", "yes"), has_attribute.astype(np.int64)))
    return labels


def _slot_label(column: Int64[np.ndarray, " rows"], names: Sequence[str]) -> Label:
    """Return the label of attributes that exclude each other."""
    numbers = np.unique(column[column >= 0])
    classes = tuple(names[number] for number in numbers)
    values = np.where(column >= 0, np.searchsorted(numbers, column), -1)
    for known_values, name in KNOWN_LABELS.items():
        if known_values.issuperset(classes):
            return Label(name, classes, values)
    more = "/…" if len(classes) > 3 else ""
    return Label("/".join(classes[:3]) + more, classes, values)


def fit_probe(
    features: Float[Tensor, "rows D"], values: Int64[Tensor, " rows"], is_train: Bool[Tensor, " rows"]
) -> ProbeAccuracy | None:
    """Fit a logistic regression to some rows, and return how often it is right about the others.

    Features are standardised; the weights, not the biases, are penalised by `DECAY`. L-BFGS starts at zero and takes
    all rows at once, so that the result is always the same.

    Args:
        values: the class of each row; -1: unknown, such rows are left out.

    Returns:
        None where one of the halves is empty, or only one class is known to learn from.
    """
    is_known = values >= 0
    train = is_known & is_train
    test = is_known & ~is_train
    train_values = values[train]
    if not test.any() or len(train_values.unique()) < 2:
        return None
    mean = features[train].mean(dim=0)
    std = features[train].std(dim=0)
    std = torch.where(std > 1e-6 * mean.abs().clamp(min=1e-6), std, torch.inf)  # constant features say nothing
    inputs = (features - mean) / std
    inputs = inputs / inputs.shape[1] ** 0.5  # the norm of an input does not depend on the width of the features
    train_inputs = inputs[train]
    number = int(values.max()) + 1
    weight = torch.zeros(number, inputs.shape[1], device=inputs.device, requires_grad=True)
    bias = torch.zeros(number, device=inputs.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=STEPS, line_search_fn="strong_wolfe")

    def compute_loss() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(F.linear(train_inputs, weight, bias), train_values)
        loss = loss + DECAY / 2 * weight.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(compute_loss)
    predicted = F.linear(inputs[test], weight.detach(), bias.detach()).argmax(dim=1)
    most_frequent = train_values.bincount().argmax()
    return ProbeAccuracy(
        accuracy=float((predicted == values[test]).float().mean()),
        chance=float((most_frequent == values[test]).float().mean()),
        trained_on=int(train.sum()),
        judged=int(test.sum()),
    )


def fit_probes(
    features: Float[Tensor, "rows D"], labels: Mapping[str, Label], is_train: Bool[Tensor, " rows"]
) -> dict[str, ProbeAccuracy]:
    """Fit a probe of every label; those that cannot be learned are left out."""
    accuracies = {}
    for name, label in labels.items():
        values = torch.from_numpy(label.values).to(features.device)
        accuracy = fit_probe(features, values, is_train)
        if accuracy is not None:
            accuracies[name] = accuracy
    return accuracies
