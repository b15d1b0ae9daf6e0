"""What `scripts/tune` does: command_line -> tuner -> history (Optuna), trial (a process), report. No TensorFlow."""
