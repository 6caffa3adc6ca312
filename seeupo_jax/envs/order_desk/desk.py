"""The order desk at level 1: its tools and database, and an episode at a desk of any level."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

from seeupo_jax.envs.base import StepResult, Tool
from seeupo_jax.envs.order_desk import orders as world
from seeupo_jax.envs.tool_calls import ToolCall, ToolCallError, parse_hermes

OUTCOMES = ("cancelled", "returned", "address_changed", "refused", *world.STATUSES)
MAX_TURNS = 6


def tool(name: str, description: str, /, **arguments: str) -> Tool:
    """Makes a tool whose arguments are texts, all of them required."""
    properties = {key: {"type": "string", "description": text} for key, text in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"name": name, "description": description, "parameters": parameters}


TOOLS: tuple[Tool, ...] = (
    tool("find_customer", "The id of a customer.", name="First and last name."),
    tool(
        "list_orders",
        "The ids of a customer's orders of one item.",
        customer_id="Such as C12.",
        item="Such as mug.",
    ),
    tool("get_order", "An order's status.", order_id="Such as mug-34."),
    tool("cancel_order", "Cancels an order; cannot be undone.", order_id="Such as mug-34."),
    tool("return_order", "Takes an order back; cannot be undone.", order_id="Such as mug-34."),
    tool(
        "change_address",
        "Sends an order elsewhere; cannot be undone.",
        order_id="Such as mug-34.",
        address="Such as 7 Oak Street.",
    ),
    tool("reply", "Answers the customer and ends the case.", outcome="|".join(OUTCOMES)),
)
REFER = tool("refer", "Hands the case over unopened, as the first call only, and ends it.")


class DeskRefusal(ValueError):
    """The desk refuses a call; the text is returned to the model."""


def check_call(call: ToolCall, tools: Sequence[Tool]) -> None:
    """Checks a call's name and arguments.

    Raises:
      DeskRefusal: unknown tool, or wrong arguments.
    """
    arguments = {tool["name"]: tuple(tool["parameters"]["properties"]) for tool in tools}
    if call.name not in arguments:
        raise DeskRefusal(f"no tool {call.name!r}; tools: {', '.join(arguments)}")
    if sorted(call.arguments) != sorted(arguments[call.name]):
        raise DeskRefusal(f"{call.name} takes exactly: {', '.join(arguments[call.name])}")
    if not all(isinstance(value, str) for value in call.arguments.values()):
        raise DeskRefusal(f"{call.name} takes texts only")


class DeskState(Protocol):
    """The tools and the database state of one episode, at either level.

    max_turns: of an episode.
    finished: whether the customer has received all replies.
    """

    max_turns: ClassVar[int]

    @property
    def finished(self) -> bool: ...

    def call(self, call: ToolCall) -> str:
        """Executes a tool call; returns the tool's answer, or raises `DeskRefusal`."""
        ...

    def solved(self) -> bool: ...


class Desk:
    """The database of one task, and the outcome that was replied to the customer.

    hasty: whether an action concerned an order that had not been looked up.
    """

    max_turns: ClassVar[int] = MAX_TURNS

    def __init__(self, task: world.Task):
        self.task = task
        self.customers = {customer.name: customer for customer in task.customers}
        self.orders = {order.order_id: order for c in task.customers for order in c.orders}
        self.looked_up: set[str] = set()  # order ids
        self.outcome: str | None = None
        self.hasty = False

    @property
    def finished(self) -> bool:
        return self.outcome is not None

    def call(self, call: ToolCall) -> str:
        """Executes a tool call; returns the tool's answer.

        Raises:
          DeskRefusal: unknown tool, wrong arguments, or unknown name or id.
        """
        check_call(call, TOOLS)
        tools: dict[str, Callable[..., str]] = {
            "find_customer": self._find_customer,
            "list_orders": self._list_orders,
            "get_order": self._get_order,
            "cancel_order": lambda order_id: self._change(order_id, world.cancel),
            "return_order": lambda order_id: self._change(order_id, world.send_back),
            "change_address": lambda order_id, address: self._change(
                order_id, lambda order: world.move(order, address)
            ),
            "reply": self._reply,
        }
        return tools[call.name](**call.arguments)

    def solved(self) -> bool:
        """Whether reply and orders follow the policy, and every changed order was looked up."""
        target = self.task.target
        outcome = world.resolve(self.task.request, target)
        wanted = {o.order_id: o for c in self.task.customers for o in c.orders}
        wanted[target.order_id] = world.carry_out(outcome, target, self.task.address)
        looked_up = target.order_id in self.looked_up and not self.hasty
        return looked_up and self.outcome == outcome and self.orders == wanted

    def _find_customer(self, name: str) -> str:
        if name not in self.customers:
            raise DeskRefusal(f"no customer {name!r}")
        return json.dumps({"customer_id": self.customers[name].customer_id})

    def _list_orders(self, customer_id: str, item: str) -> str:
        for customer in self.customers.values():
            if customer.customer_id == customer_id:
                return json.dumps([o.order_id for o in customer.orders if o.item == item])
        raise DeskRefusal(f"no customer {customer_id!r}")

    def _get_order(self, order_id: str) -> str:
        answer = world.describe(self._order(order_id))
        self.looked_up.add(order_id)
        return answer

    def _order(self, order_id: str) -> world.Order:
        if order_id not in self.orders:
            raise DeskRefusal(f"no order {order_id!r}")
        return self.orders[order_id]

    def _change(self, order_id: str, action: Callable[[world.Order], world.Order]) -> str:
        order = self._order(order_id)
        if order.status in ("cancelled", "returned"):
            raise DeskRefusal(f"{order_id} is already {order.status}")
        self.orders[order_id] = action(order)
        self.hasty |= order_id not in self.looked_up
        return json.dumps({"done": order_id})

    def _reply(self, outcome: str) -> str:
        if outcome not in OUTCOMES:
            raise DeskRefusal(f"outcome must be one of: {', '.join(OUTCOMES)}")
        self.outcome = outcome
        return ""


class DeskEpisode:
    """One episode at a desk: one response per turn.

    refer_reward: of a case that is handed over; None: there is no such call.
    """

    def __init__(self, desk: DeskState, refer_reward: float | None = None):
        self.desk = desk
        self._refer_reward, self._referred = refer_reward, False
        self._turns, self._executed = 0, list[bool]()

    def step(self, text: str) -> StepResult:
        """Executes a response's tool call; the last reply, a referral or the last turn ends it.

        Raises:
          ValueError: the episode is over.
        """
        if self._over():
            raise ValueError("order_desk: the case is done; reset() must come before step().")
        self._turns += 1
        try:
            call = _single_call(text)
            if self._refer_reward is not None and call.name == REFER["name"]:
                answer = self._refer(call)
            else:
                answer = self.desk.call(call)
            self._executed.append(True)
        except (DeskRefusal, ToolCallError) as error:
            answer = json.dumps({"error": str(error)})
            self._executed.append(False)
        done = self._over()
        observation = () if done else ({"role": "tool", "content": answer},)
        reward = self.score() if done else 0.0
        info = {"bad_calls": self._executed.count(False), "executed": [*self._executed]}
        return StepResult(observation, reward, done, info)

    def score(self) -> float:
        """1 if the task is solved, else 0; of a referred case its reward."""
        if self._referred and self._refer_reward is not None:
            return self._refer_reward
        return float(self.desk.solved())

    def _over(self) -> bool:
        return self._referred or self.desk.finished or self._turns >= self.desk.max_turns

    def _refer(self, call: ToolCall) -> str:
        check_call(call, [REFER])
        if self._turns > 1:
            raise DeskRefusal("refer is the first call or none")
        self._referred = True
        return ""


def _single_call(text: str) -> ToolCall:
    calls = parse_hermes(text)
    if len(calls) != 1:
        raise ToolCallError(f"write exactly one <tool_call>, got {len(calls)}")
    return calls[0]
