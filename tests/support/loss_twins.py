"""The losses of Tinker's API in PyTorch, as its documentation writes them."""

import torch


def cross_entropy(logp, inputs, low, high):
    return (-logp * inputs["weights"]).sum()


def importance_sampling(logp, inputs, low, high):
    return -(torch.exp(logp - inputs["logprobs"]) * inputs["advantages"]).sum()


def ppo(logp, inputs, low, high):
    ratio = torch.exp(logp - inputs["logprobs"])
    clipped = torch.clamp(ratio, low, high)
    objective = torch.min(ratio * inputs["advantages"], clipped * inputs["advantages"])
    return -objective.sum()


def cispo(logp, inputs, low, high):
    ratio = torch.exp(logp - inputs["logprobs"])
    clipped = torch.clamp(ratio, low, high).detach()
    return -(clipped * logp * inputs["advantages"]).sum()


LOSS_TWINS = {each.__name__: each for each in (cross_entropy, importance_sampling, ppo, cispo)}
