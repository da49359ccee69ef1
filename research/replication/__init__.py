"""Whether claims of the papers hold over several trainings: a population of trainings, tables, one index."""
