"""Where JAX keeps the programs that XLA compiles for it."""

import jax


def keep(directory: str) -> None:
    """From now on, and all of them: many small ones are compiled before the first step."""
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # Else the directory's name would be part of what a program for a GPU is found by.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
