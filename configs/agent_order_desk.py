"""SeeUPO on the order desk, played by an agent with a loop of its own: quickstart by other means.

    python -m seeupo_jax.train --config=configs/agent_order_desk.py --workdir=runs/agent

The agent, `seeupo_jax/agents/order_desk_agent.py`, is twenty lines on the OpenAI SDK that know
nothing of training. It gets the same trajectories as quickstart's environment, bit for bit.
"""

from ml_collections import ConfigDict

from seeupo_jax.configuration.config_file import read_values


def get_config() -> ConfigDict:
    config = ConfigDict(read_values("package:quickstart"))
    config.agent = {"name": "seeupo_jax.agents.order_desk_agent:play"}
    return config
