"""The numbers of CAMBench-QR's Tables 2 to 6, for reference beside ours and never as truth.

Cite: chakraborty2025cambench. Where the paper contradicts itself is said in CONTRADICTIONS, which a test
checks against the numbers in cambench.json.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from heatproof.metrics.on_parts import structure_score

METHODS = ("layercam", "eigengradcam", "xgradcam")
BACKBONES = {"resnet50": "ResNet-50", "convnext_base": "ConvNeXt-B"}

_TABLES: dict[str, Any] = json.loads(
    files("heatproof.studies").joinpath("cambench.json").read_text(encoding="utf-8")
)
Rows = dict[str, list[float]]  # by method

TABLE_2: dict[str, dict[str, Rows]] = _TABLES["table_2"]  # BL, FMR, TMR, DtS, ms per image
TABLE_3: dict[str, Rows] = _TABLES["table_3"]  # BL slope, FMR-AURC, TMR-AURC; the backbone is not named
# rho of FMR with the drop without finders, of TMR with the drop without timing; the backbone is not named
TABLE_4: dict[str, Rows] = _TABLES["table_4"]
# by depth: BL, FMR, TMR, DtS, per cent of the parameters; ResNet-50, EigenGrad-CAM
TABLE_5: dict[str, list[float]] = _TABLES["table_5"]
# (lambda, alpha): BL, FMR, TMR, accuracy; ResNet-50, no explainer is named
TABLE_6 = {(lam, alpha): tuple(numbers) for lam, alpha, *numbers in _TABLES["table_6"]}

CONTRADICTIONS = (
    "its Table 6 is on another scale than its Table 2: for the same regime, backbone and settings BL is 0.18 "
    "there and at most 0.039 here",
    "in its Table 6 the rows with lambda = 0 differ by alpha, which then multiplies nothing (eq. 2)",
    "it says that FT-LeakMin lifts every method's StructureScore above FT-Struct's; by its own Table 2 that "
    "holds for XGrad-CAM only, and for LayerCAM and EigenGrad-CAM the score falls, on both backbones",
    "it says that a map inside the finders has a coverage AUC of 1; with its quantile thresholds a version-1 "
    "code's own finder mask gets 0.548",
)


def backbone_of(model: str) -> str:
    """The published backbone to set beside a network: its own where it is one of the two, else ResNet-50.

    >>> backbone_of("torchvision:convnext_base"), backbone_of("small")
    ('ConvNeXt-B', 'ResNet-50')
    """
    return next((title for name, title in BACKBONES.items() if name in model), "ResNet-50")


def mass_score(backbone: str, regime: str, method: str) -> float:
    """The StructureScore of the paper's Figure 5, from its Table 2."""
    leakage, finder, timing, distance, _ = TABLE_2[backbone][regime][method]
    return float(structure_score(finder, timing, leakage, distance))
