"""What `scripts/launch` does, a file a platform. Standard library and the trainer's own config only: no TensorFlow."""
