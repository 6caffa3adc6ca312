"""A program with the synchronous client that prints an answer while it is sampled."""

import json
import os
from pathlib import Path

from openai import OpenAI

task = json.loads(Path(os.environ["SEEUPO_TASK"]).read_text())
prices = task["data"]["prices"]
offers = ", ".join(f"{item} for {cents} cents" for item, cents in prices.items())
question = f"{offers}: which is the cheapest? Answer with its name alone."

client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
stream = client.chat.completions.create(
    model=os.environ["OPENAI_MODEL"],
    messages=[{"role": "user", "content": question}],
    stream=True,
)
answer = ""
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        answer += chunk.choices[0].delta.content
        print(chunk.choices[0].delta.content, end="", flush=True)

reward = float(answer == min(prices, key=prices.get))
Path(os.environ["SEEUPO_RESULT"]).write_text(json.dumps(reward))
