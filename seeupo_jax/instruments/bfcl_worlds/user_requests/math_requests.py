"""Requests to the calculator."""

from __future__ import annotations

from seeupo_jax.instruments.bfcl_worlds.draft import Draft, UserMessage, requests
from seeupo_jax.instruments.bfcl_worlds.scenarios import MATH


def _numbers(draft: Draft) -> list[float]:
    return [draft.amount(2, 90) for _ in range(draft.rng.randint(3, 6))]


def _listed(numbers: list[float]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _leave(draft: Draft, result: dict[str, float]) -> None:
    draft.set_fact("figure", result["result"])


def average(draft: Draft) -> UserMessage:
    numbers = _numbers(draft)
    _leave(draft, draft.call("mean", numbers=numbers))
    return draft.phrase(
        "What is the mean of {listed}?",
        "Average these readings: {listed}.",
        "I measured {listed}. Work out the average.",
        partial="Average some readings for me.",
        detail="The readings are {listed}.",
        listed=_listed(numbers),
    )


def spread(draft: Draft) -> UserMessage:
    numbers = _numbers(draft)
    _leave(draft, draft.call("standard_deviation", numbers=numbers))
    return draft.phrase(
        "How much do {listed} scatter? The standard deviation, please.",
        "Work out the standard deviation of {listed}.",
        partial="Work out a standard deviation.",
        detail="Of {listed}.",
        listed=_listed(numbers),
    )


def total(draft: Draft) -> UserMessage:
    numbers = _numbers(draft)
    _leave(draft, draft.call("sum_values", numbers=numbers))
    return draft.phrase(
        "Add up all of {listed} in one go.",
        "My bills are {listed}. What do they sum to?",
        partial="What do my bills sum to?",
        detail="They are {listed}.",
        listed=_listed(numbers),
    )


def largest(draft: Draft) -> UserMessage:
    numbers = _numbers(draft)
    _leave(draft, draft.call("max_value", numbers=numbers))
    return draft.phrase(
        "Let the calculator pick the largest of {listed}.",
        "Which is the maximum among {listed}?",
        listed=_listed(numbers),
    )


def smallest(draft: Draft) -> UserMessage:
    numbers = _numbers(draft)
    _leave(draft, draft.call("min_value", numbers=numbers))
    return draft.phrase(
        "Let the calculator pick the smallest of {listed}.",
        "Which is the minimum among {listed}?",
        listed=_listed(numbers),
    )


def product(draft: Draft) -> UserMessage:
    a, b = draft.amount(3, 60), draft.amount(3, 60)
    _leave(draft, draft.call("multiply", a=a, b=b))
    return draft.phrase(
        "What do you get for {a} times {b}?",
        "A field is {a} metres by {b} metres. Multiply the two, in this order.",
        partial="A field is {a} metres wide. Multiply that by its length.",
        detail="Its length is {b} metres.",
        a=a,
        b=b,
    )


def share(draft: Draft) -> UserMessage:
    part, whole = draft.amount(3, 40), draft.amount(60, 400)
    _leave(draft, draft.call("percentage", part=part, whole=whole))
    return draft.phrase(
        "{part} of {whole}: which percentage is that?",
        "How many percent of {whole} are {part}?",
        partial="How many percent of {whole} is my part?",
        detail="My part is {part}.",
        part=part,
        whole=whole,
    )


def convert_length(draft: Draft) -> UserMessage:
    units = {"km": "miles", "m": "ft", "cm": "in", "kg": "lb"}
    old = draft.choose(list(units))
    value = draft.amount(2, 90)
    _leave(
        draft,
        draft.call("imperial_si_conversion", value=value, unit_in=old, unit_out=units[old]),
    )
    return draft.phrase(
        "Convert {value} {old} to {new}.",
        "What are {value} {old} when measured in {new}?",
        partial="Convert a value from {old} to {new}.",
        detail="The value: {value}.",
        value=value,
        old=old,
        new=units[old],
    )


def convert_metric(draft: Draft) -> UserMessage:
    old, new = draft.choose_two(("km", "m", "cm", "mm"))
    value = draft.amount(2, 90)
    _leave(draft, draft.call("si_unit_conversion", value=value, unit_in=old, unit_out=new))
    return draft.phrase(
        "How many {new} are {value} {old}?",
        "Express {value} {old} in {new}.",
        partial="Express a length of some {old} in {new}.",
        detail="It is {value} {old}.",
        value=value,
        old=old,
        new=new,
    )


def logarithm(draft: Draft) -> UserMessage:
    value, base, precision = draft.amount(2, 900), draft.rng.randint(2, 9), draft.rng.randint(5, 12)
    draft.call("logarithm", value=value, base=base, precision=precision)
    return draft.phrase(
        "Take the logarithm of {value} to base {base}, with precision {precision}.",
        "The log of {value}, base {base}: I need it to a precision of {precision}.",
        partial="Take the logarithm of {value} with precision {precision}.",
        detail="To base {base}.",
        value=value,
        base=base,
        precision=precision,
    )


def round_it(draft: Draft) -> UserMessage:
    figure, places = draft.fact("figure"), draft.rng.randint(1, 2)
    draft.set_fact(
        "figure", draft.call("round_number", number=figure, decimal_places=places)["result"]
    )
    return draft.phrase(
        "Round that to {places} decimal place(s).",
        "That has too many digits: {places} after the point is enough.",
        partial="That has too many digits, so round it.",
        detail="To {places} decimal place(s).",
        places=places,
    )


def halve_it(draft: Draft) -> UserMessage:
    number = draft.rng.randint(2, 9)
    _leave(draft, draft.call("divide", a=draft.fact("figure"), b=number))
    return draft.phrase(
        "Divide that result by {number}.",
        "Split that figure evenly among {number} people: how much is it for each?",
        partial="Divide that result further.",
        detail="By {number}.",
        number=number,
    )


def add_to_it(draft: Draft) -> UserMessage:
    number = draft.amount(2, 50)
    _leave(draft, draft.call("add", a=draft.fact("figure"), b=number))
    return draft.phrase(
        "Now add {number} to that outcome.",
        "On top of that comes another {number}. What is it then?",
        partial="On top of that comes another amount. What is it then?",
        detail="The amount is {number}.",
        number=number,
    )


def take_from_it(draft: Draft) -> UserMessage:
    number = draft.amount(2, 50)
    _leave(draft, draft.call("subtract", a=draft.fact("figure"), b=number))
    return draft.phrase(
        "Take {number} off that outcome.",
        "Subtract {number} from what you just got.",
        number=number,
    )


MATH_REQUESTS = (
    *requests((MATH,), average, spread, total, largest, smallest, product, share, convert_length),
    *requests((MATH,), convert_metric, logarithm),
    *requests((MATH,), round_it, halve_it, add_to_it, take_from_it, follows="figure"),
)
