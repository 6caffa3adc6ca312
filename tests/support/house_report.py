"""Prints what is worth a look in the package's layout: a report to read, not a rule.

Long files, folders of many modules, and names that several modules or classes share.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from places import ROOT

PACKAGE = ROOT / "seeupo_jax"
LINES = 400
MODULES = 16


def shared(pairs: Iterable[tuple[str, Path]]) -> dict[str, list[Path]]:
    """Names that several files have, with these files."""
    places = defaultdict(list)
    for name, file in pairs:
        places[name].append(file.relative_to(PACKAGE))
    return {name: files for name, files in sorted(places.items()) if len(files) > 1}


def main() -> None:
    """Prints the report."""
    files = sorted(PACKAGE.rglob("*.py"))
    lines = {file: len(file.read_text().splitlines()) for file in files}
    print(f"{sum(lines.values())} lines in {len(files)} modules")
    for file, count in sorted(lines.items(), key=lambda item: -item[1]):
        if count > LINES:
            print(f"{count} lines: {file.relative_to(PACKAGE)}")
    folders = defaultdict(int)
    for file in files:
        folders[file.parent.relative_to(PACKAGE)] += 1
    for folder, count in sorted(folders.items(), key=lambda item: -item[1]):
        if count > MODULES:
            print(f"{count} modules: {folder}")
    stems = shared((file.stem, file) for file in files if not file.stem.startswith("__"))
    classes = shared(
        (node.name, file)
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    for kind, names in (("module", stems), ("class", classes)):
        for name, places in names.items():
            print(f"{kind} {name}: {', '.join(map(str, places))}")


if __name__ == "__main__":
    main()
