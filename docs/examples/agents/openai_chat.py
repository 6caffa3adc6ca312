"""An agent on chat completions with a tool, by the asynchronous client that it receives."""

import json

ITEM = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
PRICE = {"name": "price", "description": "The price of an item in cents.", "parameters": ITEM}


async def agent(task, client):
    prices = task.data["prices"]
    question = f"Which is the cheapest: {', '.join(prices)}? Answer with its name alone."
    messages = [{"role": "user", "content": question}]
    while True:
        reply = await client.chat.completions.create(
            model="policy", messages=messages, tools=[{"type": "function", "function": PRICE}]
        )
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return float(message.content == min(prices, key=prices.get))
        for call in message.tool_calls:
            item = json.loads(call.function.arguments).get("item")
            known = isinstance(item, str) and item in prices  # a policy may write a list
            cents = str(prices[item]) if known else "no such item"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": cents})
