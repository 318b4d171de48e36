"""Copies the folder `configs` into the package that is installed; all else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # a clone has them beside the package, see CONFIGS in e2e_vl/config.py
            shutil.copytree("configs", Path(self.build_lib) / "e2e_vl" / "configs", dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithConfigs})
