"""Gradients of a model's stages on some training batches: where does the task's gradient get lost?

A stage is a part of the detector (stem, res2, ..., a pyramid, res5 or a box head), the projection of region features
into the encoder, a layer of the encoder, or a head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers.modeling_layers import GradientCheckpointingLayer

from detector.checkpoint import check_arrays
from detector.structures import Loss
from e2e_vl.config import RunConfig
from e2e_vl.encoders.base import Encoder
from e2e_vl.model import VisionLanguageModel
from e2e_vl.run.evaluate import task_loss_weights
from e2e_vl.run.optim import build_optimizer
from e2e_vl.structures import Batch

Stages = Mapping[str, Sequence[nn.Parameter]]

# names of stages
RPN = "rpn"
PYRAMID = "fpn"
REGIONS = "region projection"
EMBEDDINGS = "embeddings"
OTHER = "encoder, other"
HEAD = "head"
PHRASES = "phrase head"
REFINEMENT = "box refinement"


@dataclasses.dataclass(frozen=True)
class StageGradient:
    """The gradient of a stage; norms are over all its parameters, and means are over batches."""

    stage: str
    is_trained: bool  # False: all its parameters are frozen, and all gradients 0
    weight_norm: float
    task_gradient: float  # mean norm of the gradient of the task's losses, phrases included
    detection_gradient: float  # of the detection losses; 0 without any
    # norm of the mean gradient of the task / mean norm: 1 if all batches pull in the same direction; about one by the
    # square root of their number if each pulls in its own. None: there is no gradient
    agreement: float | None
    # norm of the update at the highest learning rates of the run / norm of the weights; None: the optimiser's state is
    # unknown
    update: float | None

    @property
    def relative_gradient(self) -> float:
        """Norm of the gradient of the task / norm of the weights."""
        return self.task_gradient / self.weight_norm if self.weight_norm else 0.0


def trunk_stages(backbone: nn.Module) -> dict[str, nn.Module]:
    """Return the stages of a backbone, by name: those of the network under a pyramid, where there is one."""
    trunk = getattr(backbone, "bottom_up", backbone)
    stages = {}
    for name, module in trunk.named_children():
        if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
            stages[name] = module
    return stages


def list_stages(model: VisionLanguageModel) -> Stages:
    """Return the parameters of each stage of a model, from the pixels to the heads."""
    stages: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.detector.named_parameters():
        stages.setdefault(detector_stage(name), []).append(parameter)
    stages |= {REGIONS: [], EMBEDDINGS: []}
    layers = layer_names(model.encoder)
    stages |= {stage: [] for stage in layers.values()}
    for name, parameter in model.encoder.named_parameters():
        stages.setdefault(encoder_stage(name, layers, model.encoder.region_modules), []).append(parameter)
    stages[HEAD] = list(model.task.parameters())
    if model.phrase_head is not None:
        stages[PHRASES] = list(model.phrase_head.parameters())
    if model.box_refinement is not None:
        stages[REFINEMENT] = list(model.box_refinement.parameters())
    return {stage: parameters for stage, parameters in stages.items() if parameters}


def detector_stage(name: str) -> str:
    """Return the stage of a detector's parameter, such as "res4" of "backbone.res4.0.conv1.weight"."""
    part, *rest = name.split(".")
    if part == "proposal_generator":
        return RPN
    if part == "backbone" and rest[0] == "bottom_up":
        return rest[1]
    if part == "backbone" and rest[0].startswith("fpn_"):
        return PYRAMID
    if part in ("backbone", "roi_heads"):
        return rest[0]
    return part


def layer_names(encoder: Encoder) -> dict[str, str]:
    """Return the stage of each layer of an encoder, by the name of its module: "layers.0" is "layer 1"."""
    names = {}
    for name, module in encoder.named_modules():
        if isinstance(module, GradientCheckpointingLayer):
            stack, _, number = name.rpartition(".")
            kind = stack.rpartition(".")[2].removesuffix("s")
            names[name] = f"{kind} {int(number) + 1}" if number.isdigit() else name
    return names


def encoder_stage(name: str, layers: Mapping[str, str], region_modules: Sequence[str]) -> str:
    """Return the stage of an encoder's parameter."""
    if any(name.startswith(f"{module}.") for module in region_modules):
        return REGIONS
    for module, stage in layers.items():
        if name.startswith(f"{module}."):
            return stage
    return EMBEDDINGS if name.startswith("embeddings.") else OTHER


def measure_gradients(
    config: RunConfig,
    model: VisionLanguageModel,
    batches: Sequence[Batch],
    *,
    optimizer_state: Path | None = None,
    is_untrained: bool = False,
    name: str = "model",
) -> list[StageGradient]:
    """Measure the gradients of each stage in training mode. The model's weights and batch statistics change.

    Args:
        batches: training batches on the CPU.
        optimizer_state: file with the state of the optimiser; None: unknown.
        is_untrained: the optimiser has made no step yet, and so has no state.
        name: of the progress bar.
    """
    device = next(model.parameters()).device
    stages = list_stages(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    task_sums = GradientSums(trained)
    detection_sums = GradientSums(trained)
    model.train()
    torch.manual_seed(config.seed)  # of dropout and of the RoIs that are sampled
    for batch in tqdm(batches, desc=f"{name}: gradients", unit="batch", leave=False, delay=1):
        output = model(batch.to(device))
        task_loss = weigh_losses(output.task_losses, task_loss_weights(config))
        weights = {}
        for loss_name in output.regions.losses:
            weights[loss_name] = config.detector.loss_weight * config.detector.loss_weights.get(loss_name, 1.0)
        detection_loss = weigh_losses(output.regions.losses, weights)
        if task_loss.requires_grad:
            task_sums.add(torch.autograd.grad(task_loss, trained, retain_graph=True, allow_unused=True), stages)
        if detection_loss.requires_grad:
            detection_sums.add(torch.autograd.grad(detection_loss, trained, allow_unused=True), stages)
    weight_norms = {stage: norm_of(parameters) for stage, parameters in stages.items()}
    updates: dict[str, float | None] = dict.fromkeys(stages)
    if optimizer_state is not None or is_untrained:
        for parameter in trained:
            parameter.grad = (task_sums.total[parameter] + detection_sums.total[parameter]) / len(batches)
        updates |= measure_updates(config, model, stages, optimizer_state)
    results = []
    for stage, parameters in stages.items():
        mean_norm = task_sums.norms.get(stage, 0.0) / len(batches)
        norm_of_mean = norm_of([task_sums.total[row] for row in parameters if row in task_sums.total]) / len(batches)
        update = updates[stage]
        if update is not None and weight_norms[stage]:
            update /= weight_norms[stage]
        result = StageGradient(
            stage=stage,
            is_trained=any(parameter.requires_grad for parameter in parameters),
            weight_norm=weight_norms[stage],
            task_gradient=mean_norm,
            detection_gradient=detection_sums.norms.get(stage, 0.0) / len(batches),
            agreement=norm_of_mean / mean_norm if mean_norm else None,
            update=update,
        )
        results.append(result)
    return results


class GradientSums:
    """Sums of gradients over batches, and of their norms by stage."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.total = {parameter: torch.zeros_like(parameter) for parameter in parameters}
        self.norms: dict[str, float] = {}

    def add(self, gradients: Sequence[Tensor | None], stages: Stages) -> None:
        """Add the gradients of one batch; None: the loss does not depend on the parameter."""
        of_parameter = {}
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None:
                of_parameter[parameter] = gradient
                self.total[parameter] += gradient
        for stage, parameters in stages.items():
            norm = norm_of([of_parameter[parameter] for parameter in parameters if parameter in of_parameter])
            self.norms[stage] = self.norms.get(stage, 0.0) + norm


def weigh_losses(losses: Mapping[str, Loss], weights: Mapping[str, float]) -> Tensor:
    """Return the weighted sum of the means of losses, as one training step has it; other weights are 1."""
    total = torch.zeros(())
    for name, loss in losses.items():
        total = total.to(loss.total.device) + weights.get(name, 1.0) * loss.mean
    return total


def measure_updates(
    config: RunConfig, model: VisionLanguageModel, stages: Stages, state: Path | None
) -> dict[str, float]:
    """Take one step with the gradients of the parameters; return the norm of the change of each stage.

    The learning rates are the highest ones of the run, so that steps of warm-up and decay can be compared.

    Args:
        state: file with the state of the optimiser; None: it has made no step yet.
    """
    settings = config.train
    before = {stage: [parameter.detach().clone() for parameter in stages[stage]] for stage in stages}
    device = next(model.parameters()).device
    optimizer = build_optimizer(model, settings)
    if state is not None:
        options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        check_arrays(state)
        optimizer.load_state_dict(torch.load(state, map_location=device, weights_only=True))
        for group, current in zip(optimizer.param_groups, options, strict=True):
            group.update(current)
    if settings.max_grad_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
    optimizer.step()
    updates = {}
    for stage, parameters in stages.items():
        pairs = zip(parameters, before[stage], strict=True)
        updates[stage] = norm_of([parameter - old for parameter, old in pairs])
    return updates


def norm_of(tensors: Sequence[Tensor]) -> float:
    """Return the norm of all values of some tensors together."""
    if not tensors:
        return 0.0
    norms = [torch.linalg.vector_norm(tensor.detach().float()) for tensor in tensors]
    return float(torch.linalg.vector_norm(torch.stack(norms)))
