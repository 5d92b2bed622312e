"""The user's own training loop, with the model and the optimizer wrapped."""
