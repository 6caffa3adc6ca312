"""Random models of `transformers`: their folders, logits, gradients."""

import numpy as np
import torch
import transformers

LENGTH = 24

transformers.utils.logging.disable_progress_bar()


def make(family, values, seed, folder):
    """A random model of a family, and the folder that it is saved in."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **values)
    config._attn_implementation = "eager"  # the others have no caps of scores, and no sinks
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # norms and biases away from 1 and 0
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
            if name.endswith("A_log"):  # states that outlast a token, as those of trained models
                parameter.sub_(3)
    model.save_pretrained(folder)
    return model.eval(), str(folder)


def tokens(vocab, rows=3):
    return np.random.default_rng(0).integers(0, vocab, (rows, LENGTH))


def torch_logits(model, ids, mask=None):
    mask = None if mask is None else torch.tensor(mask)
    with torch.no_grad():
        return model(torch.tensor(ids), attention_mask=mask).logits.float().numpy()


def gradients(model, ids):
    """Gradients of the mean negative log-likelihood, by the names of tensors in the files."""
    model.zero_grad()
    logits = model(torch.tensor(ids)).logits[:, :-1]
    target = torch.tensor(ids)[:, 1:].reshape(-1)
    torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), target).backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.numpy()
        if model.config.model_type == "gpt_oss" and ".experts." in name:
            gradients |= of_packed_experts(name, gradient)
            continue
        if name.endswith("experts.gate_up_proj"):
            gate, up = np.split(gradient, 2, axis=1)
            both = {"gate_proj": gate, "up_proj": up}
        elif name.endswith("experts.down_proj"):
            both = {"down_proj": gradient}
        else:
            gradients[name] = gradient
            continue
        stem = name.rpartition(".")[0]
        for part, stacked in both.items():
            named = {f"{stem}.{i}.{part}.weight": each for i, each in enumerate(stacked)}
            gradients |= named
    return gradients


def of_packed_experts(name, packed):
    """gpt-oss: [E, in, out] of all experts, or biases [E, out]; columns of gate and up in turn."""
    stem, _, matrix = name.rpartition(".")
    kind = "bias" if matrix.endswith("_bias") else "weight"
    matrix = matrix.removesuffix("_bias")
    parts = {"down_proj": packed}
    if matrix == "gate_up_proj":
        parts = {"gate_proj": packed[..., ::2], "up_proj": packed[..., 1::2]}
    return {
        f"{stem}.{expert}.{part}.{kind}": each.T
        for part, stacked in parts.items()
        for expert, each in enumerate(stacked)
    }
