"""From a study to a run folder: what to compute (config, plan), and its computation (engines)."""
