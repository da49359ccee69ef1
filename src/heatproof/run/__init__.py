"""From one TOML file to a run folder: what to compute (config, plan), who computes it (engines)."""
