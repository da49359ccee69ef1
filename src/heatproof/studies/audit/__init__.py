"""The audit as a study: what to compute is chosen by the network, the pictures and the time there is."""
