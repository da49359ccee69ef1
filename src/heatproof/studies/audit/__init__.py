"""The audit as a study: what to compute is chosen by the network, the images and the time there is."""
