"""The audit as a study: methods, metrics and images are chosen by network, images and time."""
