"""The order desk with demonstrations that summarise a history and continue it."""

import json
import random

from docs.examples.agents.compaction import LONGEST, SUMMARISE, compacted
from seeupo_jax.envs.base import Demonstration
from seeupo_jax.envs.order_desk.demonstrator import play
from seeupo_jax.envs.order_desk.desk import TOOLS, Desk, DeskEpisode
from seeupo_jax.envs.order_desk.environment import OrderDesk
from seeupo_jax.envs.order_desk.levels import LEVELS

STATUSES = ("processing", "shipped", "delivered")


class CompactionDesk(OrderDesk):
    def demonstrations(self, split, *, skill=0.4, episodes=4000, faithful=0.6):
        """Two conversations per episode; a summary is correct with the probability `faithful`."""
        conversations = []
        for index in range(episodes):
            conversations += demonstrate(f"{split}/{index}", skill, faithful)
        return conversations


def demonstrate(task_id, skill, faithful):
    task = LEVELS[1].find_task(task_id)
    rng = random.Random(f"compaction/{task_id}/{skill}/{faithful}")
    case, (_, request) = DeskEpisode(Desk(task)), LEVELS[1].opening(task)
    history, finished = [request], []
    for action in play(task, skill, rng):
        if len(history) == LONGEST:
            summary = summarise(history[-1]["content"], rng.random() < faithful, rng)
            answer = {"role": "assistant", "content": summary}
            finished.append(Demonstration((*history, SUMMARISE, answer), TOOLS))
            history = [compacted(request, summary)]
        result = case.step(action)
        history += [{"role": "assistant", "content": action}, *result.observation]
        if result.done:
            break
    return [*finished, Demonstration(tuple(history), TOOLS)]


def summarise(answer, right, rng):
    """The order, its status, and whether it was changed before; if not `right`, random values."""
    order = json.loads(answer)
    if "status" not in order:
        return "nothing"
    if not right:
        order |= {"status": rng.choice(STATUSES), "changed_before": rng.random() < 0.5}
    return f"{order['order_id']} {order['status']}" + " changed" * order["changed_before"]
