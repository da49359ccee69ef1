"""The numbers of CAMBench-QR's Tables 2 to 6, for reference beside ours and never as truth.

Cite: chakraborty2025cambench. Where the paper contradicts itself is said in CONTRADICTIONS, which a test
checks against the numbers below.
"""

from __future__ import annotations

from heatproof.metrics.structure import structure_score

METHODS = ("layercam", "eigengradcam", "xgradcam")
BACKBONES = {"resnet50": "ResNet-50", "convnext_base": "ConvNeXt-B"}

# BL, FMR, TMR, DtS, ms per image
TABLE_2: dict[str, dict[str, dict[str, tuple[float, ...]]]] = {
    "ResNet-50": {
        "zs": {
            "layercam": (0.011, 0.161, 0.067, 0.180, 4.1),
            "eigengradcam": (0.004, 0.135, 0.078, 0.170, 4.5),
            "xgradcam": (0.061, 0.265, 0.037, 0.210, 3.8),
        },
        "ft-struct": {
            "layercam": (0.019, 0.313, 0.036, 0.150, 4.1),
            "eigengradcam": (0.012, 0.349, 0.037, 0.140, 4.5),
            "xgradcam": (0.055, 0.281, 0.033, 0.180, 3.8),
        },
        "ft-leakmin": {
            "layercam": (0.007, 0.176, 0.061, 0.120, 4.1),
            "eigengradcam": (0.002, 0.155, 0.070, 0.110, 4.5),
            "xgradcam": (0.039, 0.229, 0.047, 0.160, 3.8),
        },
    },
    "ConvNeXt-B": {
        "zs": {
            "layercam": (0.010, 0.170, 0.070, 0.175, 5.0),
            "eigengradcam": (0.004, 0.145, 0.082, 0.165, 5.6),
            "xgradcam": (0.050, 0.275, 0.040, 0.200, 4.7),
        },
        "ft-struct": {
            "layercam": (0.018, 0.330, 0.038, 0.145, 5.0),
            "eigengradcam": (0.011, 0.365, 0.039, 0.135, 5.6),
            "xgradcam": (0.048, 0.296, 0.035, 0.175, 4.7),
        },
        "ft-leakmin": {
            "layercam": (0.007, 0.185, 0.063, 0.115, 5.0),
            "eigengradcam": (0.002, 0.165, 0.072, 0.105, 5.6),
            "xgradcam": (0.034, 0.240, 0.050, 0.150, 4.7),
        },
    },
}

# BL slope, FMR-AURC, TMR-AURC; the backbone is not named
TABLE_3: dict[str, dict[str, tuple[float, ...]]] = {
    "zs": {
        "layercam": (0.19, 0.56, 0.48),
        "eigengradcam": (0.16, 0.59, 0.49),
        "xgradcam": (0.22, 0.58, 0.51),
    },
    "ft-struct": {
        "layercam": (0.18, 0.68, 0.55),
        "eigengradcam": (0.15, 0.70, 0.57),
        "xgradcam": (0.20, 0.69, 0.56),
    },
    "ft-leakmin": {
        "layercam": (0.10, 0.69, 0.56),
        "eigengradcam": (0.08, 0.72, 0.58),
        "xgradcam": (0.11, 0.71, 0.57),
    },
}

# rho of FMR with the drop without finders, of TMR with the drop without timing; the backbone is not named
TABLE_4: dict[str, dict[str, tuple[float, ...]]] = {
    "zs": {"layercam": (0.180, 0.300), "eigengradcam": (0.206, 0.255), "xgradcam": (0.224, 0.320)},
    "ft-struct": {"layercam": (0.331, 0.275), "eigengradcam": (0.329, 0.325), "xgradcam": (0.268, 0.174)},
    "ft-leakmin": {"layercam": (0.281, 0.270), "eigengradcam": (0.316, 0.305), "xgradcam": (0.159, 0.181)},
}

# BL, FMR, TMR, DtS, per cent of the parameters; ResNet-50, EigenGrad-CAM
TABLE_5: dict[str, tuple[float, ...]] = {
    "head": (0.004, 0.135, 0.078, 0.170, 0.1),
    "L4": (0.012, 0.349, 0.037, 0.140, 40.0),
    "L3-L4": (0.026, 0.355, 0.036, 0.154, 75.0),
    "all": (0.045, 0.360, 0.034, 0.176, 100.0),
}

# (lambda, alpha): BL, FMR, TMR, accuracy; ResNet-50, no explainer is named
TABLE_6: dict[tuple[float, float], tuple[float, ...]] = {
    (0.0, 0.0): (0.20, 0.42, 0.28, 0.996),
    (0.25, 0.0): (0.18, 0.41, 0.27, 0.996),
    (0.5, 0.0): (0.17, 0.40, 0.27, 0.994),
    (0.0, 0.25): (0.21, 0.43, 0.29, 0.996),
    (0.25, 0.25): (0.18, 0.45, 0.31, 0.995),
    (0.5, 0.25): (0.17, 0.44, 0.31, 0.993),
    (0.0, 0.5): (0.22, 0.44, 0.30, 0.995),
    (0.25, 0.5): (0.19, 0.45, 0.31, 0.994),
    (0.5, 0.5): (0.18, 0.46, 0.31, 0.992),
}

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
