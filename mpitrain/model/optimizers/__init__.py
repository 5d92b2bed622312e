"""Optimizers and their options, rates, state, and what comes around a step."""
