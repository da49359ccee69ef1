from .adversarial import adversarial_fragility
from .agreement import (
    map_similarity,
    method_agreement,
    metric_agreement,
    rank_correlation,
)
from .blobs import dispersion
from .classifier import accuracy, auc, recall
from .consistency import cscore, cscore_by_class, global_cscore, soft_iou
from .faithfulness import insertion_deletion
from .gold import gold_list
from .localisation import localise, localise_curve, macro_mean
from .margins import above_floors
from .mean_maps import dom
from .mosaic import disconnected_grid, grid_pointing
from .occlusion import occlusion_correlation, part_occlusion
from .on_parts import structure, structure_parts, structure_score
from .robustness import aurc, bl_slope
from .sanity import fragility, input_shift, parameter_randomisation
from .similarity import ssim, ssim_reasons
from .specificity import specificity, untrained
from .stability import cose, cose_map, cose_split, overall, ssim_to_final

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
