"""Plays one task of tau2-bench: the policy is its agent, the role `user` its user simulator.

The command of `config.agent`, run by the Python of .venv beside this file; README.md has the run.
Both call the trainer's endpoint through litellm, which reads its address and key from the
environment. A message that is none, or a limit of the run, ends a task with reward 0.
"""

import json
import os
import sys
from pathlib import Path

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no list of prices from the internet

import litellm
from loguru import logger
from tau2.registry import registry
from tau2.run import run_task


def main() -> None:
    logger.remove()
    asked = json.loads(Path(os.environ["SEEUPO_TASK"]).read_text())
    domain, name = asked["data"]["domain"], asked["data"]["name"]
    tasks = {task.id: task for task in registry.get_tasks_loader(domain)()}
    address = {"api_base": os.environ["OPENAI_BASE_URL"]}
    try:
        simulation = run_task(
            domain,
            tasks[name],
            agent="llm_agent",
            user="user_simulator",
            llm_agent=f"openai/{os.environ['OPENAI_MODEL']}",
            llm_args_agent=dict(address),
            llm_user="openai/user",
            llm_args_user=dict(address),
        )
    except litellm.BadRequestError as error:
        full = isinstance(error, litellm.ContextWindowExceededError)
        if not full and "rollout.max_turns" not in str(error):
            print(error, file=sys.stderr)
            sys.exit(2)  # the run is set up wrongly: the episode does not count
        result = {"reward": 0.0, "info": {"ended": "max_tokens" if full else "max_turns"}}
    except ValueError as error:  # neither a text nor a call, or arguments that are no JSON
        result = {"reward": 0.0, "info": {"ended": str(error)[:200]}}
    else:
        info = {"ended": simulation.termination_reason.value}
        result = {"reward": simulation.reward_info.reward, "info": info}
    Path(os.environ["SEEUPO_RESULT"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
