"""Sources of tasks: rows of files and of users' functions. No jax."""
