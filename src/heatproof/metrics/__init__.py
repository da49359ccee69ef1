"""Every score, one file per metric: pure functions, tensors or arrays (or Maps) in, nothing hidden."""

from heatproof.metrics._ssim import ssim, ssim_reasons
from heatproof.metrics.classifier import accuracy, auc, recall
from heatproof.metrics.cose import cose, cose_map, cose_split, overall, ssim_to_final
from heatproof.metrics.cscore import cscore, cscore_by_class, global_cscore, soft_iou
from heatproof.metrics.gold import gold_list
from heatproof.metrics.localise import localise, localise_curve, macro_mean
from heatproof.metrics.robustness import aurc, bl_slope
from heatproof.metrics.structure import structure, structure_parts, structure_score

__all__ = [
    "accuracy",
    "auc",
    "aurc",
    "bl_slope",
    "cose",
    "cose_map",
    "cose_split",
    "cscore",
    "cscore_by_class",
    "global_cscore",
    "gold_list",
    "localise",
    "localise_curve",
    "macro_mean",
    "overall",
    "recall",
    "soft_iou",
    "ssim",
    "ssim_reasons",
    "ssim_to_final",
    "structure",
    "structure_parts",
    "structure_score",
]
