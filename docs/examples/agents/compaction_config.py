"""SeeUPO on the order desk with an agent that compacts its history, after a short warm start."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.iterations = 20
    config.agent = {"name": "docs.examples.agents.compaction:agent"}
    config.env = {"name": "docs.examples.agents.compaction_desk:CompactionDesk"}
    config.model = {"path": "package:order_desk"}
    config.rollout = {
        "tasks": 16,
        "group_size": 8,
        "max_turns": 7,  # six at the desk, and the summary
        "max_action_tokens": 16,
        "max_context": 112,
        "temperature": 1.0,
    }
    config.warm_start = {
        "batch_size": 32,
        "stages": [
            {
                "steps": 300,
                "learning_rate": 1e-3,
                "demonstrations": {"skill": 0.4, "faithful": 0.6, "episodes": 8000},
            }
        ],
    }
    config.batching = {"microbatch_tokens": 512}
    config.optimizer = {"name": "adam", "learning_rate": 2e-4}
    config.evaluation = {"every": 5, "split": "test", "tasks": 64, "k": 4}
    config.checkpoint = {"every": 10}
    return config
