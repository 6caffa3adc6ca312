"""Sessions that answer as they are told, for tests of what stands before an engine."""

import asyncio
import contextlib
import threading

from seeupo_jax.agents.answer_form import AnswerForm
from seeupo_jax.agents.calls import CallRefused, Completion
from seeupo_jax.agents.dialects.sampling_rules import SamplingRules
from seeupo_jax.agents.endpoint import Endpoint, Limits
from seeupo_jax.envs.tool_calls import ToolCall, render_hermes
from seeupo_jax.envs.tool_formats.formats import choose_format

FORMAT = choose_format("hermes")


class ToldSession:
    """Says what the last message says, three characters a token; some texts have a meaning.

    `wait`: says "ab" and then nothing. `refuse`, `break`: fails at once; `refuse late`, `break
    late`: after "ab".
    """

    def __init__(self, name="", form=None):
        self.name, self.calls, self.params = name, [], []
        self.form = AnswerForm(FORMAT) if form is None else form
        self.waiting, self.cancelled = threading.Semaphore(0), threading.Semaphore(0)

    def ignored(self, param):
        self.params.append(param)

    max_context = 4096

    async def context(self, call):
        """A token for each character of the contents."""
        await asyncio.sleep(0)
        text = "".join(message.content for message in call.messages)
        if text == "refuse":
            raise CallRefused("messages: got them; allowed: others.", code="invalid_messages")
        return [ord(character) for character in text] + [0] * len(call.tools)

    async def complete(self, call, on_text=None):
        self.calls.append(call)
        asked = call.messages[-1].content
        tell = on_text or (lambda text: None)
        if asked in ("wait", "refuse late", "break late"):
            tell("ab")
        try:
            await asyncio.sleep(0)
            while asked == "wait":
                self.waiting.release()
                await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.cancelled.release()
            raise
        if asked.startswith("refuse"):
            raise CallRefused("3 turns are used up; allowed: 3.", code="max_turns")
        if asked.startswith("break"):
            raise RuntimeError("the engine is broken")
        return self._say(call, self.name + asked, tell)

    def _say(self, call, said, tell):
        pieces = tuple(said[i : i + 3] for i in range(0, len(said), 3))[: call.max_tokens]
        text, finish = "".join(pieces), "stop" if len(pieces) * 3 >= len(said) else "length"
        ends = [(text.index(stop), stop) for stop in call.stop if stop in text]
        end, stopped_at = min(ends, default=(None, None))
        if ends:
            text, finish = text[:end], "stop"
        for i in range(0, len(text), 3):
            tell(text[i : i + 3])
        form = self.form.with_tools(call.tools)
        answer = form.parse(text, call.tools)
        if cut := finish == "length" and not answer.calls:
            answer = form.parse(text, call.tools, cut=True)
        thoughts, content, calls = answer
        return Completion(
            text=text,
            content=content,
            calls=calls,
            finish="tool_calls" if calls and not cut else finish,
            pieces=tuple(piece.encode() for piece in pieces),
            logp=tuple(-0.5 * i for i in range(len(pieces))),
            prompt_tokens=10 * len(call.messages),
            cached_tokens=4,
            stopped_at=stopped_at,
            thoughts=thoughts,
        )


RULES = SamplingRules(temperature=0.8, top_p=0.9)
PARAMETERS = {"type": "object", "properties": {"name": {"type": "string"}}}
TOOL = {"name": "find", "description": "Finds.", "parameters": PARAMETERS}
CALLS = "I look.\n" + render_hermes("find", name="é") + "\n" + render_hermes("find")
FOUND = (ToolCall("find", {"name": "é"}), ToolCall("find", {}))


def make_endpoint(form=None, origins=(), **limits):
    """An endpoint that listens."""
    endpoint = Endpoint(
        sampling=RULES,
        model="ours",
        form=form or AnswerForm(FORMAT),
        limits=Limits(**limits),
        origins=origins,
    )
    endpoint.start()
    return endpoint


@contextlib.contextmanager
def opened(endpoint, name="", form=None, **options):
    """A session of that name behind a key: (session, access)."""
    session = ToldSession(name, form)
    access = endpoint.open_key(session, **options)
    yield session, access
    endpoint.close_key(access.api_key)
