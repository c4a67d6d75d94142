"""Passes: pure functions from one frozen value to the next."""
