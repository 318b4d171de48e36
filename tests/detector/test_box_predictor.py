from __future__ import annotations

import torch
import torch.nn.functional as F

from detector.config import AttributeConfig, ROIHeadsConfig
from detector.roi_heads import BoxPredictor

K, A, D = 3, 4, 6
ATTRIBUTES = AttributeConfig(num_classes=A, embedding_dim=5, hidden_dim=7, loss_weight=0.5)


def make(attributes: AttributeConfig = ATTRIBUTES) -> BoxPredictor:
    torch.manual_seed(0)
    predictor = BoxPredictor(D, ROIHeadsConfig(num_classes=K), attributes)
    for parameter in predictor.parameters():
        torch.nn.init.normal_(parameter)
    return predictor


def test_shapes_and_names():
    shapes = {name: tuple(value.shape) for name, value in make().state_dict().items()}
    assert shapes == {
        "cls_score.weight": (K + 1, D),
        "cls_score.bias": (K + 1,),
        "bbox_pred.weight": (4 * K, D),
        "bbox_pred.bias": (4 * K,),
        "cls_embedding.weight": (K + 1, 5),
        "fc_attr.weight": (7, D + 5),
        "fc_attr.bias": (7,),
        "attr_score.weight": (A + 1, 7),
        "attr_score.bias": (A + 1,),
    }
    assert not any("attr" in name for name in make(AttributeConfig()).state_dict())


def test_attribute_loss_averages_over_the_labels_of_each_foreground_roi():
    predictor = make()
    features = torch.randn(5, D)
    classes = torch.tensor([0, 2, K, 1, 1])
    labels = torch.tensor([[1, 3, -1], [0, -1, -1], [2, 2, 2], [-1, -1, -1], [-1, 2, -1]])
    loss = predictor.attribute_loss(features, classes, labels)
    logits = predictor.attributes(features, classes)  # with the embedding of the annotated class

    def entropy(row: int, label: int) -> torch.Tensor:
        return F.cross_entropy(logits[row], torch.tensor(label))

    expected = (entropy(0, 1) + entropy(0, 3)) / 2 + entropy(1, 0) + entropy(4, 2)
    torch.testing.assert_close(loss.total, 0.5 * expected)
    assert loss.count == 3  # background and unlabelled objects take no part


def test_attribute_loss_without_labels_is_zero_with_a_gradient():
    predictor = make()
    loss = predictor.attribute_loss(torch.randn(2, D), torch.tensor([K, 0]), torch.full((2, 3), -1))
    assert loss.mean == 0
    loss.mean.backward()
    assert predictor.attr_score.weight.grad.abs().sum() == 0


def test_box_losses_use_the_deltas_of_the_annotated_class():
    predictor = make()
    boxes = torch.tensor([[0.0, 0.0, 10.0, 10.0], [5.0, 5.0, 9.0, 9.0]])
    deltas = torch.zeros(2, 4 * K)
    deltas[0, 4:8] = torch.tensor([1.0, 0.0, 0.0, 0.0])  # class 1 moves by a tenth of the width, weight 10
    losses = predictor.box_losses(
        torch.zeros(2, K + 1), deltas, boxes, torch.tensor([1, K]), torch.tensor([[1.0, 0.0, 11.0, 10.0], [0.0] * 4])
    )
    torch.testing.assert_close(losses["loss_box_reg"].total, torch.tensor(0.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(losses["loss_cls"].mean, torch.tensor(4.0).log())
    other = predictor.box_losses(
        torch.zeros(2, K + 1), deltas, boxes, torch.tensor([0, K]), torch.tensor([[1.0, 0.0, 11.0, 10.0], [0.0] * 4])
    )
    torch.testing.assert_close(other["loss_box_reg"].mean, torch.tensor(1.0 / 2))  # over both RoIs
