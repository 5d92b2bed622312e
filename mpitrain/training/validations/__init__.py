"""Validations: what is measured, on whose parameters, and what becomes of it."""
