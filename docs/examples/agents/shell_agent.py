"""A program that lets the policy work in a shell until it says that it is done."""

import json
import os
import re
import subprocess
from pathlib import Path

from openai import BadRequestError, OpenAI

SYSTEM = (
    "You work in a shell. Answer with one command between ```bash and ```; you get its output."
    " When the task is done, answer DONE."
)
task = json.loads(Path(os.environ["SEEUPO_TASK"]).read_text())
client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
messages = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": task["data"]["instruction"]},
]
while True:
    try:
        reply = client.chat.completions.create(model="policy", messages=messages)
    except BadRequestError as error:  # its turns or its context are used up
        print(error.message)
        break
    text = reply.choices[0].message.content or ""
    messages.append({"role": "assistant", "content": text})
    command = re.search(r"```(?:bash|sh)?\n(.*?)```", text, re.DOTALL)
    if command is None:
        break
    done = subprocess.run(
        ["bash", "-c", command[1]], capture_output=True, text=True, errors="replace", timeout=60
    )
    output = (done.stdout + done.stderr)[-500:] or f"exit code {done.returncode}"
    messages.append({"role": "user", "content": output})
