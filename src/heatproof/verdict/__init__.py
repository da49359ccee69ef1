"""What a run comes to: its numbers, a training as a table, alarms, rules that a build can fail on."""
