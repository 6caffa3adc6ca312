"""Lists the tasks of a domain of tau2-bench, a line each, for `config.agent.tasks`.

Usage: third_party/tau2/.venv/bin/python third_party/tau2/list_tasks.py DOMAIN >FILE.jsonl
"""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no list of prices from the internet

from loguru import logger
from tau2.registry import registry


def main() -> None:
    logger.remove()
    (domain,) = sys.argv[1:]
    splits = registry.get_task_splits_loader(domain)()
    for split in ("train", "test") if "train" in splits else ("base",):
        for name in splits[split]:
            task_id = f"{domain}/{name}"
            row = {"task_id": task_id, "split": "test" if split == "test" else "train"}
            print(json.dumps(row | {"domain": domain, "name": name}))


if __name__ == "__main__":
    main()
