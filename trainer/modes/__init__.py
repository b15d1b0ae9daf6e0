"""What `--mode` names, a file each."""
