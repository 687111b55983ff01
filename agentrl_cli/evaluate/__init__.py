"""Evaluation of a model or checkpoint, and comparison of runs."""
