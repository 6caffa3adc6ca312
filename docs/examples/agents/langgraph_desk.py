"""A langgraph agent at an order desk: model and tools alternate until the agent has replied."""

import asyncio
import json
import os
from pathlib import Path

from desk import open_desk
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

RULES = ("system", "You work at an online shop's order desk. Use the tools; end with one reply.")


async def play(case, model):
    tools, solved = open_desk(case)

    async def ask(state):
        return {"messages": await model.bind_tools(tools).ainvoke([RULES, *state["messages"]])}

    def replied(state):
        return END if state["messages"][-1].name == "reply" else "model"

    graph = StateGraph(MessagesState)
    graph.add_node("model", ask)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_conditional_edges("tools", replied)
    await graph.compile().ainvoke({"messages": [("user", case["message"])]})
    return solved()


if __name__ == "__main__":
    case = json.loads(Path(os.environ["SEEUPO_TASK"]).read_text())["data"]
    reward = asyncio.run(play(case, ChatOpenAI(model=os.environ["OPENAI_MODEL"])))
    Path(os.environ["SEEUPO_RESULT"]).write_text(json.dumps(reward))
