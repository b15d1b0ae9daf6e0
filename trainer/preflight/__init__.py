"""A training run's programs, compiled ahead of time for TPU slices that are not there."""
