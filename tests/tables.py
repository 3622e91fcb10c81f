"""Reading the tables of the documents, so that a document that says something else than the code fails a test."""

from __future__ import annotations

from pathlib import Path


def rows_of(document: Path, heading: str) -> list[dict[str, str]]:
    """Return the rows of the first table under a heading, each as a mapping from its column's title."""
    lines = document.read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("#") and line.lstrip("# ").strip() == heading)
    table = []
    for line in lines[start + 1 :]:
        if line.startswith("|"):
            table.append([cell.strip().replace("`", "") for cell in line.strip().strip("|").split("|")])
        elif table:
            break
    head, _, *body = table
    return [dict(zip(head, row, strict=True)) for row in body]
