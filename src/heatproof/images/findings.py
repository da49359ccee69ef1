"""Pictures that may have several findings: how findings are listed, and each one as an entry of its own.

A picture has a set of findings, perhaps none. Whatever is said about one finding of one picture (its map, the
scores of that map) belongs to the entry PICTURE#FINDING; what is said about the picture as a whole (the
network's answers) keeps the picture's own name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from heatproof.errors import InputError, did_you_mean

SEPARATORS = "|;"
NOTHING = ("", "nan", "no finding", "no findings")
THRESHOLD = 0.5  # from which probability on a finding counts as predicted
YES, NO = ("1", "1.0", "true", "yes"), ("0", "0.0", "false", "no", "", "nan")


def entry_id(picture: str, finding: str) -> str:
    """
    >>> entry_id("7.png", "mass")
    '7.png#mass'
    """
    return f"{picture}#{finding}"


def finding_name(names: Sequence[str], finding: int) -> str:
    """What entries call a finding: its name, or its number where it has none."""
    return names[finding] if finding < len(names) else str(finding)


def finding_limits(thresholds: float | Sequence[float], findings: int) -> tuple[float, ...]:
    """From which probability on each finding counts: one for all, or one each."""
    if isinstance(thresholds, float | int):
        return (float(thresholds),) * findings
    if len(thresholds) != findings:
        raise InputError(f"there are {len(thresholds)} thresholds for {findings} labels; give one each")
    return tuple(map(float, thresholds))


def named_findings(text: str, known: Sequence[str] | None = None) -> tuple[str, ...]:
    """The findings that a cell lists; a known one may be called anything.

    >>> named_findings("mass|nodule; edema"), named_findings("No Finding")
    (('mass', 'nodule', 'edema'), ())
    """
    if known is not None and text in known:
        return (text,)
    parts = (part.strip() for part in re.split(f"[{SEPARATORS}]", text))
    return tuple(part for part in parts if part.lower().replace("_", " ") not in NOTHING)


def marked_findings(row: Mapping[str, str], columns: Sequence[str], where: str) -> tuple[str, ...]:
    """Those of the columns, one per finding, that hold a 1."""
    found = []
    for column in columns:
        cell = row[column].lower()
        if cell not in (*YES, *NO):
            hint = "; what is uncertain is no truth: decide, or leave the picture out" * (cell[:1] == "-")
            raise InputError(f"{where}: the column {column!r} holds 0 or 1, not {row[column]!r}{hint}")
        if cell in YES:
            found.append(column)
    return tuple(found)


def number_findings(
    listed: Sequence[Sequence[Any]], class_names: Sequence[str] | None, where: str
) -> tuple[list[tuple[int, ...]], tuple[str, ...]]:
    """Findings by name or number as sorted numbers, and their names.

    class_names: the model's findings in its own order; else names are sorted and numbers name themselves.
    """
    texts = [[str(one) for one in row] for row in listed]
    used = sorted({text for row in texts for text in row})
    if class_names is not None:
        classes = tuple(class_names)
    elif used and all(text.isdecimal() for text in used):
        classes = tuple(str(k) for k in range(max(map(int, used)) + 1))
    else:
        classes = tuple(used)
    if len(classes) < 2:
        raise InputError(
            f"{where}: several findings per picture are at least two kinds of them, but there is "
            f"{classes[0] if classes else 'none'}; give one finding as labels 0 and 1, or name all with "
            "class_names"
        )
    index = {str(k): k for k in range(len(classes))} | {name: k for k, name in enumerate(classes)}
    for text in used:
        if text not in index:
            raise InputError(
                f"{where}: the finding {text!r} is none of the {len(classes)}; {did_you_mean(text, classes)}"
            )
    return [tuple(sorted({index[text] for text in row})) for row in texts], classes


def lists_several(labels: Any) -> bool:
    """Whether labels are a table with a column per finding, or a list of findings per picture."""
    if isinstance(labels, (list, tuple)):
        return any(isinstance(one, (list, tuple, set, frozenset)) or np.ndim(one) == 1 for one in labels)
    return len(getattr(labels, "shape", ())) == 2 and labels.shape[1] > 1


def read_findings(
    labels: Any, class_names: Sequence[str] | None
) -> tuple[list[tuple[int, ...]], tuple[str, ...]]:
    """Findings per picture: a table "b k" of 0 and 1, or lists of names or numbers."""
    if isinstance(labels, (list, tuple)) and not all(hasattr(one, "shape") for one in labels):
        return number_findings([sorted(row, key=str) for row in labels], class_names, "labels")
    rows = labels if hasattr(labels, "shape") else list(labels)
    table = np.asarray([np.asarray(row) for row in rows])
    if table.ndim != 2 or not np.isin(table, (0, 1)).all():
        raise InputError(
            f"labels of several findings are a table of 0 and 1, a row per picture; got {table.dtype} of "
            f"shape {table.shape}"
        )
    names = tuple(class_names) if class_names is not None else tuple(map(str, range(table.shape[1])))
    if len(names) != table.shape[1]:
        raise InputError(f"labels have {table.shape[1]} columns, but there are {len(names)} class names")
    return number_findings([np.flatnonzero(row).tolist() for row in table], names, "labels")
