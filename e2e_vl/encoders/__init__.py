"""The encoders, one file each; all are known to `AutoModel` of transformers."""

from __future__ import annotations

import importlib
import pkgutil

from transformers import AutoConfig, AutoModel

from e2e_vl.encoders.base import Encoder

for _file in pkgutil.iter_modules(__path__):
    for _class in vars(importlib.import_module(f"{__name__}.{_file.name}")).values():
        if isinstance(_class, type) and issubclass(_class, Encoder) and _class is not Encoder:
            AutoConfig.register(_class.config_class.model_type, _class.config_class, exist_ok=True)
            AutoModel.register(_class.config_class, _class, exist_ok=True)
