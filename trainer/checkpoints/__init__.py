"""Checkpoints: arrays by name, saved while training goes on. `store.py` is the way in; it knows nothing of models."""
