"""Requests to the ticket system."""

from __future__ import annotations

from typing import Any

from seeupo_jax.instruments.bfcl_worlds import world_words as words
from seeupo_jax.instruments.bfcl_worlds.draft import Draft, UserMessage, requests
from seeupo_jax.instruments.bfcl_worlds.scenarios import TICKETS


def sign_in(draft: Draft) -> str:
    """Signs in if no user is signed in; returns the user's note about it."""
    if draft.simulator(TICKETS).current_user:
        return ""
    owners = [ticket["created_by"] for ticket in draft.simulator(TICKETS).ticket_queue]
    name = max(owners, key=owners.count)
    key = words.password(draft.rng)
    draft.call("ticket_login", username=name, password=key)
    return draft.rng.choice(
        (
            f" For the ticket system I am '{name}' with the password '{key}'.",
            f" Sign me in to the tickets first: user '{name}', password '{key}'.",
        )
    )


def some_ticket(draft: Draft, *statuses: str) -> dict[str, Any]:
    queue = draft.simulator(TICKETS).ticket_queue
    return draft.choose([t for t in queue if not statuses or t["status"] in statuses])


def open_ticket(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    title, text = words.title(draft.rng), f"{words.sentence(draft.rng)}."
    priority = draft.rng.randint(2, 5)
    made = draft.call("create_ticket", title=title, description=text, priority=priority)
    draft.set_fact("ticket", made["id"])
    return draft.phrase(
        "File a ticket: '{title}', priority {priority}. As description take '{text}'",
        "For the support queue, at priority {priority}: '{title}'. Describe it with '{text}'",
        "Report '{title}' as a ticket of priority {priority}; its description is '{text}'",
        partial="File a ticket '{title}' with the description '{text}' and a priority.",
        detail=("Priority {priority}.", "Give it priority {priority}."),
        note=note,
        title=title,
        text=text,
        priority=priority,
    )


def open_plain_ticket(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    title, priority = words.title(draft.rng), draft.rng.randint(2, 5)
    made = draft.call("create_ticket", title=title, priority=priority)
    draft.set_fact("ticket", made["id"])
    return draft.phrase(
        "Report '{title}' to support, urgency {priority} of 5. No description needed.",
        "A ticket without description, please: '{title}', at priority {priority}.",
        partial="Open me a ticket of priority {priority} that has no description.",
        detail=("Its title: '{title}'", "Head it '{title}'"),
        note=note,
        title=title,
        priority=priority,
    )


def read_ticket(draft: Draft) -> UserMessage:
    number = some_ticket(draft)["id"]
    draft.call("get_ticket", ticket_id=number)
    return draft.phrase(
        "What is ticket {number} about?",
        "Pull up number {number} of the ticket queue.",
        "I would like to see everything on record for ticket {number}.",
        partial="Pull up one of the tickets for me.",
        detail=("Number {number}.", "I mean ticket {number}."),
        number=number,
    )


def resolve_ticket(draft: Draft) -> UserMessage:
    number, fix = some_ticket(draft, "Open")["id"], draft.choose(words.FIXES)
    draft.call("resolve_ticket", ticket_id=number, resolution=fix)
    return draft.phrase(
        "Ticket {number} is sorted out. Resolve it with '{fix}'",
        "Mark {number} in the ticket queue as resolved; the resolution reads '{fix}'",
        partial="One more ticket is sorted out: resolve it with '{fix}'",
        detail=("That is ticket {number}.", "Its number is {number}."),
        number=number,
        fix=fix,
    )


def close_ticket(draft: Draft) -> UserMessage:
    number = some_ticket(draft, "Open", "Resolved")["id"]
    draft.call("close_ticket", ticket_id=number)
    return draft.phrase(
        "Ticket {number} can be closed.",
        "Nothing is left to do on ticket {number}, so close it.",
        "Shut ticket {number} for good.",
        partial="There is a ticket that can be closed.",
        detail="Close number {number}.",
        number=number,
    )


def change_priority(draft: Draft) -> UserMessage:
    ticket = some_ticket(draft)
    priority = draft.choose([p for p in range(1, 6) if p != ticket["priority"]])
    draft.call("edit_ticket", ticket_id=ticket["id"], updates={"priority": priority})
    return draft.phrase(
        "Set the priority of ticket {number} to {priority}.",
        "Ticket {number} has the wrong urgency; {priority} is the right one.",
        partial="Ticket {number} has the wrong urgency; change it.",
        detail="Priority {priority} is right.",
        number=ticket["id"],
        priority=priority,
    )


def change_title(draft: Draft) -> UserMessage:
    number, title = some_ticket(draft)["id"], words.title(draft.rng)
    draft.call("edit_ticket", ticket_id=number, updates={"title": title})
    return draft.phrase(
        "Ticket {number} should be headed '{title}' instead.",
        "Give ticket {number} a new title, namely '{title}'",
        partial="Ticket {number} should get another title.",
        detail="The title is '{title}'",
        number=number,
        title=title,
    )


def list_mine(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    draft.call("get_user_tickets", status="Open")
    return draft.phrase(
        "Which of my tickets are still open?",
        "List those of my own tickets whose status is open.",
        "Show my tickets, but only with status 'Open'.",
        note=note,
    )


def close_most_urgent(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    mine = draft.call("get_user_tickets", status="Open")
    urgent = sorted(mine, key=lambda ticket: -ticket["priority"])
    if len(urgent) > 1 and urgent[0]["priority"] == urgent[1]["priority"]:
        urgent = []
    draft.call("close_ticket", ticket_id=draft.choose(urgent[:1])["id"])
    return draft.phrase(
        "List my tickets with status 'Open' and close the one of the highest priority.",
        "Get my tickets whose status is 'Open'; the most urgent of them is done, so close it.",
        note=note,
    )


def raise_by_title(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    ticket = draft.choose(draft.call("get_user_tickets"))
    draft.call("edit_ticket", ticket_id=ticket["id"], updates={"priority": 5})
    return draft.phrase(
        "Among all my tickets there is one titled '{title}'. Look it up and set it to priority 5.",
        "Go through all of my tickets; '{title}' has become top priority, a 5.",
        partial="Go through all of my tickets and set one of them to priority 5.",
        detail="The one titled '{title}'",
        note=note,
        title=ticket["title"],
    )


def resolve_by_title(draft: Draft) -> UserMessage:
    note = sign_in(draft)
    ticket, fix = (
        draft.choose(draft.call("get_user_tickets", status="Open")),
        draft.choose(words.FIXES),
    )
    draft.call("resolve_ticket", ticket_id=ticket["id"], resolution=fix)
    return draft.phrase(
        "List my tickets with status 'Open'. Find '{title}' there, resolve it with '{fix}'",
        "Get my 'Open' tickets and resolve the one titled '{title}'. Resolution: '{fix}'",
        note=note,
        title=ticket["title"],
        fix=fix,
    )


def switch_user(draft: Draft) -> UserMessage:
    name, key = words.person(draft.rng), words.password(draft.rng)
    draft.call("ticket_login", username=name, password=key)
    return draft.phrase(
        "Let '{name}' into the ticket system in my place, whose password is '{key}'.",
        "From here on '{name}' works on the tickets: log in so, with the password '{key}'.",
        partial="Let '{name}' into the ticket system in my place.",
        detail="The password of '{name}' is '{key}'.",
        name=name,
        key=key,
    )


def sign_out(draft: Draft) -> UserMessage:
    draft.call("logout")
    return draft.phrase(
        "Log me out of the ticket system.", "My work on tickets is over: sign me out."
    )


def reread_latest(draft: Draft) -> UserMessage:
    draft.call("get_ticket", ticket_id=draft.fact("ticket"))
    return draft.phrase(
        "Let me check the record of the ticket that you filed last.",
        "Fetch the newest ticket again; I want to see how it was stored.",
    )


def resolve_latest(draft: Draft) -> UserMessage:
    fix = draft.choose(words.FIXES)
    draft.call("resolve_ticket", ticket_id=draft.fact("ticket"), resolution=fix)
    return draft.phrase(
        "The ticket that you filed last is done already: '{fix}' is the resolution.",
        "Good news: the newest ticket is fixed. Resolve it with '{fix}'",
        partial="Good news: the newest ticket is fixed. Resolve it with my words.",
        detail="Write '{fix}'",
        fix=fix,
    )


def close_latest(draft: Draft) -> UserMessage:
    draft.call("close_ticket", ticket_id=draft.fact("ticket"))
    return draft.phrase(
        "False alarm. Close the ticket that you filed last.",
        "The newest ticket is not needed any longer, so close it.",
    )


def restate_latest(draft: Draft) -> UserMessage:
    text = f"{words.sentence(draft.rng)}."
    draft.call("edit_ticket", ticket_id=draft.fact("ticket"), updates={"description": text})
    return draft.phrase(
        "The description of the ticket that you filed last should rather be '{text}'",
        "In the newest ticket, put '{text}' as description.",
        partial="The newest ticket needs another description.",
        detail="Put '{text}'",
        text=text,
    )


TICKET_REQUESTS = (
    *requests((TICKETS,), open_ticket, open_plain_ticket, read_ticket, resolve_ticket),
    *requests((TICKETS,), close_ticket, change_priority, change_title, list_mine),
    *requests(
        (TICKETS,), close_most_urgent, raise_by_title, resolve_by_title, switch_user, sign_out
    ),
    *requests(
        (TICKETS,), reread_latest, resolve_latest, close_latest, restate_latest, follows="ticket"
    ),
)
