"""Labels: class names and numbers, and the labels of multi-label images.

A multi-label image has a set of labels ("findings" in code and file formats), possibly empty. Maps of a label
and their scores are stored under the id IMAGE#FINDING, predictions under the image's own id.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from heatproof.errors import InputError, did_you_mean

SEPARATORS = "|;"
NOTHING = ("", "nan", "no finding", "no findings")
THRESHOLD = 0.5  # least probability of a predicted label
YES, NO = ("1", "1.0", "true", "yes"), ("0", "0.0", "false", "no", "", "nan")
NEGATIVE = re.compile(r"-\d+(\.\d*)?")


def entry_id(image: str, finding: str) -> str:
    """Id of a label of an image, such as 7.png#mass."""
    return f"{image}#{finding}"


def finding_name(names: Sequence[str], finding: int) -> str:
    """The name of a finding in entries: its class name, or its number where it has none."""
    return names[finding] if finding < len(names) else str(finding)


def finding_limits(thresholds: float | Sequence[float], findings: int) -> tuple[float, ...]:
    """The threshold of each label, from one for all or one each."""
    if isinstance(thresholds, float | int):
        return (float(thresholds),) * findings
    if len(thresholds) != findings:
        raise InputError(f"there are {len(thresholds)} thresholds for {findings} labels; give one each")
    return tuple(map(float, thresholds))


def named_findings(text: str, known: Sequence[str] | None = None) -> tuple[str, ...]:
    """The findings that a cell lists; a known name may contain separators.

    >>> named_findings("mass|nodule; edema"), named_findings("No Finding")
    (('mass', 'nodule', 'edema'), ())
    """
    if known is not None and text in known:
        return (text,)
    parts = (part.strip() for part in re.split(f"[{SEPARATORS}]", text))
    return tuple(part for part in parts if part.lower().replace("_", " ") not in NOTHING)


def marked_findings(row: Mapping[str, str], columns: Sequence[str], where: str) -> tuple[str, ...]:
    """Those of the columns, one per finding, that hold a 1."""
    for column in columns:
        if row[column].lower() not in (*YES, *NO):
            hint = "; uncertain labels are not supported: decide, or leave the image out"
            hint *= row[column].startswith("-")
            raise InputError(f"{where}: the column {column!r} holds 0 or 1, not {row[column]!r}{hint}")
    return tuple(column for column in columns if row[column].lower() in YES)


def number_findings(
    listed: Sequence[Sequence[Any]], class_names: Sequence[str] | None, where: str
) -> tuple[list[tuple[int, ...]], tuple[str, ...]]:
    """Findings by name or number as sorted numbers, and their names.

    class_names: the model's findings in its own order; else names are sorted and numbers name themselves.
    """
    texts = [[str(name) for name in row] for row in listed]
    used = sorted({text for row in texts for text in row})
    if class_names is not None:
        classes = tuple(class_names)
    elif used and all(text.isdecimal() for text in used):
        classes = tuple(str(k) for k in range(max(map(int, used)) + 1))
    else:
        classes = tuple(used)
    if len(classes) < 2:
        only = classes[0] if classes else "none"
        raise InputError(
            f"{where}: multi-label images need at least two labels, but there is {only}; give a single label "
            "as 0 and 1, or name all with class_names"
        )
    index = {str(k): k for k in range(len(classes))} | {name: k for k, name in enumerate(classes)}
    for text in used:
        if text not in index:
            hint = did_you_mean(text, classes)
            raise InputError(f"{where}: the label {text!r} is none of the {len(classes)}; {hint}")
    return [tuple(sorted({index[text] for text in row})) for row in texts], classes


def lists_several(labels: Any) -> bool:
    """Whether labels are multi-label: a table with a column per label, or a list per image."""
    if isinstance(labels, (list, tuple)):
        return any(isinstance(row, (list, tuple, set, frozenset)) or np.ndim(row) == 1 for row in labels)
    return len(getattr(labels, "shape", ())) == 2 and labels.shape[1] > 1


def read_findings(
    labels: Any, class_names: Sequence[str] | None
) -> tuple[list[tuple[int, ...]], tuple[str, ...]]:
    """Findings per image: a table "b k" of 0 and 1, or lists of names or numbers."""
    if isinstance(labels, (list, tuple)) and not all(hasattr(row, "shape") for row in labels):
        return number_findings([sorted(row, key=str) for row in labels], class_names, "labels")
    table = np.asarray([np.asarray(row) for row in labels])
    if table.ndim != 2 or not np.isin(table, (0, 1)).all():
        got = f"got {table.dtype} of shape {table.shape}"
        raise InputError(f"multi-label labels are a table of 0 and 1, a row per image; {got}")
    names = tuple(class_names) if class_names is not None else tuple(map(str, range(table.shape[1])))
    if len(names) != table.shape[1]:
        raise InputError(f"labels have {table.shape[1]} columns, but there are {len(names)} class names")
    return number_findings([np.flatnonzero(row).tolist() for row in table], names, "labels")


def check_labels(
    labels: Any, n: int, class_names: Sequence[str] | None
) -> tuple[list[int | None], tuple[str, ...]]:
    """Labels given as class numbers, and the classes' names."""
    if labels is None:
        return [None] * n, ()
    array = np.asarray(labels.detach().cpu() if hasattr(labels, "detach") else labels)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise InputError(f"labels are one class number per image; got {array.dtype} of shape {array.shape}")
    low, high = int(array.min()), int(array.max())
    if low < 0:
        raise InputError(f"an image has the label {low}; class numbers start at 0")
    classes = tuple(class_names) if class_names is not None else tuple(str(k) for k in range(high + 1))
    if high >= len(classes):
        raise InputError(f"an image has the label {high}, but there are only {len(classes)} class names")
    return [int(label) for label in array], classes


def number_labels(
    texts: Sequence[str], class_names: Sequence[str] | None, where: object
) -> tuple[list[int | None], tuple[str, ...]]:
    """Labels as indices into the classes; without class names, labels that are all numbers stay so.

    Numbers may be written as spreadsheets do (3.0); "nan" is an empty cell.
    """
    texts = ["" if text.lower() == "nan" else text for text in texts]
    if not any(texts):
        return [None] * len(texts), ()
    if not all(texts):
        raise InputError(f"{where}: some images have a label and some have none; fill the column or empty it")
    stems = [text.removesuffix(".0") for text in texts]
    numbers = [int(stem) if stem.isdecimal() else None for stem in stems]
    names = [text for text, number in zip(texts, numbers, strict=True) if number is None]
    for name in set(names) - set(class_names or ()):
        if NEGATIVE.fullmatch(name):
            raise InputError(
                f"{where}: the label {name!r} is negative, but class numbers start at 0; "
                "leave images without a label out, or empty the whole column"
            )
        if any(mark in name for mark in SEPARATORS):
            raise InputError(
                f"{where}: the label {name!r} seems to name several classes, but an image has one here; "
                "choose one, list the name in class_names, or set multilabel = true"
            )
    if class_names is not None:
        classes = tuple(class_names)
    elif 0 < len(names) < len(texts):
        raise InputError(
            f"{where}: some labels are numbers, but {names[0]!r} is none; fix it or set class_names"
        )
    else:
        classes = tuple(sorted(set(names)) or map(str, range(max(map(int, stems)) + 1)))
    index = {name: k for k, name in enumerate(classes)}
    labels = [index.get(text, number) for text, number in zip(texts, numbers, strict=True)]
    for text, label in zip(texts, labels, strict=True):
        if label is None or label >= len(classes):
            hint = did_you_mean(text, classes)
            raise InputError(f"{where}: the label {text!r} is none of the {len(classes)} classes; {hint}")
    return labels, classes
