"""Requests to the simulator of messages."""

from __future__ import annotations

from seeupo_jax.instruments.bfcl_worlds import world_words as words
from seeupo_jax.instruments.bfcl_worlds.draft import Draft, UserMessage, requests
from seeupo_jax.instruments.bfcl_worlds.scenarios import MESSAGES


def sign_in(draft: Draft) -> str:
    """Signs in if no user is signed in; returns the user's note about it."""
    workspace = draft.simulator(MESSAGES)
    if workspace.current_user:
        return ""
    user_id = next(iter(workspace.user_map.values()))
    draft.call("message_login", user_id=user_id)
    return draft.rng.choice(
        (
            f" For messages I am '{user_id}'; log me in.",
            f" Log in to the messages as '{user_id}' beforehand.",
        )
    )


def colleague(draft: Draft) -> str:
    """Draws a person of the workspace other than the user."""
    workspace = draft.simulator(MESSAGES)
    return draft.choose(
        [n for n, key in workspace.user_map.items() if key != workspace.current_user]
    )


def find_colleague(draft: Draft) -> tuple[str, str]:
    """Looks up a colleague's user ID; returns the name and the ID."""
    name = colleague(draft)
    return name, draft.call("get_user_id", user=name)["user_id"]


def send(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    name, key = find_colleague(draft)
    text = draft.choose(words.ERRANDS)
    draft.call("send_message", receiver_id=key, message=text)
    draft.set_fact("receiver", key)
    return draft.phrase(
        "Look up {name}'s user ID and message them '{text}'",
        "{name} has to know. Find out the user ID, then send '{text}'",
        "Send {name} the message '{text}', after looking up which ID that is.",
        partial=("Look up the user ID of a colleague and message them '{text}'",),
        detail=("{name} is the one I mean.", "It goes to {name}."),
        note=note,
        name=name,
        text=text,
    )


def send_to_id(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    key = draft.simulator(MESSAGES).user_map[colleague(draft)]
    text = draft.choose(words.ERRANDS)
    draft.call("send_message", receiver_id=key, message=text)
    draft.set_fact("receiver", key)
    return draft.phrase(
        "Write '{text}' to the user with ID '{key}'.",
        "'{key}' waits for my answer: send them '{text}'",
        partial="'{key}' waits for my answer. Send it.",
        detail="The answer is '{text}'",
        note=note,
        key=key,
        text=text,
    )


def look_up(draft: Draft) -> UserMessage:
    name, _ = find_colleague(draft)
    return draft.phrase(
        "Which user ID does {name} have in our workspace?",
        "I need {name}'s ID for a form.",
        partial="I need somebody's user ID for a form.",
        detail=("{name}'s.", "The ID of {name}, I mean."),
        name=name,
    )


def list_people(draft: Draft) -> UserMessage:
    draft.call("list_users")
    return draft.phrase(
        "Who is in the workspace for messages? Names are enough.",
        "Give me the names of everyone in our message workspace.",
    )


def list_sent(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    draft.call("view_messages_sent")
    return draft.phrase(
        "What have I written to people so far?",
        "Show all the messages that went out from me.",
        note=note,
    )


def withdraw(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    inbox = draft.simulator(MESSAGES).inbox
    key = draft.choose([next(iter(entry)) for entry in inbox])
    draft.call("delete_message", receiver_id=key)
    return draft.phrase(
        "Delete the latest message that I sent to '{key}'.",
        "My last words to '{key}' were a mistake, so take that message back.",
        partial="My last message to someone was a mistake, so take it back.",
        detail="It went to '{key}'.",
        note=note,
        key=key,
    )


def introduce(draft: Draft) -> UserMessage:
    people = draft.simulator(MESSAGES).user_map
    note = sign_in(draft)
    name = draft.choose([name for name in words.FIRST_NAMES if name not in people])
    draft.call("add_contact", user_name=name)
    return draft.phrase(
        "{name} has joined us: add that contact.",
        "Put {name} on the list of contacts.",
        partial="Put a new colleague on the list of contacts.",
        detail="The name is {name}.",
        note=note,
        name=name,
    )


def introduce_and_greet(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    people = draft.simulator(MESSAGES).user_map
    name = draft.choose([name for name in words.FIRST_NAMES if name not in people])
    key = draft.call("add_contact", user_name=name)["user_id"]
    text = draft.choose(words.ERRANDS)
    draft.call("send_message", receiver_id=key, message=text)
    draft.set_fact("receiver", key)
    return draft.phrase(
        "Add {name} as a contact, and send the new user ID '{text}'",
        "{name} is new here. Make a contact of that name and write them '{text}'",
        partial="Add {name} as a contact, and send the new user ID my message.",
        detail="The message: '{text}'",
        note=note,
        name=name,
        text=text,
    )


def search(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    text = next(iter(draft.choose(draft.simulator(MESSAGES).inbox).values()))
    word = draft.choose([word for word in text.split() if len(word) > 4])
    draft.call("search_messages", keyword=word)
    return draft.phrase(
        "Which messages contain '{word}'?",
        "I once wrote about '{word}'. Search the messages for that word.",
        partial="I once wrote about something. Search the messages for it.",
        detail="Search for '{word}'.",
        note=note,
        word=word,
    )


def search_and_repeat(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    old = next(iter(draft.choose(draft.simulator(MESSAGES).inbox).values()))
    word = draft.choose([word for word in old.split() if len(word) > 4])
    messages = draft.call("search_messages", keyword=word)["results"]
    key = draft.choose(messages if len(messages) == 1 else [])["receiver_id"]
    text = draft.choose(words.ERRANDS)
    draft.call("send_message", receiver_id=key, message=text)
    draft.set_fact("receiver", key)
    return draft.phrase(
        "Search my messages for '{word}'. Whoever got that one should also get '{text}'",
        "Somebody received a message with '{word}'. Search for it and write them '{text}' too.",
        note=note,
        word=word,
        text=text,
    )


def count_messages(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    draft.call("get_message_stats")
    return draft.phrase(
        "How many messages and contacts do my statistics show?",
        "Give me the message statistics.",
        note=note,
    )


def write_again(draft: Draft) -> UserMessage:
    text = draft.choose(words.ERRANDS)
    draft.call("send_message", receiver_id=draft.fact("receiver"), message=text)
    return draft.phrase(
        "Send the person whom you wrote to last '{text}' as well.",
        "And another message to the same person as last time: '{text}'",
        partial="And another message to the same person as last time, please.",
        detail="That one says '{text}'",
        text=text,
    )


def take_back(draft: Draft) -> UserMessage:
    draft.call("delete_message", receiver_id=draft.fact("receiver"))
    return draft.phrase(
        "Take back the latest message to the person whom you wrote to last.",
        "I regret it: the message that you sent last has to be deleted.",
    )


MESSAGE_REQUESTS = (
    *requests((MESSAGES,), send, send_to_id, look_up, list_people, list_sent, withdraw),
    *requests((MESSAGES,), introduce, introduce_and_greet, search, search_and_repeat),
    *requests((MESSAGES,), count_messages),
    *requests((MESSAGES,), write_again, take_back, follows="receiver"),
)
