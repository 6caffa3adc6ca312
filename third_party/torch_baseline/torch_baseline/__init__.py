"""SeeUPO in PyTorch on Hugging Face models, to measure and to check the JAX implementation with."""
