"""Every score, one file per metric: pure functions, tensors or arrays (or Maps) in, nothing hidden."""

from typing import TYPE_CHECKING

from heatproof.lazy import names_are_late

if TYPE_CHECKING:
    from heatproof.metrics.adversarial import adversarial_fragility
    from heatproof.metrics.agreement import (
        map_similarity,
        method_agreement,
        metric_agreement,
        rank_correlation,
    )
    from heatproof.metrics.blobs import dispersion
    from heatproof.metrics.classifier import accuracy, auc, recall
    from heatproof.metrics.consistency import cscore, cscore_by_class, global_cscore, soft_iou
    from heatproof.metrics.faithfulness import insertion_deletion
    from heatproof.metrics.gold import gold_list
    from heatproof.metrics.localisation import localise, localise_curve, macro_mean
    from heatproof.metrics.margins import above_floors
    from heatproof.metrics.mean_maps import dom
    from heatproof.metrics.mosaic import disconnected_grid, grid_pointing
    from heatproof.metrics.occlusion import occlusion_correlation, part_occlusion
    from heatproof.metrics.on_parts import structure, structure_parts, structure_score
    from heatproof.metrics.robustness import aurc, bl_slope
    from heatproof.metrics.sanity import fragility, input_shift, parameter_randomisation
    from heatproof.metrics.similarity import ssim, ssim_reasons
    from heatproof.metrics.specificity import specificity, untrained
    from heatproof.metrics.stability import cose, cose_map, cose_split, overall, ssim_to_final

__all__ = [
    "above_floors",
    "accuracy",
    "adversarial_fragility",
    "auc",
    "aurc",
    "bl_slope",
    "cose",
    "cose_map",
    "cose_split",
    "cscore",
    "cscore_by_class",
    "disconnected_grid",
    "dispersion",
    "dom",
    "fragility",
    "global_cscore",
    "gold_list",
    "grid_pointing",
    "input_shift",
    "insertion_deletion",
    "localise",
    "localise_curve",
    "macro_mean",
    "map_similarity",
    "method_agreement",
    "metric_agreement",
    "occlusion_correlation",
    "overall",
    "parameter_randomisation",
    "part_occlusion",
    "rank_correlation",
    "recall",
    "soft_iou",
    "specificity",
    "ssim",
    "ssim_reasons",
    "ssim_to_final",
    "structure",
    "structure_parts",
    "structure_score",
    "untrained",
]

names_are_late(__name__)
