"""Servers of one of two policies, whose weights are updated while they answer."""

import contextlib
import functools
import threading

import httpx
import jax
import numpy as np
import openai_cases
from flax import nnx
from rollout_cases import stir

from seeupo_jax.agents.answer_form import AnswerForm
from seeupo_jax.agents.dialects.sampling_rules import SamplingRules
from seeupo_jax.agents.endpoint import Endpoint
from seeupo_jax.agents.serving import ServingSession
from seeupo_jax.agents.weight_updates import WeightUpdates
from seeupo_jax.configuration import schema
from seeupo_jax.envs.tool_formats.formats import TOOL_FORMATS
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.files.weights import read_tokenizer
from seeupo_jax.policy.rope import Rope
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.rollout.engine.cache_memory import plan_cache
from seeupo_jax.rollout.engine.sampling import Sampling
from seeupo_jax.rollout.engine.slots import SlotEngine

ACTION, CONTEXT = 192, 256
FORM = AnswerForm(TOOL_FORMATS["hermes"])
PROMPT = [5, 6, 7, 8]
KEY = "servers-key"


@functools.cache
def tokenizer():
    return read_tokenizer("package:order_desk")


@functools.cache
def network():
    """A network, and the parameters of two policies that hardly ever end an answer."""
    sizes = openai_cases.SIZES | {"vocab_size": tokenizer().vocab_size}
    arch = Architecture(**sizes, mlp_width=24, rope=Rope(theta=100.0))
    made, params = policy.split_model(Transformer(arch, nnx.Rngs(0)))
    first = stir(params)
    second = jax.tree.map(lambda x: -x if x.ndim == 1 else x, first)
    return made, first, second


@functools.cache
def logits_LV(number):
    made, *params = network()
    return openai_cases.logits_of(made, params[number], CONTEXT)


class Server:
    """A server of the first policy; folders `first` and `second` below its root are the two."""

    def __init__(self, root, base_url, key, counts):
        self.root, self.url = root, base_url.removesuffix("/v1")
        self.counts = counts
        self.headers = {"Authorization": f"Bearer {key}"}
        self._http = httpx.Client(base_url=self.url, headers=self.headers, timeout=60)

    @property
    def open_calls(self):
        return int(
            float(self._http.get("/metrics").text.split("seeupo_open_calls ")[-1].split()[0])
        )

    def close(self):
        self._http.close()

    def post(self, path, body=None, code=200):
        answer = self._http.post(path, json=body)
        assert answer.status_code == code, answer.text
        return answer.json()

    def get(self, path):
        return self._http.get(path).json()

    def generate(self, tokens=ACTION, **params):
        body = {"input_ids": PROMPT, "return_logprob": True}
        params = {"max_new_tokens": tokens, "temperature": 1.0} | params
        return self.post("/generate", body | {"sampling_params": params})


@contextlib.contextmanager
def updated_server(root):
    """A server of the first policy, that takes the weights of folders below a root."""
    made, first, second = network()
    rollout = schema.Rollout(
        tasks=1, group_size=4, max_action_tokens=ACTION, max_context=CONTEXT, page_size=16
    )
    engine = SlotEngine(
        made,
        Sampling(1.0, None, None, ACTION, tokenizer().end_ids),
        plan_cache(made.arch, rollout),
        steps=1,
        few=True,
        per_turn=True,
    )
    engine.begin(first, seed=1, version=0)
    limits = {"max_action_tokens": ACTION, "max_context": CONTEXT}
    serving = ServingSession(engine, tokenizer(), FORM, **limits)

    def load(folder):
        if not folder.is_dir() or folder.name not in ("first", "second"):
            raise ValueError(f"{folder}: got no policy; allowed: first or second.")
        return second if folder.name == "second" else first

    updates = WeightUpdates(serving, root, load, on_swap="keep", model_path="first")
    rules = SamplingRules(1.0, serves=True, constrains=True)
    endpoint = Endpoint(
        sampling=rules,
        model="m",
        form=FORM,
        metrics=serving.metrics.text,
        controls=updates.controls,
    )
    thread = threading.Thread(target=serving.run)
    with contextlib.ExitStack() as stack:
        thread.start()
        stack.callback(thread.join, 30)
        stack.callback(serving.stop)
        endpoint.start()
        stack.callback(endpoint.close)
        access = endpoint.open_key(serving, key=KEY)
        made = Server(root, access.base_url, access.api_key, serving.counts)
        stack.callback(made.close)
        yield made


def check_logp(answer, number, first=0, last=None):
    """Log-probabilities are those of one of the two policies."""
    entries = answer["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in entries] == answer["output_ids"]
    logp = [entry[0] for entry in entries]
    same_logp(PROMPT, answer["output_ids"], logp, number, first, last)


def same_logp(context, tokens, logp, number, first=0, last=None):
    logp_LV = logits_LV(number)([*context, *tokens])[len(context) - 1 : -1]
    logp_LV = logp_LV - np.logaddexp.reduce(logp_LV, axis=-1, keepdims=True)
    wanted = logp_LV[np.arange(len(tokens)), tokens][first:last]
    np.testing.assert_allclose(logp[first:last], wanted, atol=1e-4)
