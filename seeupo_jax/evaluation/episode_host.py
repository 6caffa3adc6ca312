"""The player of a run's episodes: environments, or an agent that calls the policy."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from seeupo_jax import envs
from seeupo_jax.agents.agent_player import AgentHost
from seeupo_jax.agents.agent_tasks import AgentTasks, find_tasks, misspelt_functions
from seeupo_jax.agents.answer_form import AnswerForm, resolve_form
from seeupo_jax.agents.calls import Access, Runner, Session
from seeupo_jax.agents.control import Control
from seeupo_jax.agents.harnesses.table import HARNESSES
from seeupo_jax.agents.openai_server import OpenAIServer
from seeupo_jax.agents.runners.command_agents import CommandAgents, agent_words, program_words
from seeupo_jax.agents.runners.function_agents import FunctionAgents, load_function, open_clients
from seeupo_jax.agents.sandboxes.sandbox_checks import check_sandboxes
from seeupo_jax.agents.sandboxes.sandboxes import Sandboxes
from seeupo_jax.configuration import schema
from seeupo_jax.configuration.role_schema import POLICY, role_names
from seeupo_jax.configuration.schema import Config
from seeupo_jax.configuration.user_code import shown
from seeupo_jax.envs import Environment, Message, Tool
from seeupo_jax.envs.mixture import read_components
from seeupo_jax.envs.pool import EnvCall, EnvPool, Failure
from seeupo_jax.envs.transport.isolated import IsolatedEnvironment, check_isolated
from seeupo_jax.envs.transport.open_files import open_files, raise_open_files
from seeupo_jax.envs.validation import check_reset, check_step, first_role, reset_episode
from seeupo_jax.policy.files.tokenizer import Tokenizer
from seeupo_jax.rollout.engine.protocol import Engine
from seeupo_jax.rollout.environment_player import EnvironmentHost
from seeupo_jax.rollout.player import Host
from seeupo_jax.tasks.task_folders import TaskFolders

if TYPE_CHECKING:
    from seeupo_jax.agents.dialects.sampling_rules import SamplingRules
    from seeupo_jax.agents.endpoint import Endpoint

_log = logging.getLogger(__name__)
_ANSWER = "?"  # of a policy that has not been asked yet
MODEL = POLICY  # what the endpoint calls it; agents may name any
_SERVED = ("remote", "openenv")  # environments that are clients of servers
_SPARE_FILES = 64  # in addition to conversations and open files: checkpoints, programs


def check_host(config: Config) -> None:
    """Whether what plays the episodes can be made.

    Raises:
      ValueError: an environment that cannot be made in a process of its own or needs none, whose
        server keeps one episode for several conversations, or that gives a call up before its time
        limit, an agent that cannot be called or started, or a missing package; one sentence.
    """
    env, agent = config.env, config.agent
    if agent.given:
        from seeupo_jax.agents import endpoint  # noqa: F401  # says what package is missing

        if agent.name is not None:
            open_clients()
        _ = load_function(agent) if agent.name is not None else _words(config)
        if config.tasks is not None and isinstance(tasks := find_tasks(config), TaskFolders):
            check_sandboxes(_sandboxes(config, tasks))
        return _warn_of_names(f"config.agent.name: {agent.name}", misspelt_functions(agent))
    for name, options in _parts(env.name, env.options):
        _check_own_limit(name, options, env.timeout_s)
        _check_retries(name, options, config.rollout.max_turns)
    if config.rollout.concurrency != 1 and _keeps_one_episode(env.name, env.options):
        raise ValueError(
            f"config.rollout.concurrency: got {config.rollout.concurrency} with env openenv over"
            " http, whose server keeps one episode; allowed: 1, or a ws:// address."
        )
    if config.rollout.asynchronous and _keeps_one_episode(env.name, env.options):
        raise ValueError(
            "config.env.options.url: got an http address of env openenv, whose server keeps one"
            " episode, with samplers beside training (rollout.devices, rollout.port, or servers"
            " with rollout.max_lag), which play while the trainer evaluates; allowed: a ws://"
            " address."
        )
    if env.isolation == "process":
        if all(part in _SERVED for part, _ in _parts(env.name, env.options)):
            raise ValueError(
                f"config.env.isolation: got process with env {env.name}, whose episodes are in a"
                " server's processes: a client that is killed would leave its session open there;"
                " allowed: thread."
            )
        check_isolated(env.name, env.options, memory_mib=env.memory_mib, timeout_s=env.timeout_s)
    for name, _ in _parts(env.name, env.options):
        _warn_of_names(f"config.env.name: {name}", envs.misspelt_methods(name))


def _warn_of_names(where: str, misspelt: Mapping[str, str]) -> None:
    text = "%s has %s(), which the trainer does not call; is %s() meant?"
    for name, meant in misspelt.items():
        _log.warning(text, where, name, meant)


def _keeps_one_episode(name: str, options: Mapping[str, Any]) -> bool:
    """Whether all of an environment's conversations would be one episode of a server."""
    return any(
        part == "openenv" and str(own.get("url")).startswith(("http://", "https://"))
        for part, own in _parts(name, options)
    )


def _parts(name: str, options: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The name and options of an environment, or of all those of a mixture."""
    if name != "mixture":
        yield name, options
        return
    for part in read_components(options.get("environments")).values():
        yield from _parts(part.name, part.options)


def _check_own_limit(name: str, options: Mapping[str, Any], timeout_s: float) -> None:
    """Whether a server's client leaves it to the pool to end a call: else that is no timeout."""
    own_s = options.get("timeout_s") if name in _SERVED else None
    if isinstance(own_s, int | float) and own_s <= timeout_s:
        raise ValueError(
            f"config.env.options.timeout_s: got {own_s:g} for env {name}, with which a call that"
            f" hangs would count as env_error; allowed: none, or more than {timeout_s:g}"
            " (config.env.timeout_s)."
        )


def _check_retries(name: str, options: Mapping[str, Any], max_turns: int) -> None:
    """Whether an episode has the turns that a task with retries may take."""
    retries = options.get("retries", 0) if name == "prompts" else 0
    if isinstance(retries, int) and max_turns <= retries:
        raise ValueError(
            f"config.rollout.max_turns: got {max_turns} with env.options.retries={retries};"
            f" allowed: at least {retries + 1}, an answer and its retries."
        )


def make_environment(env: schema.Env) -> Environment:
    """One that plays episodes; in a process of its own it begins when used."""
    if env.isolation == "process":
        return IsolatedEnvironment(env.name, env.options, memory_mib=env.memory_mib)
    return envs.make(env.name, **env.options)


@contextlib.contextmanager
def open_environment(env: schema.Env, calls: int) -> Iterator[Environment]:
    """An environment for so many calls, then closed; at their time limit its process is killed."""
    environment, limit_s = make_environment(env), calls * env.timeout_s

    def kill(isolated: IsolatedEnvironment) -> None:
        text = (
            "config.env.timeout_s: %d calls of env %s take more than %g s; its process is killed."
        )
        _log.warning(text, calls, env.name, limit_s)
        isolated.kill()

    timer = threading.Timer(limit_s, kill, (environment,))
    if isinstance(environment, IsolatedEnvironment):
        timer.start()
    try:
        yield environment
    finally:
        timer.cancel()
        with contextlib.suppress(Exception):  # of a user's code: no episode is played yet
            environment.close()


def build_pool(config: Config, size: int) -> EnvPool:
    """`size` environments, a conversation each."""
    env = config.env
    return EnvPool(
        functools.partial(make_environment, env),
        size,
        workers=env.workers,
        timeout_s=env.timeout_s,
        retries=env.retries,
        retry_wait_s=env.retry_wait_s,
    )


def try_resets(
    config: Config, task_ids: Sequence[str], tokenizer: Tokenizer | None = None
) -> list[tuple[Tool, ...]]:
    """Begins an episode of each task as a rollout does, with its retries and its time limit.

    Args:
      tokenizer: begins the conversation, too; None: it is not known yet.

    Returns: the tools of each.

    Raises:
      ValueError: one does not begin, or the chat template does not write its messages; one
        sentence.
    """

    def begin(environment: Environment, answer: Any) -> tuple[tuple[Tool, ...], str | None]:
        messages, tools = check_reset(answer)
        first_role(environment, role_names(config.roles))
        refusal = None
        if tokenizer is not None:
            if tools:
                _warn_of_format(config, tokenizer, environment)
            refusal = _template_refusal(tokenizer, environment, messages, tools)
        return tools, refusal

    listed: list[tuple[Tool, ...]] = []
    with contextlib.closing(build_pool(config, 1)) as pool:
        for task_id in task_ids:
            reset = functools.partial(
                reset_episode, task_id=task_id, seed=config.seed, episode_seed=0
            )
            pool.submit(EnvCall(0, reset, begin, fresh=True))
            ((_, (result, retries)),) = pool.poll(None)
            if isinstance(result, Failure):
                raise ValueError(_no_episode(config.env.name, task_id, result.reason, retries))
            tools, refusal = result
            if refusal is not None:
                raise ValueError(refusal)
            listed.append(tools)
    return listed


def _warn_of_format(config: Config, tokenizer: Tokenizer, environment: Environment) -> None:
    """Warns of an environment that reads tool calls in another format than the policy writes."""
    read = getattr(environment, "tool_format", None)
    try:
        written = resolve_form(config.agent, tokenizer).tool_format.name
    except ValueError:  # a template whose format is not known
        return
    if isinstance(read, str) and read != written:
        _log.warning(
            "config.env.name: %s reads tool calls as %s, and the model's chat template writes %s:"
            " tool_format of the class sets it.",
            config.env.name,
            read,
            written,
        )


def _template_refusal(
    tokenizer: Tokenizer,
    environment: Environment,
    messages: Sequence[Message],
    tools: Sequence[Tool],
) -> str | None:
    """Why a chat template does not write an episode's messages, in a sentence; None: it does.

    Where it lacks a role, the environment answers once.
    """
    try:
        conversation = tokenizer.begin(messages, tools)
        if tokenizer.unwritten:
            conversation.extend(tokenizer.action(_ANSWER), _first_answer(environment))
    except ValueError as error:
        return str(error)
    return tokenizer.unwritten.get("tool") if tools else None


def _first_answer(environment: Environment) -> Sequence[Message]:
    """The environment's observation after a one-character action; empty if the step fails."""
    try:
        return check_step(environment.step(_ANSWER)).observation
    except (Exception, SystemExit):  # of a user's code
        return ()


def _no_episode(name: str, task_id: str, reason: str, retries: int) -> str:
    after = f", also after {retries} retries" if retries else ""
    allowed = "" if "; allowed: " in reason else "; allowed: a reset that returns messages, tools"
    return (
        f"config.env.name: got {name!r}, whose task {shown(task_id)} does not begin{after}:"
        f" {reason.rstrip('.')}{allowed}."
    )


def build_host(
    config: Config,
    engine: Engine,
    tasks: AgentTasks,
    tokenizer: Tokenizer,
    log: Callable[[str], None],
) -> Host:
    """Environments, one for each conversation of the engine; or a runner of agents and an endpoint.

    Args:
      tasks: of the run, which stay open; agents get their data.
      tokenizer: of the policy, whose chat template decides how agents get its answers.

    Raises:
      ValueError: the template's calls are in no known format, the endpoint's address cannot be
        had, or too few files may be open at once.
    """
    agent = config.agent
    served = isinstance(engine, OpenAIServer) or any(role.server for role in config.roles)
    check_open_files(config, engine.concurrency, served=served)
    if not agent.given:
        return EnvironmentHost(build_pool(config, engine.concurrency))
    form = resolve_form(agent, tokenizer)
    endpoint = make_endpoint(config, MODEL, form)

    def open_key(session: Session, temperature: float | None) -> Access:
        return endpoint.open_key(session, sampling=_sampling_rules(config, temperature))

    # A verifier makes no calls, and the driver of its sandbox ends it.
    verifying_s = 0.0
    if isinstance(tasks, TaskFolders):
        verifying_s = tasks.verifier_timeout_s * config.sandbox.timeout_scale
    endpoint.start(agent.host, agent.port)
    log(f"agents call the policy at {endpoint.base_url}")
    return AgentHost(
        runner=build_runner(config, tasks),
        open_key=open_key,
        close_key=endpoint.close_key,
        form=form,
        timeout_s=agent.timeout_s + verifying_s,
        data=tasks.data,
        volatile=() if agent.harness is None else HARNESSES[agent.harness].volatile,
        close_endpoint=endpoint.close,
    )


def check_open_files(config: Config, conversations: int, *, served: bool = False) -> None:
    """Raises the limit of open files, which a connection or pipe of a conversation counts as.

    Args:
      served: a server has the policy, with a connection for each conversation.

    Raises:
      ValueError: so many conversations at once need more.
    """
    limit, agent = raise_open_files(), config.agent
    if agent.given:
        each = 1 if agent.name is None else 2  # a function's end of a connection is here too
    else:
        each = 2 if config.env.isolation == "process" else 0
    each += served
    others = open_files() + _SPARE_FILES
    if each and conversations * each + others > limit:
        raise ValueError(
            f"config.rollout.concurrency: got {conversations} conversations at once in this"
            f" process, with {each} open files each and {others} others; allowed: as many as the"
            f" limit of {limit:g} open files has room for, or a higher limit (`ulimit -n`)."
        )


def check_endpoint() -> None:
    """ValueError: the extra `agents` is not installed."""
    importlib.import_module("seeupo_jax.agents.endpoint")


def make_endpoint(
    config: Config,
    model: str,
    form: AnswerForm,
    *,
    serves: bool = False,
    origins: Sequence[str] = (),
    metrics: Callable[[], bytes] | None = None,
    controls: Sequence[Control] = (),
) -> Endpoint:
    """An endpoint that does not listen yet.

    Args:
      model: the served name. form: of its answers. serves: as of `SamplingRules`.
      origins, metrics, controls: as of `Endpoint`.

    Raises:
      ValueError: the extra `agents` is not installed.
    """
    from seeupo_jax.agents.endpoint import Endpoint, Limits

    agent = config.agent
    return Endpoint(
        sampling=_sampling_rules(config, serves=serves),
        model=model,
        form=form,
        roles=role_names(config.roles) if not serves else (),
        limits=Limits(request_bytes=agent.request_kib * 2**10),
        origins=origins,
        metrics=metrics,
        controls=controls,
    )


def _sampling_rules(
    config: Config, temperature: float | None = None, *, serves: bool = False
) -> SamplingRules:
    """How the policy is sampled; `temperature`: None is that of training.

    With top_k=1 the likeliest token is taken, which clients ask for by temperature 0.
    """
    from seeupo_jax.agents.dialects.sampling_rules import SamplingRules

    rollout, agent = config.rollout, config.agent
    flags = {
        # A harness asks for what its authors chose, and cannot be told otherwise.
        "ignore": agent.ignore_sampling or agent.harness is not None,
        "serves": serves,
        "constrains": serves or agent.constraints,
        "without_media": agent.harness is not None,  # its tools read any file
    }
    if rollout.top_k == 1:
        return SamplingRules(0.0, **flags)
    temperature = rollout.temperature if temperature is None else temperature
    return SamplingRules(temperature, rollout.top_p, rollout.top_k, **flags)


def build_runner(config: Config, tasks: AgentTasks) -> Runner:
    """Builds the runner of `config.agent`, in sandboxes for tasks that are folders."""
    agent, most, sandboxes = config.agent, config.env.max_reward, None
    if agent.name is not None:
        return FunctionAgents(agent.name, load_function(agent), max_reward=most)
    words = _words(config)
    if isinstance(tasks, TaskFolders):
        sandboxes = _sandboxes(config, tasks)
    return CommandAgents(
        words,
        model=MODEL,
        memory_mib=agent.memory_mib,
        output_kib=agent.output_kib,
        max_reward=most,
        sandboxes=sandboxes,
    )


def _sandboxes(config: Config, tasks: TaskFolders) -> Sandboxes:
    return Sandboxes(config.sandbox, tasks, _words(config), config.agent, config.rollout)


def _words(config: Config) -> list[str]:
    """The words of the agent's command line; in a sandbox, those of its program."""
    agent, rollout = config.agent, config.rollout
    if config.tasks is not None:
        return program_words(agent, in_image=config.sandbox.runtime != "local")
    return agent_words(agent, max_context=rollout.max_context, max_answer=rollout.max_action_tokens)
