"""Models' own chat templates, which forget thoughts, and training templates of them."""

import chat_cases as cases
from places import SUPPORT

from seeupo_jax.configuration import schema
from seeupo_jax.policy.files.huggingface_tokenizer import HuggingFaceTokenizer
from seeupo_jax.policy.files.tokenizer import Transcript

OWN = {
    "qwen3": cases.QWEN3_TEMPLATE.read_text(),
    # Written for these tests, as the models' published templates are.
    **{
        name: (SUPPORT / f"chat_templates/{name}.jinja").read_text()
        for name in ("qwen3_5", "glm4_5")
    },
}
OWN["qwen3_thinking"] = (
    OWN["qwen3"].partition("{%- if add_generation_prompt %}")[0] + cases.ASKS_FOR_THOUGHTS
)
SMOLLM3 = (SUPPORT / "chat_templates/smollm3.jinja").read_text()
OFF = {"enable_thinking": False}
SYSTEM = {"role": "system", "content": "You work at a desk."}
USER = {"role": "user", "content": "Where is it?"}
THANKS = {"role": "user", "content": "Thanks!"}


def make(template, chat_template="keep_thoughts", kwargs=None, *, glm=False):
    library = cases.small_library(template, cases.GLM_CONTROL if glm else cases.QWEN_CONTROL)
    chat = schema.Chat(template=chat_template, template_kwargs=kwargs or {})
    # GLM's actions end with the name of the next role.
    ends = [library.convert_tokens_to_ids(name) for name in ("<|user|>", "<|observation|>")]
    generation = {"eos_token_id": ends} if glm else {}
    return HuggingFaceTokenizer(library, chat, generation=generation, where="a test")


def family(name, chat_template="keep_thoughts", kwargs=None):
    return make(OWN[name], chat_template, kwargs, glm=name == "glm4_5")


def play(tokenizer, actions, replies):
    """The segments of an episode with these actions, each answered by the next message."""
    transcript, conversation = Transcript(), tokenizer.begin([SYSTEM, USER], ())
    for turn, (action, reply) in enumerate(zip(actions, replies, strict=True)):
        transcript.read(conversation.tokens)
        transcript.act(action, turn, [0.0] * len(action))
        conversation = conversation.extend(action, [reply])
    return transcript.segments(), conversation
