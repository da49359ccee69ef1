"""Watching explanations while a model trains: Monitor, with the alarms that verdict/ finds.

    monitor = hp.monitor.Monitor(images, labels, methods)
    monitor.step(model, epoch)          inside any training loop

Callbacks for Lightning, Hugging Face, Keras, fastai and MONAI, and an evaluator for MLflow, are in files of
those names; each imports its library.
"""

from heatproof.monitor.together import AlarmRaised
from heatproof.monitor.watch import Monitor
from heatproof.verdict.alarms import Alarm, Thresholds, find_alarms
from heatproof.verdict.trajectory import Trajectory

__all__ = ["Alarm", "AlarmRaised", "Monitor", "Thresholds", "Trajectory", "find_alarms"]
