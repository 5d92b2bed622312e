"""What a run reports to its user: console, report, result, environment."""
