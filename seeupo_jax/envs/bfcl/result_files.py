"""Episodes of `bfcl` in the official layout of results, for the official scorer.

FOLDER/member_I/result/MODEL/multi_turn/BFCL_v4_CATEGORY_result.json has one JSON object per line,
`{"id": ..., "result": [[step, ...] per user turn]}`. Member I holds episode I of each task;
FOLDER/member_I is the scorer's project root. MODEL determines how the scorer parses a step: steps
are written as `<tool_call>` blocks for `DECODER`, independent of the episodes' `format`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from seeupo_jax.envs.bfcl.environment import Bfcl
from seeupo_jax.envs.bfcl.formats import FORMATS, known_tools
from seeupo_jax.envs.bfcl.simulated_apis import World
from seeupo_jax.envs.tool_calls import ToolCall, ToolCallError, render_python

# Its decoder reads JSON arguments of every type; the decoder of `[f(x=1)]` drops positional
# arguments and fails on some dicts.
DECODER = "Qwen/Qwen3-14B-FC"

# A call of no simulator: also an error for the scorer, without any effect.
_NO_CALL = ToolCall("no_such_tool", {})


def export_results(
    environment: Bfcl, played: Iterable[tuple[str, int, Sequence[Mapping[str, str]]]], folder: Path
) -> list[str]:
    """Writes the result files; those of an earlier export of the category there are replaced.

    Args:
      environment: the environment in which the episodes were played.
      played: task id, member and messages of each episode.

    Returns:
      For each member the shell command that scores it; it needs a full install of `bfcl-eval`.
    """
    rows: dict[int, dict[str, str]] = {}
    for task_id, member, messages in played:
        row = {"id": task_id, "result": to_result(environment, task_id, messages)}
        rows.setdefault(member, {})[task_id] = json.dumps(row) + "\n"
    place = Path("result", DECODER.replace("/", "_"), "multi_turn")
    file = f"BFCL_v4_{environment.category}_result.json"
    for earlier in folder.glob(f"member_*/{place / file}"):
        earlier.unlink()
    commands = []
    for member in sorted(rows):
        root = folder / f"member_{member}"
        (root / place).mkdir(parents=True, exist_ok=True)
        lines = sorted(rows[member].items(), key=lambda row: int(row[0].rpartition("_")[2]))
        text = "".join(line for _, line in lines)
        (root / place / file).write_text(text, encoding="utf-8")
        commands.append(
            f"BFCL_PROJECT_ROOT={shlex.quote(str(root.absolute()))} bfcl evaluate --model {DECODER}"
            f" --test-category {environment.category} --partial-eval"
        )
    return commands


def to_result(
    environment: Bfcl, task_id: str, messages: Sequence[Mapping[str, str]]
) -> list[list[str]]:
    """The steps of each user turn that ended; the scorer counts a truncated episode as a failure.

    Calls are rewritten as the environment parsed them: arguments by name, tuples as lists. The
    official executor evaluates names and has no limits, so a call to an unknown tool, with an
    unknown argument, or refused for its size becomes a call that only fails. `<tool_call>` in a
    message that was not run is made unparsable.
    """
    parse = FORMATS[environment.format].parse
    task = environment.find_task(task_id)
    world, tools = World(task), known_tools(tuple(task.classes))
    ended: list[list[str]] = []
    steps: list[str] = []
    for text in (m["content"] for m in messages if m["role"] == "assistant"):
        try:
            calls = parse(text, tools)
        except ToolCallError:
            steps.append(_without_calls(text))
            continue
        if calls:
            steps.append("\n".join(_write(_exported(world, call)) for call in calls))
            continue
        ended.append([*steps, _without_calls(text)])
        steps = []
    return ended


def _exported(world: World, call: ToolCall) -> ToolCall:
    """A call as the scorer may parse it; it is executed again in the episode's world."""
    too_large = f"Error during execution: {call.name} refused: the result would be too large"
    answer = world.call(call)
    is_tool = any(callable(getattr(part, call.name, None)) for part in world.instances.values())
    if answer == too_large or call.name.startswith("_") or not is_tool:
        return _NO_CALL
    if call.positional:
        try:
            return world.read(render_python([call])[1:-1])
        except (TypeError, ValueError):  # the arguments are not the tool's
            return _NO_CALL
    return call if all(name.isidentifier() for name in call.arguments) else _NO_CALL


def _write(call: ToolCall) -> str:
    body = json.dumps({"name": call.name, "arguments": call.arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def _without_calls(text: str) -> str:
    return text.replace("<tool_call>", "<tool_call >")
