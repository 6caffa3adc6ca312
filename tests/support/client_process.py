"""Calls a server by a Python client, in a process of its own, and prints what came back as JSON.

They leave connections open, which the tests' own process treats as errors.
client_process.py CLIENT VARIANT HOST KEY
"""

import json
import sys
from typing import Literal

import pydantic

ASKED = [{"role": "user", "content": "Hi"}]
FULL = [{"role": "user", "content": "full"}]


class Weather(pydantic.BaseModel):
    """A record that clients ask for."""

    city: Literal["Paris", "Rome"]


def litellm(model, host, key):
    """Two steps with a tool, a record, and the errors of a full context: whole and as a stream."""
    import litellm

    base = host if model.startswith("anthropic") else f"{host}/v1"
    fixed = {"model": model, "api_base": base, "api_key": key, "max_retries": 0, "max_tokens": 90}
    function = {"name": "weather", "parameters": Weather.model_json_schema()}
    asked = {
        "temperature": 0.2,
        "top_p": 0.5,
        "tools": [{"type": "function", "function": function}],
    }
    steps = fixed | asked
    first = litellm.completion(messages=ASKED, tool_choice="required", **steps).choices[0].message
    (call,) = first.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "21"}
    second = litellm.completion(messages=[*ASKED, first, result], **steps).choices[0].message
    third = litellm.completion(messages=ASKED, response_format=Weather, **fixed)
    record = json.loads(third.choices[0].message.content)
    errors = []
    for stream in (False, True):
        try:
            list(litellm.completion(messages=FULL, stream=stream, **fixed))
        except Exception as error:
            errors.append(type(error).__name__)
    return [json.loads(call.function.arguments), second.content, record, *errors]


def langchain(api, host, key):
    """A call of a forced tool, twice, and a record by a schema."""
    from langchain_anthropic import ChatAnthropic
    from langchain_openai import ChatOpenAI

    if api == "messages":
        model = ChatAnthropic(model="m", base_url=host, api_key=key, max_tokens=90, max_retries=0)
    else:
        fixed = {"base_url": f"{host}/v1", "api_key": key, "max_retries": 0}
        model = ChatOpenAI(model="m", use_responses_api=api == "responses", **fixed)
    forced = [
        model.bind_tools([Weather], tool_choice=choice).invoke("Hi").tool_calls[0]["args"]
        for choice in ("Weather", "any")
    ]
    record = model.with_structured_output(Weather, method="json_schema").invoke("Hi")
    return [*forced, record.model_dump()]


def smolagents(variant, host, key):
    """The call of an agent's tool, and the answer of the next step."""
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    @tool
    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name.
        """
        called.append(city)
        return "21"

    called = []
    model = OpenAIModel(model_id="m", api_base=f"{host}/v1", api_key=key)
    agent = ToolCallingAgent(tools=[weather], model=model, max_steps=1, verbosity_level=0)
    agent.run("Hi")
    return called


def instructor(mode, host, key):
    """A record."""
    import instructor
    import openai

    client = openai.OpenAI(base_url=f"{host}/v1", api_key=key, max_retries=0)
    patched = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
    record = patched.create(model="m", messages=ASKED, response_model=Weather, max_retries=0)
    return record.model_dump()


def pydantic_ai(variant, host, key):
    """Two records, the second from a conversation that continues the first's."""
    import pydantic_ai
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    api, form = variant.split("/")
    if api == "anthropic":
        model = AnthropicModel("m", provider=AnthropicProvider(base_url=host, api_key=key))
    else:
        kind = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[api]
        model = kind("m", provider=OpenAIProvider(base_url=f"{host}/v1", api_key=key))
    agent = pydantic_ai.Agent(model, output_type=getattr(pydantic_ai, form)(Weather), retries=0)
    first = agent.run_sync("Hi", model_settings={"temperature": 0.2})
    second = agent.run_sync("Again", message_history=first.all_messages())
    return [first.output.model_dump(), second.output.model_dump()]


if __name__ == "__main__":
    name, *given = sys.argv[1:]
    print(json.dumps(globals()[name](*given)))
