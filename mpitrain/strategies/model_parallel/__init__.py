"""Strategies that divide the model."""
