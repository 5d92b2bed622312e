"""Many runs of one job: what is tried, what came of it, and which is best."""
