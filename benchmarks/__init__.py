"""What heatproof costs, measured: one file per section, each with parts(asked)."""
