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

AUTO_CLASSES = "transformers.models.auto.modeling_auto"
ENCODERS = "e2e_vl.encoders"  # the package registers its encoders when it is imported


def register_encoders() -> None:
    """See above; called once, by `import e2e_vl`."""
    if AUTO_CLASSES in sys.modules:
        importlib.import_module(ENCODERS)
    else:
        sys.meta_path.insert(0, _AfterAutoClasses())


class _AfterAutoClasses(importlib.abc.MetaPathFinder):
    """Imports the encoders right after the Auto classes."""

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != AUTO_CLASSES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            importlib.import_module(ENCODERS)

        spec.loader.exec_module = execute_and_register
        return spec
