"""An agent on Anthropic's messages API with a tool."""

from anthropic import AsyncAnthropic

ITEM = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
PRICE = {"name": "price", "description": "The price of an item in cents.", "input_schema": ITEM}


async def agent(task, client):
    prices = task.data["prices"]
    question = f"Which is the cheapest: {', '.join(prices)}? Answer with its name alone."
    messages = [{"role": "user", "content": question}]
    address = str(client.base_url).removesuffix("/").removesuffix("/v1")  # the SDK adds /v1
    async with AsyncAnthropic(base_url=address, api_key=client.api_key) as anthropic:
        while True:
            reply = await anthropic.messages.create(
                model="policy", max_tokens=64, messages=messages, tools=[PRICE]
            )
            messages.append({"role": "assistant", "content": reply.content})
            calls = [block for block in reply.content if block.type == "tool_use"]
            if not calls:
                text = "".join(block.text for block in reply.content)
                return float(text == min(prices, key=prices.get))
            results = []
            for call in calls:
                item = call.input.get("item")
                known = isinstance(item, str) and item in prices  # a policy may write a list
                cents = str(prices[item]) if known else "no such item"
                results.append({"type": "tool_result", "tool_use_id": call.id, "content": cents})
            messages.append({"role": "user", "content": results})
