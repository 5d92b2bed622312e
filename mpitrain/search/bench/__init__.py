"""Measuring one job under several strategies and numbers of workers."""
