"""Predict, compare, tune and diagnose trainings, and report on them."""
