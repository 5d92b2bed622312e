"""Many configurations of one job: which there are, who trains which of them when, and what is noted down."""
