"""Keras on JAX: one sharded, compiled step."""
