"""Generates the tables in docs/ of configuration fields, of fields on resuming, and of metrics.

    python docs/tools/reference.py

A test fails if a page differs from its generated form.
"""

import re
from pathlib import Path

from seeupo_jax.configuration.field_reference import describe_fields, describe_groups
from seeupo_jax.configuration.resume_fields import DECISIONS, Decision
from seeupo_jax.metric_table import METRICS

DOCS = Path(__file__).parents[1]


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def table(heading: str, rows: list[list[str]]) -> str:
    lines = [heading, "|" + "---|" * (heading.count("|") - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(map(cell, row))} |" for row in rows)]) + "\n"


def configuration(page: str) -> str:
    """The page with a generated table per group of fields, from the heading `config` on."""
    head, _, _ = page.partition("## config\n")
    parts = []
    for group, about in describe_groups().items():
        rows = [
            [f"`{field.name}`", field.type, f"`{field.default}`" if field.default else "empty"]
            + [field.allowed, field.words]
            for field in describe_fields()
            if field.group == group
        ]
        heading = f"## {f'config.{group}'.removesuffix('.')}\n\n{about}\n\n"
        parts.append(
            heading + table("| field | type | default | allowed | what it decides |", rows)
        )
    return head + "\n".join(parts)


def metrics(page: str) -> str:
    """The page with a generated row per metric; the last cell, its meaning, is kept."""
    head, heading, rows = page.partition("| name | unit | reduction | meaning |\n")
    cells = (re.split(r" ?(?<!\\)\| ?", row)[1:-1] for row in rows.splitlines()[1:])
    meanings = {cell[0]: cell[-1].replace("\\|", "|") for cell in cells}
    names = {f"`{metric.name}`": metric for metric in METRICS.values()}
    return head + table(
        heading.strip(),
        [[name, m.unit, m.over, meanings.get(name, "")] for name, m in names.items()],
    )


def checkpoints(page: str) -> str:
    """The page with the generated table of how fields are handled when a run resumes."""
    head, heading, rest = page.partition("| effect of a change when a run resumes | fields |\n")
    _, _, after = rest.partition("\n\n")
    rows = [
        [f"{kind.value[0].upper()}{kind.value[1:]}", "; ".join(fields_of(kind))]
        for kind in Decision
    ]
    return f"{head}{table(heading.strip(), rows)}\n{after}"


def fields_of(kind: Decision) -> list[str]:
    """The fields with a decision, by group; `all of` a group whose fields all have it."""
    parts = []
    for group, kinds in DECISIONS.items():
        names = [f"`{name}`" for name in kinds.get(kind, "").split()]
        listed = f"`{group}`: {', '.join(names)}" if group else ", ".join(names)
        parts += [f"all of `{group}`" if len(kinds) == 1 else listed] if names else []
    return parts


PAGES = {"configuration.md": configuration, "metrics.md": metrics, "checkpoints.md": checkpoints}

if __name__ == "__main__":
    for name, rewritten in PAGES.items():
        (DOCS / name).write_text(rewritten((DOCS / name).read_text()))
