"""The command `python -m seeupo_jax.envs.bfcl_worlds`, whose code is an instrument's."""

import runpy

if __name__ == "__main__":
    runpy.run_module("seeupo_jax.instruments.bfcl_worlds", run_name="__main__")
