"""From settings to objects: the only place that knows which detectors, encoders, tasks and data sets there are.

A new encoder, task or data set is one file of its own and one entry in the dicts below.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from detector.config import DetectorConfig
from detector.faster_rcnn import FasterRCNN
from detector.images import ResizeRule
from detector.interface import Detector
from detector.selection import SelectionRule
from e2e_vl.config import RunConfig
from e2e_vl.data.collate import collate
from e2e_vl.data.refcoco import RefCOCODataset, referring_texts
from e2e_vl.encoders.vl_bert import VLBertConfig, VLBertModel
from e2e_vl.model import VisionLanguageModel
from e2e_vl.synthetic.build import make_refcoco
from e2e_vl.synthetic.scenes import SceneConfig
from e2e_vl.tasks.base import Task
from e2e_vl.tasks.refcoco import ReferringConfig, ReferringTask
from e2e_vl.text import build_vocabulary, load_tokenizer

DETECTORS = {"builtin": FasterRCNN}
ENCODERS = {"vl_bert": (VLBertConfig, VLBertModel)}
TASKS = {"refcoco": (ReferringConfig, ReferringTask)}
DATASETS = {"refcoco": RefCOCODataset}
TRAINING_TEXTS = {"refcoco": referring_texts}
SYNTHETIC = {"refcoco": make_refcoco}
