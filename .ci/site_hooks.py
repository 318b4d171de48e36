"""Hooks of mkdocs.yml: pages outside docs/ become part of the site, and comments at fields part of the reference.

Links in pages stay as GitHub reads them: relative to the file in the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

OUTSIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "CITATION.cff")
LINK = re.compile(r"(?<=\]\()([^)\s#]+)")  # without its anchor
COMMENT_LINE = re.compile(r"\s*# (.*)")
COMMENT_AFTER_CODE = re.compile(r".*?\S  # (.*)")


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add the files outside docs/; README.md becomes the start page."""
    root = Path(config.config_file_path).parent
    for name in OUTSIDE:
        files.append(File(name, str(root), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Return a page whose links start from its position in the site, no longer from that in the repository."""
    page_folder = posixpath.dirname(page.file.src_uri)
    source_folder = "" if page.file.src_uri in OUTSIDE else posixpath.join("docs", page_folder)

    def link_in_site(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(source_folder, match[0]))
        if not target.startswith("docs/") and target not in OUTSIDE:
            return match[0]  # an address
        return posixpath.relpath(target.removeprefix("docs/"), page_folder or ".")

    return LINK.sub(link_in_site, markdown)


class FieldComments(griffe.Extension):
    """Makes the comments at a field its docstring, and leaves only fields of settings."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Take the comment above a field of a class, and the one behind it, for its docstring."""
        if attr.docstring is not None or attr.lineno is None or not attr.parent.is_class:
            return
        lines = attr.lines_collection[attr.filepath]
        comments: list[str] = []
        for line in reversed(lines[: attr.lineno - 1]):
            comment = COMMENT_LINE.fullmatch(line)
            if comment is None:
                break
            comments.insert(0, comment[1])
        comment = COMMENT_AFTER_CODE.fullmatch(lines[attr.endlineno - 1])
        if comment is not None:
            comments.append(comment[1])
        if comments:
            attr.docstring = griffe.Docstring(" ".join(comments), parent=attr)

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Drop the methods and properties of settings."""
        if not cls.name.endswith("Config"):
            return
        for name, member in list(cls.members.items()):
            if member.is_function or "property" in member.labels:
                del cls.members[name]
