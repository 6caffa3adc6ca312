"""Runs in which a role is frozen, from their beginning to an evaluation: games of Kuhn poker."""

import contextlib
import re
import subprocess
import sys

import numpy as np
import pytest
import run_cases
from flax import nnx
from loaded_python import LoadedPython
from places import CONFIGS
from process_cases import environment
from safetensors.numpy import load_file

from seeupo_jax import Callback, Server, evaluate, load_config, read_trajectories, train
from seeupo_jax.envs.kuhn_poker.environment import ROLES, KuhnPoker
from seeupo_jax.metrics.metrics_log import read_metrics
from seeupo_jax.planning.explain.explain_training import explain_training
from seeupo_jax.policy import save_pretrained
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.files.tokenizer import train_tokenizer
from seeupo_jax.policy.transformer import Transformer

KUHN = CONFIGS / "kuhn_poker.py"
SMALL = (
    "iterations=2",
    "log_checksum=True",
    "warm_start.stages=()",
    "model.remat=none",
    "batching.buckets=(64,)",
    "rollout.tasks=3",
    "rollout.group_size=4",
    "rollout.prefill_tokens=32",
    "evaluation.every=2",
    "evaluation.tasks=12",
    "evaluation.k=1",
    "evaluation.temperature=0.01",  # as good as greedy: what plays it makes no difference
    "checkpoint.every=1",
)
KEY, WEIGHTS = "the-servers.key", "model.safetensors"
pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def opponent(tmp_path_factory):
    """A model folder, with the words of the game as tokens."""
    folder = tmp_path_factory.mktemp("roles") / "opponent"
    words = KuhnPoker().vocabulary()
    tokenizer = train_tokenizer([*words], words, 267, load_config(KUHN).chat)
    sizes = {"width": 16, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 8, "mlp_width": 16}
    arch = Architecture(vocab_size=tokenizer.vocab_size, **sizes)
    save_pretrained(Transformer(arch, nnx.Rngs(0)), folder, tokenizer)
    return folder


def against(opponent, **frozen):
    """The configuration of a run that begins with the opponent's policy, as the first player."""
    roles = [{"name": ROLES[0]}, {"name": ROLES[1], **frozen}]
    return load_config(KUHN, [*SMALL, f"model.path={opponent}", f"roles={roles}"])


@pytest.fixture(scope="module")
def by_path(opponent):
    """A configuration, the workdir of its run, and the opponent's weights before it."""
    config, before = against(opponent, path=str(opponent)), load_file(opponent / WEIGHTS)
    return config, train(config, opponent.parent / "by_path").workdir, before


@pytest.fixture(scope="module")
def served(opponent):
    """The address of a server of the opponent, in a process of its own; its key is set."""
    command = [sys.executable, "-m", "seeupo_jax.serve", f"--config={KUHN}", "--port=0"]
    command += [f"--model={opponent}", "--config.rollout.tasks=1"]
    command += ["--config.rollout.group_size=4", "--config.roles=()"]
    own = environment() | {"SEEUPO_API_KEY": KEY}
    process = LoadedPython(command, env=own, stdout=subprocess.PIPE, text=True)
    with contextlib.ExitStack() as stack:
        stack.callback(process.communicate)
        stack.callback(process.kill)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("OPENAI_API_KEY", KEY)
        yield re.search(r"http://[^/]+", process.stdout.readline())[0]


def hands(workdir):
    return list(read_trajectories(workdir, evaluation=False))


def check_frozen(workdir, before):
    """The second role was played and not trained; the policy is no more what it was `before`."""
    lines = run_cases.iterations(workdir)
    assert [line["rollout/frozen_turns"] for line in lines] == [12, 12]
    for line in lines:
        assert line["rollout/failed"] == 0 and line["rollout/frozen_tokens"] >= 12
        assert "rollout/role_reward/player_1" in line and line["sweep/turns"] >= 1
        assert "rollout/role_reward/player_2" not in line  # a frozen role has no reward of its own
    for hand in hands(workdir):
        own, frozen = hand["segments"]
        assert [own["role"], frozen["role"]] == [*ROLES] and max(own["turn"]) >= 0
        assert set(frozen["turn"]) == {-1} and set(frozen["logp"]) == {None}
        said = [m["content"] for m in hand["messages"] if m["role"] == "assistant"]
        assert len(said) == len(hand["info"]["history"])
    trained = load_file(workdir / "policy" / WEIGHTS)
    assert any((trained[name] != before[name]).any() for name in before)


def test_a_policy_learns_against_a_frozen_one_of_a_folder(by_path, opponent):
    config, workdir, before = by_path
    check_frozen(workdir, before)
    after = load_file(opponent / WEIGHTS)
    for name in before:
        np.testing.assert_array_equal(after[name], before[name])
    sections = dict(explain_training(config, workdir.parent / "new"))
    memory = "\n".join(sections["memory"])
    assert "policies that play frozen roles, and their samplers" in memory


class StopAfter(Callback):
    def __init__(self, iteration):
        self.iteration = iteration

    def on_iteration(self, run, iteration, metrics):
        if iteration == self.iteration:
            run.stop()


def test_a_run_against_a_frozen_role_resumes_to_the_last_bit(by_path):
    config, undisturbed, _ = by_path
    workdir = undisturbed.parent / "resumed"
    assert train(config, workdir, [StopAfter(1)]).stopped is not None
    assert train(config, workdir).stopped is None
    assert run_cases.checksums(workdir) == run_cases.checksums(undisturbed)
    assert hands(workdir) == hands(undisturbed)


def test_a_server_of_ours_plays_a_frozen_role(served, opponent):
    workdir = opponent.parent / "by_server"
    train(against(opponent, server=served), workdir)
    check_frozen(workdir, load_file(opponent / WEIGHTS))
    assert all(line["rollout/server_failures"] == 0 for line in run_cases.iterations(workdir))


def test_a_served_policy_is_evaluated_beside_a_frozen_role(served, opponent, by_path):
    """The opponent in its first seat is the server's, in its second the folder's: the same."""
    config, workdir, _ = by_path
    own = evaluate(config, opponent.parent / "own", untrained=True)
    theirs = evaluate(config, opponent.parent / "served", server=Server(served, dialect="vllm"))
    for episode, other in zip(own.episodes, theirs.episodes, strict=True):
        assert (episode.task_id, episode.score) == (other.task_id, other.score)
    seats = {"eval/avg@1/seat=first", "eval/avg@1/seat=second"}
    assert seats <= {*own.metrics} and own.avg_at_k == theirs.avg_at_k
    *_, last = (line for line in read_metrics(workdir) if "eval/avg@1" in line)
    assert last["iteration"] == 2 and seats <= {*last}


def test_roles_of_a_served_policy_are_played_by_messages_a_frozen_one_is_not(served, opponent):
    """A server of ours does not say that it is vLLM: it is sent chat completions."""
    roles = [{"name": role} for role in ROLES]
    both = load_config(KUHN, [*SMALL, f"model.path={opponent}", f"roles={roles}"])
    own = evaluate(both, opponent.parent / "both", untrained=True)
    theirs = evaluate(both, opponent.parent / "both_served", server=Server(served))
    assert own.avg_at_k == theirs.avg_at_k
    said = (
        r"config.roles\[1\]: got a frozen role; allowed with the dialect chat: roles of the policy"
    )
    with pytest.raises(ValueError, match=said):
        config = against(opponent, path=str(opponent))
        evaluate(config, opponent.parent / "refused", server=Server(served))
