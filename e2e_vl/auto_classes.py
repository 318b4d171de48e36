"""`AutoModel.from_pretrained` of transformers knows the encoders of this project after `import e2e_vl`.

Transformers and torch take seconds to import, too long for `--help` and for the check of a setting. So the encoders are
registered when the program itself imports the Auto classes, or at once if it did so before.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

# In this order: the second imports the first.
AUTO_CLASSES = ("transformers.models.auto.configuration_auto", "transformers.models.auto.modeling_auto")
ENCODERS = "e2e_vl.encoders"  # the package registers its encoders when it is imported


def register_encoders() -> None:
    """See above; called once, by `import e2e_vl`."""
    if any(name in sys.modules for name in AUTO_CLASSES):
        importlib.import_module(ENCODERS)
    else:
        sys.meta_path.insert(0, _AfterAutoClasses())


class _AfterAutoClasses(importlib.abc.MetaPathFinder):
    """Imports the encoders right after the Auto classes."""

    def __init__(self) -> None:
        self.awaited = list(AUTO_CLASSES)

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.awaited:
            return None
        self.awaited.remove(name)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            if AUTO_CLASSES[1] not in sys.modules or name == AUTO_CLASSES[1]:  # else the second is not ready yet
                importlib.import_module(ENCODERS)

        spec.loader.exec_module = execute_and_register
        return spec
