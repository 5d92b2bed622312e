"""What a run tells its user: console, report, result, environment."""
