"""Results of a run: its numbers, the verdict, trainings as tables, alarms, and rules for CI."""
